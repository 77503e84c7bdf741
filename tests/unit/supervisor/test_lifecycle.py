import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extractor.errors import BugError
from extractor.protocol.states import AVAILABLE_DEPTHS, Action, Depth, Pause, Reason, State, deepest, refusal
from extractor.supervisor import lifecycle
from extractor.supervisor.lifecycle import EnginePhase, Facts

DEPTHS = st.sampled_from([None, *AVAILABLE_DEPTHS])
FACTS = st.builds(
    Facts,
    is_prepared=st.booleans(),
    engine=st.sampled_from(EnginePhase),
    is_done=st.booleans(),
    depth=DEPTHS,
    is_stopping=st.booleans(),
    is_failed=st.booleans(),
    has_ended=st.booleans(),
)


@given(FACTS)
def test_a_paused_run_is_never_called_running(facts):
    state = lifecycle.derive(facts)

    assert not (facts.depth is not None and not facts.is_done and state == State.RUNNING)


@given(FACTS)
def test_only_a_run_that_has_ended_is_in_a_terminal_state(facts):
    assert lifecycle.derive(facts).is_terminal == facts.has_ended


@given(FACTS)
def test_held_means_that_the_rank_said_so(facts):
    if lifecycle.derive(facts) == State.HELD:
        assert facts.engine == EnginePhase.HELD


@given(FACTS)
def test_unloaded_means_that_no_process_is_there(facts):
    if lifecycle.derive(facts) == State.UNLOADED:
        assert facts.engine == EnginePhase.NONE


class Life(RuleBasedStateMachine):
    """Whatever happens to the facts of a run, one after the other, its state changes only as the table says."""

    def __init__(self):
        super().__init__()
        self.facts = Facts()
        self.state = State.CREATED

    def _set(self, **changes):
        facts = {name: getattr(self.facts, name) for name in Facts.__struct_fields__} | changes
        self.facts = Facts(**facts)
        state = lifecycle.derive(self.facts)
        lifecycle.check(self.state, state)
        self.state = state

    @initialize(depth=DEPTHS)
    def begin(self, depth):
        self._set(depth=depth)

    @rule()
    def prepared(self):
        if not self.facts.has_ended:
            self._set(is_prepared=True)

    @rule()
    def done(self):
        if self.facts.is_prepared and self.facts.engine in {EnginePhase.WORKING, EnginePhase.LEAVING}:
            self._set(is_done=True)

    @rule()
    def was_done_already(self):
        if not self.facts.is_prepared and not self.facts.has_ended:
            self._set(is_prepared=True, is_done=True)

    @rule(depth=DEPTHS)
    def pause_or_resume(self, depth):
        self._set(depth=depth)

    @rule(engine=st.sampled_from(EnginePhase))
    def engine(self, engine):
        facts, now = self.facts, self.facts.engine
        # A process is started only when nothing pauses the run; whatever it does next, it may also be gone.
        if engine != EnginePhase.NONE and now == EnginePhase.NONE:
            may_start = (
                facts.is_prepared and facts.depth is None and not facts.is_stopping and not facts.is_done
            )
            engine = EnginePhase.LOADING if may_start and not facts.is_failed else EnginePhase.NONE
        if engine == EnginePhase.LOADING and now in {
            EnginePhase.WORKING,
            EnginePhase.HELD,
            EnginePhase.LEAVING,
        }:
            engine = EnginePhase.LEAVING
        if now == EnginePhase.LEAVING and engine != EnginePhase.NONE:
            engine = EnginePhase.LEAVING
        if engine == EnginePhase.HELD and (now != EnginePhase.WORKING or facts.depth is None):
            engine = now
        if not facts.has_ended:
            self._set(engine=engine)

    @rule()
    def stop(self):
        if not self.facts.has_ended:
            self._set(is_stopping=True)

    @rule()
    def fail(self):
        if not self.facts.has_ended:
            self._set(is_failed=True)

    @rule()
    def end(self):
        if self.facts.engine == EnginePhase.NONE and (self.facts.is_prepared or self.facts.is_failed):
            self._set(has_ended=True)

    @invariant()
    def knows_every_state(self):
        assert self.state in lifecycle.TRANSITIONS


TestLife = Life.TestCase


def test_a_change_that_is_not_in_the_table_is_a_bug():
    with pytest.raises(BugError, match="finished to running"):
        lifecycle.check(State.FINISHED, State.RUNNING)


def test_the_table_has_every_state():
    assert set(lifecycle.TRANSITIONS) == set(State)


@pytest.mark.parametrize("state", [state for state in State if state.is_terminal])
def test_nothing_follows_a_terminal_state_and_nothing_can_be_done_in_it(state):
    assert lifecycle.TRANSITIONS[state] == frozenset()
    assert all(refusal(action, state, ()) for action in Action)


def pause(reason, depth):
    return Pause(reason, depth, 1.0, "ops1")


def test_the_deepest_pause_counts():
    pauses = [pause(Reason.DISK, Depth.HOLD), pause(Reason.OPERATOR, Depth.UNLOAD)]

    assert deepest(pauses) == Depth.UNLOAD
    assert deepest([]) is None


def test_resume_is_refused_when_nothing_is_paused():
    assert "not paused" in refusal(Action.RESUME, State.RUNNING, ())
    assert refusal(Action.RESUME, State.HELD, [pause(Reason.OPERATOR, Depth.HOLD)]) is None


def test_a_held_run_can_be_unloaded_and_an_unloaded_one_not_again():
    assert refusal(Action.PAUSE, State.HELD, [pause(Reason.OPERATOR, Depth.HOLD)]) is None
    assert refusal(Action.PAUSE, State.UNLOADED, [pause(Reason.OPERATOR, Depth.UNLOAD)]) is not None


def test_a_run_that_is_being_stopped_can_only_be_killed():
    refused = {action for action in Action if refusal(action, State.DRAINING, ())}

    assert refused == {Action.PAUSE, Action.RESUME, Action.STOP}
