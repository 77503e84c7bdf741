"""Everything a person can do in the console, once: id, verb, key, words, danger.

Key bindings, the key line, the help screen and the palette are made from `ACTIONS`; nothing else binds a key.
It knows which supervisor `Action` an entry asks for, and refuses to know whether it is possible: that is what
the supervisor says (`Snapshot.actions`), and what is shown.

Invariants: an upper-case key acts and a lower-case key or digit changes nothing of a run; no key is a toggle;
within a screen no key means two things. Words for leaving the console and for ending a run share no verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from extractor.protocol.states import Action

if TYPE_CHECKING:
    from extractor.protocol.api import Snapshot


class Danger(StrEnum):
    """What stands between a key and its effect."""

    SAFE = "safe"
    """Done at once."""
    CONFIRM = "confirm"
    """Asked first; doing nothing is the default."""
    TYPE_NAME = "type-name"
    """The name of the run has to be typed."""


class Place(StrEnum):
    """Where an action's key works."""

    EVERYWHERE = "everywhere"
    LOG = "log"
    RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """One thing that can be done.

    Attributes:
        id: stable; what bindings and tests call it.
        verb: of the command line that does the same; None when there is none.
        key: as typed.
        other_keys: Textual's names of further keys.
        label: one or two words, for the key line.
        description: one sentence, for help and palette.
        danger: what is asked before.
        mutates: whether it changes a run.
        action: what the supervisor is asked for.
        place: where its key works.
        in_key_line: whether the key line names it.
        also_on: a place whose key line names it as well.
    """

    id: str
    verb: str | None
    key: str
    label: str
    description: str
    danger: Danger = Danger.SAFE
    mutates: bool = False
    action: Action | None = None
    other_keys: tuple[str, ...] = ()
    place: Place = Place.EVERYWHERE
    in_key_line: bool = True
    also_on: Place | None = None


ACTIONS: tuple[ActionSpec, ...] = (
    ActionSpec(
        id="pause",
        verb="pause",
        key="P",
        label="pause",
        description="Pause the run; asks how much to free. Nothing is lost, resume goes on.",
        danger=Danger.CONFIRM,
        mutates=True,
        action=Action.PAUSE,
    ),
    ActionSpec(
        id="resume",
        verb="resume",
        key="R",
        label="resume",
        description="Lift every pause that is in force and go on.",
        mutates=True,
        action=Action.RESUME,
    ),
    ActionSpec(
        id="stop",
        verb="stop",
        key="S",
        label="stop",
        description="Stop the run after the shards in hand; asks first. `tapdeck start` takes it up again.",
        danger=Danger.CONFIRM,
        mutates=True,
        action=Action.STOP,
    ),
    ActionSpec(
        id="kill",
        verb="kill",
        key="K",
        label="kill",
        description="Kill the run at once; the shards in hand are lost and done again. Asks for its name.",
        danger=Danger.TYPE_NAME,
        mutates=True,
        action=Action.KILL,
        in_key_line=False,
    ),
    ActionSpec(
        id="start",
        verb="start",
        key="N",
        label="new run",
        description="Begin a new run, or go on with an ended one, from a run.toml; shows the estimate first.",
        danger=Danger.CONFIRM,
        mutates=True,
        in_key_line=False,
        also_on=Place.RUNS,
    ),
    ActionSpec(
        id="runs", verb="list", key="0", label="runs", description="The list of runs; attach to another one."
    ),
    ActionSpec(
        id="overview",
        verb="status",
        key="1",
        label="overview",
        description="State, progress, disk, GPUs, shards and last events of the run.",
    ),
    ActionSpec(
        id="log",
        verb="logs",
        key="2",
        label="log",
        description="Events and the logs of the run's processes.",
    ),
    ActionSpec(
        id="palette",
        verb=None,
        key=":",
        label="palette",
        description="Find an action by its name.",
    ),
    ActionSpec(id="help", verb=None, key="?", label="help", description="Keys, signs and colours."),
    ActionSpec(
        id="detach",
        verb=None,
        key="q",
        other_keys=("ctrl+c", "ctrl+q"),
        label="detach",
        description="Leave the console. The run continues; `tapdeck attach` comes back to it.",
    ),
    ActionSpec(
        id="log_next",
        verb=None,
        key="n",
        label="next source",
        description="Log: show the next source.",
        place=Place.LOG,
    ),
    ActionSpec(
        id="log_previous",
        verb=None,
        key="p",
        label="previous",
        description="Log: show the source before.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="log_follow",
        verb=None,
        key="f",
        other_keys=("end",),
        label="follow",
        description="Log: go to the end and stay there.",
        place=Place.LOG,
    ),
    ActionSpec(
        id="log_up",
        verb=None,
        key="k",
        other_keys=("up",),
        label="up",
        description="Log: one line up; new lines no longer move the view.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="log_down",
        verb=None,
        key="j",
        other_keys=("down",),
        label="down",
        description="Log: one line down.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="log_page_up",
        verb=None,
        key="b",
        other_keys=("pageup",),
        label="page up",
        description="Log: one page up.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="log_page_down",
        verb=None,
        key="space",
        other_keys=("pagedown",),
        label="page down",
        description="Log: one page down.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="log_first",
        verb=None,
        key="g",
        other_keys=("home",),
        label="first",
        description="Log: the first line that is kept.",
        place=Place.LOG,
        in_key_line=False,
    ),
    ActionSpec(
        id="runs_up",
        verb=None,
        key="k",
        other_keys=("up",),
        label="up",
        description="Runs: the run above.",
        place=Place.RUNS,
        in_key_line=False,
    ),
    ActionSpec(
        id="runs_down",
        verb=None,
        key="j",
        other_keys=("down",),
        label="down",
        description="Runs: the run below.",
        place=Place.RUNS,
        in_key_line=False,
    ),
    ActionSpec(
        id="runs_open",
        verb="attach",
        key="enter",
        label="attach",
        description="Runs: open the console on the run under the cursor.",
        place=Place.RUNS,
    ),
)

BY_ID = {spec.id: spec for spec in ACTIONS}
_TEXTUAL_NAMES = {":": "colon", "?": "question_mark"}


def keys_of(spec: ActionSpec) -> str:
    """The keys of an action, as Textual's bindings name them."""
    return ",".join((_TEXTUAL_NAMES.get(spec.key, spec.key), *spec.other_keys))


def actions_of(place: Place) -> list[ActionSpec]:
    """The actions whose keys work in one place alone."""
    return [spec for spec in ACTIONS if spec.place == place]


def unavailable(spec: ActionSpec, snapshot: Snapshot | None, *, read_only: bool) -> str | None:
    """Why an action cannot be asked for now, in words; None when it can.

    What the supervisor says counts. This console adds only what it knows of itself.
    """
    if not spec.mutates:
        return None
    if read_only:
        return "this console is read-only"
    if spec.action is None:
        return None
    if snapshot is None:
        return "nothing is known of the run yet"
    return snapshot.actions.get(spec.action)
