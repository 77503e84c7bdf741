"""One long-lived thread per thing that may block, and the clock that it waits on.

Invariant: a `Periodic` has one thread for its whole life. A step that blocks delays the next step of this
thread and nothing else; there is no second thread for it and no queue of missed steps. The threads are
daemons: a driver call that never returns cannot keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """Time, as the samplers need it."""

    def monotonic(self) -> float:
        """Seconds from some origin; never goes back."""

    def now_utc(self) -> float:
        """Seconds since the epoch."""

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Blocks for a while, or until `stop` is set."""


class RealClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        """Seconds from some origin; never goes back."""
        return time.monotonic()

    def now_utc(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Blocks for a while, or until `stop` is set."""
        stop.wait(seconds)


class Periodic:
    """Takes a step again and again in a thread of its own."""

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        clock: Clock,
        *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: of the thread.
            step: may block; returns the seconds to wait until the next step.
            clock: to wait on.
            finish: called in the same thread after the last step.
        """
        self._step = step
        self._clock = clock
        self._finish = finish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Once only."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end after its step. Does not wait."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False if it has not by then, or was never started."""
        if self._thread.ident is None:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._clock.wait(self._stop, self._step())
        if self._finish is not None:
            self._finish()
