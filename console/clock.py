"""Time, as the console needs it: passed in, so that tests and screenshots have their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one to say what time it is, one to measure how long something took."""

    def now_utc(self) -> float:
        """Seconds since the epoch; may jump."""

    def monotonic(self) -> float:
        """Seconds that only grow."""


class RealClock:
    """This machine's."""

    def now_utc(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only grow, and go on while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
