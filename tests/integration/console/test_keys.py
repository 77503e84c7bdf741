"""Every key on the overview, and what it asks of the supervisor."""

import msgspec
import pytest

from console.screens.help import HelpScreen, PaletteScreen
from console.screens.log import LogScreen
from console.screens.overview import OverviewScreen
from console.screens.runs import RunsScreen
from console.screens.start import StartScreen
from extractor.errors import ConflictError
from extractor.protocol.states import Action, Depth
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import ended, hearing, lost, make_app, running_app, screen_text, until
from tests.support.fake_feed import Asked

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("key", "screen"),
    [
        ("0", RunsScreen),
        ("2", LogScreen),
        ("N", StartScreen),
        ("question_mark", HelpScreen),
        ("colon", PaletteScreen),
    ],
)
async def test_keys_that_look_change_the_screen_and_ask_nothing(key, screen):
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, screen))
        assert feed.asked == []


async def test_1_comes_back_to_the_overview():
    app = make_app(hearing(snapshots.running()))
    async with running_app(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: isinstance(app.screen, LogScreen))
        await pilot.press("1")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        await until(pilot, lambda: "RUNNING" in screen_text(app))


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_detaching_leaves_the_run_alone(key):
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: app.return_code is not None)
    assert (app.return_code, feed.asked) == (0, [])
    assert app.farewell() == "detached; the run continues: tapdeck attach kimi-k25-eagle3"


@pytest.mark.parametrize("key", ["ctrl+c", "ctrl+q"])
async def test_detaching_works_while_a_dialog_wants_a_name(key):
    app = make_app(hearing(snapshots.running()))
    async with running_app(app) as pilot:
        await pilot.press("K")
        await pilot.press(key)
        await until(pilot, lambda: app.return_code is not None)


@pytest.mark.parametrize(("key", "depth"), [("h", Depth.HOLD), ("u", Depth.UNLOAD)])
async def test_pause_asks_how_deep_and_sends_what_the_operator_saw(key, depth):
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("P")
        await until(pilot, lambda: "hold" in screen_text(app))
        assert "705 GB stay on the GPUs" in screen_text(app)
        assert "22m04s" in screen_text(app)
        await pilot.press(key)
        await until(pilot, lambda: feed.asked)
        assert feed.asked == [Asked(Action.PAUSE, depth, 41)]
        await until(pilot, lambda: "pause accepted" in screen_text(app))


async def test_a_run_that_nobody_has_touched_has_revision_0_and_can_be_paused():
    feed = hearing(msgspec.structs.replace(snapshots.running(), revision=0))
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("P", "h")
        await until(pilot, lambda: feed.asked)
        assert feed.asked == [Asked(Action.PAUSE, Depth.HOLD, 0)]


