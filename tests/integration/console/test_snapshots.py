"""How the screens look: compared with pictures that a person has looked at.

Each also asserts the fact that the picture is there for, so that an update of pictures cannot lose it.
Refresh after looking: `pytest tests/integration/console/test_snapshots.py --snapshot-update`.
"""

from pathlib import Path

import pytest

from console.feed import Lost
from console.widgets.signs import ASCII
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import (
    NARROW,
    WIDE,
    FixedClock,
    ended,
    hearing,
    make_app,
    screen_text,
    until,
)
from tests.support.fake_desk import ESTIMATE, FakeDesk, as_output
from tests.support.fake_feed import FakeFeed

SIZES = pytest.mark.parametrize("size", [NARROW, WIDE], ids=["80x24", "120x40"])


@pytest.fixture
def looks_right(snap_compare):
    """Compares a screen with its picture once it shows a fact."""

    def compare(app, fact, size, press=(), then=None):
        async def wait(pilot):
            await pilot.pause()
            for key in press:
                await pilot.press(key)
            if then is not None:
                then(app)
            await until(pilot, lambda: fact in screen_text(app))
            await pilot.pause()

        return snap_compare(app, terminal_size=size, run_before=wait)

    return compare


@SIZES
@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (snapshots.preparing, "tokenizing 15,000 samples"),
        (snapshots.loading, "96 weight files"),
        (snapshots.running, "953 / 2,310 done"),
        (snapshots.on_cpu, "no GPU to show: no driver"),
        (snapshots.held_by_operator, "‖ HELD"),
        (snapshots.held_by_disk, "HELD by disk"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_overview_of_a_live_run(looks_right, make, fact, size):
    assert looks_right(make_app(hearing(make())), fact, size)


@SIZES
@pytest.mark.parametrize(
    ("make", "fact"),
    [(snapshots.failed, "illegal memory access"), (snapshots.finished, "not running; finished")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_overview_of_an_ended_run(looks_right, make, fact, size):
    assert looks_right(make_app(ended(make())), fact, size)


@SIZES
def test_overview_when_the_supervisor_is_gone(looks_right, size):
    clock = FixedClock()
    app = make_app(hearing(snapshots.running()), clock)

    def lose(app):
        clock.move(14)
        app.take(Lost("it does not answer", pid=4411, is_alive=False))

    assert looks_right(app, "? STALE 14 s", size, then=lose)


@SIZES
def test_overview_of_a_read_only_console(looks_right, size):
    assert looks_right(make_app(hearing(snapshots.running(), read_only=True)), "read-only:", size)


def test_overview_in_ascii(looks_right):
    assert looks_right(make_app(hearing(snapshots.running()), signs=ASCII), "* RUNNING", NARROW)


def test_overview_before_the_first_word(looks_right):
    assert looks_right(make_app(FakeFeed()), "no word yet", NARROW)


@pytest.mark.parametrize(
    ("keys", "fact"),
    [
        (["P"], "Pause kimi-k25-eagle3?"),
        (["S"], "Stop kimi-k25-eagle3?"),
        (["K"], "Type the run's name"),
        (["question_mark"], "Upper case acts"),
        (["colon"], "detach"),
        (["R"], "cannot resume now: it is not paused"),
    ],
    ids=["pause", "stop", "kill", "help", "palette", "refusal"],
)
def test_dialogs(looks_right, keys, fact):
    assert looks_right(make_app(hearing(snapshots.running())), fact, NARROW, press=keys)


@SIZES
def test_log(looks_right, size):
    assert looks_right(make_app(hearing(snapshots.running())), "attached from ssh", size, press=["2"])


@SIZES
def test_runs(looks_right, size):
    assert looks_right(make_app(None), "2 live of 4", size)


@SIZES
def test_start_screen_with_an_estimate(looks_right, size):
    desk = FakeDesk(outcomes=[as_output(ESTIMATE)], told=("preparing 3,000 of 15,000 samples",))
    app = make_app(None, desk=desk)
    assert looks_right(app, "it fits", size, press=["N", *"job.toml", "enter"])


@pytest.mark.parametrize("size", ["80x24", "120x40"])
def test_the_pictures_in_the_docs_are_the_ones_that_are_tested(size):
    here = Path(__file__).parent
    tested = here / "__snapshots__" / "test_snapshots" / f"test_overview_of_a_live_run[running--{size}].svg"
    shown = here.parents[2] / "docs" / "images" / f"overview-{size}.svg"
    assert shown.read_text() == tested.read_text()
