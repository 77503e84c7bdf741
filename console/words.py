"""How numbers, times and states are said to people, once for command line and console. Pure.

Owns signs, units and roundings; it refuses to know a clock, a terminal or the locale (the time zone of
`when_words` apart). A value that cannot be had is said with its reason, never as 0. Every sign has a variant in
ASCII. Sizes and durations, which the supervisor speaks of as well, are in `extractor.quantities`.

Text of events, names and errors passes through as it is: making it safe for a terminal is for whoever prints.
"""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING

from extractor.protocol.api import Unavailable
from extractor.protocol.states import Pause, Reason, State
from extractor.quantities import UNKNOWN, three_digits

if TYPE_CHECKING:
    from extractor.protocol.api import EventLine, Gpu, StateInfo

_GLYPHS: dict[State, tuple[str, str]] = {
    State.CREATED: ("◌", "."),
    State.PREPARING: ("◌", "."),
    State.LOADING: ("◌", "."),
    State.RUNNING: ("●", "*"),
    State.HOLDING: ("‖", "="),
    State.HELD: ("‖", "="),
    State.PARKING: ("○", "o"),
    State.PARKED: ("○", "o"),
    State.UNLOADING: ("○", "o"),
    State.UNLOADED: ("○", "o"),
    State.DRAINING: ("◍", "v"),
    State.STOPPED: ("■", "#"),
    State.FINISHED: ("✔", "+"),
    State.FAILED: ("✖", "x"),
}
_COUNTS = ((1e6, "M"), (1e9, "G"), (1e12, "T"))
_UNAVAILABLE = {
    "not_supported": "not supported",
    "no_permission": "no permission",
    "transient": "no answer",
    "lost": "lost",
    "no_driver": "no driver",
    "not_yet": "not yet known",
}
_WEEK_S = 6 * 24 * 3600


def glyph(state: State, *, ascii_only: bool = False) -> str:
    """The sign of a state: one cell."""
    return _GLYPHS[state][ascii_only]


def state_words(info: StateInfo, *, ascii_only: bool = False) -> str:
    """Sign and word of a state; who paused it when nobody did by hand: "HELD by disk"."""
    by = sorted({str(pause.reason) for pause in info.pauses})
    is_paused = not info.state.is_terminal and by not in ([], [str(Reason.OPERATOR)])
    cause = f" by {' and '.join(by)}" if is_paused else ""
    return f"{glyph(info.state, ascii_only=ascii_only)} {info.state.upper()}{cause}"


def pause_words(pause: Pause, *, now_utc: float | None = None, zone: datetime.tzinfo | None = None) -> str:
    """One pause: depth, reason, who, since when, and its note."""
    since = when_words(pause.since_utc, now_utc=now_utc, zone=zone)
    note = f": {pause.note}" if pause.note else ""
    return f"{pause.depth} by {pause.reason} ({pause.by}) since {since}{note}"


def count_words(count: float) -> str:
    """Exact below a million, then three digits: "2,310", "12.4 M", "1.20 G"."""
    if abs(count) < 1e6:
        return f"{count:,.0f}"
    factor, unit = next((pair for pair in _COUNTS if abs(count) < 999.5 * pair[0]), _COUNTS[-1])
    return f"{three_digits(count / factor)} {unit}"


def of_words(done: float, total: float) -> str:
    """Done and total: "12.4 M / 30.0 M (41.3 %)"; no share of nothing, and 100 % only when all is done."""
    share = "" if total <= 0 else f" ({percent_words(done / total)})"
    return f"{count_words(done)} / {count_words(total)}{share}"


def percent_words(share: float) -> str:
    """As in "41.2 %"; what is not all is never said as 100 %."""
    percent = 100 * share
    if share < 1:
        percent = min(99.9, percent)
    return f"{percent:.1f} %"


def rate_words(tokens_per_s: float | None) -> str:
    """As in "4,980 tok/s"; "unknown" for None."""
    if tokens_per_s is None or not math.isfinite(tokens_per_s):
        return UNKNOWN
    digits = 1 if 0 < tokens_per_s < 10 else 0
    return f"{tokens_per_s:,.{digits}f} tok/s"


def when_words(utc: float, *, now_utc: float | None = None, zone: datetime.tzinfo | None = None) -> str:
    """A moment in local time: "06:40", "Tue 06:40" or "2026-12-01 06:40", as near as it is to now.

    Args:
        utc: seconds since the epoch.
        now_utc: the present; None takes the form with the whole date.
        zone: None: the machine's own.
    """
    moment = datetime.datetime.fromtimestamp(utc, tz=datetime.UTC).astimezone(zone)
    if now_utc is not None:
        now = datetime.datetime.fromtimestamp(now_utc, tz=datetime.UTC).astimezone(zone)
        if moment.date() == now.date():
            return f"{moment:%H:%M}"
        if abs(utc - now_utc) < _WEEK_S:
            return f"{_DAYS[moment.weekday()]} {moment:%H:%M}"
    return f"{moment:%Y-%m-%d %H:%M}"


# Not strftime's %a, which speaks the locale's language; everything else here is English.
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def unavailable_words(value: Unavailable) -> str:
    """Why a value cannot be had."""
    return f"{_UNAVAILABLE[value.reason]}{f' ({value.detail})' if value.detail else ''}"


def value_words(value: float | Unavailable, unit: str) -> str:
    """As in "97 %" or "402 W", or the reason: "? (no permission)"."""
    if isinstance(value, Unavailable):
        return f"? ({_UNAVAILABLE[value.reason]})"
    return f"{value:.0f} {unit}"


def gpu_words(gpu: Gpu) -> str:
    """One GPU on one line: index, rank, busy, memory, power, temperature, name."""
    memory = f"{_gigabytes(gpu.memory_used_bytes)}/{_gigabytes(gpu.memory_total_bytes)} GB"
    power = f"{_number(gpu.power_watts)}/{_number(gpu.power_limit_watts)} W"
    return (
        f"{gpu.index} {f'r{gpu.rank}' if gpu.rank else '-'}  busy {value_words(gpu.busy_percent, '%')}  "
        f"{memory}  {power}  {value_words(gpu.temperature_celsius, 'C')}  {gpu.name}"
    )


def event_words(
    event: EventLine, *, now_utc: float | None = None, zone: datetime.tzinfo | None = None
) -> str:
    """One event on one line: when, who, what."""
    return f"{when_words(event.time_utc, now_utc=now_utc, zone=zone)} {event.who}  {event.text}"


def _gigabytes(value: float | Unavailable) -> str:
    return "?" if isinstance(value, Unavailable) else f"{value / 1e9:.1f}"


def _number(value: float | Unavailable) -> str:
    return "?" if isinstance(value, Unavailable) else f"{value:.0f}"
