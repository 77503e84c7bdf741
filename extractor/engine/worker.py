"""The process of one rank: loads the model, proves the capture, computes shard after shard.

Started by `extractor.supervisor.launcher` as `python -m extractor.engine.worker SPEC`, with its environment
already set. It takes work from the supervisor and never decides what to do next. Shards are committed by
the writer threads while the next shard is computed.

A hold takes effect between two batches: the shard in hand stays as it is, everything stays loaded, and the
shard goes on with its next batch, so its bytes do not depend on pauses. When the supervisor is gone the shard in
hand is finished and committed if that takes no longer than `EngineSpec.grace_s` (it is dropped when the rank is
held, and a load is broken off), then the process exits and frees its GPU. SIGINT is ignored (a Ctrl-C in the
terminal goes to the command, which then says `Stop`); SIGTERM means `Stop`.
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
from extractor.engine import sglang_compat
from extractor.engine.channel import Channel
from extractor.engine.orders import Orders
from extractor.errors import EngineError, TapdeckError
from extractor.plan import Shard, plan_shards
from extractor.protocol import EngineSpec
from extractor.store.pipeline import ShardSpec, WriterPool

if TYPE_CHECKING:
    from extractor.engine.model import Engine
    from extractor.store.shard import ShardRecord


SHARD_SHARE = 0.75
"""Of the grace time: after that no further batch of the shard in hand is begun."""
LEAST_GRACE_S = 10.0
"""What the batch in flight may always take before a rank without supervisor is ended from within."""


class Worker:
    """Joins orders, channel, data set, engine and writers."""

    def __init__(self, spec: EngineSpec, channel: Channel, orders: Orders) -> None:
        self._spec = spec
        self._channel = channel
        self._orders = orders
        self._samples = PreparedDataset.open(Path(spec.prepared))
        lengths = self._samples.lengths[: spec.num_samples].tolist()
        self._plan = plan_shards(lengths, spec.geometry)
        self._writers = WriterPool(spec.writer_threads, self._on_commit, self._on_error)

    def run(self, engine: Engine) -> None:
        """Works until told to finish, drain or stop, or left alone. Blocking.

        Raises:
            TapdeckError: the engine cannot go on.
        """
        try:
            while (shard := self._orders.next_shard()) is not None:
                self._work(engine, self._plan[shard])
        finally:
            self._writers.close()

    def load(self, started_at: float) -> Engine:
        """Loads the model and proves its capture. Blocking, seconds to minutes.

        Raises:
            TapdeckError: the model cannot be loaded, or the proof failed.
        """
        self._channel.send(protocol.Stage("load"))
        from extractor.engine.model import Engine
        from extractor.engine.proof import prove

        engine = Engine(self._spec)
        self._channel.send(protocol.Stage("proof"))
        lines = prove(engine, self._proof_sequences(), self._proof_of_chunks())
        if self._spec.device == "cuda":
            self._warm_up(engine)
        self._channel.send(
            protocol.Ready(
                load_s=time.monotonic() - started_at,
                proof=lines,
                settings=engine.runner.settings,
                versions=sglang_compat.versions(),
                buffer_bytes=engine.pool.num_bytes,
                gpu_uuid=_gpu_uuid() if self._spec.device == "cuda" else None,
            )
        )
        return engine

    def _warm_up(self, engine: Engine) -> None:
        """The fullest batch and the longest sample: kernels are compiled, and what is too large fails now."""
        self._channel.send(protocol.Stage("warm-up"))
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
        writer = self._writers.open_shard(
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
            )
        )
        self._channel.send(protocol.ShardStarted(shard.index))
        try:
            for number, batch in enumerate(shard.batches):
                if not self._orders.may_go_on(shard.index):
                    writer.abandon()
                    return
                samples = [self._samples.sample(index) for index in batch]
                block = engine.compute([sample.input_ids for sample in samples])
                num_tokens = block.num_tokens
                writer.submit(block, samples)
                self._channel.send(protocol.BatchDone(shard.index, number, num_tokens))
        except BaseException:
            writer.abandon()
            raise
        writer.finish()

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
        cause = error if isinstance(error, OSError) else error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        name = None if number is None else errno.errorcode.get(number)
        self._channel.send(protocol.ShardFailed(shard, f"{type(error).__name__}: {error}", name))


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
        argv: the path of the `EngineSpec`.
    """
    started_at = time.monotonic()
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=EngineSpec)
    orders = Orders(grace_s=spec.grace_s * SHARD_SHARE, on_held=lambda held: channel.send(held))  # noqa: PLW0108 -- made below
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: orders.stop())
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
        f"{spec.replica}.0",
        lifeline_fd=None if lifeline is None else int(lifeline),
        on_request=orders.tell,
        on_supervisor_gone=leave,
    )
    try:
        _run(spec, channel, orders, is_loading, started_at)
    except TapdeckError as error:
        channel.send(
            protocol.Failed(
                code=error.code,
                exit_code=error.exit_code,
                message=error.message,
                remedy=error.remedy,
                trace=traceback.format_exc(),
            )
        )
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported
        message = f"{type(error).__name__}: {error}"
        channel.send(
            protocol.Failed(
                code="crash",
                exit_code=EngineError.exit_code,
                message=message,
                remedy=None,
                trace=traceback.format_exc(),
            )
        )
        traceback.print_exc()
        return EngineError.exit_code
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        channel.send(protocol.Bye(peak_rss_bytes=peak))
        channel.close()
        _end_helpers()
    return 0


def _run(
    spec: EngineSpec, channel: Channel, orders: Orders, is_loading: threading.Event, started_at: float
) -> None:
    process = psutil.Process()
    channel.send(
        protocol.Hello(
            protocol=protocol.PROTOCOL_VERSION,
            pid=process.pid,
            start_time=process.create_time(),
        )
    )
    sglang_compat.check_version(allow_unverified=spec.allow_unverified_sglang)
    sglang_compat.prepare_process(spec.device)
    worker = Worker(spec, channel, orders)
    engine = worker.load(started_at)
    is_loading.clear()
    worker.run(engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
