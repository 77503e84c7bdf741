"""The log screen: sources, following, bounded memory."""

import msgspec
import pytest

from console.feed import Heard
from console.screens import log
from extractor.protocol import api
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import hearing, lost, make_app, running_app, screen_text, until

pytestmark = pytest.mark.asyncio


def feed_with(num_lines=100, **logs):
    lines = [f"line {number}" for number in range(num_lines)]
    feed = hearing(snapshots.running(), logs={"supervisor": lines, "replica-0": ["from the replica"], **logs})
    feed.interval_s = 0.25
    return feed


async def open_log(app, pilot, *keys):
    await pilot.press("2")
    await until(pilot, lambda: "replica-0" in screen_text(app))
    await pilot.press(*keys)


async def test_events_come_first_with_who():
    app = make_app(feed_with())
    async with running_app(app) as pilot:
        await open_log(app, pilot)
        await until(pilot, lambda: "attached from ssh 10.0.0.7" in screen_text(app))
        assert "6 lines" in screen_text(app)


async def test_new_events_are_added_once():
    feed = feed_with()
    app = make_app(feed)
    async with running_app(app) as pilot:
        await open_log(app, pilot)
        new = api.EventLine(17, snapshots.NOW, "paused", "ops2", "paused by hand")
        events = (*snapshots.events()[1:], new)
        feed.say(Heard(msgspec.structs.replace(snapshots.running(1), events=events)))
        await until(pilot, lambda: "paused by hand" in screen_text(app))
        assert "7 lines" in screen_text(app)
        assert screen_text(app).count("attached from ssh") == 1


async def test_n_and_p_go_through_the_sources():
    app = make_app(feed_with())
    async with running_app(app) as pilot:
        await open_log(app, pilot, "n")
        await until(pilot, lambda: "from the replica" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: "line 99" in screen_text(app))
        await pilot.press("p", "p")
        await until(pilot, lambda: "run started on cuda" in screen_text(app))


async def test_following_shows_what_is_appended():
    feed = feed_with()
    app = make_app(feed)
    async with running_app(app) as pilot:
        await open_log(app, pilot, "p")
        await until(pilot, lambda: "line 99" in screen_text(app))
        feed.logs["supervisor"].append("appended")
        await until(pilot, lambda: "appended" in screen_text(app))


async def test_moving_up_stays_where_it_is_and_f_follows_again():
    feed = feed_with()
    app = make_app(feed)
    async with running_app(app) as pilot:
        await open_log(app, pilot, "p")
        await until(pilot, lambda: "line 99" in screen_text(app))
        await pilot.press("up", "pageup")
        await until(pilot, lambda: "line 99" not in screen_text(app))
        before = [line for line in screen_text(app).splitlines() if line.startswith(" line")]
        feed.logs["supervisor"].append("appended")
        await until(pilot, lambda: "101 lines" in screen_text(app))
        assert [line for line in screen_text(app).splitlines() if line.startswith(" line")] == before
        await pilot.press("f")
        await until(pilot, lambda: "appended" in screen_text(app) and "following" in screen_text(app))


async def test_g_goes_to_the_first_line_and_down_comes_back():
    app = make_app(feed_with())
    async with running_app(app) as pilot:
        await open_log(app, pilot, "p")
        await until(pilot, lambda: "line 99" in screen_text(app))
        await pilot.press("g")
        await until(pilot, lambda: " line 0\n" in screen_text(app))
        await pilot.press("j", "pagedown")
        await until(pilot, lambda: " line 0\n" not in screen_text(app))


async def test_memory_is_bounded_and_what_was_dropped_is_counted(monkeypatch):
    monkeypatch.setattr(log, "MOST_LINES", 50)
    app = make_app(feed_with())
    async with running_app(app) as pilot:
        await open_log(app, pilot, "p")
        await until(pilot, lambda: "50 of 100 lines kept" in screen_text(app))


async def test_a_line_as_long_as_a_file_is_cut():
    app = make_app(feed_with(zzz=["x" * 1_000_000]))
    async with running_app(app) as pilot:
        await open_log(app, pilot, "p")
        await until(pilot, lambda: "xxx" in screen_text(app))
        assert screen_text(app).count("x") < log.MOST_CHARACTERS + 100


async def test_a_log_that_does_not_answer_says_so():
    feed = lost(snapshots.running())
    feed.interval_s = 0.25
    app = make_app(feed)
    async with running_app(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "attached from ssh" in screen_text(app))
        feed.logs["supervisor"] = ["back"]
        await until(pilot, lambda: "supervisor" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: "back" in screen_text(app))
        del feed.logs["supervisor"]
        await until(pilot, lambda: "no log 'supervisor'" in screen_text(app))
