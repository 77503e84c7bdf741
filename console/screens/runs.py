"""The list of runs: live ones first. Chooses one to attach to; changes none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType  # noqa: TC002 -- Textual reads the annotation
from textual.message import Message

from console import words
from console.actions import Place
from console.screens.base import RunScreen
from console.screens.bindings import bindings
from console.widgets.key_line import key_line
from console.widgets.lines import Line, Span, fitted, line, width_of
from console.widgets.panel import Panel
from console.widgets.run_panels import state_role
from console.widgets.view import whole_duration
from console.widgets.view_panel import ViewPanel
from console.workers import begin

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Resize

    from console.desk import Desk, RunRow
    from console.widgets.signs import Signs
    from console.widgets.view import View

LOOK_EVERY_S = 5.0
NAME_CELLS = 28


class RunsScreen(RunScreen):
    """One row per run."""

    CSS_PATH = Path(__file__).with_name("runs.tcss")
    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.RUNS)
    place = Place.RUNS

    @dataclass
    class Chosen(Message):
        """The operator wants to see a run."""

        path: Path

    def __init__(self, signs: Signs, desk: Desk) -> None:
        super().__init__(signs)
        self._desk = desk
        self._rows: list[RunRow] | None = None
        self._chosen = 0

    def compose(self) -> ComposeResult:
        """Title, rows, keys."""
        ascii_only = self.signs.ascii_only
        yield Panel(id="title", ascii_only=ascii_only)
        yield Panel(id="runs", ascii_only=ascii_only)
        yield Panel(id="notice", ascii_only=ascii_only)
        yield ViewPanel(
            lambda view, width: key_line(view, width, Place.RUNS), id="keys", ascii_only=ascii_only
        )

    def opened(self) -> None:
        """Begins to look."""
        self._draw()
        begin(self, "runs", self._look)

    def on_resize(self, event: Resize) -> None:
        """Columns depend on the width."""
        del event
        self._draw()

    def show_view(self, view: View) -> None:
        """Ages grow."""
        super().show_view(view)
        self._draw()

    async def _look(self) -> None:
        while True:
            rows = await self._desk.runs()
            under = self._rows[self._chosen].path if self._rows else None
            self._rows = rows
            # The cursor stays on its run when the order changes.
            paths = [row.path for row in rows]
            self._chosen = paths.index(under) if under in paths else 0
            self._draw()
            await asyncio.sleep(LOOK_EVERY_S)

    # Drawing.

    def _draw(self) -> None:
        view = self.view
        if not self._is_open or view is None:
            return
        count = (
            ""
            if self._rows is None
            else f"{sum(row.is_live for row in self._rows)} live of {len(self._rows)}"
        )
        self.draw("title", [line((" tapdeck  ", "dim"), ("runs", "strong"), (f"   {count}", "dim"))])
        self.draw("runs", self._lines(view))

    def _lines(self, view: View) -> list[Line]:
        if self._rows is None:
            return [line((" looking into the run folders", "dim"))]
        if not self._rows:
            return [
                line(
                    " no run yet. ",
                    ("N", "key"),
                    " starts one from a run.toml; `tapdeck demo` makes one to try",
                )
            ]
        room = max(1, self.query_one("#runs").size.height - 1)
        first = max(0, self._chosen - room + 1)
        shown = self._rows[first : first + room]
        rows = [self._row(view, row, is_chosen=first + i == self._chosen) for i, row in enumerate(shown)]
        rest = len(self._rows) - len(shown)
        return [*rows, line((f" {len(shown)} of {len(self._rows)} runs", "dim"))] if rest else rows

    def _row(self, view: View, row: RunRow, *, is_chosen: bool) -> Line:
        cursor = Span(f"{self.signs.cursor if is_chosen else ' '} ", "key")
        name = _padded(
            fitted((Span(row.name, "strong" if is_chosen else ""),), NAME_CELLS, more=self.signs.more)
        )
        if row.snapshot is None:
            said = "starting; nothing known yet" if row.is_live else "never got as far as a first snapshot"
            return (cursor, *name, Span(said, "dim"))
        info, done = row.snapshot.state, row.snapshot.progress
        state = words.state_words(info, ascii_only=self.signs.ascii_only)
        if not row.is_live and not info.state.is_terminal:
            state = f"? no supervisor, was {info.state}"
        share = (
            words.percent_words(done.tokens_done / done.tokens_total) if done and done.tokens_total else ""
        )
        age = (
            "live" if row.is_live else f"{whole_duration(max(0.0, view.now_utc - row.snapshot.time_utc))} ago"
        )
        where = f"  {row.snapshot.run.output}" if view.wide else ""
        return (
            cursor,
            *name,
            Span(f"{state:<28}", state_role(info.state) if row.is_live or info.state.is_terminal else "warn"),
            Span(f"{share:>8}"),
            Span(f"{age:>12}", "good" if row.is_live else "dim"),
            Span(where, "dim"),
        )

    # Keys.

    def action_runs_up(self) -> None:
        """The run above."""
        self._move(-1)

    def action_runs_down(self) -> None:
        """The run below."""
        self._move(1)

    def _move(self, rows: int) -> None:
        self._chosen = max(0, min(len(self._rows or []) - 1, self._chosen + rows))
        self._draw()

    def action_runs_open(self) -> None:
        """Attaches to the run under the cursor."""
        if self._rows:
            self.post_message(self.Chosen(self._rows[self._chosen].path))


def _padded(name: Line) -> Line:
    return (*name, *line(" " * max(1, NAME_CELLS + 1 - width_of(name))))
