"""Drives the console without a terminal: an app with a clock of its own, and waits for conditions."""

from __future__ import annotations

import datetime
from contextlib import asynccontextmanager

from textual.pilot import Pilot

from console.app import TapdeckApp
from console.feed import Ended, Feed, Heard, Lost
from console.widgets.panel import Panel
from tests.support import console_snapshots
from tests.support.fake_desk import FakeDesk
from tests.support.fake_feed import FakeFeed

WIDE = (120, 40)
NARROW = (80, 24)


class FixedClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = console_snapshots.NOW
        self.passed = 1_000.0

    def now_utc(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.passed

    def move(self, seconds: float) -> None:
        self.now += seconds
        self.passed += seconds


def make_app(feed: Feed | None, clock: FixedClock | None = None, **options) -> TapdeckApp:
    options.setdefault("desk", FakeDesk())
    return TapdeckApp(feed, clock=clock or FixedClock(), zone=datetime.UTC, **options)


def hearing(snapshot, **options) -> FakeFeed:
    return FakeFeed(Heard(snapshot), **options)


def ended(snapshot, **options) -> FakeFeed:
    return FakeFeed(Ended(snapshot), **options)


def lost(snapshot=None, *, is_alive=True, pid=4411, **options) -> FakeFeed:
    return FakeFeed(Lost("it does not answer", pid=pid, is_alive=is_alive, snapshot=snapshot), **options)


def screen_text(app: TapdeckApp) -> str:
    """What all panels of the screen on top show."""
    return "\n".join(text for panel in app.screen.query(Panel) for text in panel.shown)


async def until(pilot: Pilot, condition, *, turns: int = 200) -> None:
    """Waits until a condition holds."""
    for _ in range(turns):
        if condition():
            return
        await pilot.pause()
    raise AssertionError(f"never so; the screen:\n{screen_text(pilot.app)}")


@asynccontextmanager
async def running_app(app: TapdeckApp, size=NARROW):
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield pilot
