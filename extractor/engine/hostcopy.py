"""From the device to host memory: one arena allocated once, copies on a side stream, verdicts on values.

Shapes: K taps, T tokens of a batch, H hidden size. A block holds the states of one batch as [K, T, H] in
the dtype of the disk, each tap contiguous, so that writer threads write straight from it. It is filled at once,
or chunk by chunk in the order of the rows. Where several ranks write, a rank copies the rows of its own taps alone,
and looks at the values of all: verdicts are the same everywhere.

Invariants: host memory is bounded by the arena, whatever the disk does; a range of it is filled again only after
its block was released; a block's rows are read only after `wait`; of what was computed on the device, the pool
keeps the states of the last fill alone, so the device never holds more than those and the next ones.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from extractor.engine.arena import Arena
from extractor.errors import BugError, EngineError
from extractor.estimate import MAGNITUDE_BYTES, aligned, block_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NON_FINITE = "non_finite"
ALL_ZERO = "all_zero"


class HostPool:
    """A fixed amount of host memory, and the copies into it.

    Attributes:
        num_bytes: how much.
        arena: who has which part of it.
    """

    def __init__(
        self,
        *,
        num_bytes: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
        own: slice = slice(None),
    ) -> None:
        """Allocates the memory; pins it when the states come from CUDA (at about 1.4 GB/s).

        Args:
            num_bytes: see `extractor.estimate.host_buffer_bytes`.
            hidden_size: H.
            dtype: on disk.
            device: "cuda" or "cpu".
            own: which of the taps, in stored order, are copied.

        Raises:
            EngineError: so much memory cannot be pinned.
        """
        self.num_bytes = num_bytes
        self.arena = Arena(num_bytes)
        self._own = own
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]  # torch ships none
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if device == "cuda":
            _pin(self._memory)
        self._last_copy: _Copy | None = None

    def copy(self, states: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> CopiedBatch:
        """Starts the copy of one batch; blocks until there is room.

        Args:
            states: tap name to [T, H] on the device, produced on the current stream.
            lengths: tokens of each sample, in row order; they add up to T.

        Returns:
            The block, whose rows are valid after `wait`.
        """
        block = self.take(list(states), lengths)
        block.fill(states)
        return block

    def take(self, taps: Sequence[str], lengths: Sequence[int]) -> CopiedBatch:
        """An empty block for one batch; blocks until there is room.

        Args:
            taps: K names, in stored order.
            lengths: tokens of each sample, in row order; they add up to T.

        Raises:
            BugError: the pool was made for smaller batches.
        """
        num_tokens = sum(lengths)
        own = taps[self._own]
        size = block_bytes(
            num_tokens,
            hidden_size=self._hidden_size,
            num_taps=len(taps),
            num_own=len(own),
            dtype=str(self._dtype).removeprefix("torch."),
        )
        begin = self.arena.take(size)
        memory = self._memory[begin : begin + size]
        states_bytes = len(own) * num_tokens * self._hidden_size * self._dtype.itemsize
        magnitude_bytes = len(taps) * num_tokens * MAGNITUDE_BYTES
        return CopiedBatch(
            self,
            begin,
            taps=taps,
            own=own,
            host_KTH=memory[:states_bytes].view(self._dtype).view(len(own), num_tokens, self._hidden_size),
            absmax_KT=memory[aligned(states_bytes) :][:magnitude_bytes]
            .view(torch.float32)
            .view(len(taps), num_tokens),
            lengths=lengths,
        )

    def start(self, states: Sequence[torch.Tensor], host_KTH: torch.Tensor, absmax_KT: torch.Tensor) -> _Copy:
        """Starts the copy of rows, then waits for the one before: its states may leave the device."""
        copy = _Copy(self._enqueue(states, host_KTH, absmax_KT), states)
        if self._stream is None:
            copy.finish()
        if self._last_copy is not None:
            self._last_copy.finish()
        self._last_copy = copy
        return copy

    def _enqueue(
        self, states: Sequence[torch.Tensor], host_KTH: torch.Tensor, absmax_KT: torch.Tensor
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            self._copy_all(states, host_KTH, absmax_KT)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy_all(states, host_KTH, absmax_KT)
            # Blocking: whoever waits sleeps, and does not spin on a core that a writer could use.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch ships none
            event.record(self._stream)
        return event

    def _copy_all(
        self, states: Sequence[torch.Tensor], host_KTH: torch.Tensor, absmax_KT: torch.Tensor
    ) -> None:
        rows = iter(host_KTH)
        own = set(range(len(states))[self._own])
        for row, state_TH in enumerate(states):
            # Verdicts are about what is stored, so the cast comes first: it can overflow.
            stored_TH = state_TH.to(self._dtype).contiguous()
            if row in own:
                next(rows).copy_(stored_TH, non_blocking=True)
            absmax_KT[row].copy_(stored_TH.abs().amax(dim=-1), non_blocking=True)


class _Copy:
    """One copy in flight, and the device tensors that must outlive it."""

    def __init__(self, event: torch.cuda.Event | None, sources: Sequence[torch.Tensor]) -> None:
        self._event = event
        self._sources = list(sources)
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Blocks until the copy is complete, and drops the tensors. Any thread, any number of times."""
        if self._event is not None:
            self._event.synchronize()
        with self._lock:
            self._sources.clear()


class CopiedBatch:
    """The states of one batch in host memory; satisfies `extractor.store.pipeline.HostBlock`."""

    def __init__(
        self,
        pool: HostPool,
        begin: int,
        *,
        taps: Sequence[str],
        own: Sequence[str],
        host_KTH: torch.Tensor,
        absmax_KT: torch.Tensor,
        lengths: Sequence[int],
    ) -> None:
        self._pool = pool
        self._begin = begin
        self._taps = tuple(taps)
        self._rows = {tap: host_KTH[row] for row, tap in enumerate(own)}
        self._host_KTH = host_KTH
        self._absmax_KT = absmax_KT
        self._lengths = list(lengths)
        self._num_filled = 0
        self._copies: list[_Copy] = []
        self._lock = threading.Lock()
        self._verdicts: list[str | None] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the rows of each tap."""
        return sum(self._lengths)

    @property
    def own_taps(self) -> tuple[str, ...]:
        """The taps whose rows it holds."""
        return tuple(self._rows)

    def fill(self, states: Mapping[str, torch.Tensor]) -> None:
        """Starts the copy of the next rows, and waits for the copy before it. One thread.

        Args:
            states: tap name to [t, H] on the device, produced on the current stream; with what is there
                already at most T rows.

        Raises:
            BugError: other taps, or more rows than the block has left.
        """
        num_rows = next(iter(states.values())).shape[0]
        begin, end = self._num_filled, self._num_filled + num_rows
        if tuple(states) != self._taps or end > self.num_tokens:
            raise BugError(
                f"rows {begin} to {end} of the taps {', '.join(states)}, for a block of {self.num_tokens} rows of "
                f"{', '.join(self._taps)}"
            )
        self._copies.append(
            self._pool.start(
                list(states.values()), self._host_KTH[:, begin:end], self._absmax_KT[:, begin:end]
            )
        )
        self._num_filled = end

    def wait(self) -> None:
        """Blocks until the copy is complete. Any thread, any number of times.

        Raises:
            BugError: not all rows were given.
        """
        if self._num_filled != self.num_tokens:
            raise BugError(f"a block of {self.num_tokens} rows was given {self._num_filled}")
        for copy in self._copies:
            copy.finish()

    def verdicts(self) -> Sequence[str | None]:
        """Per sample: None, or why its values may not be stored. Call after `wait`."""
        with self._lock:
            if self._verdicts is None:
                self._verdicts = _judge(self._absmax_KT.numpy(), self._lengths)
            return self._verdicts

    def magnitudes(self, tap: str) -> memoryview:
        """The largest magnitude of each row [T] of any tap, as bytes of float32. Call after `wait`."""
        absmax_T = self._absmax_KT[self._taps.index(tap)].numpy()
        # A NaN has many bit patterns, and which one comes out of a reduction is nobody's promise.
        return np.where(np.isnan(absmax_T), np.float32("nan"), absmax_T).view(np.uint8).data

    def rows(self, tap: str) -> memoryview:
        """The bytes of one of its own taps, [T, H] row-major. Call after `wait`."""
        return self._rows[tap].reshape(-1).view(torch.uint8).numpy().data

    def tensor(self, tap: str) -> torch.Tensor:
        """One of its own taps as [T, H] in the dtype of the disk; a view of the arena. Call after `wait`."""
        return self._rows[tap]

    def release(self) -> None:
        """Gives the memory back, once nothing is copied into it; nothing of the block may be used afterwards."""
        for copy in self._copies:
            copy.finish()
        self._rows.clear()
        self._pool.arena.give_back(self._begin)


def _pin(memory: torch.Tensor) -> None:
    # Not by torch's own allocator of pinned memory, which rounds up to a power of two.
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]  # torch ships none
    if int(code) != 0:
        raise EngineError(
            f"{memory.nbytes:,} bytes of host memory cannot be pinned: {code}",
            remedy="lower writer.buffers, batch.max_tokens or data.max_len, or raise the limit of locked memory "
            "(ulimit -l, the container's memlock)",
            code="host_memory",
        )


def _judge(absmax_KT: np.ndarray, lengths: Sequence[int]) -> list[str | None]:
    """One verdict per sample from the largest magnitude of each row."""
    verdicts: list[str | None] = []
    start = 0
    for length in lengths:
        sample_KT = absmax_KT[:, start : start + length]
        start += length
        if not np.isfinite(sample_KT).all():
            verdicts.append(NON_FINITE)
        elif (sample_KT.max(axis=1) == 0).any():
            verdicts.append(ALL_ZERO)
        else:
            verdicts.append(None)
    return verdicts
