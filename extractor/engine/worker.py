"""The process of one rank: loads the model, proves the capture, computes shard after shard.

Started by `extractor.supervisor.launcher` as `python -m extractor.engine.worker SPEC RANK`, with its environment
already set. It takes work from the supervisor and never decides what to do next. Shards are committed by
the writer threads while the next shard is computed.

A replica has one such process for each of its `EngineSpec.tp` ranks. Rank 0 is told what to do, and the others do
what it does (`extractor.engine.lockstep`); each writes its own taps, and rank 0 publishes the shard.

A hold takes effect between two batches: the shard in hand stays as it is, everything stays loaded, and the
shard goes on with its next batch, so its bytes do not depend on pauses. When the supervisor is gone the shard in
hand is finished and committed if that takes no longer than `EngineSpec.grace_s` (it is dropped when the rank is
held, and a load is broken off), then the process exits and frees its GPU; rank 0 decides that as it decides
everything, and a rank that it does not lead to the end any more is ended by its own clock. SIGINT is ignored (a
Ctrl-C in the terminal goes to the command, which then says `Stop`); SIGTERM means `Stop`, to rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil

from extractor import protocol
from extractor.dataset.prepared import PreparedDataset
from extractor.engine import lockstep, sglang_compat
from extractor.engine.channel import Channel
from extractor.engine.lockstep import Alone
from extractor.engine.orders import Orders
from extractor.errors import EngineError, RanksDisagreeError, TapdeckError
from extractor.plan import Shard, plan_shards
from extractor.protocol import EngineSpec
from extractor.store.pipeline import ShardSpec, WriterPool

if TYPE_CHECKING:
    from extractor.engine.lockstep import Lockstep
    from extractor.engine.model import Engine
    from extractor.store.shard import ShardRecord, ShardWriter
    from extractor.store.shares import Share


SHARD_SHARE = 0.75
"""Of the grace time: after that no further batch of the shard in hand is begun."""
LEAST_GRACE_S = 10.0
"""What the batch in flight may always take before a rank without supervisor is ended from within."""


class Worker:
    """Joins orders, channel, data set, engine and writers."""

    def __init__(self, spec: EngineSpec, rank: int, channel: Channel, orders: Orders) -> None:
        self._spec = spec
        self._rank = rank
        self._channel = channel
        self._orders = orders
        # Ranks beyond the number of taps have nothing to write, and only compute.
        self._num_writing = min(spec.tp, len(spec.taps.taps))
        self._samples = PreparedDataset.open(Path(spec.prepared))
        lengths = self._samples.lengths[: spec.num_samples].tolist()
        self._plan = plan_shards(lengths, spec.geometry)
        self._writers = WriterPool(
            spec.writer_threads, self._on_commit, self._on_error, on_share=self._hand_over
        )
        self._lockstep: Lockstep = Alone()

    def join(self) -> None:
        """Meets the other ranks. Blocks on rank 0 until all are there."""
        self._lockstep = lockstep.join(
            self._spec, self._rank, on_share=self._writers.take_share, on_fault=self._on_fault
        )

    def close(self, *, is_in_step: bool) -> None:
        """Commits what is finished and leaves the other ranks. Blocking.

        Args:
            is_in_step: all ranks leave now; after an error that is for the supervisor to say.
        """
        self._writers.close()
        self._lockstep.close(is_in_step=is_in_step)

    def run(self, engine: Engine) -> None:
        """Works until told to finish, drain or stop, or left alone. Blocking.

        Raises:
            TapdeckError: the engine cannot go on.
        """
        while (shard := self._lockstep.agree("the next shard", self._orders.next_shard)) is not None:
            self._work(engine, self._plan[shard])

    def load(self, started_at: float) -> Engine:
        """Loads the model and proves its capture. Blocking, seconds to minutes.

        Raises:
            TapdeckError: the model cannot be loaded, or the proof failed.
        """
        self._say(protocol.Stage("load"))
        from extractor.engine.model import Engine
        from extractor.engine.proof import prove

        engine = Engine(self._spec, self._rank, self._lockstep)
        self._say(protocol.Stage("proof"))
        lines = prove(engine, self._proof_sequences(), self._proof_of_chunks())
        if self._spec.device == "cuda":
            self._warm_up(engine)
        uuid = _gpu_uuid() if self._spec.device == "cuda" else None
        ranks = self._lockstep.gather("ready", {"buffer_bytes": engine.pool.num_bytes, "gpu_uuid": uuid})
        self._say(
            protocol.Ready(
                load_s=time.monotonic() - started_at,
                proof=lines,
                settings=engine.runner.settings,
                versions=sglang_compat.versions(),
                buffer_bytes=sum(rank["buffer_bytes"] for rank in ranks),
                gpu_uuids=tuple(rank["gpu_uuid"] for rank in ranks if rank["gpu_uuid"] is not None),
            )
        )
        return engine

    def _say(self, report: protocol.AnyReport) -> None:
        """Reports what all ranks do alike; rank 0 does so for all of them."""
        if self._rank == 0:
            self._channel.send(report)

    def _warm_up(self, engine: Engine) -> None:
        """The fullest batch and the longest sample: kernels are compiled, and what is too large fails now."""
        self._say(protocol.Stage("warm-up"))
        lengths = self._samples.lengths
        tokens = {
            batch: sum(int(lengths[index]) for index in batch)
            for shard in self._plan
            for batch in shard.batches
        }
        budget = self._spec.geometry.max_tokens
        fullest = max(
            (batch for batch in tokens if tokens[batch] <= budget), key=tokens.__getitem__, default=()
        )
        largest = max(tokens, key=tokens.__getitem__)
        for batch in {fullest, largest} - {()}:
            engine.compute([self._samples.sample(index).input_ids for index in batch]).release()

    def _proof_sequences(self) -> list[np.ndarray]:
        """Real token ids that differ: the ends of the first samples (they often begin alike)."""
        room = max(1, self._spec.geometry.max_tokens // len(sglang_compat.PROOF_LENGTHS))
        sequences: list[np.ndarray] = []
        for number, length in enumerate(sglang_compat.PROOF_LENGTHS):
            ids = self._samples.sample(number % len(self._samples)).input_ids[-min(length, room) :]
            # Equal tokens have equal states, and a swap of theirs could not be seen: rotated until they differ.
            for _ in ids:
                if not any(np.array_equal(ids[:8], other[:8]) for other in sequences):
                    break
                ids = np.roll(ids, 1)
            sequences.append(ids)
        return sequences

    def _proof_of_chunks(self) -> np.ndarray | None:
        """The beginning of the longest sample, where the plan has samples in chunks."""
        if not self._spec.has_chunks:
            return None
        longest = int(np.argmax(self._samples.lengths[: self._spec.num_samples]))
        length = min(sglang_compat.PROOF_CHUNKED_TOKENS, self._spec.geometry.max_tokens)
        return self._samples.sample(longest).input_ids[:length]

    def _work(self, engine: Engine, shard: Shard) -> None:
        writer = self._open(shard) if self._rank < self._num_writing else None
        self._say(protocol.ShardStarted(shard.index))
        try:
            for number, batch in enumerate(shard.batches):
                if not self._lockstep.agree("the next batch", lambda: self._orders.may_go_on(shard.index)):
                    if writer is not None:
                        writer.abandon()
                    return
                samples = [self._samples.sample(index) for index in batch]
                block = engine.compute([sample.input_ids for sample in samples])
                num_tokens = block.num_tokens
                if writer is None:
                    block.release()
                else:
                    writer.submit(block, samples)
                self._say(protocol.BatchDone(shard.index, number, num_tokens))
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        if writer is not None:
            writer.finish()

    def _open(self, shard: Shard) -> ShardWriter:
        return self._writers.open_shard(
            ShardSpec(
                output=Path(self._spec.output),
                index=shard.index,
                samples=shard.samples,
                replica=self._spec.replica,
                taps=self._spec.taps.taps,
                geometry=self._spec.geometry,
                num_tokens=shard.num_tokens,
                hidden_size=self._spec.hidden_size,
                dtype=self._spec.store_dtype,
                fingerprint=self._spec.fingerprint,
                rank=self._rank,
                num_ranks=self._num_writing,
            )
        )

    def _hand_over(self, share: Share) -> None:
        self._lockstep.hand_over(share)

    def _on_commit(self, record: ShardRecord) -> None:
        self._channel.send(
            protocol.ShardDone(
                shard=record.index,
                num_samples=record.num_samples,
                num_tokens=record.num_tokens,
                num_supervised=record.num_supervised_tokens,
                num_bytes=sum(file.bytes for file in record.files.values()),
                quarantined=len(record.quarantined),
            )
        )

    def _on_error(self, shard: int, error: BaseException) -> None:
        if isinstance(error, RanksDisagreeError) or self._rank:
            # The next shard would meet the same; and what a follower could not hand over nobody waits for.
            self._on_fault(error)
            return
        cause = error if isinstance(error, OSError) else error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        name = None if number is None else errno.errorcode.get(number)
        self._channel.send(protocol.ShardFailed(shard, f"{type(error).__name__}: {error}", name))

    def _on_fault(self, error: BaseException) -> None:
        """An error of a thread that has nobody above it: the supervisor ends this replica for it."""
        self._channel.send(_failed(error, self._rank))


def _failed(error: BaseException, rank: int) -> protocol.Failed:
    """The report of an error. Call where it was caught."""
    if not isinstance(error, TapdeckError):
        error = EngineError(f"{type(error).__name__}: {error}", code="crash")
    return protocol.Failed(
        code=error.code,
        exit_code=error.exit_code,
        message=error.message,
        remedy=error.remedy,
        trace=traceback.format_exc(),
        rank=rank,
        at_s=time.monotonic(),
    )


def _gpu_uuid() -> str:
    """The GPU of this process, by the name that NVML has for it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _end_late(grace_s: float) -> None:
    """Ends the process when it has not ended by itself."""
    # A batch that never ends (a kernel or a collective that hangs) must not keep the GPU for ever.
    threading.Event().wait(max(grace_s, LEAST_GRACE_S))
    _end_helpers()
    os._exit(EngineError.exit_code)


def _end_helpers() -> None:
    """Ends the processes that libraries have started here: without us they would keep the GPU and the lease."""
    for helper in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()


def main(argv: list[str]) -> int:
    """Entry point of the process; the exit code is the error's.

    Args:
        argv: the path of the `EngineSpec`, and the number of this rank.
    """
    started_at = time.monotonic()
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=EngineSpec)
    rank = int(argv[1])
    orders = Orders(grace_s=spec.grace_s * SHARD_SHARE, on_held=lambda held: channel.send(held))  # noqa: PLW0108 -- made below
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One of several ranks cannot stop alone, and whoever ends a group of processes reaches rank 0 as well.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda *_: orders.stop())
    lifeline = os.environ.pop("TAPDECK_LIFELINE_FD", None)
    is_loading = threading.Event()
    is_loading.set()

    def leave() -> None:
        # Nothing is in hand while the model loads, and loading cannot be interrupted any other way; a
        # large model would keep the output folder and the GPU for many minutes.
        if is_loading.is_set():
            _end_helpers()
            os._exit(EngineError.exit_code)
        orders.lose_supervisor()
        threading.Thread(target=_end_late, args=(spec.grace_s,), name="grace", daemon=True).start()

    channel = Channel(
        spec.endpoint,
        f"{spec.replica}.{rank}",
        lifeline_fd=None if lifeline is None else int(lifeline),
        on_request=orders.tell,
        on_supervisor_gone=leave,
    )
    process = psutil.Process()
    channel.send(
        protocol.Hello(
            protocol=protocol.PROTOCOL_VERSION,
            pid=process.pid,
            start_time=process.create_time(),
            rank=rank,
        )
    )
    worker: Worker | None = None
    failed: protocol.Failed | None = None
    try:
        sglang_compat.check_version(allow_unverified=spec.allow_unverified_sglang)
        sglang_compat.prepare_process(spec.device, rank=rank, tp=spec.tp)
        worker = Worker(spec, rank, channel, orders)
        worker.join()
        engine = worker.load(started_at)
        is_loading.clear()
        worker.run(engine)
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported
        # Made now: when it was raised tells which of several ranks was first.
        failed = _failed(error, rank)
        if not isinstance(error, TapdeckError):
            traceback.print_exc()
    finally:
        if worker is not None:
            worker.close(is_in_step=failed is None)
        if failed is not None:
            channel.send(failed)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        channel.send(protocol.Bye(peak_rss_bytes=peak, rank=rank))
        channel.close()
        _end_helpers()
    return 0 if failed is None else failed.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
