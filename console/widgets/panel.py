"""The one widget that draws: lines of roles, each sent to the terminal only when it has changed.

Bytes over SSH are the reason: a stock widget sends all its lines when one has changed. A panel compares line by
line and marks just the changed ones. It parses no markup; every text passes `lines.visible` here, so no other
widget can forget to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from console.widgets.lines import ROLES, Span, fitted, plain, visible, width_of

if TYPE_CHECKING:
    from rich.style import Style

    from console.widgets.lines import Line


class Panel(Widget):
    """Lines of text. As high as its lines, unless the style sheet says otherwise."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"panel--{role}" for role in ROLES}
    DEFAULT_CSS = """
    Panel { height: auto; width: 1fr; }
    Panel > .panel--strong { text-style: bold; }
    Panel > .panel--dim { text-style: dim; }
    Panel > .panel--good { color: $success; }
    Panel > .panel--warn { color: $warning; text-style: bold; }
    Panel > .panel--bad { color: $error; text-style: bold; }
    Panel > .panel--busy { color: $secondary; }
    Panel > .panel--key { color: $primary; text-style: bold; }
    Panel > .panel--reverse { text-style: reverse; }
    """

    def __init__(
        self,
        *,
        id: str | None = None,  # noqa: A002 -- Textual's name
        classes: str | None = None,
        ascii_only: bool = False,
    ) -> None:
        super().__init__(id=id, classes=classes, markup=False)
        self.ascii_only = ascii_only
        self.more = "..." if ascii_only else "\u2026"
        self._lines: list[Line] = []

    @property
    def shown(self) -> list[str]:
        """The text of its lines, as it is shown but for the cut at its width."""
        return [plain(one) for one in self._lines]

    def show(self, lines: list[Line]) -> None:
        """Shows other lines; draws those that differ."""
        new = [
            tuple(Span(visible(span.text, ascii_only=self.ascii_only), span.role) for span in one)
            for one in lines
        ]
        old, self._lines = self._lines, new
        if len(old) != len(new):
            self.refresh(layout=True)
            return
        for y, (before, after) in enumerate(zip(old, new, strict=True)):
            if before != after:
                # Only as far as there is or was text: blanks behind it are on the screen already.
                self.refresh(Region(0, y, min(self.size.width, max(width_of(before), width_of(after))), 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002 -- Textual's
        """One row per line."""
        return len(self._lines)

    def get_content_width(self, container: Size, viewport: Size) -> int:  # noqa: ARG002 -- Textual's
        """The widest line."""
        return max((len(one) for one in self.shown), default=0)

    def render_line(self, y: int) -> Strip:
        """One row."""
        base = self.rich_style
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width, base)
        spans = fitted(self._lines[y], width, more=self.more)
        strip = Strip([Segment(span.text, self._style(base, span)) for span in spans])
        return strip.adjust_cell_length(width, base)

    def _style(self, base: Style, span: Span) -> Style:
        if not span.role:
            return base
        return base + self.get_component_rich_style(f"panel--{span.role}", partial=True)
