"""The states of a run, its pauses, and what an operator may do in which state. Pure.

DESIGN: `created -> preparing -> loading -> running -> finished`; `holding -> held`, `parking -> parked`,
`unloading -> unloaded` on the way to a pause; `draining -> stopped`; `failed`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(StrEnum):
    """Where a run is."""

    CREATED = "created"
    PREPARING = "preparing"
    LOADING = "loading"
    RUNNING = "running"
    HOLDING = "holding"
    HELD = "held"
    PARKING = "parking"
    PARKED = "parked"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"
    DRAINING = "draining"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """The supervisor of such a run ends; starting the run again goes on with it."""
        return self in {State.STOPPED, State.FINISHED, State.FAILED}

    @property
    def is_paused(self) -> bool:
        """A pause is in force; nothing is computed."""
        return self in {State.HELD, State.PARKED, State.UNLOADED}


class Depth(StrEnum):
    """How much a pause frees, from nothing to everything."""

    HOLD = "hold"
    PARK = "park"
    UNLOAD = "unload"


class Reason(StrEnum):
    """Who or what paused a run."""

    OPERATOR = "operator"
    DISK = "disk"
    TENANT = "tenant"
    SCHEDULE = "schedule"
    FAULT = "fault"


class Pause(msgspec.Struct, frozen=True):
    """One pause in force. There may be one for each reason.

    Attributes:
        reason: one of them is never lifted by another: the operator's stays until an operator resumes.
        depth: the deepest of all pauses in force counts.
        since_utc: seconds since the epoch.
        by: user and pid, or "auto".
        note: what happened, for people ("" when the reason says all).
    """

    reason: Reason
    depth: Depth
    since_utc: float
    by: str
    note: str = ""


class Action(StrEnum):
    """What an operator can do to a run; the names of `POST /v1/actions/{name}`."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    KILL = "kill"


_DEPTHS = list(Depth)
AVAILABLE_DEPTHS = (Depth.HOLD, Depth.UNLOAD)
"""Depths of this version; `park` needs GPUs that it was measured on."""


def deepest(pauses: Iterable[Pause]) -> Depth | None:
    """The depth in force, or None when nothing pauses the run."""
    return max((pause.depth for pause in pauses), key=_DEPTHS.index, default=None)


def refusal(action: Action, state: State, pauses: Iterable[Pause]) -> str | None:
    """Why an action is not possible now, in words; None when it is."""
    if state.is_terminal:
        return f"the run is {state}; start it again to go on" if state != State.FINISHED else "it is finished"
    match action:
        case Action.PAUSE if state == State.DRAINING:
            return "it is being stopped"
        case Action.PAUSE if any(p.reason == Reason.OPERATOR and p.depth == Depth.UNLOAD for p in pauses):
            return "it is paused already, at the deepest depth"
        case Action.RESUME if state == State.DRAINING:
            return "it is being stopped"
        case Action.RESUME if not list(pauses):
            return "it is not paused"
        case Action.STOP if state == State.DRAINING:
            return "it is being stopped already; kill ends it at once"
        case _:
            return None
