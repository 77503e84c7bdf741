"""Begins a run: the path of a run.toml, its estimate, a question, then `tapdeck start --detach`.

The console prepares and starts nothing itself: it runs tapdeck's own verbs and shows what they say. A refusal is
shown whole. Leaving the screen ends an estimate, and never a run that has been started.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input

from console.screens.base import RunScreen
from console.screens.dialogs import ConfirmDialog
from console.widgets.field import Field
from console.widgets.lines import Line, Role, Span, line, wrapped
from console.widgets.panel import Panel
from console.workers import begin
from extractor.quantities import bytes_words

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from console.desk import Desk, Outcome
    from console.widgets.signs import Signs

TOLD_LINES = 10
LABEL_CELLS = 11
FIXED_ROWS = 7
"""Rows that neither the estimate nor what the commands say can have."""
START = "start"


class Origin(msgspec.Struct, frozen=True):
    """One variable of `estimate --json`."""

    name: str
    value: str
    origin: str


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What `tapdeck estimate --json` prints; what is missing is shown as unknown."""

    run: str = ""
    model: str = ""
    output: str = ""
    device: str = ""
    dtype: str = ""
    samples: int = 0
    tokens: int = 0
    rejected: int = 0
    num_shards: int = 0
    shards_done: int = 0
    taps: tuple[str, ...] = ()
    ids_after: tuple[int, ...] = ()
    ids_before: tuple[int, ...] = ()
    bytes_per_token: int = 0
    total_bytes: int = 0
    needed_bytes: int = 0
    free_bytes: int = 0
    reserve_bytes: int = 0
    fits: bool = True
    nccl_preset: str = "none"
    environment: tuple[Origin, ...] = ()


class Started(msgspec.Struct, frozen=True):
    """What `tapdeck start --detach --json` prints."""

    run: str
    folder: str


