"""Panels of the work: the map of shards and the last events."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from console import words
from console.widgets.lines import Line, Role, Span, line
from console.widgets.signs import CELL_ROLES, CELL_WORDS, bucketed
from console.widgets.view import View, age_of, facts, title

if TYPE_CHECKING:
    from extractor.protocol.api import EventLine, Progress

AUTO = "auto"


def shards(view: View, width: int, height: int) -> list[Line]:
    """The map, one cell per shard or per bucket of shards; in the narrow layout one line of counts."""
    snapshot = view.snapshot
    done = snapshot.progress if snapshot else None
    if snapshot is None or done is None:
        return [title("Shards", width, view.signs)] if view.wide else []
    counts = _counts(view, done)
    if not view.wide:
        return [(Span(" shards "), *counts)]
    head = title("Shards", width, view.signs, middle=_legend(view), right=age_of(view))
    rows = max(0, height - 3)
    columns = max(1, width - 2)
    if snapshot.shards is None or not rows:
        return [head, (Span(" "), *counts)]
    letters = bucketed(snapshot.shards.cells, rows * columns)
    scale = snapshot.shards.shards_per_cell * -(-len(snapshot.shards.cells) // (rows * columns))
    note = Span(f"one cell: up to {scale} shards, the worst of them" if scale > 1 else "", "dim")
    drawn = [_row(view, letters[first : first + columns]) for first in range(0, len(letters), columns)]
    return [head, (Span(" "), *counts), *drawn, (Span(" "), *line(note))]


def _row(view: View, letters: str) -> Line:
    runs = ((letter, len(list(same))) for letter, same in groupby(letters))
    return (Span(" "), *(Span(view.signs.cells[letter] * size, CELL_ROLES[letter]) for letter, size in runs))


def _legend(view: View) -> Line:
    parts = [
        part
        for letter, word in CELL_WORDS.items()
        for part in (Span(view.signs.cells[letter], CELL_ROLES[letter]), Span(f" {word} ", "dim"))
    ]
    return tuple(parts)


def _counts(view: View, done: Progress) -> Line:
    failed: Role = "bad" if done.shards_failed else ""
    to_do = done.shards_total - done.shards_done - done.shards_running - done.shards_failed
    return facts(
        view,
        f"{done.shards_done:,} / {done.shards_total:,} done",
        f"{done.shards_running:,} running",
        (f"{done.shards_failed:,} failed", failed),
        f"{max(0, to_do):,} to go",
    )


def events(view: View, width: int, height: int) -> list[Line]:
    """The last events, the newest at the bottom; as many as there is room for."""
    snapshot = view.snapshot
    head = [title("Events", width, view.signs, right=age_of(view))] if view.wide else []
    found = snapshot.events if snapshot else ()
    room = max(0, height - len(head))
    rows = [event_line(view, event) for event in found[-room:]] if room else []
    return [*head, *rows]


def event_line(view: View, event: EventLine) -> Line:
    """When, who, what."""
    when = words.when_words(event.time_utc, now_utc=view.now_utc, zone=view.zone)
    who = Span(f"{event.who:<5} ", "dim" if event.who == AUTO else "strong")
    return line((f" {when} ", "dim"), who, event.text)
