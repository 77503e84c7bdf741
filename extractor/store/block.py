"""One batch on its way from the engine's host buffers to the tap files of a shard.

Owns the count of lanes that still need a block, and so the single call of its `release`. Invariants: a
block is waited for once, whoever comes first; it is released exactly once, after that wait has returned
or raised and after every lane has written or dropped it; a sample with a verdict loses its rows in every
tap and in the tokens alike.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from extractor.errors import BugError
from extractor.store.record import Quarantined

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class HostBlock(Protocol):
    """Rows of one batch for every tap, in host memory that the engine owns."""

    @property
    def num_tokens(self) -> int:
        """T of the batch."""

    def wait(self) -> None:
        """Blocks until the copy from the device is complete. Called once, by a writer thread."""

    def verdicts(self) -> Sequence[str | None]:
        """Per sample of the batch None, `non_finite` or `all_zero`. Called once, after `wait`."""

    def magnitudes(self, tap: str) -> memoryview:
        """The largest magnitude of each row [T] of any tap of the shard, as bytes. Called after `wait`."""

    def rows(self, tap: str) -> memoryview:
        """The contiguous rows [T, H] of one tap as uint8. Called after `wait`, by any writer thread.

        Only of the taps that this rank writes.
        """

    def release(self) -> None:
        """Gives the memory back. Called exactly once, by a writer thread."""


class Sample(Protocol):
    """A prepared sample, as far as the store needs it."""

    @property
    def index(self) -> int:
        """Its index in the prepared data set."""

    @property
    def sample_id(self) -> str:
        """Its stable id."""

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Token ids [t]."""

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """1 where a token is supervised, else 0 [t]."""


class Batch:
    """A block, its samples in row order, and the lanes that still need it."""

    def __init__(
        self, block: HostBlock, samples: Sequence[Sample], num_lanes: int, compared: Sequence[str] = ()
    ) -> None:
        """Takes the block over.

        Args:
            block: its rows.
            samples: its samples in row order.
            num_lanes: how many need it.
            compared: taps whose magnitudes are compared with those of other ranks.

        Raises:
            BugError: samples and block do not fit each other; the block is not taken.
        """
        _check_samples(block, samples)
        self._samples = tuple(samples)
        self._block: HostBlock | None = block
        self._num_tokens = block.num_tokens
        self._lanes_left = num_lanes
        self._lock = threading.Lock()
        self._is_waited_for = False
        self._verdicts: tuple[str | None, ...] | None = None
        self._compared = tuple(compared)
        self._magnitudes: dict[str, bytes] = {}

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """Indices of all its samples, in row order."""
        return tuple(sample.index for sample in self._samples)

    def settle(self) -> None:
        """Waits for the copy and takes the verdicts, once. Blocking.

        Raises:
            BugError: there are not as many verdicts as samples.
            Exception: whatever the block's `wait` raises, for the first lane that asks.
        """
        with self._lock:
            if self._is_waited_for or self._block is None:
                return
            self._is_waited_for = True
            self._block.wait()
            verdicts = tuple(self._block.verdicts())
            if len(verdicts) != len(self._samples):
                raise BugError(f"{len(verdicts)} verdicts for a batch of {len(self._samples)} samples")
            self._magnitudes = {
                tap: xxhash.xxh3_128_digest(self._block.magnitudes(tap)) for tap in self._compared
            }
            self._verdicts = verdicts

    def magnitudes(self, tap: str) -> bytes:
        """Digest over the magnitudes of one of the compared taps."""
        self._settled()
        return self._magnitudes[tap]

    def pieces(self, tap: str, row_bytes: int) -> list[memoryview]:
        """The rows of one tap that are to be stored, as few contiguous pieces as possible.

        Raises:
            BugError: the copy failed, or the rows have another size than they should.
        """
        verdicts = self._settled()
        if self._block is None:
            raise BugError("a block was read after its release")
        rows = self._block.rows(tap)
        if rows.format != "B" or rows.ndim != 1 or rows.nbytes != self._num_tokens * row_bytes:
            raise BugError(
                f"tap {tap}: {rows.nbytes} bytes of format {rows.format!r} for {self._num_tokens} rows of "
                f"{row_bytes} bytes"
            )
        return [
            rows[begin * row_bytes : end * row_bytes]
            for begin, end in _kept_rows([sample.input_ids.size for sample in self._samples], verdicts)
        ]

    def leave(self) -> None:
        """Says that one lane is through with the block; the last one releases it."""
        with self._lock:
            self._lanes_left -= 1
            if self._lanes_left:
                return
            block, self._block = self._block, None
        if block is not None:
            block.release()

    def stored(self) -> list[Sample]:
        """Its samples that are stored, in row order."""
        return [s for s, verdict in zip(self._samples, self._settled(), strict=True) if verdict is None]

    def quarantined(self) -> list[Quarantined]:
        """Its samples that are left out, in row order."""
        return [
            Quarantined(sample.index, sample.sample_id, verdict)
            for sample, verdict in zip(self._samples, self._settled(), strict=True)
            if verdict is not None
        ]

    def _settled(self) -> tuple[str | None, ...]:
        if self._verdicts is None:
            raise BugError("a batch was used although its copy from the device failed")
        return self._verdicts


def _check_samples(block: HostBlock, samples: Sequence[Sample]) -> None:
    for sample in samples:
        ids, mask = sample.input_ids, sample.loss_mask
        if ids.dtype != np.int32 or mask.dtype != np.uint8 or ids.ndim != 1 or ids.shape != mask.shape:
            raise BugError(
                f"sample {sample.index}: input_ids {ids.dtype} {ids.shape} and loss_mask {mask.dtype} "
                f"{mask.shape}; expected int32 [t] and uint8 [t]"
            )
    num_tokens = sum(sample.input_ids.size for sample in samples)
    if num_tokens != block.num_tokens:
        raise BugError(f"a block of {block.num_tokens} rows for samples of {num_tokens} tokens")


def _kept_rows(lengths: Sequence[int], verdicts: Sequence[str | None]) -> list[tuple[int, int]]:
    """Row ranges (begin, end) of the samples without a verdict, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    row = 0
    for length, verdict in zip(lengths, verdicts, strict=True):
        if verdict is None:
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + length)
            else:
                ranges.append((row, row + length))
        row += length
    return ranges
