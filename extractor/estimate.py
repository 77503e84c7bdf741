"""Bytes, disk forecast and time of a run: pure functions, no clock and no disk."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from extractor.quantities import bytes_words, duration_words

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 4 + 1
"""input_ids int32 and loss_mask uint8."""
SAMPLE_BYTES = 8 + 8
"""cu_seqlens and sample_index, int64 each."""
FILE_OVERHEAD_BYTES = 4096
"""Header of one safetensors file, aligned."""

ETA_BLOCK = 6
"""Rates are compared in means of so many intervals: single ones differ by what a batch happens to hold."""
ETA_BAND_AT_START = 0.5
"""Relative half-width of the band after one interval; it shrinks with the square root of their number."""
ETA_WORST = 4.0
"""The band's slow end is at most so many times the mean, however uneven the rates are."""


BLOCK_ALIGN_BYTES = 256
"""Where the parts of a block of host memory begin."""
MAGNITUDE_BYTES = 4
"""The largest magnitude of each row of each tap, float32: what a verdict on the values needs."""


class SizeEstimate(msgspec.Struct, frozen=True):
    """What a run will write.

    Attributes:
        bytes_per_token: states of all taps, token id and mask of one token.
        total_bytes: all shards.
        largest_sample_tokens: of the longest sample.
        largest_sample_bytes: its states.
        num_shards: shards of the plan.
    """

    bytes_per_token: int
    total_bytes: int
    largest_sample_tokens: int
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
    return SizeEstimate(states + TOKEN_BYTES, total, longest, longest * states, num_shards)


def block_bytes(
    num_tokens: int, *, hidden_size: int, num_taps: int, dtype: str, num_own: int | None = None
) -> int:
    """Host memory for the states of one batch: its rows in the dtype of the disk, and their magnitudes.

    Args:
        num_tokens: T, of the batch.
        hidden_size: H.
        num_taps: K, stored tensors per token.
        dtype: on disk.
        num_own: how many of them this rank copies; None: all.
    """
    num_copied = num_taps if num_own is None else num_own
    states = num_tokens * states_bytes_per_token(hidden_size, num_copied, dtype)
    return aligned(states) + aligned(num_tokens * num_taps * MAGNITUDE_BYTES)


def host_buffer_bytes(
    *,
    buffers: int,
    max_tokens: int,
    longest: int,
    hidden_size: int,
    num_taps: int,
    dtype: str,
    num_own: int | None = None,
) -> int:
    """Host memory between the engine and the writers: all there ever is.

    Enough for `buffers` full batches; where that is more, for the longest sample beside one full batch, so that
    a sample that is computed in chunks needs its own size once and nothing waits for ever. It is thus at most
    the batches plus the longest sample. An example: 32,768 tokens of 7,168 with four taps in bfloat16 are
    1.88 GB; with batches of 8,192 (0.47 GB) four buffers are 1.88 GB, so 2.35 GB are taken. The device
    meanwhile holds the states of two chunks at most, here 0.94 GB.

    Args:
        buffers: as configured.
        max_tokens: token budget of a batch.
        longest: tokens of the longest sample.
        hidden_size: H.
        num_taps: stored tensors per token.
        dtype: on disk.
        num_own: how many of them this rank copies; None: all.
    """
    batch, sample = (
        block_bytes(tokens, hidden_size=hidden_size, num_taps=num_taps, dtype=dtype, num_own=num_own)
        for tokens in (max_tokens, longest)
    )
    return max(buffers * batch, sample + batch)


