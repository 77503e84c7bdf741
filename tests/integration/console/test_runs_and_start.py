"""The list of runs, and the way from a run.toml to a run."""

from pathlib import Path

import pytest

from console.desk import Outcome
from console.screens.overview import OverviewScreen
from console.screens.runs import RunsScreen
from console.screens.start import StartScreen
from tests.support.console_driver import NARROW, WIDE, make_app, running_app, screen_text, until
from tests.support.fake_desk import ESTIMATE, STARTED, FakeDesk, as_output

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_the_list_tells_state_progress_and_age(size):
    app = make_app(None)
    async with running_app(app, size) as pilot:
        await until(pilot, lambda: "2 live of 4" in screen_text(app))
        text = screen_text(app)
    for fact in (
        "● RUNNING",
        "41.3 %",
        "live",
        "✖ FAILED",
        "? no supervisor, was running",
        "nothing known yet",
    ):
        assert fact in text


async def test_without_runs_it_says_how_to_begin():
    app = make_app(None, desk=FakeDesk(rows=[]))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "no run yet" in screen_text(app))
        await pilot.press("enter", "down")
        assert isinstance(app.screen, RunsScreen)


async def test_enter_attaches_to_the_run_under_the_cursor():
    desk = FakeDesk()
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await until(pilot, lambda: "glm-demo" in screen_text(app))
        await pilot.press("down", "down", "up", "enter")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen) and "RUNNING" in screen_text(app))
    assert desk.opened == [Path("/state/glm")]


async def test_the_cursor_stays_within_the_list():
    desk = FakeDesk()
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await until(pilot, lambda: "glm-demo" in screen_text(app))
        await pilot.press(*["down"] * 9, "enter")
        await until(pilot, lambda: desk.opened)
    assert desk.opened == [Path("/state/fresh")]


@pytest.mark.parametrize("key", ["1", "2"])
async def test_without_a_run_there_is_nothing_to_show(key):
    app = make_app(None)
    async with running_app(app) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: "no run is chosen yet" in screen_text(app))


@pytest.mark.parametrize("key", ["P", "R", "S", "K"])
async def test_without_a_run_nothing_can_be_done_to_it(key):
    app = make_app(None)
    async with running_app(app) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: "no run is chosen" in screen_text(app))
        assert isinstance(app.screen, RunsScreen)


async def test_from_a_run_toml_to_its_overview():
    desk = FakeDesk(outcomes=[as_output(ESTIMATE), as_output(STARTED)], told=("preparing 3,000 of 15,000",))
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await pilot.press("N", *"job.toml", "enter")
        await until(pilot, lambda: "it fits" in screen_text(app))
        text = screen_text(app)
        for fact in (
            "preparing 3,000 of 15,000",
            "moonshotai/Kimi-K2.5",
            "after 2,30,58,60; before (vLLM) 3,31,59,61",
            "15,000 samples, 30,000,000 tokens, 12 rejected",
            "57.3 kB per token, 1.72 TB in all",
            "NCCL_DEBUG=INFO  from shell",
            "NCCL_PROTO=LL  from preset",
        ):
            assert fact in text
        await pilot.press("enter")
        await until(pilot, lambda: "Start kimi-k25-eagle3?" in screen_text(app))
        await pilot.press("y")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
    assert desk.asked == [("estimate", "job.toml", "--json"), ("start", "job.toml", "--detach", "--json")]
    assert desk.opened == [Path("/state/kimi-k25-eagle3")]


async def test_nothing_is_started_without_a_yes():
    desk = FakeDesk(outcomes=[as_output(ESTIMATE)])
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await pilot.press("N", *"job.toml", "enter")
        await until(pilot, lambda: "it fits" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: "Start kimi-k25-eagle3?" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, StartScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, RunsScreen))
    assert desk.asked == [("estimate", "job.toml", "--json")]


async def test_a_refusal_is_shown_whole():
    said = ("error: model.pth: unknown key", "  What to do: did you mean model.path?")
    desk = FakeDesk(outcomes=[Outcome(2, b"", said)])
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await pilot.press("N", *"job.toml", "enter")
        await until(pilot, lambda: "did you mean model.path?" in screen_text(app))
        assert "error: model.pth: unknown key" in screen_text(app)
        assert "exit code 2; nothing was started" in screen_text(app)


async def test_a_start_that_is_refused_is_shown_whole():
    desk = FakeDesk(outcomes=[as_output(ESTIMATE), Outcome(6, b"", ("another run owns the output",))])
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await pilot.press("N", *"job.toml", "enter")
        await until(pilot, lambda: "it fits" in screen_text(app))
        await pilot.press("enter", "y")
        await until(pilot, lambda: "another run owns the output" in screen_text(app))
        assert isinstance(app.screen, StartScreen)


async def test_what_does_not_fit_is_not_started():
    desk = FakeDesk(outcomes=[as_output({**ESTIMATE, "fits": False})])
    app = make_app(None, desk=desk)
    async with running_app(app) as pilot:
        await pilot.press("N", *"job.toml", "enter")
        await until(pilot, lambda: "IT DOES NOT FIT" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: "nothing can be started before there is room" in screen_text(app))


async def test_a_typed_q_is_a_letter():
    app = make_app(None)
    async with running_app(app) as pilot:
        await pilot.press("N", "q", "P", "1")
        await pilot.pause()
        assert isinstance(app.screen, StartScreen)
        assert app.screen.query_one("#path").value == "qP1"
