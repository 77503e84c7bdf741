"""One replica as the supervisor sees it: its process, its socket, and its messages in order.

Owns the socket folder and the process, and ends both. It decides nothing about shards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import zmq
import zmq.asyncio

from extractor import protocol
from extractor.errors import EngineError
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
"""How long a rank may take to exit after its last message."""


class Replica:
    """A running replica. Use as a context manager: leaving it leaves no process behind."""

    def __init__(
        self,
        make_spec: Callable[[str], EngineSpec],
        *,
        launcher: Launcher,
        run_folder: Path,
        environment: Mapping[str, str],
        keep_fds: Sequence[int] = (),
    ) -> None:
        """Starts the process.

        Args:
            make_spec: makes the spec from the endpoint that the rank shall connect to.
            launcher: starts the process.
            run_folder: for the spec and the log.
            environment: of the rank.
            keep_fds: descriptors the rank inherits.
        """
        # Socket paths are limited to 107 bytes, run folders are not.
        self._socket_folder = make_socket_folder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._said_bye = False
        self._shadow: zmq.asyncio.Socket | None = None
        try:
            self.process: RankProcess = self._start(make_spec, launcher, run_folder, environment, keep_fds)
        except BaseException:
            self._close()
            raise

    def _start(
        self,
        make_spec: Callable[[str], EngineSpec],
        launcher: Launcher,
        run_folder: Path,
        environment: Mapping[str, str],
        keep_fds: Sequence[int],
    ) -> RankProcess:
        endpoint = f"ipc://{self._socket_folder}/ranks"
        self._socket.bind(endpoint)
        spec = make_spec(endpoint)
        self.name = spec.replica
        self._identity = f"{spec.replica}.0".encode()
        # One log for all starts of a replica: what follows the dash is the word of one start.
        stem = f"replica-{spec.replica.partition('-')[0]}"
        self.log = run_folder / f"{stem}.log"
        spec_file = run_folder / f"{stem}.json"
        _remove_what_was_left(spec_file)
        spec_file.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=2))
        return launcher.start(spec_file, environment=environment, log=self.log, keep_fds=keep_fds)

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
        """Ends the process if it still runs, and removes the socket."""
        self.process.kill()
        self._close()

    def send(self, request: AnyRequest) -> None:
        """Sends a request; the rank must have said Hello."""
        self._socket.send_multipart([self._identity, protocol.encode(request)])

    async def arrival(self, timeout_s: float) -> None:
        """Waits until there is a report, up to `timeout_s`; `reports(0)` then has it."""
        if self._shadow is None:
            self._shadow = zmq.asyncio.Socket.from_socket(self._socket)
        await self._shadow.poll(int(timeout_s * 1000))

    def reports(self, timeout_s: float) -> Iterator[AnyReport]:
        """The reports that are there, after waiting up to `timeout_s` for the first.

        Raises:
            EngineError: the process ended without a word, or speaks another protocol version.
        """
        received = self._socket.poll(int(timeout_s * 1000))
        while received:
            _, payload = self._socket.recv_multipart()
            report = protocol.decode_report(payload)
            if isinstance(report, protocol.Hello) and report.protocol != protocol.PROTOCOL_VERSION:
                raise EngineError(
                    f"the worker speaks protocol {report.protocol}, this command {protocol.PROTOCOL_VERSION}",
                    remedy="one of them is from another installation; install tapdeck once",
                )
            self._said_bye |= isinstance(report, protocol.Bye)
            yield report
            received = self._socket.poll(0)
        # An exited process may have left messages in the socket: look once more before judging.
        code = self.process.poll()
        if code is not None and not self._said_bye and not self._socket.poll(LAST_LOOK_MS):
            raise EngineError(
                f"the worker process (pid {self.process.pid}) ended without a word: {_describe(code)}\n"
                f"its last lines:\n{self.log_tail()}",
                remedy=f"see {self.log}; run the same command again to resume",
                code="worker_died",
            )

    @property
    def has_left(self) -> bool:
        """The rank has sent its last message."""
        return self._said_bye

    def wait(self) -> int | None:
        """Waits for the process after its last message; its exit code, or None if it hangs."""
        return self.process.wait(EXIT_WAIT_S)

    def log_tail(self) -> str:
        """The last lines of the rank's log."""
        with self.log.open("rb") as file:
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
