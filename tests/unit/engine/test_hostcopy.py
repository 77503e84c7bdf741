"""Host memory of the states: what lies in it, how much there is, and what may not be stored."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st

from extractor.engine.hostcopy import HostPool
from extractor.errors import BugError
from extractor.estimate import host_buffer_bytes


def pool(buffers=2, dtype=torch.bfloat16, max_tokens=16, longest=0, own=slice(None)):
    num_bytes = host_buffer_bytes(
        buffers=buffers,
        max_tokens=max_tokens,
        longest=longest,
        hidden_size=8,
        num_taps=2,
        num_own=len(range(2)[own]),
        dtype=str(dtype).removeprefix("torch."),
    )
    return HostPool(num_bytes=num_bytes, hidden_size=8, dtype=dtype, device="cpu", own=own)


def states(num_tokens):
    return {name: torch.randn(num_tokens, 8) for name in ("layer_001", "final")}


def test_rows_are_the_bytes_of_the_states_in_the_dtype_of_the_disk():
    given = states(6)
    block = pool().copy(given, [4, 2])
    block.wait()
    for name, state in given.items():
        stored = torch.frombuffer(bytearray(block.rows(name)), dtype=torch.bfloat16).view(6, 8)
        assert torch.equal(stored, state.bfloat16())
    assert block.num_tokens == 6


def test_strided_states_are_stored_row_by_row():
    packed = torch.randn(5, 16)
    block = pool(dtype=torch.float32).copy({"a": packed[:, :8], "b": packed[:, 8:]}, [5])
    block.wait()
    assert bytes(block.rows("b")) == packed[:, 8:].contiguous().numpy().tobytes()


@for_all(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_chunks_are_joined_in_the_order_of_the_rows(chunks, dtype):
    whole = states(sum(chunks))
    buffers = pool(dtype=dtype, longest=30)
    # Beside it lies a block that must stay as it is.
    other = buffers.copy(states(4), [4])
    before = {name: other.tensor(name).clone() for name in whole}
    block = buffers.take(list(whole), [sum(chunks)])
    begin = 0
    for size in chunks:
        block.fill({name: state[begin : begin + size] for name, state in whole.items()})
        begin += size
    block.wait()
    for name, state in whole.items():
        assert torch.equal(block.tensor(name), state.to(dtype))
        assert torch.equal(other.tensor(name), before[name])
    assert block.verdicts() == [None]


def test_a_value_in_any_chunk_condemns_the_whole_sample():
    block = pool().take(["layer_001", "final"], [9])
    for number in range(3):
        rows = states(3)
        if number == 1:
            rows["final"][2, 7] = float("nan")
        block.fill(rows)
    block.wait()
    assert block.verdicts() == ["non_finite"]


def test_a_block_that_is_not_full_is_not_read_and_a_full_one_takes_no_more():
    block = pool().take(["layer_001", "final"], [4])
    block.fill(states(3))
    with pytest.raises(BugError, match="a block of 4 rows was given 3"):
        block.wait()
    with pytest.raises(BugError, match="rows 3 to 5"):
        block.fill(states(2))
    with pytest.raises(BugError, match="of the taps final, layer_001"):
        block.fill(dict(reversed(states(1).items())))
    block.fill(states(1))
    block.wait()


class Event:
    """Of a copy that a device has not done yet."""

    def __init__(self):
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1


def test_the_device_keeps_the_states_of_the_last_copy_alone():
    buffers = pool(longest=64)
    events = []
    buffers._stream = object()
    buffers._enqueue = lambda *_: events.append(Event()) or events[-1]
    block = buffers.take(["layer_001", "final"], [40])
    alive = []
    for number in range(4):
        chunk = states(10)
        alive.append(weakref.ref(chunk["final"]))
        block.fill(chunk)
        del chunk
        gc.collect()
        assert [state() is not None for state in alive] == [False] * number + [True]
        # The one before is complete; the last may go on while the next is computed.
        assert [event.num_waits > 0 for event in events] == [True] * number + [False]
    block.wait()
    gc.collect()
    assert alive[-1]() is None
    waits = events[-1].num_waits
    block.release()
    assert events[-1].num_waits > waits


def test_memory_does_not_grow_with_the_number_of_batches():
    buffers = pool(buffers=2)
    held = [buffers.copy(states(16), [16]) for _ in range(2)]
    third = threading.Thread(target=lambda: held.append(buffers.copy(states(16), [16])), daemon=True)
    third.start()
    while not buffers.arena.num_waiting:
        third.join(0.001)
    held[0].release()
    third.join(timeout=10)
    assert len(held) == 3
    assert buffers.arena.peak_bytes == buffers.num_bytes


def test_memory_is_bounded_in_bytes():
    # Two batches of 2 taps x 16 tokens: 8 bfloat16 values and one float32 magnitude each, both rounded to 256.
    assert pool(buffers=2).num_bytes == 2 * (2 * 16 * 8 * 2 + 256)


@pytest.mark.parametrize(("value", "verdict"), [(float("nan"), "non_finite"), (float("-inf"), "non_finite")])
def test_value_that_is_not_finite_condemns_its_sample_alone(value, verdict):
    given = states(9)
    given["final"][4, 3] = value
    block = pool().copy(given, [4, 2, 3])
    block.wait()
    assert block.verdicts() == [None, verdict, None]


def test_sample_that_is_zero_in_one_tap_is_condemned_and_a_zero_row_is_not():
    given = states(9)
    given["layer_001"][4:6] = 0
    given["final"][0] = 0
    block = pool().copy(given, [4, 2, 3])
    block.wait()
    assert block.verdicts() == [None, "all_zero", None]


def test_value_too_large_for_the_dtype_of_the_disk_is_not_finite():
    given = states(4)
    given["final"][2, 0] = 1e6
    block = pool(dtype=torch.float16).copy(given, [2, 2])
    block.wait()
    assert block.verdicts() == [None, "non_finite"]


@pytest.mark.parametrize(("rank", "own"), [(0, ("layer_001",)), (1, ("final",)), (2, ())])
def test_a_rank_holds_the_rows_of_its_own_taps_and_judges_all(rank, own):
    given = states(9)
    given["layer_001"][4, 3] = float("nan")
    given["final"][6:] = 0
    buffers = pool(own=slice(rank, None, 3))
    assert buffers.num_bytes == 2 * (len(own) * 16 * 8 * 2 + 256)
    block = buffers.copy(given, [4, 2, 3])
    block.wait()
    assert block.own_taps == own
    for name in own:
        assert torch.equal(block.tensor(name).isnan(), given[name].isnan())
        assert torch.equal(block.tensor(name).nan_to_num(), given[name].bfloat16().nan_to_num())
    assert list(block.verdicts()) == [None, "non_finite", "all_zero"]


def test_magnitudes_are_the_same_bytes_on_every_rank_and_differ_with_a_value():
    given = states(6)
    given["final"][2, 1] = float("nan")
    # Another NaN than that of Python.
    other = {name: state.clone() for name, state in given.items()}
    other["final"].view(torch.int32)[2, 1] = -1
    seen = []
    for rank, values in ((0, given), (1, other)):
        block = pool(own=slice(rank, None, 2)).copy(values, [6])
        block.wait()
        seen.append({name: bytes(block.magnitudes(name)) for name in given})
    assert seen[0] == seen[1]
    assert {len(data) for data in seen[0].values()} == {6 * 4}

    other["final"][5] *= 1.5
    block = pool(own=slice(1, None, 2)).copy(other, [6])
    block.wait()
    assert bytes(block.magnitudes("final")) != seen[0]["final"]
    assert bytes(block.magnitudes("layer_001")) == seen[0]["layer_001"]
