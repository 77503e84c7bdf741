"""Where a supervisor is: its lock, its sockets and `supervisor.json` in the run folder.

Invariants: one supervisor per run folder, by a lock held for life and let go by the kernel when the process
ends, however it ends; whatever a dead one left behind is removed by the holder of the lock and by nobody else;
on the way out a socket is removed only if it is still the one that was made here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from extractor import release
from extractor.errors import AccessError, LeaseError
from extractor.processes import ProcessIdentity, RealMachine, is_alive, own_identity
from extractor.protocol import api

if TYPE_CHECKING:
    from types import TracebackType

    from extractor.folders import RunFolder

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 107; a path that nearly reaches it is replaced by a short one."""
SOCKET_PREFIX = "tapdeck-"
LOCK_WAIT_S = 2.0
"""A supervisor that is just leaving, or one that lost the race, needs a moment."""


class Place:
    """The place of one supervisor. Use as a context manager around its life.

    Attributes:
        socket, readonly_socket: where to listen.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Takes the lock. Blocking, up to `LOCK_WAIT_S`.

        Raises:
            LeaseError: another supervisor has it; says which.
            AccessError: the run folder cannot be written.
        """
        self._folder = folder
        self._fd = _lock(folder)
        self._owned: dict[Path, tuple[int, int]] = {}
        self._short: Path | None = None
        base = folder.path
        if len(os.fsencode(base / "supervisor-readonly.sock")) > MAX_SOCKET_PATH_BYTES:
            self._short = base = make_socket_folder()
        self.socket = base / "supervisor.sock"
        self.readonly_socket = base / "supervisor-readonly.sock"
        self._clear_what_was_left()

    def __enter__(self) -> Self:
        """The place itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes sockets and record, if they are ours, then lets the lock go."""
        for path, identity in self._owned.items():
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == identity:
                    path.unlink()
        if self._short is not None:
            remove_socket_folder(self._short)
        os.close(self._fd)

    def announce(self) -> None:
        """Writes `supervisor.json`; call when both sockets are listening. Blocking, short."""
        machine = RealMachine()
        own = own_identity(machine)
        record = api.SupervisorRecord(
            pid=own.pid,
            start_ticks=own.start_ticks,
            boot_id=machine.boot_id(),
            host=machine.host(),
            socket=str(self.socket),
            readonly_socket=str(self.readonly_socket),
            started_utc=time.time(),
            tapdeck_version=release.version(),
            api_version=api.API_VERSION,
        )
        part = self._folder.supervisor.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        part.replace(self._folder.supervisor)
        for path in (self.socket, self.readonly_socket, self._folder.supervisor):
            self._owned[path] = _identity(path)

    def _clear_what_was_left(self) -> None:
        # A supervisor that was killed may have had its sockets in a short folder of their own.
        left = _record(self._folder)
        if left is not None and _is_alive(left):
            # It runs, and somebody has removed the lock file under it.
            os.close(self._fd)
            raise _taken(self._folder)
        if left is not None:
            remove_socket_folder(Path(left.socket).parent)
        for path in (self.socket, self.readonly_socket, self._folder.supervisor):
            path.unlink(missing_ok=True)


def _lock(folder: RunFolder) -> int:
    try:
        fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AccessError(
            f"{folder.lock}: cannot be opened: {error.strerror}",
            remedy="give yourself access to the run folder",
        ) from error
    end = time.monotonic() + LOCK_WAIT_S
    pause = threading.Event()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(fd)
                raise _taken(folder) from None
            pause.wait(0.05)
        else:
            return fd


def make_socket_folder() -> Path:
    """A folder with a short path for sockets, for this user alone."""
    return Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX))


def remove_socket_folder(folder: Path) -> None:
    """Removes what `make_socket_folder` made, now or in a process that was killed; leaves everything else."""
    is_ours = folder.name.startswith(SOCKET_PREFIX) and folder.parent == Path(tempfile.gettempdir())
    if is_ours and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def _record(folder: RunFolder) -> api.SupervisorRecord | None:
    try:
        return msgspec.json.decode(folder.supervisor.read_bytes(), type=api.SupervisorRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _is_alive(record: api.SupervisorRecord) -> bool:
    machine = RealMachine()
    is_here = (record.host, record.boot_id) == (machine.host(), machine.boot_id())
    return (
        is_here
        and record.pid != os.getpid()
        and is_alive(machine, ProcessIdentity(record.pid, record.start_ticks))
    )


def _taken(folder: RunFolder) -> LeaseError:
    record = _record(folder)
    where = "it is just starting or ending"
    if record is not None:
        where = f"pid {record.pid} on {record.host}, socket {record.socket}"
    return LeaseError(
        f"run {folder.name} is already running: {where}",
        remedy=f"tapdeck attach {folder.name}",
        code="already_running",
    )


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino
