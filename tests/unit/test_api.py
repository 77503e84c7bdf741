import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.protocol import api
from extractor.protocol.states import Action, State

RUN = api.RunInfo(
    name="r",
    folder="/r",
    output="/o",
    config_file="/r/run.toml",
    model="/m",
    device="cpu",
    host="h",
    supervisor_pid=1,
    started_utc=1.0,
    user="ops1",
    tapdeck_version="0",
)


def snapshot(revision=0, state=State.RUNNING, cells=".", events=0, progress=None):
    return api.Snapshot(
        api_version=api.API_VERSION,
        revision=revision,
        time_utc=1.0,
        run=RUN,
        state=api.StateInfo(state, 1.0, ""),
        progress=progress,
        rates=None,
        disk=None,
        telemetry=None,
        shards=api.ShardMap(cells, 1) if cells else None,
        replicas=(),
        events=tuple(api.EventLine(n, 1.0, "note", "auto", "text") for n in range(events)),
        actions=dict.fromkeys(Action),
        clients=api.Clients(0, 0),
    )


PROGRESS = st.none() | st.builds(api.Progress, *[st.integers(0, 9)] * 9)
SNAPSHOTS = st.builds(
    snapshot,
    revision=st.integers(0, 3),
    state=st.sampled_from(State),
    cells=st.text("rdx.", max_size=4),
    events=st.integers(0, 3),
    progress=PROGRESS,
)


@given(st.lists(SNAPSHOTS, min_size=2, max_size=5))
def test_a_client_that_got_every_delta_has_what_the_supervisor_has(snapshots):
    known = snapshots[0]
    for seq, new in enumerate(snapshots[1:]):
        wire = msgspec.json.encode(api.delta(known, new, seq=seq))
        known = api.apply(known, msgspec.json.decode(wire, type=api.StreamMessage))
        assert known == new


def test_what_has_not_changed_is_not_sent():
    old = snapshot(cells="." * 4000)
    new = msgspec.structs.replace(old, revision=1)

    assert len(msgspec.json.encode(api.delta(old, new, seq=1))) < 100


def test_a_section_that_is_gone_is_sent_as_gone():
    old, new = snapshot(cells="."), snapshot(cells="")
    wire = msgspec.json.encode(api.delta(old, new, seq=1))

    assert api.apply(old, msgspec.json.decode(wire, type=api.StreamMessage)).shards is None


def test_a_request_with_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.json.decode(b'{"speed": 1}', type=api.ActionRequest)


def test_an_answer_with_an_unknown_field_is_understood():
    wire = msgspec.json.encode(snapshot()).replace(b"{", b'{"mood":"good",', 1)

    assert msgspec.json.decode(wire, type=api.Snapshot) == snapshot()


@pytest.mark.parametrize("value", [api.Unavailable("lost", "gone"), 3.5, 0.0])
def test_a_value_and_its_absence_are_told_apart(value):
    wire = msgspec.json.encode(value)

    assert msgspec.json.decode(wire, type=float | api.Unavailable) == value
