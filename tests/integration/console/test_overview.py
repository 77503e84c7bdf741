"""What the overview says about a run, and about its own knowledge of it."""

import msgspec
import pytest

from console.feed import Ended, Heard, Lost
from console.widgets.panel import Panel
from console.widgets.signs import ASCII
from extractor.protocol import api
from extractor.protocol.states import Depth, Pause, Reason, State
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import (
    NARROW,
    WIDE,
    FixedClock,
    ended,
    hearing,
    lost,
    make_app,
    running_app,
    screen_text,
    until,
)
from tests.support.fake_feed import FakeFeed

pytestmark = pytest.mark.asyncio


def shown(app, panel_id):
    return "\n".join(app.screen.query_one(f"#{panel_id}", Panel).shown)


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_a_running_run_is_told_in_full(size):
    app = make_app(hearing(snapshots.running()))
    async with running_app(app, size) as pilot:
        await until(pilot, lambda: "RUNNING" in screen_text(app))
        text = screen_text(app)
    for fact in (
        "● RUNNING 3h12m",
        "41.3 %",
        "12.4 M / 30.0 M tokens",
        "2 quarantined",
        "12 rejected",
        "953 / 2,310 done",
        "1 failed",
        "1,354 to go",
        "4,980 tok/s now",
        "4,874 tok/s mean",
        "finish 22:00 ±11 min",
        "2.31 TB",
        "enough, 1.20 TB to spare",
        "NCCL pcie-blackwell",
        "r0.7",
        "taps after 2,30,58 + final",
        "3,31,59,61",
        "attached from ssh",
        "you: write",
    ):
        assert fact in text


async def test_the_narrow_overview_shows_eight_gpus_and_three_events():
    app = make_app(hearing(snapshots.running()))
    async with running_app(app, NARROW) as pilot:
        await until(pilot, lambda: len(shown(app, "events").splitlines()) >= 3)
        assert len(shown(app, "gpus").splitlines()) == 9
        assert app.screen.query_one("#keys").region.bottom == 24


async def test_without_a_gpu_it_says_why_and_shows_the_processors():
    app = make_app(hearing(snapshots.on_cpu()))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "no GPU to show: no driver" in screen_text(app))
        assert "CPU 23 % of 128" in screen_text(app)


async def test_one_lost_gpu_hides_no_other():
    gone = api.Unavailable("lost", "Xid 79")
    gpus = list(snapshots.running().telemetry.gpus)
    gpus[3] = msgspec.structs.replace(
        gpus[3], busy_percent=gone, memory_used_bytes=gone, power_watts=gone, temperature_celsius=gone
    )
    snapshot = msgspec.structs.replace(snapshots.running(), telemetry=snapshots.telemetry(tuple(gpus)))
    app = make_app(hearing(snapshot))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "busy: lost (Xid 79)" in shown(app, "gpus"))
        rows = shown(app, "gpus").splitlines()
        assert "? %" in rows[4]
        assert "98 %" in rows[2]


async def test_a_gpu_that_is_not_sampled_any_more_is_stale_alone():
    gpus = list(snapshots.running().telemetry.gpus)
    gpus[2] = msgspec.structs.replace(gpus[2], sampled_utc=snapshots.NOW - 14)
    snapshot = msgspec.structs.replace(snapshots.running(), telemetry=snapshots.telemetry(tuple(gpus)))
    app = make_app(hearing(snapshot))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "STALE 14 s" in shown(app, "gpus"))
        assert shown(app, "gpus").count("STALE") == 1


async def test_more_gpus_than_rows_are_counted():
    gpus = tuple(snapshots.gpu(index) for index in range(16))
    snapshot = msgspec.structs.replace(snapshots.running(), telemetry=snapshots.telemetry(gpus))
    app = make_app(hearing(snapshot))
    async with running_app(app, NARROW) as pilot:
        await until(pilot, lambda: "9 more GPUs" in shown(app, "gpus"))


async def test_who_paused_it_and_why_is_said_for_every_pause():
    pauses = (
        Pause(Reason.OPERATOR, Depth.HOLD, snapshots.NOW - 600, "ops2 (pid 7001)"),
        Pause(Reason.DISK, Depth.HOLD, snapshots.NOW - 240, "auto", "99.6 GB free, reserve 100 GB"),
    )
    snapshot = msgspec.structs.replace(
        snapshots.held_by_operator(),
        state=api.StateInfo(State.HELD, snapshots.NOW - 600, "paused", pauses),
    )
    app = make_app(hearing(snapshot))
    async with running_app(app, WIDE) as pilot:
        await until(pilot, lambda: "HELD by disk and operator" in screen_text(app))
        said = shown(app, "reason").replace("\n ", " ")
        assert "hold by operator (ops2 (pid 7001)) since 20:50" in said
        assert "99.6 GB free, reserve 100 GB" in said


