"""The key line: what can be done here, from the action registry; what cannot be done now is dimmed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console.actions import ACTIONS, ActionSpec, Place, unavailable
from console.widgets.lines import Line, Span, line, width_of
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
    choices = (
        _keys(view, specs, gap, brief=brief) for gap, brief in (("  ", False), (" ", False), (" ", True))
    )
    lines = list(choices)
    return [next((one for one in lines if width_of(one) <= width), lines[-1])]


def _keys(view: View, specs: Sequence[ActionSpec], gap: str, *, brief: bool) -> Line:
    """The keys; the brief form leaves out the labels of what cannot be done now."""
    note = Span(" read-only:" if view.read_only and any(spec.mutates for spec in specs) else "", "warn")
    parts = [part for spec in specs for part in _key(view, spec, gap, brief=brief)]
    return line(note, " ", *parts[1:])


def _key(view: View, spec: ActionSpec, gap: str, *, brief: bool) -> Line:
    is_off = unavailable(spec, view.snapshot, read_only=view.read_only) is not None
    if spec.action is not None and (view.link == Link.ENDED or view.is_stale):
        is_off = True
    return (
        Span(gap),
        Span(spec.key, "dim" if is_off else "key"),
        Span("" if is_off and brief else f" {spec.label}", "dim" if is_off else ""),
    )
