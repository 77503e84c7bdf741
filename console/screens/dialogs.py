"""Dialogs before an action: how deep a pause, whether to stop, the name before a kill.

They ask and return an answer; they act on nothing. Escape always means: do nothing. The default does nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from console.widgets.field import Field
from console.widgets.lines import Line, Role, Span, line, wrapped
from console.widgets.panel import Panel
from extractor.protocol.api import Unavailable
from extractor.protocol.states import AVAILABLE_DEPTHS, Depth
from extractor.quantities import bytes_words, duration_words

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from console.widgets.view import View
    from extractor.protocol.api import Snapshot

Answer = TypeVar("Answer")
TEXT_COLUMNS = 70


class Dialog(ModalScreen[Answer]):
    """A box over the screen. Answers None when the operator does nothing."""

    CSS_PATH = Path(__file__).with_name("dialogs.tcss")
    BINDINGS = [Binding("escape", "nothing", "do nothing")]  # noqa: RUF012 -- as Textual declares it
    AUTO_FOCUS = None

    def __init__(self, view: View, *, classes: str = "") -> None:
        super().__init__(classes=f"dialog {classes}")
        self.view = view

    def compose(self) -> ComposeResult:
        """A box with lines."""
        with Vertical(classes="box"):
            yield Panel(id="text", ascii_only=self.view.signs.ascii_only)

    def on_mount(self) -> None:
        """Draws its lines."""
        self.query_one("#text", Panel).show(self.lines())
        self.opened()

    def opened(self) -> None:
        """What a dialog does when it is there. Not `on_mount`: Textual calls that of every class."""

    def lines(self) -> list[Line]:
        """What it says."""
        return []

    def action_nothing(self) -> None:
        """Leaves everything as it is."""
        self.dismiss(None)


def _text(view: View, text: str, role: Role = "", most: int = 4) -> list[Line]:
    return wrapped(text, TEXT_COLUMNS, role=role, most=most, more=view.signs.more)


class PauseDialog(Dialog[Depth]):
    """How much a pause is to free."""

    BINDINGS = [  # noqa: RUF012
        Binding("h", "choose('hold')", "hold"),
        Binding("u", "choose('unload')", "unload"),
    ]

    def lines(self) -> list[Line]:
        """Each depth: what it frees, and how long the way back takes."""
        snapshot = self.view.snapshot
        rows = [row for depth in AVAILABLE_DEPTHS for row in _depth(depth, snapshot)]
        return [
            *_text(self.view, f"Pause {self.view.name}?", "strong", most=2),
            (),
            *rows,
            (),
            *_text(
                self.view,
                "Hold waits for the batch in hand, unload for the shard. A pause of yours stays until somebody "
                "resumes.",
            ),
            line("esc", ("  do nothing", "dim")),
        ]

    def action_choose(self, depth: str) -> None:
        """Answers with a depth."""
        self.dismiss(Depth(depth))


def _depth(depth: Depth, snapshot: Snapshot | None) -> list[Line]:
    used = _memory_in_use(snapshot)
    kept = f"{bytes_words(used)} stay on the GPUs" if used else "the model stays in memory"
    freed = f"frees {bytes_words(used)} on the GPUs and" if used else "frees the model's memory and"
    if depth == Depth.HOLD:
        return [line(("h", "key"), ("  hold    ", "strong"), f"frees nothing: {kept}"), _back("at once")]
    return [
        line(("u", "key"), ("  unload  ", "strong"), f"{freed} ends the worker processes"),
        _back(_load_words(snapshot)),
    ]


def _back(when: str) -> Line:
    return line((f"           back {when}", "dim"))


def _load_words(snapshot: Snapshot | None) -> str:
    known = [replica.load_s for replica in (snapshot.replicas if snapshot else ()) if replica.load_s]
    if not known:
        return "after the model is loaded again; not measured on this run yet"
    return f"in about {duration_words(max(known))} (model load, as measured on this run)"


def _memory_in_use(snapshot: Snapshot | None) -> float:
    telemetry = snapshot.telemetry if snapshot else None
    if telemetry is None or isinstance(telemetry.gpus, Unavailable):
        return 0.0
    ours = (gpu.memory_used_bytes for gpu in telemetry.gpus if gpu.rank)
    return sum(value for value in ours if not isinstance(value, Unavailable))


class ConfirmDialog(Dialog[bool]):
    """Yes or no; no is the default.

    Args:
        question: what is asked.
        effect: what a yes does.
        yes: what a yes is called.
    """

    BINDINGS = [  # noqa: RUF012
        Binding("y", "yes", "yes"),
        Binding("n,enter", "nothing", "no"),
    ]

    def __init__(self, view: View, *, question: str, effect: str, yes: str) -> None:
        super().__init__(view, classes="-danger")
        self._question, self._effect, self._yes = question, effect, yes

    def lines(self) -> list[Line]:
        """Question, effect, and the two answers."""
        return [
            *_text(self.view, self._question, "strong", most=2),
            (),
            *_text(self.view, self._effect),
            (),
            line(("y", "key"), f"  yes, {self._yes}"),
            line(("n", "key"), "  no, do nothing ", (" default: enter, esc ", "reverse")),
        ]

    def action_yes(self) -> None:
        """Answers yes."""
        self.dismiss(True)


class TypeNameDialog(Dialog[bool]):
    """The name of the run has to be typed before the answer is yes."""

    def __init__(self, view: View) -> None:
        super().__init__(view, classes="-danger")

    def compose(self) -> ComposeResult:
        """Lines, the field, and what was wrong with what was typed."""
        with Vertical(classes="box"):
            yield Panel(id="text", ascii_only=self.view.signs.ascii_only)
            yield Field(id="name")
            yield Panel(id="wrong", ascii_only=self.view.signs.ascii_only)

    def opened(self) -> None:
        """Takes the keys."""
        self.query_one(Input).focus()

    def lines(self) -> list[Line]:
        """What will be lost."""
        return [
            *_text(self.view, f"Kill {self.view.name} at once?", "strong", most=2),
            (),
            *_text(
                self.view,
                "Its processes are killed; shards in hand are lost and computed again after the next start. "
                "Finished shards are kept. Stop (S) loses nothing.",
            ),
            (),
            *_text(self.view, f"Type the run's name to kill it: {self.view.name}", most=3),
            line("esc", ("  do nothing", "dim")),
        ]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Right: yes. Wrong: says so and stays."""
        event.stop()
        if event.value.strip() == self.view.name:
            self.dismiss(True)
            return
        self.query_one("#wrong", Panel).show([(Span("that is not its name; nothing was done", "warn"),)])
