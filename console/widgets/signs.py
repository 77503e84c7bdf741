"""The signs that panels draw with, and their ASCII variant. Pure.

States of shards differ by sign and by role, so that they can be told apart without colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from console.widgets.lines import Role


@dataclass(frozen=True, kw_only=True)
class Signs:
    """One set of signs.

    Attributes:
        bar: an eighth of a cell up to a full one.
        bar_rest: what is not reached yet.
        spark: heights, lowest first.
        gap: an interval without a value.
        dot: between facts of a line.
        rule: of titles.
        about: before a band.
        degree: of Celsius.
        warning: before what needs a look.
        more: for what was cut.
        cells: sign for each letter of `extractor.protocol.api.ShardMap`.
        cursor: the chosen row.
    """

    bar: str
    bar_rest: str
    spark: str
    gap: str
    dot: str
    rule: str
    about: str
    degree: str
    warning: str
    more: str
    cells: dict[str, str]
    cursor: str
    ascii_only: bool


UNICODE = Signs(
    bar="▏▎▍▌▋▊▉█",
    bar_rest="░",
    spark="▁▂▃▄▅▆▇█",
    gap=" ",
    dot=" · ",
    rule="─",
    about="±",
    degree="°C",
    warning="▲",
    more="…",
    cells={"d": "■", "r": "▣", ".": "□", "x": "✖"},
    cursor="▶",
    ascii_only=False,
)
ASCII = Signs(
    bar="########",
    bar_rest="-",
    spark="_.-=+*%#",
    gap=" ",
    dot=" | ",
    rule="-",
    about="+-",
    degree="C",
    warning="!",
    more="...",
    cells={"d": "#", "r": ">", ".": ".", "x": "X"},
    cursor=">",
    ascii_only=True,
)
CELL_ROLES: dict[str, Role] = {"d": "good", "r": "busy", ".": "dim", "x": "bad"}
CELL_WORDS = {"d": "done", "r": "running", ".": "to do", "x": "failed"}


def bar(share: float, width: int, signs: Signs) -> str:
    """A bar of `width` cells, filled by a share of 0 to 1."""
    share = min(1.0, max(0.0, share))
    if signs.ascii_only:
        full = int(share * width)
        return signs.bar[-1] * full + signs.bar_rest * (width - full)
    full, eighths = divmod(int(share * width * 8), 8)
    partial = signs.bar[eighths - 1] if eighths else ""
    return (signs.bar[-1] * full + partial).ljust(width, signs.bar_rest)


def sparkline(values: Sequence[float | None], width: int, signs: Signs) -> str:
    """The last values, the newest at the right; None is a gap. From zero up, so that a dip looks as deep as it is."""
    last = values[-width:] if width > 0 else []
    top = max((value for value in last if value is not None), default=0.0)
    levels = len(signs.spark) - 1
    drawn = (
        signs.gap
        if value is None
        else signs.spark[round(levels * max(0.0, value) / top)]
        if top
        else signs.spark[0]
        for value in last
    )
    return "".join(drawn).rjust(width)


def bucketed(cells: str, room: int) -> str:
    """The letters of a map in at most `room` places; a place shows the worst of its shards.

    A failure first, then work, then what is to do: a place is done when all its shards are.
    """
    if room <= 0:
        return ""
    size = -(-len(cells) // room)
    if size <= 1:
        return cells
    buckets = (cells[first : first + size] for first in range(0, len(cells), size))
    return "".join(next(letter for letter in "xr.d" if letter in bucket) for bucket in buckets)
