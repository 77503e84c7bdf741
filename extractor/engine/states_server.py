"""The engine as a process that computes states for the program that started it (`extractor.states_client`).

Started as `python -m extractor.engine.states_server SPEC`. It loads the model, proves the capture, then answers each
`Compute` with the states of the batch in shared memory; nothing is written to disk. There is room for one batch
there: the next is put in when the caller has taken the one before, while the model already computes further ones.

The caller is watched through the lifeline and through a handle on its process, since processes that the caller has
forked hold the lifeline's other end as well. When it is gone, whatever the cause, this process ends at once with
everything it has started, and removes the files of this start. SIGINT is ignored: a Ctrl-C is the caller's.

Shapes: K taps, T tokens of a batch, H hidden size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import resource
import select
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
from extractor.engine import sglang_compat
from extractor.engine.channel import Channel
from extractor.errors import BugError, EngineError, TapdeckError
from extractor.protocol import Compute, EngineSpec, Taken

if TYPE_CHECKING:
    import torch

    from extractor.engine.hostcopy import CopiedBatch
    from extractor.engine.model import Engine
    from extractor.protocol import AnyRequest

PROOF_SEED = 0


class Requests:
    """What the caller wants, by number. `tell` is for the channel's thread, the rest for the computing one."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Compute] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._taken = -1

    def tell(self, request: AnyRequest) -> None:
        """Takes a request; never blocks for long.

        Raises:
            BugError: it is one for the ranks of a run.
        """
        match request:
            case Compute():
                self._wanted.put(request)
            case Taken():
                with self._changed:
                    self._taken = max(self._taken, request.number)
                    self._changed.notify()
            case _:
                raise BugError(f"{request!r} was sent to a process that has no shards")

    def next(self, *, wait: bool) -> Compute | None:
        """The next batch that is still wanted; None when there is none now and nobody wants to wait."""
        while True:
            try:
                request = self._wanted.get(block=wait)
            except queue.Empty:
                return None
            if self.is_wanted(request.number):
                return request

    def is_wanted(self, number: int) -> bool:
        """Whether the caller still waits for this batch."""
        with self._changed:
            return number > self._taken

    def wait_until_taken(self, number: int) -> None:
        """Blocks until the caller needs the states of this batch no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken >= number)


class StatesServer:
    """Joins requests, engine, shared memory and channel."""

    def __init__(self, spec: EngineSpec, requests: Requests, shared_fd: int) -> None:
        self._spec = spec
        self._requests = requests
        self._shared = mmap.mmap(shared_fd, 0)
        os.close(shared_fd)
        self._last = -1

    def load(self) -> tuple[Engine, tuple[protocol.ProofLine, ...]]:
        """Loads the model and proves its capture. Blocking, seconds to minutes.

        Raises:
            TapdeckError: the model cannot be loaded, or the proof failed.
        """
        from extractor.engine.model import Engine
        from extractor.engine.proof import prove

        engine = Engine(self._spec)
        # No data yet: any ids show where states come from, and at random no two sequences are alike.
        rng = np.random.default_rng(PROOF_SEED)
        room = max(1, self._spec.geometry.max_tokens // len(sglang_compat.PROOF_LENGTHS))
        lengths = [min(length, room) for length in sglang_compat.PROOF_LENGTHS]
        vocab_size = engine.runner.vocab_size
        lines = prove(engine, [rng.integers(vocab_size, size=n, dtype=np.int32) for n in lengths])
        if self._spec.device == "cuda":
            # Kernels are compiled, and a budget too large for the GPU fails now.
            lengths = fullest_batch(self._spec)
            engine.forward([rng.integers(vocab_size, size=n, dtype=np.int32) for n in lengths])
        return engine, lines

    def serve(self, engine: Engine, channel: Channel) -> None:
        """Answers requests, for ever.

        Raises:
            TapdeckError: the engine cannot go on.
        """
        computed: tuple[int, CopiedBatch] | None = None
        while True:
            request = self._requests.next(wait=computed is None)
            begun = None if request is None else (request.number, self._begin(engine, request))
            # Handed over while the device computes the batch that was just begun.
            if computed is not None:
                self._hand_over(channel, *computed)
            computed = begun

    def _begin(self, engine: Engine, request: Compute) -> CopiedBatch:
        tokens = np.frombuffer(request.tokens, dtype="<i4")
        return engine.compute(np.split(tokens, np.cumsum(request.lengths)[:-1]))

    def _hand_over(self, channel: Channel, number: int, block: CopiedBatch) -> None:
        try:
            self._requests.wait_until_taken(self._last)
            if not self._requests.is_wanted(number):
                return
            block.wait()
            num_tokens = block.num_tokens
            shared_KTH = self._view(num_tokens)
            for row, tap in enumerate(self._spec.taps.names):
                shared_KTH[row].copy_(block.tensor(tap))
            self._last = number
            channel.send(protocol.StatesReady(number, num_tokens, tuple(block.verdicts())))
        finally:
            block.release()

    def _view(self, num_tokens: int) -> torch.Tensor:
        """The shared memory as [K, T, H]."""
        import torch

        shape = len(self._spec.taps.taps), num_tokens, self._spec.hidden_size
        dtype = getattr(torch, self._spec.store_dtype)
        return torch.frombuffer(self._shared, dtype=dtype, count=int(np.prod(shape))).view(shape)


def fullest_batch(spec: EngineSpec) -> list[int]:
    """Lengths of the inputs of a batch as large as any can be; the longest input has `geometry.shard_tokens`."""
    longest = spec.geometry.shard_tokens
    return [longest] * min(spec.geometry.max_tokens // longest, spec.max_batch_samples)


def _watch(caller_fd: int, spec_file: Path, endpoint: str) -> None:
    """Ends this process when the caller's has ended."""
    poll = select.poll()
    poll.register(caller_fd, select.POLLIN)
    poll.poll()
    _leave(spec_file, endpoint)


def _leave(spec_file: Path, endpoint: str) -> None:
    """Ends the process and what it has started, now; nobody is left who could use a result."""
    socket = Path(endpoint.removeprefix("ipc://"))
    for path in (spec_file, spec_file.with_suffix(".log"), socket):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in {spec_file.parent, socket.parent}:
        with contextlib.suppress(OSError):
            folder.rmdir()
    _end_helpers()
    os._exit(EngineError.exit_code)


def _end_helpers() -> None:
    for helper in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()


def main(argv: list[str]) -> int:
    """Entry point of the process; the exit code is the error's.

    Args:
        argv: the path of the `EngineSpec`.
    """
    started_at = time.monotonic()
    spec_file = Path(argv[0])
    spec = msgspec.json.decode(spec_file.read_bytes(), type=EngineSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline_fd, caller_fd, shared_fd = (
        int(os.environ.pop(f"TAPDECK_{name}_FD")) for name in ("LIFELINE", "CALLER", "STATES")
    )
    threading.Thread(
        target=_watch, args=(caller_fd, spec_file, spec.endpoint), name="caller", daemon=True
    ).start()
    requests = Requests()
    channel = Channel(
        spec.endpoint,
        f"{spec.replica}.0",
        lifeline_fd=lifeline_fd,
        on_request=requests.tell,
        on_supervisor_gone=lambda: _leave(spec_file, spec.endpoint),
    )
    try:
        _run(StatesServer(spec, requests, shared_fd), spec, channel, started_at)
    except TapdeckError as error:
        _report(channel, error.code, error.message, error.remedy, error.exit_code)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported
        _report(channel, "crash", f"{type(error).__name__}: {error}", None, EngineError.exit_code)
        traceback.print_exc()
        return EngineError.exit_code
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        channel.send(protocol.Bye(peak_rss_bytes=peak))
        channel.close()
        _end_helpers()
    return 0


def _report(channel: Channel, code: str, message: str, remedy: str | None, exit_code: int) -> None:
    trace = traceback.format_exc()
    channel.send(protocol.Failed(code=code, exit_code=exit_code, message=message, remedy=remedy, trace=trace))


def _run(server: StatesServer, spec: EngineSpec, channel: Channel, started_at: float) -> None:
    process = psutil.Process()
    channel.send(
        protocol.Hello(protocol=protocol.PROTOCOL_VERSION, pid=process.pid, start_time=process.create_time())
    )
    sglang_compat.check_version(allow_unverified=spec.allow_unverified_sglang)
    sglang_compat.prepare_process(spec.device)
    engine, lines = server.load()
    channel.send(
        protocol.Ready(
            load_s=time.monotonic() - started_at,
            proof=lines,
            settings=engine.runner.settings | {"vocab_size": engine.runner.vocab_size},
            versions=sglang_compat.versions(),
            buffer_bytes=engine.pool.num_bytes,
        )
    )
    server.serve(engine, channel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
