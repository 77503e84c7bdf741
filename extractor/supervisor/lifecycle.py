"""The state of a run as a function of facts, and the table of changes that may happen. Pure.

The supervisor never sets a state. It knows facts (what is loaded, which pauses are in force, what was asked
for) and derives the state from them, so a state cannot contradict what the processes do. `check` then
compares with the table: a change that is not in it is a bug of ours, and raises.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from extractor.errors import BugError
from extractor.protocol.states import Depth, State


class EnginePhase(StrEnum):
    """What the replica's processes are doing."""

    NONE = "none"
    LOADING = "loading"
    WORKING = "working"
    HELD = "held"
    LEAVING = "leaving"


class Facts(msgspec.Struct, frozen=True):
    """What a state depends on.

    Attributes:
        is_prepared: the plan is known.
        engine: of the replica.
        is_done: no shard is left to do; what remains is writing the lists of the data set.
        depth: the deepest pause in force, or None.
        is_stopping: an operator or a signal has ended the run.
        is_failed: the run cannot go on.
        has_ended: processes are gone and the lists of the data set are written; nothing more will happen.
    """

    is_prepared: bool = False
    engine: EnginePhase = EnginePhase.NONE
    is_done: bool = False
    depth: Depth | None = None
    is_stopping: bool = False
    is_failed: bool = False
    has_ended: bool = False


def derive(facts: Facts) -> State:
    """The state that the facts amount to."""
    if facts.has_ended:
        if facts.is_failed:
            return State.FAILED
        return State.STOPPED if facts.is_stopping else State.FINISHED
    if facts.is_stopping or facts.is_failed:
        return State.DRAINING
    if not facts.is_prepared:
        return State.PREPARING
    if facts.is_done:
        # Nothing is left that a pause could keep from being computed.
        return State.RUNNING
    if facts.depth is not None:
        return _paused(facts.engine, facts.depth)
    if facts.engine in {EnginePhase.NONE, EnginePhase.LOADING, EnginePhase.LEAVING}:
        # Leaving with work left to do and no pause: resumed too late, it is loaded again.
        return State.LOADING
    return State.RUNNING


def _paused(engine: EnginePhase, depth: Depth) -> State:
    # What is loaded decides, not what was asked for: a run that was held and whose supervisor was restarted
    # has nothing on the GPUs.
    if engine == EnginePhase.NONE:
        return State.UNLOADED
    if depth == Depth.HOLD and engine != EnginePhase.LEAVING:
        return State.HELD if engine == EnginePhase.HELD else State.HOLDING
    if depth == Depth.PARK:
        raise BugError("park is not available in this version")
    return State.UNLOADING


_END = frozenset({State.DRAINING, State.STOPPED, State.FINISHED, State.FAILED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATED: frozenset({State.PREPARING}) | _END,
    State.PREPARING: frozenset({State.LOADING, State.UNLOADED, State.RUNNING}) | _END,
    State.LOADING: frozenset({State.RUNNING, State.HOLDING, State.UNLOADING, State.UNLOADED}) | _END,
    # A rank that dies is loaded again.
    State.RUNNING: frozenset({State.LOADING, State.HOLDING, State.HELD, State.UNLOADING, State.UNLOADED})
    | _END,
    State.HOLDING: frozenset({State.HELD, State.RUNNING, State.LOADING, State.UNLOADING, State.UNLOADED})
    | _END,
    State.HELD: frozenset({State.RUNNING, State.LOADING, State.HOLDING, State.UNLOADING, State.UNLOADED})
    | _END,
    State.PARKING: frozenset({State.PARKED, State.RUNNING, State.UNLOADING, State.UNLOADED}) | _END,
    State.PARKED: frozenset({State.RUNNING, State.UNLOADING, State.UNLOADED}) | _END,
    # Resumed while its processes still leave: they are started again.
    State.UNLOADING: frozenset({State.UNLOADED, State.LOADING, State.RUNNING, State.HOLDING, State.HELD})
    | _END,
    State.UNLOADED: frozenset({State.LOADING, State.UNLOADING}) | _END,
    State.DRAINING: frozenset({State.STOPPED, State.FINISHED, State.FAILED}),
    State.STOPPED: frozenset(),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}
"""Which state may follow which; a state may always follow itself."""


def check(old: State, new: State) -> None:
    """Refuses a change that is not in the table.

    Raises:
        BugError: it is not.
    """
    if new != old and new not in TRANSITIONS[old]:
        raise BugError(f"a run cannot go from {old} to {new}")