async def test_silence_turns_every_panel_stale():
    clock = FixedClock()
    app = make_app(hearing(snapshots.running()), clock)
    async with running_app(app, WIDE) as pilot:
        await until(pilot, lambda: "1 s ago" in shown(app, "disk"))
        clock.move(14)
        app.show_view()
        await until(pilot, lambda: "? STALE 14 s: no word from the supervisor" in screen_text(app))
        for panel in ("progress", "disk", "gpus", "shards", "events"):
            assert "STALE" in shown(app, panel)
        assert "The run itself does not depend on this console." in screen_text(app)


async def test_two_missed_intervals_are_not_stale():
    clock = FixedClock()
    app = make_app(hearing(snapshots.running()), clock)
    async with running_app(app, WIDE) as pilot:
        await until(pilot, lambda: "RUNNING" in screen_text(app))
        clock.move(2)
        app.show_view()
        await until(pilot, lambda: "2 s ago" in shown(app, "disk"))
        assert "STALE" not in screen_text(app)


@pytest.mark.parametrize(("is_alive", "word"), [(True, "alive"), (False, "gone")])
async def test_a_lost_supervisor_is_told_with_its_pid_and_comes_back_by_itself(is_alive, word):
    clock = FixedClock()
    feed = hearing(snapshots.running())
    app = make_app(feed, clock)
    async with running_app(app) as pilot:
        await until(pilot, lambda: "RUNNING" in screen_text(app))
        clock.move(14)
        feed.say(Lost("it does not answer", pid=4411, is_alive=is_alive))
        await until(
            pilot, lambda: f"? STALE 14 s: no word from the supervisor (pid 4411 {word})" in screen_text(app)
        )
        feed.say(Heard(snapshots.running(15)))
        await until(pilot, lambda: "STALE" not in screen_text(app))


async def test_a_wall_clock_that_jumps_makes_nothing_stale():
    clock = FixedClock()
    app = make_app(hearing(snapshots.running()), clock)
    async with running_app(app, WIDE) as pilot:
        clock.now += 86_400
        app.show_view()
        await until(pilot, lambda: "RUNNING 3h12m" in screen_text(app))
        assert "STALE" not in screen_text(app)


async def test_an_ended_run_is_clearly_not_running():
    app = make_app(ended(snapshots.finished()))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "not running; finished 20:56" in screen_text(app))
        assert "STALE" not in screen_text(app)
        await pilot.press("q")
    assert app.farewell().startswith("kimi-k25-eagle3 is finished: all 2,310 shards are written")
    assert not app.has_failed


async def test_a_failed_run_says_what_to_do():
    app = make_app(ended(snapshots.failed()))
    async with running_app(app, WIDE) as pilot:
        await until(pilot, lambda: "illegal memory access" in screen_text(app))
        assert "What to do" in shown(app, "reason").replace("\n ", " ")
    assert app.has_failed


async def test_a_run_whose_supervisor_vanished_before_this_console_came():
    app = make_app(lost(snapshots.running(), is_alive=False))
    async with running_app(app) as pilot:
        await until(pilot, lambda: "(pid 4411 gone)" in screen_text(app))
        assert "tapdeck start" in shown(app, "reason").replace("\n ", " ")
        assert "was ● RUNNING" in screen_text(app)
    assert "run continues" not in app.farewell()


async def test_a_run_of_which_nothing_is_known_yet():
    app = make_app(FakeFeed())
    async with running_app(app) as pilot:
        await until(pilot, lambda: "no word yet" in screen_text(app))
        app.take(Heard(snapshots.preparing()))
        await until(pilot, lambda: "PREPARING" in screen_text(app))
        app.take(Ended(snapshots.finished()))
        await until(pilot, lambda: "not running" in screen_text(app))


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (200, 60)])
@pytest.mark.parametrize("make", [snapshots.preparing, snapshots.running, snapshots.failed])
async def test_any_size_can_be_drawn(size, make):
    app = make_app(hearing(make()))
    async with running_app(app, size) as pilot:
        await until(pilot, lambda: "kimi" in screen_text(app) or size[0] < 40)


async def test_in_ascii_there_is_nothing_but_ascii():
    app = make_app(hearing(snapshots.running()), signs=ASCII)
    async with running_app(app, WIDE) as pilot:
        await until(pilot, lambda: "* RUNNING" in screen_text(app))
        assert screen_text(app).isascii()


async def test_a_resize_changes_the_layout_and_loses_no_fact():
    app = make_app(hearing(snapshots.running()))
    async with running_app(app, NARROW) as pilot:
        await until(pilot, lambda: "RUNNING" in screen_text(app))
        await pilot.resize_terminal(*WIDE)
        await until(pilot, lambda: "Progress" in screen_text(app) and "■" in shown(app, "shards"))
        await pilot.resize_terminal(*NARROW)
        await until(pilot, lambda: "■" not in shown(app, "shards"))
