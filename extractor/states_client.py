"""The caller's side of an engine in a process of its own: batches of token ids out, states in shared memory in.

Owns the process, the shared memory, the sockets and their folders, and ends all of them. The states of one batch
are in the shared memory at a time, so what is held besides the results does not grow with the number of inputs.

Invariants: a batch is known by its number, which is never given twice, so what an interrupted call left behind is
not taken for the next one's; after an error nothing of the process is left, and every later use says why.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zmq

from extractor import protocol
from extractor.errors import BugError, EngineError, GeneratorError
from extractor.supervisor.launcher import LocalLauncher
from extractor.supervisor.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from extractor.protocol import AnyReport, EngineSpec

MODULE = "extractor.engine.states_server"
POLL_S = 0.2
"""How soon the end of the process is seen; reports are seen at once."""
AHEAD = 3
"""Batches sent and not yet taken: one is read here, one waits to be handed over, one is computed."""
AGAIN = "make a new HiddenStatesGenerator"


class StatesClient:
    """A started engine, for one call at a time.

    Attributes:
        pid: of the engine's process.
        vocab_size: token ids are below it; 0 before `wait_until_ready`.
    """

    def __init__(
        self, make_spec: Callable[[str], EngineSpec], *, environment: Mapping[str, str], shared_bytes: int
    ) -> None:
        """Starts the process and returns at once.

        Args:
            make_spec: makes the spec from the endpoint that the process shall connect to.
            environment: of the process.
            shared_bytes: size of the states of the largest batch.
        """
        self._owner_pid = os.getpid()
        self._ended: GeneratorError | None = None
        self._next_number = 0
        self._lock = threading.RLock()
        self.vocab_size = 0
        self._folder = Path(tempfile.mkdtemp(prefix="tapdeck-"))
        # Without a name in any folder: gone with the last process that has it, and not bound by /dev/shm's size.
        shared_fd = os.memfd_create("tapdeck-states")
        # The lifeline alone is not enough: its other end is also in every process that this one forks.
        caller_fd = os.pidfd_open(self._owner_pid)
        try:
            os.truncate(shared_fd, shared_bytes)
            self._shared: mmap.mmap | None = mmap.mmap(shared_fd, shared_bytes)
            fds = {"TAPDECK_STATES_FD": str(shared_fd), "TAPDECK_CALLER_FD": str(caller_fd)}
            self._replica = Replica(
                make_spec,
                launcher=LocalLauncher(MODULE),
                run_folder=self._folder,
                environment={**environment, **fds},
                keep_fds=(shared_fd, caller_fd),
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(shared_fd)
            os.close(caller_fd)
        self.pid = self._replica.process.pid

    @property
    def shared(self) -> mmap.mmap:
        """The states of the batch in hand, see `compute`.

        Raises:
            GeneratorError: the engine has ended.
        """
        shared = self._shared
        if shared is None:
            self.require_usable()
            raise BugError("an engine that runs has no shared memory")
        return shared

    def wait_until_ready(self) -> protocol.Ready:
        """Blocks until the model is loaded and its capture is proven: seconds to minutes.

        Raises:
            GeneratorError: the engine refused, failed or died.
        """
        with self._in_use():
            for report in self._reports():
                if isinstance(report, protocol.Ready):
                    self.vocab_size = int(report.settings["vocab_size"])
                    return report
        raise BugError("the reports of an engine have no end")

    def compute(self, batches: Sequence[Sequence[npt.NDArray[np.int32]]]) -> Iterator[protocol.StatesReady]:
        """Computes batches, in their order.

        Args:
            batches: token ids of the sequences of each batch, int32 [t] each.

        Yields:
            For each batch, when its states are in `shared`, as [taps, tokens, hidden size] in the dtype of the spec;
            valid until the next step.

        Raises:
            GeneratorError: the engine failed or died, or was closed.
        """
        first = self._next_number
        # What an interrupted call has left is not computed, and does not keep the memory.
        with self._in_use():
            self._replica.send(protocol.Taken(first - 1))
        for done in range(len(batches)):
            with self._in_use():
                while self._next_number - first < min(done + AHEAD, len(batches)):
                    self._order(batches[self._next_number - first])
                report = self._states(first + done)
            yield report
            with self._in_use():
                self._replica.send(protocol.Taken(report.number))

    def require_usable(self) -> None:
        """Refuses to go on after an error or `close`, and in a process that was forked from the caller's.

        Raises:
            GeneratorError: with the reason.
        """
        if os.getpid() != self._owner_pid:
            raise GeneratorError(
                f"this generator belongs to process {self._owner_pid}; this is a fork of it (pid {os.getpid()})",
                remedy=f"generate in the process that made it, or {AGAIN} in this one",
                code="generator_forked",
            )
        if self._ended is not None:
            raise GeneratorError(
                f"this generator cannot be used any more: {self._ended.message}",
                remedy=AGAIN,
                code=self._ended.code,
            ) from self._ended

    def close(self) -> None:
        """Ends the process and frees what it holds.

        Any thread, also from a signal handler, any number of times. In a forked process it does nothing.
        """
        self._end(GeneratorError("it was closed", code="generator_closed"))

    def _end(self, reason: GeneratorError) -> None:
        if self._ended is not None or os.getpid() != self._owner_pid:
            return
        self._ended = reason
        # Before the lock: another thread that waits for states then sees that none will come.
        self._replica.process.kill(wait=False)
        with self._lock:
            # Leaving the replica ends its processes and sockets; nothing they hold is worth a polite end.
            self._replica.__exit__(None, None, None)
        shutil.rmtree(self._folder, ignore_errors=True)
        # Not closed: a tensor over it, in another thread, holds no more than a reference.
        self._shared = None

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """For everything that touches the sockets: an error of the engine ends it for good."""
        with self._lock:
            self.require_usable()
            try:
                yield
            except (EngineError, zmq.ZMQError) as error:
                # Closed meanwhile, by a signal handler or another thread: the error is only what came of that.
                if self._ended is not None:
                    self.require_usable()
                if isinstance(error, zmq.ZMQError):
                    raise
                # Of a process that has died the remedy is that of a run.
                remedy = AGAIN if error.code == "worker_died" else error.remedy or AGAIN
                ours = GeneratorError(
                    error.message, remedy=remedy, code=error.code, exit_code=error.exit_code
                )
                for note in getattr(error, "__notes__", ()):
                    ours.add_note(note)
                self._end(ours)
                raise ours from error

    def _order(self, sequences: Sequence[npt.NDArray[np.int32]]) -> None:
        number = self._next_number
        # First of all: a number that an interrupt has wasted is harmless, one that is given twice is not.
        self._next_number += 1
        tokens = np.concatenate(sequences).astype("<i4").tobytes()
        self._replica.send(protocol.Compute(number, tuple(len(ids) for ids in sequences), tokens))

    def _states(self, number: int) -> protocol.StatesReady:
        for report in self._reports():
            if isinstance(report, protocol.StatesReady) and report.number >= number:
                if report.number > number:
                    raise BugError(f"batch {report.number} came before batch {number}")
                return report
        raise BugError("the reports of an engine have no end")

    def _reports(self) -> Iterator[AnyReport]:
        """What the process says, for as long as it can go on.

        Raises:
            EngineError: it failed, died or left.
        """
        while True:
            for report in self._replica.reports(POLL_S):
                if isinstance(report, protocol.Failed):
                    error = EngineError(
                        report.message, remedy=report.remedy, code=report.code, exit_code=report.exit_code
                    )
                    error.add_note(report.trace)
                    raise error
                if isinstance(report, protocol.Bye):
                    raise EngineError(f"the engine has left by itself\n{self._replica.log_tail()}")
                yield report
