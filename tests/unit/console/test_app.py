"""What the console knows, what it says when one leaves, and what it loads."""

import datetime
import subprocess
import sys

import pytest

from console.app import TapdeckApp
from console.feed import Ended, Heard, Lost
from console.known import Display, Known
from console.widgets.signs import UNICODE
from console.widgets.view import Link
from tests.support import console_snapshots as snapshots
from tests.support.console_driver import FixedClock
from tests.support.fake_feed import FakeFeed

DISPLAY = Display(signs=UNICODE, wide=False, zone=datetime.UTC, interval_s=1.0)


@pytest.fixture
def clock():
    return FixedClock()


@pytest.fixture
def known(clock):
    return Known(FakeFeed(), clock)


def test_before_the_first_word_nothing_is_known(known):
    view = known.view(DISPLAY)
    assert (view.link, view.snapshot, view.is_stale) == (Link.WAITING, None, False)


def test_the_supervisors_clock_goes_on_with_the_monotonic_one(known, clock):
    known.take(Heard(snapshots.running()))
    clock.passed += 2
    clock.now += 10_000
    view = known.view(DISPLAY)
    assert view.now_utc == snapshots.NOW + 2
    assert view.silent_s == 2


@pytest.mark.parametrize(("passed_s", "is_stale"), [(3.0, False), (3.1, True)])
def test_three_missed_intervals_are_stale(known, clock, passed_s, is_stale):
    known.take(Heard(snapshots.running()))
    clock.move(passed_s)
    assert known.view(DISPLAY).is_stale is is_stale


def test_a_slow_feed_is_stale_later(clock):
    known = Known(FakeFeed(interval_s=2.0), clock)
    known.take(Heard(snapshots.running()))
    clock.move(5)
    assert not known.view(DISPLAY).is_stale


def test_what_was_heard_is_kept_when_the_link_is_lost(known, clock):
    known.take(Heard(snapshots.running()))
    clock.move(14)
    known.take(Lost("gone", pid=4411, is_alive=False))
    view = known.view(DISPLAY)
    assert (view.snapshot, view.silent_s, view.pid) == (snapshots.running(), 14, 4411)


def test_an_ended_run_is_never_stale(known, clock):
    known.take(Ended(snapshots.finished()))
    clock.move(86_400)
    assert not known.view(DISPLAY).is_stale


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (Heard(snapshots.running()), "detached; the run continues: tapdeck attach kimi-k25-eagle3"),
        (
            Lost("no answer", pid=1, is_alive=True),
            "detached; the run continues: tapdeck attach kimi-k25-eagle3",
        ),
        (
            Lost("no answer", pid=1, is_alive=False),
            "detached; no word from the supervisor of kimi-k25-eagle3: see tapdeck status kimi-k25-eagle3",
        ),
        (
            Ended(snapshots.finished()),
            "kimi-k25-eagle3 is finished: all 2,310 shards are written; tapdeck verify checks them",
        ),
    ],
    ids=["live", "silent", "gone", "ended"],
)
def test_the_farewell_says_how_things_stand(update, expected, clock):
    app = TapdeckApp(FakeFeed(), clock=clock)
    app.take(update)
    assert app.farewell() == expected


def test_before_the_first_word_the_farewell_promises_nothing(clock):
    app = TapdeckApp(FakeFeed(), clock=clock)
    assert "continues" not in app.farewell()


def test_without_a_run_the_farewell_promises_nothing(clock):
    assert TapdeckApp(None, clock=clock).farewell() == "detached"


def test_the_console_loads_no_model_library_and_the_http_library_only_later():
    program = (
        "import sys, console.app, console.screens.log, console.screens.runs, console.screens.start; "
        "print([name for name in ('aiohttp', 'sglang', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
