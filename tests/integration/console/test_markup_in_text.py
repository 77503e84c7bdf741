"""Case console-markup-in-text: text from outside is shown character by character and obeyed nowhere."""

from pathlib import Path

import msgspec
import pytest

from console.desk import Outcome, RunRow
from console.feed import Heard
from console.screens.log import LogScreen
from console.widgets.lines import visible
from extractor.errors import ConflictError
from extractor.protocol import api
from extractor.protocol.states import State
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import WIDE, hearing, make_app, running_app, screen_text, until
from tests.support.fake_desk import ESTIMATE, FakeDesk, as_output

pytestmark = pytest.mark.asyncio
LINES = (
    (Path(__file__).parents[2] / "data/cases/console-markup-in-text/lines.txt")
    .read_bytes()
    .decode("utf-8")
    .split("\n")[:-1]
)


def drawn(app) -> str:
    """What is really on the screen, row by row."""
    return "\n".join(
        "".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()
    )


def hostile(text: str) -> api.Snapshot:
    whole = snapshots.running()
    return msgspec.structs.replace(
        whole,
        run=msgspec.structs.replace(whole.run, name=text, host=text, nccl_preset=text),
        state=api.StateInfo(State.RUNNING, snapshots.NOW, text),
        disk=msgspec.structs.replace(whole.disk, path=text, verdict=text),
        events=(api.EventLine(1, snapshots.NOW, "event", text, text),),
        telemetry=snapshots.telemetry(api.Unavailable("no_driver", text)),
    )


def has_no_control_character(text: str) -> bool:
    return not any((ord(char) < 0x20 and char != "\n") or 0x7F <= ord(char) < 0xA0 for char in text)


async def test_the_overview_shows_every_string_as_it_is():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app, WIDE) as pilot:
        for text in LINES:
            feed.name = text
            feed.say(Heard(hostile(text)))
            # As name, reason, verdict and reason why there is no GPU, at least.
            await until(pilot, lambda text=text: drawn(app).count(visible(text)) >= 4)
            assert has_no_control_character(drawn(app))


async def test_dialogs_show_the_name_as_it_is():
    feed = hearing(snapshots.running())
    app = make_app(feed)
    async with running_app(app, WIDE) as pilot:
        for text in LINES:
            feed.name = text
            for key in ("P", "S", "K"):
                await pilot.press(key)
                await until(pilot, lambda text=text: visible(text) in screen_text(app))
                assert has_no_control_character(drawn(app))
                await pilot.press("escape")


async def test_a_refusal_is_shown_as_it_is():
    feed = hearing(snapshots.held_by_operator())
    app = make_app(feed)
    async with running_app(app, WIDE) as pilot:
        for text in LINES:
            feed.refuse_with = ConflictError(text)
            await pilot.press("R")
            await until(pilot, lambda text=text: f"resume was not done: {visible(text)}" in drawn(app))


async def test_the_log_shows_every_line_as_it_is():
    feed = hearing(snapshots.running(), logs={"supervisor": LINES})
    app = make_app(feed)
    async with running_app(app, WIDE) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "supervisor" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: all(visible(text) in drawn(app) for text in LINES))
        assert isinstance(app.screen, LogScreen)
        assert has_no_control_character(drawn(app))


async def test_the_list_of_runs_shows_a_name_as_it_is():
    rows = [RunRow(text, Path(f"/state/{n}"), is_live=True, snapshot=None) for n, text in enumerate(LINES)]
    app = make_app(None, desk=FakeDesk(rows=rows))
    async with running_app(app, WIDE) as pilot:
        # Names longer than their column are cut, and what is left of them is as it was.
        await until(pilot, lambda: all(visible(text)[:20] in drawn(app) for text in LINES))
        assert has_no_control_character(drawn(app))


async def test_what_a_command_says_is_shown_as_it_is():
    desk = FakeDesk(outcomes=[Outcome(2, b"", tuple(LINES))])
    app = make_app(None, desk=desk)
    async with running_app(app, WIDE) as pilot:
        await pilot.press("N", *"x.toml", "enter")
        await until(pilot, lambda: all(visible(text) in drawn(app) for text in LINES))


@pytest.mark.parametrize("text", LINES)
async def test_an_estimate_is_shown_as_it_is(text):
    found = {**ESTIMATE, "run": text, "model": text, "output": text}
    app = make_app(None, desk=FakeDesk(outcomes=[as_output(found)], told=(text,)))
    async with running_app(app, WIDE) as pilot:
        await pilot.press("N", *"x.toml", "enter")
        await until(pilot, lambda: drawn(app).count(visible(text)) >= 4)


async def test_help_survives_hostile_reasons():
    snapshot = hostile("[/bold]")
    actions = dict.fromkeys(snapshot.actions, "[/bold] closed twice [/]")
    app = make_app(hearing(msgspec.structs.replace(snapshot, actions=actions)))
    async with running_app(app, WIDE) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: "[/bold] closed twice [/]" in drawn(app))
        await pilot.press("escape", "colon")
        await until(pilot, lambda: "not now: [/bold] closed twice [/]" in drawn(app))
        app.take(Heard(snapshot))