def aligned(num_bytes: int) -> int:
    """Rounded up to where the next part of a block may begin."""
    return -(-num_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES


class Eta(msgspec.Struct, frozen=True):
    """Seconds of computing left.

    Attributes:
        low_s: if all goes as fast as it may.
        mean_s: most likely.
        high_s: if all goes as slowly as it may.
    """

    low_s: float
    mean_s: float
    high_s: float


def eta(
    *,
    tokens_left: int,
    tokens_done: int,
    running_s: float,
    recent: Sequence[float] = (),
    interval_s: float = 1.0,
) -> Eta | None:
    """Time left, with a band; the rule is ours.

    * The expected rate is midway between the mean of the whole start and the mean of `recent`. Where shards of
      long and of short samples take turns both are the same in the long run; after a lasting change (a GPU that
      throttles) the recent one is right, and a short disturbance moves the result by half its weight.
    * The band reaches from the faster of the two to the slower, each widened by two standard errors of the
      recent mean, taken over blocks of `ETA_BLOCK` intervals, and never by less than
      `ETA_BAND_AT_START / sqrt(intervals computed so far)`.

    Args:
        tokens_left: to compute.
        tokens_done: computed in `running_s`.
        running_s: seconds of computing.
        recent: tokens/s of the last intervals of computing, oldest first; without them the mean of the
            start is all that counts.
        interval_s: length of one.

    Returns:
        None before the first token, and when nothing was computed in all of `recent`.
    """
    if tokens_left <= 0:
        return Eta(0.0, 0.0, 0.0)
    if tokens_done <= 0 or running_s <= 0:
        return None
    overall = tokens_done / running_s
    recently = statistics.fmean(recent) if recent else overall
    if recently <= 0:
        return None
    rate = (overall + recently) / 2
    widening = max(
        2 * _standard_error(recent), rate * ETA_BAND_AT_START / math.sqrt(max(1.0, running_s / interval_s))
    )
    fastest = max(overall, recently) + widening
    slowest = max(min(overall, recently) - widening, rate / ETA_WORST)
    return Eta(tokens_left / fastest, tokens_left / rate, tokens_left / slowest)


def _standard_error(rates: Sequence[float]) -> float:
    """Of the mean of rates, over blocks; 0.0 with less than two blocks."""
    # The oldest rates are left out where they do not fill a block.
    starts = range(len(rates) % ETA_BLOCK, len(rates), ETA_BLOCK)
    blocks = [statistics.fmean(rates[start : start + ETA_BLOCK]) for start in starts]
    return statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) >= 2 else 0.0


class DiskForecast(msgspec.Struct, frozen=True):
    """Whether the rest of a run fits, and when it would not.

    Attributes:
        is_enough: what is needed fits above the reserve, or nothing is needed.
        full_in_s: seconds until the reserve is touched; None when it never is, or the rate is not known.
        verdict: that in words.
    """

    is_enough: bool
    full_in_s: float | None
    verdict: str


def disk_forecast(
    *,
    free_bytes: int,
    reserve_bytes: int,
    needed_bytes: int,
    write_bytes_per_s: float | None,
    eta_s: float | None = None,
) -> DiskForecast:
    """Whether what is left to write fits above the reserve.

    Args:
        free_bytes: on the output's file system.
        reserve_bytes: must stay free; the run holds there.
        needed_bytes: still to be written.
        write_bytes_per_s: at which that happens; None when not known.
        eta_s: seconds in which it will be written; stands in for a rate that is not known.
    """
    spare = free_bytes - reserve_bytes - needed_bytes
    if needed_bytes <= 0:
        return DiskForecast(True, None, "enough: nothing more to write")
    if spare >= 0:
        return DiskForecast(True, None, f"enough: {bytes_words(spare)} to spare")
    room = max(0, free_bytes - reserve_bytes)
    full_in_s = 0.0 if room == 0 else _seconds_to_write(room, needed_bytes, write_bytes_per_s, eta_s)
    what = f"{bytes_words(-spare)} too little"
    reserve = f"the reserve of {bytes_words(reserve_bytes)}"
    if room == 0:
        return DiskForecast(False, full_in_s, f"{what}: no space above {reserve}")
    when = "" if full_in_s is None else f" in {duration_words(full_in_s)}"
    return DiskForecast(False, full_in_s, f"{what}: holds at {reserve}{when}")


def _seconds_to_write(
    num_bytes: int, needed_bytes: int, write_bytes_per_s: float | None, eta_s: float | None
) -> float | None:
    if write_bytes_per_s is not None and write_bytes_per_s > 0:
        return num_bytes / write_bytes_per_s
    return None if eta_s is None else eta_s * num_bytes / needed_bytes
