"""What every panel draws from: the last snapshot, how fresh it is, and how to say it. Pure.

Ages come from the supervisor's clock, carried on by this machine's monotonic one: a clock that jumps makes
nothing stale, and nothing stale look fresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from console.widgets.lines import Line, Role, Span, apart, fitted, line, width_of
from console.words import when_words
from extractor.quantities import duration_words

if TYPE_CHECKING:
    import datetime

    from console.widgets.signs import Signs
    from extractor.protocol.api import Snapshot

MISSED_INTERVALS = 3
"""So many intervals without news, and what is shown is stale."""


class Link(StrEnum):
    """What the console knows of the supervisor."""

    WAITING = "waiting"
    LIVE = "live"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class View:
    """One run at one moment, as this console sees it.

    Attributes:
        name: of the run.
        link: what is known of the supervisor.
        snapshot: the last one; None when there never was one.
        now_utc: the present, on the supervisor's clock.
        silent_s: since the supervisor's last word.
        interval_s: in which it is expected to speak.
        why: why the link is lost.
        pid, is_alive: of the supervisor; None when not known.
        read_only: whether this console may only look.
        wide: whether there is room for the wide layout.
        zone: of the times shown; None: the machine's.
    """

    name: str
    link: Link
    snapshot: Snapshot | None
    now_utc: float
    silent_s: float
    interval_s: float
    signs: Signs
    why: str = ""
    pid: int | None = None
    is_alive: bool | None = None
    read_only: bool = False
    wide: bool = False
    zone: datetime.tzinfo | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the supervisor should have spoken and has not. An ended run has nothing to say."""
        if self.link == Link.ENDED:
            return False
        return self.link == Link.LOST or self.silent_s > MISSED_INTERVALS * self.interval_s


def age_words(age_s: float) -> str:
    """How old data is, in whole seconds: what is fresh reads the same every second."""
    return f"{whole_duration(max(1.0, age_s))} ago"


def whole_duration(seconds: float) -> str:
    """A duration in whole seconds: tenths would be sent to the terminal again and again."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else duration_words(whole)


def age_of(view: View, sampled_utc: float | None = None, interval_s: float | None = None) -> Span:
    """The age of a panel's data, STALE after three missed intervals; of an ended run, the time it was read.

    Args:
        view: the present.
        sampled_utc: when the data was read; None: when the supervisor last spoke.
        interval_s: in which it is read; None: in which the supervisor speaks.
    """
    if view.snapshot is None:
        return Span("")
    if view.link == Link.ENDED:
        read = when_words(sampled_utc or view.snapshot.time_utc, now_utc=view.now_utc, zone=view.zone)
        return Span(f"as it was {read}", "dim")
    age_s = view.silent_s if sampled_utc is None else view.now_utc - sampled_utc
    limit_s = MISSED_INTERVALS * (interval_s or view.interval_s)
    if view.is_stale or age_s > limit_s:
        return Span(f"STALE {whole_duration(max(1.0, age_s))}", "warn")
    return Span(age_words(age_s), "dim")


def title(text: str, width: int, signs: Signs, *, middle: Line = (), right: Span = Span("")) -> Line:  # noqa: B008
    """First row of a panel: its name, what belongs to all rows, and the age of the data, on a rule."""
    end = line(" " if right.text else "", right)
    left = line((signs.rule + " ", "dim"), (text, "strong"), " ", *middle, " " if middle else "")
    # The age is never cut.
    left = fitted(left, width - width_of(end) - 2, more=signs.more)
    rest = max(1, width - width_of(left) - width_of(end))
    return (*left, Span(signs.rule * rest, "dim"), *end)


def facts(view: View, *parts: str | tuple[str, Role] | Span) -> Line:
    """Facts on one line, with dots between; empty ones are left out."""
    spans = [span for part in parts for span in line(part)]
    between = [part for span in spans for part in (Span(view.signs.dot, "dim"), span)]
    return tuple(between[1:])


def both_ends(view: View, left: Line, right: Line, width: int) -> Line:
    """Two lines on one, at both ends."""
    return apart(left, right, width, more=view.signs.more)
