"""Panels that draw a `View`: they keep the last one, and draw it again when their size changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console.widgets.panel import Panel

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.events import Resize

    from console.widgets.lines import Line
    from console.widgets.view import View


class ViewPanel(Panel):
    """Draws a view with a pure function of its width; as high as what that returns."""

    def __init__(
        self,
        draw: Callable[[View, int], list[Line]],
        *,
        id: str | None = None,  # noqa: A002 -- Textual's name
        ascii_only: bool = False,
    ) -> None:
        super().__init__(id=id, ascii_only=ascii_only)
        self._draw = draw
        self._view: View | None = None

    def show_view(self, view: View) -> None:
        """Draws what is new."""
        self._view = view
        self._redraw()

    def on_resize(self, event: Resize) -> None:
        """The lines depend on the width."""
        del event
        self._redraw()

    def _redraw(self) -> None:
        if self._view is not None and self.size.width:
            self.show(self.lines_of(self._view))

    def lines_of(self, view: View) -> list[Line]:
        """What it shows of a view at its present size."""
        return self._draw(view, self.size.width)


class FilledPanel(ViewPanel):
    """A panel whose height the layout gives, and that fills it."""

    def __init__(
        self,
        draw: Callable[[View, int, int], list[Line]],
        *,
        id: str | None = None,  # noqa: A002 -- Textual's name
        ascii_only: bool = False,
    ) -> None:
        super().__init__(
            lambda view, width: draw(view, width, self.size.height), id=id, ascii_only=ascii_only
        )
