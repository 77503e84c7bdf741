"""Help and palette: the action registry, to read and to search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Input

from console.actions import ACTIONS, ActionSpec, Place, unavailable
from console.screens.dialogs import Dialog
from console.widgets.field import Field
from console.widgets.lines import Line, Span, line, wrapped
from console.widgets.panel import Panel
from console.widgets.signs import CELL_ROLES, CELL_WORDS

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from console.widgets.view import View

HELP_COLUMNS = 70
MOST_FOUND = 12


class HelpScreen(Dialog[None]):
    """All keys, with why some do nothing at present; signs."""

    CSS_PATH = Path(__file__).with_name("dialogs.tcss")
    BINDINGS = [  # noqa: RUF012 -- as Textual declares it
        Binding("question_mark,q,enter", "nothing", "close"),
        Binding("down,j", "scroll(1)", "down"),
        Binding("up,k", "scroll(-1)", "up"),
        Binding("pagedown,space", "scroll(10)", "page down"),
        Binding("pageup,b", "scroll(-10)", "page up"),
    ]

    def compose(self) -> ComposeResult:
        """A box that scrolls."""
        with VerticalScroll(classes="box", can_focus=False):
            yield Panel(id="text", ascii_only=self.view.signs.ascii_only)

    def action_scroll(self, rows: int) -> None:
        """Moves the text."""
        self.query_one(VerticalScroll).scroll_relative(y=rows, animate=False)

    def lines(self) -> list[Line]:
        """Keys first: what acts, then what only looks."""
        acting = [spec for spec in ACTIONS if spec.mutates]
        looking = [spec for spec in ACTIONS if not spec.mutates]
        return [
            line(("Upper case acts, lower case never changes a run", "strong"), ("   esc closes", "dim")),
            *(row for spec in acting for row in _entry(self.view, spec)),
            line(("Looking", "strong")),
            *(row for spec in looking for row in _entry(self.view, spec)),
            line(("Signs", "strong")),
            self._cells(),
        ]

    def _cells(self) -> Line:
        signs = self.view.signs
        parts = [
            part
            for letter, word in CELL_WORDS.items()
            for part in (Span(signs.cells[letter], CELL_ROLES[letter]), Span(f" {word}   "))
        ]
        return (Span("  shards  "), *parts)


def key_words(spec: ActionSpec) -> str:
    """The keys of an action, as a person reads them."""
    return " ".join((spec.key, *spec.other_keys))


def _entry(view: View, spec: ActionSpec) -> list[Line]:
    why_not = unavailable(spec, view.snapshot, read_only=view.read_only)
    text = spec.description + (f" Not now: {why_not}." if why_not else "")
    rows = wrapped(text, HELP_COLUMNS - 9, role="dim" if why_not else "", most=3, more=view.signs.more)
    keys = Span(f" {spec.key:<7} ", "dim" if why_not else "key")
    return [(keys if not index else Span(" " * 9), *row) for index, row in enumerate(rows)]


class PaletteScreen(Dialog[str]):
    """Finds an action by words; answers with its id."""

    BINDINGS = [  # noqa: RUF012
        Binding("down,ctrl+n", "move(1)", "down", priority=True),
        Binding("up,ctrl+p", "move(-1)", "up", priority=True),
    ]

    def __init__(self, view: View, place: Place) -> None:
        super().__init__(view)
        self._place = place
        self._chosen = 0
        self._found: list[ActionSpec] = []

    def compose(self) -> ComposeResult:
        """A field and what it finds."""
        with Vertical(classes="box"):
            yield Field(id="query", placeholder="words of an action")
            yield Panel(id="text", ascii_only=self.view.signs.ascii_only)

    def opened(self) -> None:
        """Takes the keys, lists everything."""
        self.query_one(Input).focus()
        self._find("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Finds again."""
        event.stop()
        self._find(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answers with the chosen one."""
        event.stop()
        if self._found:
            self.dismiss(self._found[self._chosen].id)

    def action_move(self, rows: int) -> None:
        """Chooses another one."""
        self._chosen = max(0, min(len(self._found) - 1, self._chosen + rows))
        self._draw()

    def _find(self, query: str) -> None:
        wanted = query.lower().split()
        here = (spec for spec in ACTIONS if spec.place in {Place.EVERYWHERE, self._place})
        self._found = [
            spec
            for spec in here
            if spec.id != "palette"
            and all(
                word in f"{spec.id} {spec.verb} {spec.label} {spec.description}".lower() for word in wanted
            )
        ]
        self._chosen = 0
        self._draw()

    def _draw(self) -> None:
        first = max(0, self._chosen - MOST_FOUND + 1)
        shown = self._found[first : first + MOST_FOUND]
        rows = [self._row(spec, is_chosen=first + i == self._chosen) for i, spec in enumerate(shown)]
        count = f"{len(shown)} of {len(self._found)}" if len(shown) < len(self._found) else ""
        rest = line((count or "up, down, enter; esc closes" if rows else "nothing has these words", "dim"))
        self.query_one("#text", Panel).show([*rows, rest])

    def _row(self, spec: ActionSpec, *, is_chosen: bool) -> Line:
        why_not = unavailable(spec, self.view.snapshot, read_only=self.view.read_only)
        cursor = self.view.signs.cursor if is_chosen else " "
        about = f"not now: {why_not}" if why_not else spec.description
        return line(
            (f"{cursor} {spec.key:<6}", "key"),
            (f"{spec.label:<11}", "strong" if is_chosen else ""),
            (about, "dim"),
        )
