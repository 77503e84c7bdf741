"""Bytes, disk forecast and time of a run: pure functions, no clock and no disk."""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 4 + 1
"""input_ids int32 and loss_mask uint8."""
SAMPLE_BYTES = 8 + 8
"""cu_seqlens and sample_index, int64 each."""
FILE_OVERHEAD_BYTES = 4096
"""Header of one safetensors file, aligned."""


class SizeEstimate(msgspec.Struct, frozen=True):
    """What a run will write.

    Attributes:
        bytes_per_token: states of all taps, token id and mask of one token.
        total_bytes: all shards.
        largest_sample_bytes: states of the longest sample.
        num_shards: shards of the plan.
    """

    bytes_per_token: int
    total_bytes: int
    largest_sample_bytes: int
    num_shards: int


class DiskVerdict(msgspec.Struct, frozen=True):
    """Whether what is left to write fits.

    Attributes:
        needed_bytes: still to be written.
        free_bytes: free on the output's file system.
        reserve_bytes: must stay free.
    """

    needed_bytes: int
    free_bytes: int
    reserve_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How much more space is needed; 0 when it fits."""
        return max(0, self.needed_bytes + self.reserve_bytes - self.free_bytes)


def states_bytes_per_token(hidden_size: int, num_taps: int, dtype: str) -> int:
    """Bytes of all taps of one token."""
    return DTYPE_BYTES[dtype] * hidden_size * num_taps


def size(
    *,
    hidden_size: int,
    num_taps: int,
    dtype: str,
    num_tokens: int,
    num_samples: int,
    num_shards: int,
    longest: int,
) -> SizeEstimate:
    """Size of the shards of a plan; exact but for file-system blocks and the JSON files.

    Args:
        hidden_size: H.
        num_taps: stored tensors per token.
        dtype: on disk.
        num_tokens: of all samples.
        num_samples: of the run.
        num_shards: of the plan.
        longest: tokens of the longest sample.
    """
    states = states_bytes_per_token(hidden_size, num_taps, dtype)
    total = num_tokens * (states + TOKEN_BYTES) + num_samples * SAMPLE_BYTES
    total += num_shards * (num_taps + 1) * FILE_OVERHEAD_BYTES
    return SizeEstimate(states + TOKEN_BYTES, total, longest * states, num_shards)


def eta_s(*, tokens_left: int, tokens_done: int, elapsed_s: float) -> float | None:
    """Seconds left at the mean rate so far; None before the first token."""
    if tokens_done <= 0 or elapsed_s <= 0:
        return None
    return tokens_left * elapsed_s / tokens_done
