"""Begins work in Textual's workers, so that an app that ends at once leaves no coroutine behind, never awaited."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from textual.dom import DOMNode


def begin(
    node: DOMNode,
    group: str,
    function: Callable[..., Coroutine[Any, Any, None]],
    *args: object,
    exclusive: bool = True,
) -> None:
    """Begins a function in a worker of a screen or the app; ends with it.

    Args:
        node: whose work it is.
        group: name of what it does; of an exclusive one the work before is ended.
        function: called when the worker begins.
        *args: its arguments.
        exclusive: whether work of the same group is ended first.
    """
    # Any: mypy finds no result type in Textual's union of what a worker takes.
    work: Any = partial(function, *args)
    node.run_worker(work, group=group, exclusive=exclusive)
