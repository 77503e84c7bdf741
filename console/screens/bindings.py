"""Key bindings of a place, made from the action registry: nothing else binds a key of a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding

from console.actions import Place, actions_of, keys_of

if TYPE_CHECKING:
    from textual.binding import BindingType


def bindings(place: Place) -> list[BindingType]:
    """The keys of one place; each calls the action method that has the id of its entry."""
    return [Binding(keys_of(spec), spec.id, spec.label, show=False) for spec in actions_of(place)]
