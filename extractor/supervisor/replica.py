"""One replica as the supervisor sees it: its ranks, their socket, and their messages in order.

Owns the socket folder and the processes, and ends both. It decides nothing about shards.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from signal import SIGABRT
from typing import TYPE_CHECKING, Self

import msgspec
import zmq
import zmq.asyncio

from extractor import protocol
from extractor.errors import BugError, EngineError
from extractor.supervisor.place import make_socket_folder, remove_socket_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from extractor.protocol import AnyReport, AnyRequest, EngineSpec
    from extractor.supervisor.launcher import Launcher, RankProcess

LOG_TAIL_LINES = 15
LAST_LOOK_MS = 100
"""ZeroMQ's own thread may still be reading what a process sent just before it ended."""
TAIL_BYTES = 64 * 1024
EXIT_WAIT_S = 30.0
"""How long a rank may take to exit after its last message, or to follow rank 0."""
SETTLE_S = 1.0
"""How long other ranks may take to say what they know when one has died or failed; then they are ended."""


class _Rank:
    """One process of a replica, and what it has said of its end."""

    def __init__(self, number: int, process: RankProcess, log: Path) -> None:
        self.number = number
        self.process = process
        self.log = log
        self.has_left = False
        self.failed: protocol.Failed | None = None
        self.peak_rss_bytes = 0

    @property
    def is_silent(self) -> bool:
        """It is gone and has not said its last word."""
        return not self.has_left and self.process.poll() is not None


