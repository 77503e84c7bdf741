"""From the device to host buffers: a pool allocated once, copies on a side stream, verdicts on values.

Shapes: K taps, T tokens of a batch, H hidden size. A buffer holds the states of one batch as [K, T, H] in
the dtype of the disk, each tap contiguous, so that writer threads write straight from it. Where several ranks
write, a rank copies the rows of its own taps alone, and looks at the values of all: verdicts are the same everywhere.

Invariants: memory is bounded by the pool, whatever the disk does; a buffer is refilled only after every
tap in it was released; a block's rows are read only after `wait`.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NON_FINITE = "non_finite"
ALL_ZERO = "all_zero"


class _Buffer:
    """Host memory for one batch; pinned when the states come from CUDA."""

    def __init__(
        self,
        num_taps: int,
        num_own: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        pinned: bool,
    ) -> None:
        self.states = torch.empty(num_own * max_tokens * hidden_size, dtype=dtype, pin_memory=pinned)
        self.absmax = torch.empty(num_taps * max_tokens, dtype=torch.float32, pin_memory=pinned)


class HostPool:
    """A fixed number of host buffers, and the copies into them."""

    def __init__(
        self,
        *,
        num_buffers: int,
        num_taps: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
        own: slice = slice(None),
    ) -> None:
        """Allocates the buffers.

        Args:
            num_buffers: how many batches fit.
            num_taps: K.
            max_tokens: of a batch.
            hidden_size: H.
            dtype: of the disk.
            device: "cuda" or "cpu".
            own: which of the taps, in stored order, are copied.
        """
        self.num_taps = num_taps
        self._own = own
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]  # torch ships none
        buffers = [
            _Buffer(
                num_taps,
                len(range(num_taps)[own]),
                max_tokens,
                hidden_size,
                dtype,
                pinned=device == "cuda",
            )
            for _ in range(num_buffers)
        ]
        self.num_bytes = sum(buffer.states.nbytes + buffer.absmax.nbytes for buffer in buffers)
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)

    def copy(self, states: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> CopiedBatch:
        """Starts the copy of one batch into a free buffer; blocks until one is free.

        Args:
            states: tap name to [T, H] on the device, produced on the current stream.
            lengths: tokens of each sample, in row order; they add up to T.

        Returns:
            The block, whose rows are valid after `wait`.
        """
        buffer = self._free.get()
        num_tokens = sum(lengths)
        taps = list(states)
        own = taps[self._own]
        host_KTH = buffer.states[: len(own) * num_tokens * self._hidden_size].view(
            len(own), num_tokens, self._hidden_size
        )
        absmax_KT = buffer.absmax[: len(taps) * num_tokens].view(len(taps), num_tokens)
        event = self._start(states, host_KTH, absmax_KT)
        return CopiedBatch(
            self,
            buffer,
            taps=taps,
            own=own,
            host_KTH=host_KTH,
            absmax_KT=absmax_KT,
            lengths=lengths,
            event=event,
            sources=list(states.values()),
        )

    def _start(
        self, states: Mapping[str, torch.Tensor], host_KTH: torch.Tensor, absmax_KT: torch.Tensor
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            self._copy_all(states, host_KTH, absmax_KT)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy_all(states, host_KTH, absmax_KT)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships none
            event.record(self._stream)
        return event

    def _copy_all(
        self, states: Mapping[str, torch.Tensor], host_KTH: torch.Tensor, absmax_KT: torch.Tensor
    ) -> None:
        rows = iter(host_KTH)
        own = set(list(states)[self._own])
        for row, (tap, state_TH) in enumerate(states.items()):
            # Verdicts are about what is stored, so the cast comes first: it can overflow.
            stored_TH = state_TH.to(self._dtype).contiguous()
            if tap in own:
                next(rows).copy_(stored_TH, non_blocking=True)
            absmax_KT[row].copy_(stored_TH.abs().amax(dim=-1), non_blocking=True)

    def give_back(self, buffer: _Buffer) -> None:
        """Makes a buffer free again. Any thread."""
        self._free.put(buffer)


class CopiedBatch:
    """The states of one batch in host memory; satisfies `extractor.store.pipeline.HostBlock`."""

    def __init__(
        self,
        pool: HostPool,
        buffer: _Buffer,
        *,
        taps: Sequence[str],
        own: Sequence[str],
        host_KTH: torch.Tensor,
        absmax_KT: torch.Tensor,
        lengths: Sequence[int],
        event: torch.cuda.Event | None,
        sources: list[torch.Tensor],
    ) -> None:
        self._pool = pool
        self._buffer = buffer
        self._taps = tuple(taps)
        self._rows = {tap: host_KTH[row] for row, tap in enumerate(own)}
        self._absmax_KT = absmax_KT
        self._lengths = list(lengths)
        self._event = event
        # The device tensors must outlive the copy; they are dropped as soon as it is complete.
        self._sources = sources
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

    def wait(self) -> None:
        """Blocks until the copy is complete. Any thread, any number of times."""
        if self._event is not None:
            self._event.synchronize()
        with self._lock:
            self._sources.clear()

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
        """One of its own taps as [T, H] in the dtype of the disk; a view of the buffer. Call after `wait`."""
        return self._rows[tap]

    def release(self) -> None:
        """Gives the buffer back; nothing of the block may be used afterwards."""
        self._rows.clear()
        self._pool.give_back(self._buffer)


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
