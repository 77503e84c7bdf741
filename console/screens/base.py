"""What the screens share: they are told of views and notices, and show them in their panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen

from console.actions import Place
from console.widgets.lines import Line, Role, Span, wrapped
from console.widgets.panel import Panel
from console.widgets.view_panel import ViewPanel

if TYPE_CHECKING:
    from console.widgets.signs import Signs
    from console.widgets.view import View

WIDE_COLUMNS = 110
TALL_ROWS = 34
NOTICE_LINES = 4


class RunScreen(Screen[None]):
    """A full screen over one run.

    Args:
        signs: to draw with.
    """

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE_COLUMNS, "-wide")]  # noqa: RUF012 -- as Textual declares it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL_ROWS, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = None
    place: ClassVar[Place] = Place.EVERYWHERE
    """Whose keys work on it besides those that work everywhere."""

    def __init__(self, signs: Signs) -> None:
        super().__init__()
        self.signs = signs
        self._view: View | None = None
        self._notice: tuple[str, Role] = ("", "")
        self._is_open = False

    @property
    def view(self) -> View | None:
        """The last view it was told of."""
        return self._view

    def show_view(self, view: View) -> None:
        """Shows what has changed. Before it is mounted it only remembers."""
        self._view = view
        for panel in self.query(ViewPanel):
            panel.show_view(view)

    def draw(self, panel_id: str, lines: list[Line]) -> None:
        """Shows lines in a panel. Nothing before the screen is open, and while its panels are taken down."""
        if self._is_open:
            for panel in self.query(f"#{panel_id}").results(Panel):
                panel.show(lines)

    def show_notice(self, text: str, role: Role = "") -> None:
        """What became of the last thing that the operator did; stays until the next."""
        self._notice = (text, role)
        width = max(20, self.app.size.width - 2)
        shown = wrapped(text, width, role=role, most=NOTICE_LINES, more=self.signs.more) if text else []
        self.draw("notice", [(Span(" "), *row) for row in shown])

    def on_mount(self) -> None:
        """Catches up with what it was told before."""
        self._is_open = True
        if self._view is not None:
            self.show_view(self._view)
        self.show_notice(*self._notice)
        self.opened()

    def opened(self) -> None:
        """What a screen does when it is there. Not `on_mount`: Textual calls that of every class."""
