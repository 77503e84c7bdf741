"""The log: events and the logs of the run's processes, one source at a time.

Lines are data: plain text, control characters as signs, never markup. Memory is bounded by `MOST_LINES`; what
was dropped is said. Following is a state of the view, not of the run: moving up leaves it, `f` comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType  # noqa: TC002 -- Textual reads the annotation

from console.actions import Place
from console.feed import EVENTS
from console.screens.base import RunScreen
from console.screens.bindings import bindings
from console.widgets import run_panels
from console.widgets.key_line import key_line
from console.widgets.lines import Line, Span, line, visible, wrapped
from console.widgets.panel import Panel
from console.widgets.view_panel import FilledPanel, ViewPanel
from console.widgets.work_panels import event_line
from console.workers import begin
from extractor.errors import TapdeckError

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from console.feed import Feed
    from console.widgets.signs import Signs
    from console.widgets.view import View
    from extractor.protocol.api import EventLine

MOST_LINES = 5_000
MOST_CHARACTERS = 4_000
"""Of one line; a line may be as long as a file."""
FIRST_LINES = 500
FIRST_SOURCE = "supervisor"


class LogScreen(RunScreen):
    """Events and logs."""

    CSS_PATH = Path(__file__).with_name("log.tcss")
    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.LOG)
    place = Place.LOG

    def __init__(self, signs: Signs, feed: Feed) -> None:
        super().__init__(signs)
        self._feed = feed
        self._source = EVENTS
        self._sources: tuple[str, ...] = (EVENTS,)
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._events: deque[EventLine] = deque(maxlen=MOST_LINES)
        self._num_read = 0
        self._trouble = ""
        self._below = 0
        """Lines hidden below the view; 0: it follows."""

    def compose(self) -> ComposeResult:
        """Header, sources, lines, keys."""
        ascii_only = self.signs.ascii_only
        yield ViewPanel(run_panels.header, id="header", ascii_only=ascii_only)
        yield Panel(id="sources", ascii_only=ascii_only)
        yield FilledPanel(self._draw_lines, id="lines", ascii_only=ascii_only)
        yield Panel(id="notice", ascii_only=ascii_only)
        yield ViewPanel(
            lambda view, width: key_line(view, width, Place.LOG), id="keys", ascii_only=ascii_only
        )

    def opened(self) -> None:
        """Begins to read."""
        self._read_anew()

    def show_view(self, view: View) -> None:
        """Takes the events of a snapshot that are new."""
        last = self._events[-1].number if self._events else -1
        found = view.snapshot.events if view.snapshot else ()
        new = [event for event in found if event.number > last]
        self._events.extend(new)
        if self._source == EVENTS and self._below:
            self._below = min(self._below + len(new), self._num_lines - 1)
        super().show_view(view)
        self._draw_sources()

    @property
    def _num_lines(self) -> int:
        return len(self._events) if self._source == EVENTS else len(self._lines)

    # Reading.

    def _read_anew(self) -> None:
        self._lines.clear()
        self._num_read, self._below, self._trouble = 0, 0, ""
        self._redraw()
        begin(self, "log", self._read, self._source)

    async def _read(self, source: str) -> None:
        offset: int | None = None
        asked = FIRST_SOURCE if source == EVENTS else source
        while True:
            try:
                chunk = await self._feed.log(
                    asked, offset=offset, lines=1 if source == EVENTS else FIRST_LINES
                )
            except TapdeckError as error:
                self._trouble = error.message if source != EVENTS else ""
            else:
                self._sources = (EVENTS, *(name for name in chunk.sources if name != EVENTS))
                self._trouble = ""
                offset = chunk.next_offset
                if source != EVENTS:
                    self._take(chunk.lines)
            self._redraw()
            await asyncio.sleep(self._feed.interval_s)

    def _take(self, lines: tuple[str, ...]) -> None:
        more = self.signs.more
        cut = (text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + more for text in lines)
        self._lines.extend(cut)
        self._num_read += len(lines)
        if self._below:
            self._below = min(self._below + len(lines), self._num_lines - 1)

    # Drawing.

    def _redraw(self) -> None:
        self._draw_sources()
        if self.view is not None:
            for panel in self.query(FilledPanel):
                panel.show_view(self.view)

    def _draw_sources(self) -> None:
        names = [Span(f" {name} ", "reverse" if name == self._source else "dim") for name in self._sources]
        total = len(self._events) if self._source == EVENTS else self._num_read
        shown = (
            f"{self._num_lines:,} of {total:,} lines kept" if total > self._num_lines else f"{total:,} lines"
        )
        where = f"{self._below:,} more below; f follows" if self._below else "following"
        state = Span(f"   {self._trouble or where}", "warn" if self._trouble or self._below else "dim")
        self.draw("sources", [line(" ", *names, (f"   {shown}", "dim"), state)])

    def _draw_lines(self, view: View, width: int, height: int) -> list[Line]:
        """The lines that end above what is hidden below; long ones over several rows."""
        rows: list[Line] = []
        for index in range(self._num_lines - 1 - self._below, -1, -1):
            rows[:0] = self._drawn(view, index, width)
            if len(rows) >= height:
                return rows[-height:]
        return rows or [line((" nothing here yet", "dim"))]

    def _drawn(self, view: View, index: int, width: int) -> list[Line]:
        ascii_only = self.signs.ascii_only
        if self._source == EVENTS:
            head = event_line(view, self._events[index])
            text = "".join(span.text for span in head[2:])
            indent = sum(len(span.text) for span in head[:2])
            rows = wrapped(
                visible(text, ascii_only=ascii_only), width - indent, most=20, more=self.signs.more
            )
            return [(*(head[:2] if not i else (Span(" " * indent),)), *row) for i, row in enumerate(rows)]
        text = visible(self._lines[index], ascii_only=ascii_only)
        return [(Span(" "), *row) for row in wrapped(text, width - 1, most=200, more=self.signs.more)]

    # Keys.

    def action_log_next(self) -> None:
        """The next source."""
        self._choose(1)

    def action_log_previous(self) -> None:
        """The source before."""
        self._choose(-1)

    def _choose(self, step: int) -> None:
        at = self._sources.index(self._source) if self._source in self._sources else 0
        self._source = self._sources[(at + step) % len(self._sources)]
        self._read_anew()

    def action_log_follow(self) -> None:
        """The end, and stay there."""
        self._move(-self._num_lines)

    def action_log_first(self) -> None:
        """The first line that is kept, as far as a page allows."""
        self._move(self._num_lines)

    def action_log_up(self) -> None:
        """One line up."""
        self._move(1)

    def action_log_down(self) -> None:
        """One line down."""
        self._move(-1)

    def action_log_page_up(self) -> None:
        """One page up."""
        self._move(self._page)

    def action_log_page_down(self) -> None:
        """One page down."""
        self._move(-self._page)

    @property
    def _page(self) -> int:
        return max(1, self.query_one("#lines").size.height - 1)

    def _move(self, lines: int) -> None:
        most = max(0, self._num_lines - self._page - 1)
        self._below = max(0, min(most, self._below + lines))
        self._redraw()