class Replica:
    """A running replica. Use as a context manager: leaving it leaves no process behind.

    Requests go to rank 0. When a rank dies or fails, all others are ended: they would wait for it in the middle of
    a collective. What comes of that in the others is never taken for the cause.
    """

    def __init__(
        self,
        make_spec: Callable[[str], EngineSpec],
        *,
        launcher: Launcher,
        run_folder: Path,
        environment: Mapping[str, str],
        keep_fds: Sequence[int] = (),
    ) -> None:
        """Starts the processes.

        Args:
            make_spec: makes the spec from the endpoint that the ranks shall connect to.
            launcher: starts the processes.
            run_folder: for the spec and the logs.
            environment: of the ranks.
            keep_fds: descriptors the ranks inherit.
        """
        # Socket paths are limited to 107 bytes, run folders are not.
        self._socket_folder = make_socket_folder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._said_bye = False
        self._shadow: zmq.asyncio.Socket | None = None
        self._ranks: list[_Rank] = []
        self._judged_at: float | None = None
        self._left_at: float | None = None
        try:
            self._start(make_spec, launcher, run_folder, environment, keep_fds)
        except BaseException:
            self.kill()
            self._close()
            raise

    def _start(
        self,
        make_spec: Callable[[str], EngineSpec],
        launcher: Launcher,
        run_folder: Path,
        environment: Mapping[str, str],
        keep_fds: Sequence[int],
    ) -> None:
        endpoint = f"ipc://{self._socket_folder}/ranks"
        self._socket.bind(endpoint)
        spec = make_spec(endpoint)
        self.name = spec.replica
        # One log for all starts of a rank: what follows the dash is the word of one start.
        stem = f"replica-{spec.replica.partition('-')[0]}"
        self.log = run_folder / f"{stem}.log"
        spec_file = run_folder / f"{stem}.json"
        _remove_what_was_left(spec_file)
        spec_file.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=2))
        for number in range(spec.tp):
            log = run_folder / f"{stem}.{number}.log" if number else self.log
            process = launcher.start(
                spec_file, rank=number, environment=environment, log=log, keep_fds=keep_fds
            )
            self._ranks.append(_Rank(number, process, log))

    def _close(self) -> None:
        if self._shadow is not None:
            self._shadow.close()
        self._socket.close()
        self._context.term()
        remove_socket_folder(self._socket_folder)

    def __enter__(self) -> Self:
        """The replica itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the processes that still run, and removes the socket."""
        self.kill()
        self._close()

    @property
    def process(self) -> RankProcess:
        """Rank 0."""
        return self._ranks[0].process

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        """All ranks, in their order."""
        return tuple(rank.process for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks, in their order."""
        return tuple(process.pid for process in self.processes)

    def kill(self, *, wait: bool = True) -> None:
        """Ends all ranks at once. Does nothing to those that have ended.

        Args:
            wait: return when they are gone.
        """
        # Nobody is waited for before all are told: freeing the memory of a GPU takes seconds.
        if not self._ranks:
            return
        *others, last = self.processes
        for process in others:
            process.kill(wait=False)
        last.kill(wait=wait)
        if wait:
            for process in others:
                process.kill()

    def send(self, request: AnyRequest) -> None:
        """Sends a request to rank 0; it must have said Hello."""
        self._socket.send_multipart([f"{self.name}.0".encode(), protocol.encode(request)])

    async def arrival(self, timeout_s: float) -> None:
        """Waits until there is a report, up to `timeout_s`; `reports(0)` then has it."""
        if self._shadow is None:
            self._shadow = zmq.asyncio.Socket.from_socket(self._socket)
        await self._shadow.poll(int(timeout_s * 1000))

    def reports(self, timeout_s: float) -> Iterator[AnyReport]:
        """The reports that are there, after waiting up to `timeout_s` for the first.

        Of ranks other than 0 they are `Hello` alone. `Failed` is that of the rank that failed first, names it where
        there are several, and comes once all have ended or were ended; one `Bye`, with the memory of all, is the last.

        Raises:
            EngineError: a process ended without a word, or speaks another protocol version.
        """
        received = self._socket.poll(int(timeout_s * 1000))
        while received:
            identity, payload = self._socket.recv_multipart()
            yield from self._take(int(identity.rpartition(b".")[2]), protocol.decode_report(payload))
            received = self._socket.poll(0)
        yield from self._judge()

    def _take(self, number: int, report: AnyReport) -> Iterator[AnyReport]:
        """Notes what a rank says of its end; hands on everything else."""
        rank = self._ranks[number]
        match report:
            case protocol.Hello():
                if report.protocol != protocol.PROTOCOL_VERSION:
                    raise EngineError(
                        f"the worker speaks protocol {report.protocol}, this command {protocol.PROTOCOL_VERSION}",
                        remedy="one of them is from another installation; install tapdeck once",
                    )
                yield report
            case protocol.Failed():
                rank.failed = rank.failed or report
            case protocol.Bye():
                rank.has_left = True
                rank.peak_rss_bytes = report.peak_rss_bytes
            case _ if number == 0:
                yield report
            case _:
                pass

    def _judge(self) -> Iterator[AnyReport]:
        """The end of the replica, once it is certain what it was."""
        if self._said_bye:
            return
        # An exited process may have left messages in the socket: look once more before judging.
        if any(rank.is_silent for rank in self._ranks) and self._socket.poll(LAST_LOOK_MS):
            return
        silent = [rank for rank in self._ranks if rank.is_silent]
        failed = [rank for rank in self._ranks if rank.failed is not None]
        if not silent and not failed:
            yield from self._leave_politely()
            return
        # A rank that loses another one raises, or its library aborts it; nothing kills it for that.
        killed = [
            rank for rank in silent if (rank.process.poll() or 0) < 0 and rank.process.poll() != -SIGABRT
        ]
        now = time.monotonic()
        self._judged_at = self._judged_at or now + SETTLE_S
        has_ended = all(rank.has_left or rank in silent for rank in self._ranks)
        if not killed and not has_ended and now < self._judged_at:
            # What another one says meanwhile may be the cause, and this an effect.
            return
        for rank in self._ranks:
            if not rank.has_left:
                rank.process.kill(wait=False)
        if killed or not failed:
            raise self._death((killed or silent)[0])
        first = min(failed, key=lambda rank: rank.failed.at_s if rank.failed else 0.0)
        self._said_bye = True
        yield self._named(first)
        yield self._bye()

    def _leave_politely(self) -> Iterator[AnyReport]:
        """`Bye` once all have left; who does not follow rank 0 out of the door is shown it."""
        if self._ranks[0].has_left:
            now = time.monotonic()
            self._left_at = self._left_at or now
            if now >= self._left_at + EXIT_WAIT_S:
                self.kill(wait=False)
            elif not all(rank.has_left for rank in self._ranks):
                return
            self._said_bye = True
            yield self._bye()

    def _bye(self) -> protocol.Bye:
        return protocol.Bye(sum(rank.peak_rss_bytes for rank in self._ranks))

    def _named(self, rank: _Rank) -> AnyReport:
        failed = rank.failed
        if failed is None:
            raise BugError(f"rank {rank.number} has not failed")
        message = f"rank {rank.number}: {failed.message}" if len(self._ranks) > 1 else failed.message
        return msgspec.structs.replace(failed, message=message, remedy=failed.remedy or f"see {rank.log}")

    def _death(self, rank: _Rank) -> EngineError:
        which = f" of rank {rank.number}" if len(self._ranks) > 1 else ""
        code = rank.process.poll()
        return EngineError(
            f"the worker process{which} (pid {rank.process.pid}) ended without a word: {_describe(code or 0)}\n"
            f"its last lines:\n{_tail(rank.log)}",
            remedy=f"see {rank.log}; run the same command again to resume",
            code="worker_died",
        )

    @property
    def has_left(self) -> bool:
        """All ranks have sent their last message, or were ended after one did."""
        return self._said_bye

    def wait(self) -> int | None:
        """Waits for the processes after their last message; rank 0's exit code, or None if one hangs."""
        end = time.monotonic() + EXIT_WAIT_S
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in self.processes]
        return None if None in codes else codes[0]

    def log_tail(self) -> str:
        """The last lines of rank 0's log."""
        return _tail(self.log)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])


def _remove_what_was_left(spec_file: Path) -> None:
    """The socket folder of a start before, whose supervisor was killed and could not remove it."""
    try:
        before = msgspec.json.decode(spec_file.read_bytes(), type=protocol.EngineSpec)
    except (OSError, msgspec.DecodeError):
        return
    remove_socket_folder(Path(before.endpoint.removeprefix("ipc://")).parent)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    import signal

    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
