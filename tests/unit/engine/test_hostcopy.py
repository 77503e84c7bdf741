"""Host buffers: what lies in them, how many there are, and what may not be stored."""

import threading

import pytest
import torch

from extractor.engine.hostcopy import HostPool


def pool(num_buffers=2, dtype=torch.bfloat16):
    return HostPool(
        num_buffers=num_buffers, num_taps=2, max_tokens=16, hidden_size=8, dtype=dtype, device="cpu"
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