class StartScreen(RunScreen):
    """From a run.toml to a run."""

    CSS_PATH = Path(__file__).with_name("start.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back", show=False),
        Binding("enter", "ask", "ask", show=False),
    ]

    @dataclass
    class Begun(Message):
        """A run has been started; its run folder."""

        path: Path

    @dataclass
    class Left(Message):
        """The operator does not want to start one."""

    def __init__(self, signs: Signs, desk: Desk, *, path: str = "") -> None:
        super().__init__(signs)
        self._desk = desk
        self._path = path
        self._told: deque[str] = deque(maxlen=TOLD_LINES)
        self._refusal: tuple[str, ...] = ()
        self._doing = ""
        self._estimate: Estimate | None = None

    def compose(self) -> ComposeResult:
        """Title, path, what the commands say, the estimate, keys."""
        ascii_only = self.signs.ascii_only
        yield Panel(id="title", ascii_only=ascii_only)
        yield Field(self._path, id="path", placeholder="path of a run.toml")
        yield Panel(id="told", ascii_only=ascii_only)
        yield Panel(id="estimate", ascii_only=ascii_only)
        yield Panel(id="notice", ascii_only=ascii_only)
        yield Panel(id="keys", ascii_only=ascii_only)

    def opened(self) -> None:
        """Takes the keys."""
        self.draw("title", [line((" tapdeck  ", "dim"), ("start a run", "strong"))])
        self.query_one(Input).focus()
        self._draw()

    # Estimating.

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Estimates; nothing is started by that."""
        event.stop()
        if event.value.strip():
            self._path = str(Path(event.value.strip()).expanduser())
            self._estimate, self._refusal = None, ()
            begin(self, "start", self._do_estimate, self._path)

    async def _do_estimate(self, path: str) -> None:
        outcome = await self._command("estimate", path, "--json")
        try:
            self._estimate = msgspec.json.decode(outcome.output, type=Estimate)
        except msgspec.DecodeError:
            self._refuse(outcome)
            return
        self.set_focus(None)
        self._draw()

    async def _command(self, *arguments: str) -> Outcome:
        self._told.clear()
        self._doing = arguments[0]
        self._tell(f"tapdeck {' '.join(arguments)}")
        try:
            return await self._desk.command(arguments, self._tell)
        finally:
            self._doing = ""

    def _tell(self, text: str) -> None:
        self._told.append(text)
        self._draw()

    def _refuse(self, outcome: Outcome) -> None:
        said = outcome.errors or ("it said nothing",)
        self._refusal = (*said, f"exit code {outcome.exit_code}; nothing was started")
        self._told.clear()
        self.query_one(Input).focus()
        self._draw()

    # Starting.

    def action_ask(self) -> None:
        """Asks; no is the default."""
        found = self._estimate
        if found is None or self.view is None:
            return
        if not found.fits:
            self.show_notice(
                "it does not fit on the disk; nothing can be started before there is room", "bad"
            )
            return
        dialog = ConfirmDialog(
            self.view,
            question=f"Start {found.run or self._path}?",
            effect=f"{found.tokens:,} tokens, {bytes_words(found.needed_bytes)} to write to {found.output}. "
            "The run goes on without this console.",
            yes="start it",
        )
        self.app.push_screen(dialog, self._answered)

    def _answered(self, answer: bool | None) -> None:
        if answer:
            begin(self, "start", self._do_start, self._path)

    async def _do_start(self, path: str) -> None:
        self._estimate = None
        outcome = await self._command(START, path, "--detach", "--json")
        try:
            begun = msgspec.json.decode(outcome.output, type=Started)
        except msgspec.DecodeError:
            self._refuse(outcome)
            return
        self.post_message(self.Begun(Path(begun.folder)))

    def action_back(self) -> None:
        """Goes back; starts nothing."""
        if self._doing == START:
            self.show_notice("the run is being started; wait for the answer", "warn")
            return
        self.workers.cancel_group(self, "start")
        self.post_message(self.Left())

    # Drawing.

    def _draw(self) -> None:
        if not self._is_open:
            return
        width = max(20, self.app.size.width - 2)
        told = [
            (Span(" "), *row)
            for text in self._told
            for row in wrapped(text, width, role="dim", most=2, more=self.signs.more)
        ]
        refused = [
            (Span(" "), *row)
            for text in self._refusal
            for row in wrapped(text, width, role="bad", most=20, more=self.signs.more)
        ]
        estimate = estimate_lines(self._estimate, width, self.signs)
        # The estimate is never cut for what led to it.
        room = max(0, self.app.size.height - FIXED_ROWS - len(estimate))
        self.draw("told", refused or told[max(0, len(told) - room) :])
        self.draw("estimate", estimate)
        self.draw("keys", [self._keys()])

    def _keys(self) -> Line:
        if self._doing == START:
            return line((f" tapdeck {START} is at work", "busy"))
        if self._doing:
            return line(
                (f" tapdeck {self._doing} is at work  ", "busy"), ("esc", "key"), " back, nothing is started"
            )
        if self._estimate is not None:
            return line(
                (" enter", "key"), " start it (asks first)  ", ("esc", "key"), " back, nothing is started"
            )
        return line((" enter", "key"), " estimate  ", ("esc", "key"), " back, nothing is started")


def estimate_lines(found: Estimate | None, width: int, signs: Signs) -> list[Line]:
    """What the run would be, one fact a line. Pure."""
    if found is None:
        return []
    rejected = f", {found.rejected:,} rejected" if found.rejected else ""
    done = f", {found.shards_done:,} done already" if found.shards_done else ""
    verdict = "it fits" if found.fits else "IT DOES NOT FIT"
    names = " ".join(found.taps)
    rows: list[tuple[str, str, Role]] = [
        ("run", found.run, "strong"),
        ("model", f"{found.model}  {found.dtype} on {found.device}", ""),
        ("taps", names, ""),
        ("ids", f"after {_ids(found.ids_after)}; before (vLLM) {_ids(found.ids_before)}", ""),
        ("data", f"{found.samples:,} samples, {found.tokens:,} tokens{rejected}", ""),
        ("work", f"{found.num_shards:,} shards{done}", ""),
        (
            "size",
            f"{bytes_words(found.bytes_per_token)} per token, {bytes_words(found.total_bytes)} in all",
            "",
        ),
        ("output", found.output, ""),
        (
            "disk",
            f"needs {bytes_words(found.needed_bytes)}, {bytes_words(found.free_bytes)} free, "
            f"{bytes_words(found.reserve_bytes)} reserved: {verdict}",
            "good" if found.fits else "bad",
        ),
        ("NCCL", f"preset {found.nccl_preset}", ""),
        *(
            ("", f"{v.name}={v.value}  from {v.origin}", "warn" if v.origin == "shell" else "dim")
            for v in found.environment
        ),
    ]
    return [row for label, text, role in rows for row in _fact(label, text, role, width, signs)]


def _fact(label: str, text: str, role: Role, width: int, signs: Signs) -> list[Line]:
    rows = wrapped(text, width - LABEL_CELLS, role=role, most=4, more=signs.more)
    heads = [Span(f" {label}".ljust(LABEL_CELLS), "dim"), *[Span(" " * LABEL_CELLS)] * len(rows)]
    return [(head, *row) for head, row in zip(heads, rows, strict=False)]


def _ids(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids)) or "none"
