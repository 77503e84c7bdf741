"""A loaded model with its taps: token ids in, states on the device out.

Joins the SGLang runner and the capture; knows neither files nor shards. One instance per process, since
SGLang keeps process-wide state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from extractor.engine.capture import Capture
from extractor.engine.hostcopy import HostPool
from extractor.engine.lockstep import Alone
from extractor.engine.proof import prove
from extractor.engine.sglang_compat import Runner
from extractor.errors import BugError, EngineError
from extractor.estimate import host_buffer_bytes
from extractor.plan import chunk_edges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from extractor.engine.hostcopy import CopiedBatch
    from extractor.engine.lockstep import Lockstep
    from extractor.engine.sglang_compat import Prefill
    from extractor.protocol import EngineSpec, ProofLine
    from extractor.taps import TapSelection


class Engine:
    """One replica's model on this rank.

    Attributes:
        spec: what it was started from.
        rank: of this process within its replica.
        lockstep: the other ranks.
        runner: the SGLang runner.
        capture: the taps.
        pool: host memory for the states of batches.
    """

    def __init__(self, spec: EngineSpec, rank: int = 0, lockstep: Lockstep | None = None) -> None:
        """Loads the weights; takes seconds to minutes. On all ranks of a replica at the same time.

        Args:
            spec: of the replica.
            rank: of this process.
            lockstep: the other ranks; None: there are none.

        Raises:
            EngineError: SGLang refuses the model or a setting.
        """
        self.spec = spec
        self.rank = rank
        self.lockstep = lockstep or Alone()
        self.runner = Runner(spec, rank, self.lockstep)
        self.capture = Capture(
            self.runner.anatomy, hidden_size=spec.hidden_size, dtype=getattr(torch, spec.dtype)
        )
        self.capture.set_taps(spec.taps)
        self.pool = host_pool(spec, rank)

    def set_taps(
        self, taps: TapSelection, sequences: Sequence[np.ndarray], in_chunks: np.ndarray | None = None
    ) -> tuple[ProofLine, ...]:
        """Changes what is captured from the next batch on, and proves it; between two batches.

        Args:
            taps: the new selection.
            sequences: two or more token id arrays that differ, int32 [t] each, for the proof.
            in_chunks: where batches may be long samples in chunks: one for the proof of that, as in `prove`.

        Returns:
            The checks of the proof with their errors.

        Raises:
            ProofError: a check failed. The earlier taps are in force again.
            CaptureError: SGLang does not capture what was asked for. The earlier taps are in force again.
        """
        before, pool = self.spec, self.pool
        try:
            self.capture.set_taps(taps)
            self.spec = msgspec.structs.replace(before, taps=taps)
            if host_pool_bytes(self.spec, self.rank) > pool.num_bytes:
                # Blocks on their way to the disk give their memory back to the earlier pool.
                self.pool = host_pool(self.spec, self.rank)
            return prove(self, sequences, in_chunks)
        except BaseException:
            self.spec, self.pool = before, pool
            self.capture.set_taps(before.taps)
            raise

    def compute(self, sequences: Sequence[np.ndarray]) -> CopiedBatch:
        """One batch of the plan, packed or a long sample in chunks; blocks until there is host memory for it.

        Args:
            sequences: token ids, int32 [t] each: samples that fit a batch together, or a single longer one.

        Returns:
            The states of all rows, on their way to host memory.

        Raises:
            EngineError, CaptureError: as `forward`.
        """
        if len(sequences) == 1:
            edges = chunk_edges(len(sequences[0]), self.spec.geometry)
            if len(edges) > 1:
                return self.compute_chunks(sequences[0], edges)
        states, _ = self.forward(sequences)
        return self.pool.copy(states, [len(ids) for ids in sequences])

    def compute_chunks(self, ids: np.ndarray, edges: Sequence[tuple[int, int]]) -> CopiedBatch:
        """One sample, chunk after chunk over its own keys and values; its states leave the device by the chunk.

        Args:
            ids: token ids, int32 [t].
            edges: (first token, end) of each chunk, which together are the sample.

        Returns:
            As `compute`.

        Raises:
            EngineError, CaptureError: as `forward`; also when a chunk was not computed over those before it.
        """
        self._check_vocabulary([ids])
        block: CopiedBatch | None = None
        try:
            with self.runner.long_sample(ids) as sample:
                for begin, end in edges:
                    self.capture.begin_batch()
                    self.runner.prefill_next(sample, end)
                    states = self.capture.collect(end - begin)
                    if block is None:
                        # After the first chunk: the device computes while the writers make room.
                        block = self.pool.take(list(states), [len(ids)])
                    block.fill(states)
        except BaseException:
            if block is not None:
                block.release()
            raise
        if block is None:
            raise BugError("a sample without chunks")
        return block

    def forward(self, sequences: Sequence[np.ndarray]) -> tuple[dict[str, torch.Tensor], Prefill]:
        """One packed prefill.

        Args:
            sequences: token ids, int32 [t] each, together T tokens.

        Returns:
            Tap name to [T, H] on the device, rows in the order of the sequences; and the prefill itself.

        Raises:
            EngineError: a token id is not in the vocabulary, or SGLang changed the batch.
            CaptureError: a per-batch check failed.
        """
        self._check_vocabulary(sequences)
        self.capture.begin_batch()
        prefill = self.runner.prefill(sequences)
        return self.capture.collect(sum(len(ids) for ids in sequences)), prefill

    def _check_vocabulary(self, sequences: Sequence[np.ndarray]) -> None:
        for ids in sequences:
            # An id beyond the embedding is a device-side assert on CUDA, after which nothing can be said.
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.runner.vocab_size:
                raise EngineError(
                    f"token id {int(ids.max())} is not in the model's vocabulary of {self.runner.vocab_size}",
                    remedy="the tokenizer does not belong to this model",
                    code="token_out_of_vocabulary",
                )


def host_pool(spec: EngineSpec, rank: int = 0) -> HostPool:
    """The host memory for the states of a run that this rank copies.

    Raises:
        EngineError: there is not so much.
    """
    return HostPool(
        num_bytes=host_pool_bytes(spec, rank),
        hidden_size=spec.hidden_size,
        dtype=getattr(torch, spec.store_dtype),
        device=spec.device,
        own=_own_taps(spec, rank),
    )


def host_pool_bytes(spec: EngineSpec, rank: int = 0) -> int:
    """How much host memory that is."""
    num_taps = len(spec.taps.taps)
    return host_buffer_bytes(
        buffers=spec.buffers,
        max_tokens=spec.geometry.max_tokens,
        longest=spec.longest_sample,
        hidden_size=spec.hidden_size,
        num_taps=num_taps,
        num_own=len(range(num_taps)[_own_taps(spec, rank)]),
        dtype=spec.store_dtype,
    )


def _own_taps(spec: EngineSpec, rank: int) -> slice:
    return slice(rank, None, spec.tp)
