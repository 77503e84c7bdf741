"""Host buffers: what lies in them, how many there are, and what may not be stored."""

import threading

import pytest
import torch

from extractor.engine.hostcopy import HostPool


def pool(num_buffers=2, dtype=torch.bfloat16, own=slice(None)):
    return HostPool(
        num_buffers=num_buffers, num_taps=2, max_tokens=16, hidden_size=8, dtype=dtype, device="cpu", own=own
    )


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


def test_memory_does_not_grow_with_the_number_of_batches():
    buffers = pool(num_buffers=2)
    held = [buffers.copy(states(3), [3]) for _ in range(2)]
    third = threading.Thread(target=lambda: held.append(buffers.copy(states(3), [3])), daemon=True)
    third.start()
    third.join(timeout=0.2)
    assert third.is_alive()
    held[0].release()
    third.join(timeout=10)
    assert len(held) == 3


def test_buffers_are_bounded_in_bytes():
    # Two buffers of 2 taps x 16 tokens: 8 bfloat16 values and one float32 magnitude each.
    assert pool(num_buffers=2).num_bytes == 2 * 2 * 16 * (8 * 2 + 4)


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
    assert buffers.num_bytes == 2 * 16 * (len(own) * 8 * 2 + 2 * 4)
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
