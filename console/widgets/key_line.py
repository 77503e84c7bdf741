"""The key line: what can be done here, from the action registry; what cannot be done now is dimmed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console.actions import ACTIONS, ActionSpec, Place, unavailable
from console.widgets.lines import Line, Span, line
from console.widgets.view import Link, View

if TYPE_CHECKING:
    from collections.abc import Sequence


def key_line(view: View, width: int, place: Place = Place.EVERYWHERE) -> list[Line]:
    """One line of keys with their labels, closer together where there is little room."""
    specs = [spec for spec in ACTIONS if spec.in_key_line and spec.place in {Place.EVERYWHERE, place}]
    if place != Place.EVERYWHERE:
        # Its own keys first; what acts on the run is on the overview's line.
        own = [spec for spec in ACTIONS if spec.in_key_line and spec.place == place]
        also = [spec for spec in ACTIONS if spec.also_on == place]
        specs = [*own, *also, *(spec for spec in specs if spec.place != place and not spec.mutates)]
    roomy = _keys(view, specs, "  ")
    return [roomy if _width(roomy) <= width else _keys(view, specs, " ")]


def _width(content: Line) -> int:
    return sum(len(span.text) for span in content)


def _keys(view: View, specs: Sequence[ActionSpec], gap: str) -> Line:
    note = Span(" read-only:" if view.read_only and any(spec.mutates for spec in specs) else "", "warn")
    parts = [part for spec in specs for part in _key(view, spec, gap)]
    return line(note, " ", *parts[1:])


def _key(view: View, spec: ActionSpec, gap: str) -> Line:
    is_off = unavailable(spec, view.snapshot, read_only=view.read_only) is not None
    if spec.action is not None and (view.link == Link.ENDED or view.is_stale):
        is_off = True
    return (
        Span(gap),
        Span(spec.key, "dim" if is_off else "key"),
        Span(f" {spec.label}", "dim" if is_off else ""),
    )
