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
from extractor.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

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
        pool: host buffers for the states of batches.
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
        self.pool = self._new_pool(len(spec.taps.taps))

    def set_taps(self, taps: TapSelection, sequences: Sequence[np.ndarray]) -> tuple[ProofLine, ...]:
        """Changes what is captured from the next batch on, and proves it; between two batches.

        Args:
            taps: the new selection.
            sequences: two or more token id arrays that differ, int32 [t] each, for the proof.

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
            if len(taps.taps) > pool.num_taps:
                # Blocks on their way to the disk give their buffers back to the earlier pool.
                self.pool = self._new_pool(len(taps.taps))
            return prove(self, sequences)
        except BaseException:
            self.spec, self.pool = before, pool
            self.capture.set_taps(before.taps)
            raise

    def _new_pool(self, num_taps: int) -> HostPool:
        return HostPool(
            num_buffers=self.spec.buffers,
            num_taps=num_taps,
            max_tokens=self.spec.geometry.max_tokens,
            hidden_size=self.spec.hidden_size,
            dtype=getattr(torch, self.spec.store_dtype),
            device=self.spec.device,
            own=slice(self.rank, None, self.spec.tp),
        )

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
        for ids in sequences:
            # An id beyond the embedding is a device-side assert on CUDA, after which nothing can be said.
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.runner.vocab_size:
                raise EngineError(
                    f"token id {int(ids.max())} is not in the model's vocabulary of {self.runner.vocab_size}",
                    remedy="the tokenizer does not belong to this model",
                    code="token_out_of_vocabulary",
                )
        self.capture.begin_batch()
        prefill = self.runner.prefill(sequences)
        return self.capture.collect(sum(len(ids) for ids in sequences)), prefill