@pytest.mark.parametrize("opener", ["P", "S", "K"])
async def test_escape_does_nothing(opener):
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press(opener)
        await until(pilot, lambda: not isinstance(app.screen, OverviewScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        assert feed.asked == []


async def test_a_pause_that_was_not_loaded_yet_does_not_promise_a_time():
    app = make_app(hearing(snapshots.loading()))
    async with running_app(app) as pilot:
        await pilot.press("P")
        await until(pilot, lambda: "not measured on this run yet" in screen_text(app))


async def test_resume_is_asked_at_once():
    feed = hearing(snapshots.held_by_operator())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("R")
        await until(pilot, lambda: feed.asked)
        assert feed.asked == [Asked(Action.RESUME, None, 41)]


@pytest.mark.parametrize("key", ["n", "enter", "escape"])
async def test_stop_takes_anything_but_yes_for_no(key):
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("S")
        await until(pilot, lambda: "Stop kimi-k25-eagle3?" in screen_text(app))
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        assert feed.asked == []


async def test_stop_is_asked_for_after_yes():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("S")
        await pilot.press("y")
        await until(pilot, lambda: feed.asked)
        assert feed.asked == [Asked(Action.STOP, None, 41)]


async def test_kill_needs_the_name_of_the_run():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("K")
        await pilot.press(*"kimi", "enter")
        await until(pilot, lambda: "that is not its name" in screen_text(app))
        assert feed.asked == []
        await pilot.press(*"-k25-eagle3", "enter")
        await until(pilot, lambda: feed.asked)
        assert feed.asked == [Asked(Action.KILL, None, 41)]


async def test_a_conflict_says_what_the_supervisor_says():
    feed = hearing(snapshots.running())
    feed.refuse_with = ConflictError("ops2 paused it a second ago", remedy="look again", code="conflict")
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("S")
        await pilot.press("y")
        await until(
            pilot, lambda: "stop was not done: ops2 paused it a second ago look again" in screen_text(app)
        )
        assert "RUNNING" in screen_text(app)


async def test_nothing_is_shown_as_done_before_the_supervisor_says_so():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("P")
        await pilot.press("h")
        await until(pilot, lambda: "pause accepted" in screen_text(app))
        assert "RUNNING" in screen_text(app)
        assert "HELD" not in screen_text(app)


async def test_an_answer_vanishes_after_a_while_and_a_later_one_stays(monkeypatch):
    app = make_app(hearing(snapshots.running()))
    due = []
    async with running_app(app) as pilot:
        monkeypatch.setattr(app, "set_timer", lambda delay_s, forget: due.append((delay_s, forget)))
        await pilot.press("R")
        await until(pilot, lambda: "cannot resume now" in screen_text(app))
        await pilot.press("P")
        await pilot.press("h")
        await until(pilot, lambda: "pause accepted" in screen_text(app))
        *earlier, (last_delay_s, forget_last) = due
        assert last_delay_s == 20.0
        for _, forget in earlier:
            forget()
        await pilot.pause()
        assert "pause accepted" in screen_text(app)
        forget_last()
        await until(pilot, lambda: "pause accepted" not in screen_text(app))


@pytest.mark.parametrize(
    ("key", "feed", "why"),
    [
        ("R", hearing(snapshots.running()), "cannot resume now: it is not paused"),
        ("S", ended(snapshots.finished()), "cannot stop now: it is finished"),
        ("P", lost(snapshots.running()), "cannot pause now: no word from the supervisor; nothing was sent"),
        ("K", hearing(snapshots.running(), read_only=True), "cannot kill now: this console is read-only"),
        ("N", hearing(snapshots.running(), read_only=True), "cannot start a run: this console is read-only"),
    ],
)
async def test_an_action_that_is_not_possible_says_why_and_asks_nothing(key, feed, why):
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: why in screen_text(app))
        assert isinstance(app.screen, OverviewScreen)
        assert feed.asked == []


async def test_the_palette_finds_an_action_by_its_words_and_does_it():
    feed = hearing(snapshots.held_by_operator())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("colon")
        await pilot.press(*"lift every", "enter")
        await until(pilot, lambda: feed.asked)
        assert feed.asked[0].action == Action.RESUME


async def test_the_palette_opens_the_dialog_of_a_dangerous_action():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("colon")
        await pilot.press(*"kill", "enter")
        await until(pilot, lambda: "Type the run's name" in screen_text(app))
        assert feed.asked == []


async def test_the_palette_says_why_an_action_is_not_possible():
    app = make_app(hearing(snapshots.running()))
    async with running_app(app) as pilot:
        await pilot.press("colon")
        await until(pilot, lambda: "not now: it is not paused" in screen_text(app))
        await pilot.press(*"nothing has such words")
        await until(pilot, lambda: "nothing has these words" in screen_text(app))


async def test_help_names_every_key_and_why_some_do_nothing():
    app = make_app(hearing(snapshots.running()))
    async with running_app(app) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: "Not now: it is" in screen_text(app))
        await pilot.press("down", "pagedown", "up", "escape")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
