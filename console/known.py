"""What the console knows of a run: the last thing that its feed said, and when. Makes views of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from console.feed import Ended, Heard, Lost
from console.widgets.view import Link, View

if TYPE_CHECKING:
    import datetime

    from console.clock import Clock
    from console.feed import Feed, Update
    from console.widgets.signs import Signs
    from extractor.protocol.api import Snapshot


@dataclass(frozen=True, kw_only=True)
class Display:
    """How views are to be drawn."""

    signs: Signs
    wide: bool
    zone: datetime.tzinfo | None
    interval_s: float


class Known:
    """One run, or none, as far as its feed has told.

    Args:
        feed: whose words these are; None before a run is chosen.
        clock: the time.
    """

    def __init__(self, feed: Feed | None, clock: Clock) -> None:
        self.feed = feed
        self._clock = clock
        self._last: Update | None = None
        self._snapshot: Snapshot | None = None
        self._heard_at = clock.monotonic()

    @property
    def silent_s(self) -> float:
        """Since the supervisor's last word, or since this console began to listen."""
        return self._clock.monotonic() - self._heard_at

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: nothing more is expected."""
        return isinstance(self._last, Ended)

    def take(self, update: Update) -> None:
        """Takes what the feed says."""
        self._last = update
        if isinstance(update, Heard):
            self._snapshot, self._heard_at = update.snapshot, self._clock.monotonic()

    def view(self, display: Display) -> View:
        """The run now."""
        now_utc = self._clock.now_utc()
        base = View(
            name=self.feed.name if self.feed else "",
            link=Link.WAITING,
            snapshot=None,
            now_utc=now_utc,
            silent_s=0.0,
            interval_s=max(display.interval_s, self.feed.interval_s if self.feed else 0.0),
            signs=display.signs,
            read_only=self.feed.read_only if self.feed else False,
            wide=display.wide,
            zone=display.zone,
        )
        match self._last:
            case None:
                return base
            case Ended(snapshot=last):
                return replace(base, link=Link.ENDED, snapshot=last)
            case Heard(snapshot=last):
                return replace(
                    base,
                    link=Link.LIVE,
                    snapshot=last,
                    now_utc=last.time_utc + self.silent_s,
                    silent_s=self.silent_s,
                )
            case Lost() as lost:
                return self._lost(base, lost)

    def _lost(self, base: View, lost: Lost) -> View:
        view = replace(base, link=Link.LOST, why=lost.why, pid=lost.pid, is_alive=lost.is_alive)
        if self._snapshot is not None:
            now_utc = self._snapshot.time_utc + self.silent_s
            return replace(view, snapshot=self._snapshot, now_utc=now_utc, silent_s=self.silent_s)
        if lost.snapshot is not None:
            silent_s = max(0.0, base.now_utc - lost.snapshot.time_utc)
            return replace(view, snapshot=lost.snapshot, silent_s=silent_s)
        return replace(view, silent_s=self.silent_s)
