"""The lease of an output folder: one run writes to it at a time, and a second one learns who does.

Owns `lease.json` (who, and a heartbeat) and `lease.lock`. On the host of its holder a lease is an flock,
held for life on a descriptor that worker processes inherit, so it lasts until the last of them is gone.
Where locks are node-local or not supported, the heartbeat in `lease.json` decides.

Invariants: a lease is taken over only when its holder cannot be alive (no such process, another boot) or
has not been heard of for `stale_seconds`; `release` and `heartbeat` never touch the lease of another;
the lock file is never removed, since a waiting process may have it open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from typing import TYPE_CHECKING

import msgspec

from extractor.errors import LeaseBusyError, LeaseError
from extractor.processes import Machine, ProcessIdentity, RealMachine, is_alive, own_identity
from extractor.store import atomic, names

if TYPE_CHECKING:
    from pathlib import Path

STALE_SECONDS = 120.0
"""A holder on another host that was silent for so long is taken for dead."""
POLL_SECONDS = 0.5
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`lease.json`. Unknown fields of later versions are ignored: what matters is who holds it.

    Attributes:
        token: differs for every lease ever taken.
        run: name of the run.
        host: name of the host.
        boot_id: of the host.
        holder: the process that took it.
        workers: processes that may write after the holder is gone.
        heartbeat_utc: when the holder was last known to live, in seconds since the epoch.
    """

    token: str
    run: str
    host: str
    boot_id: str
    holder: ProcessIdentity
    workers: tuple[ProcessIdentity, ...] = ()
    heartbeat_utc: float


class Lease:
    """A lease that this process holds."""

    def __init__(self, output: Path, record: LeaseRecord, lock_fd: int | None, machine: Machine) -> None:
        """Made by `acquire`."""
        self._output = output
        self._record = record
        self._lock_fd = lock_fd
        self._machine = machine

    @property
    def lock_fd(self) -> int | None:
        """Descriptor to hand to worker processes (`pass_fds`); None where locks are not supported."""
        return self._lock_fd

    @property
    def record(self) -> LeaseRecord:
        """What was last written."""
        return self._record

    def heartbeat(self) -> None:
        """Says that the holder lives; due several times per `STALE_SECONDS`. Blocking.

        Raises:
            LeaseError: the lease was taken over by another run.
            StoreError: it cannot be written.
        """
        self._write(msgspec.structs.replace(self._record, heartbeat_utc=self._machine.now_utc()))

    def add_worker(self, pid: int) -> None:
        """Names a process that may outlive the holder; needed where locks are not supported. Blocking.

        Raises:
            LeaseError: the lease was taken over by another run.
            StoreError: it cannot be written.
        """
        start = self._machine.start_ticks(pid)
        if start is not None:
            alive = tuple(worker for worker in self._record.workers if is_alive(self._machine, worker))
            workers = (*alive, ProcessIdentity(pid, start))
            self._write(msgspec.structs.replace(self._record, workers=workers))

    def release(self, *, remove_if_empty: bool = False) -> None:
        """Gives the folder up, if it is still ours. Blocking; may be repeated.

        Args:
            remove_if_empty: also remove the folder when it holds nothing but the lock file: a run that was
                refused after it took the lease leaves no trace.

        Raises:
            StoreError: `lease.json` cannot be read or removed.
        """
        path = self._output / names.LEASE
        try:
            if self._is_ours():
                path.unlink(missing_ok=True)
                if remove_if_empty and [entry.name for entry in self._output.iterdir()] == [names.LEASE_LOCK]:
                    # While the lock is held: whoever waits for it finds that the file is no longer there.
                    (self._output / names.LEASE_LOCK).unlink()
                    self._output.rmdir()
        except OSError as error:
            raise atomic.explain(error, path, "removed") from error
        finally:
            # Closing is enough, and unlocking would be wrong: it would also take the lock of a worker that
            # inherited the descriptor and still writes.
            fd, self._lock_fd = self._lock_fd, None
            if fd is not None:
                os.close(fd)

    def _is_ours(self) -> bool:
        there = read_lease(self._output)
        return there is not None and there.token == self._record.token

    def _write(self, record: LeaseRecord) -> None:
        if not self._is_ours() and read_lease(self._output) is None:
            raise LeaseError(
                f"{self._output / names.LEASE} is gone: the output folder was moved, emptied or removed",
                remedy="look where the shards are now, put them back, then start the run again",
                code="lease_lost",
            )
        if not self._is_ours():
            raise LeaseError(
                f"{self._output}: the lease of run {self._record.run} was taken over by another run",
                remedy="stop this run; its output folder is written by somebody else",
                code="lease_lost",
            )
        _write_record(self._output, record)
        self._record = record


def acquire(
    output: Path,
    run: str,
    *,
    machine: Machine | None = None,
    wait_seconds: float = 0.0,
    stale_seconds: float = STALE_SECONDS,
) -> Lease:
    """Takes the lease of an output folder, which is made if need be. Blocking for `wait_seconds` at most.

    Args:
        output: the output folder.
        run: name of the run, for others to read.
        machine: the operating system.
        wait_seconds: how long to wait for workers of a holder that is gone.
        stale_seconds: silence after which a holder on another host is taken for dead.

    Raises:
        LeaseError: another run holds it; the message names host, pid and run.
        LeaseBusyError: its holder is gone, and a worker still finishes a shard.
        AccessError: the folder may not be made or written.
        StoreError: the file system refuses for another reason.
    """
    machine = machine or RealMachine()
    fd, lock_fd = _take_lock(output, machine, wait_seconds, stale_seconds)
    try:
        record = LeaseRecord(
            token=uuid.uuid4().hex,
            run=run,
            host=machine.host(),
            boot_id=machine.boot_id(),
            holder=own_identity(machine),
            heartbeat_utc=machine.now_utc(),
        )
        _write_record(output, record)
        _check_won(output, record)
    except BaseException:
        os.close(fd)
        raise
    if lock_fd is None:
        os.close(fd)
    else:
        os.set_inheritable(lock_fd, True)
    return Lease(output, record, lock_fd, machine)


def _take_lock(
    output: Path, machine: Machine, wait_seconds: float, stale_seconds: float
) -> tuple[int, int | None]:
    """The open lock file, and again as a descriptor that holds the lock (None: no locks here)."""
    while True:
        fd = _open_lock(output)
        try:
            lock_fd = _wait_for_lock(output, fd, machine, wait_seconds, stale_seconds)
            if _is_in_place(output, fd):
                return fd, lock_fd
        except OSError as error:
            os.close(fd)
            raise atomic.explain(error, output / names.LEASE_LOCK, "locked") from error
        except BaseException:
            os.close(fd)
            raise
        # The holder before us removed the folder, and with it the file that we locked.
        os.close(fd)


def _open_lock(output: Path) -> int:
    try:
        output.mkdir(parents=True, exist_ok=True)
        return os.open(output / names.LEASE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise atomic.explain(error, output, "written") from error


def _is_in_place(output: Path, fd: int) -> bool:
    """Whether the open lock file is the one that the next run would open."""
    try:
        return os.path.samestat(os.fstat(fd), (output / names.LEASE_LOCK).stat())
    except FileNotFoundError:
        return False


def read_lease(output: Path) -> LeaseRecord | None:
    """Who holds the folder; None if nobody does, or if the file is no lease. Blocking.

    Raises:
        StoreError: the file is there and cannot be read.
        AccessError: it may not be read.
    """
    path = output / names.LEASE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LeaseRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        # A lease that says nothing protects nothing; it carries no data, so it may be replaced.
        return None
    except OSError as error:
        raise atomic.explain(error, path, "read") from error


def _wait_for_lock(
    output: Path, fd: int, machine: Machine, wait_seconds: float, stale_seconds: float
) -> int | None:
    """The locked descriptor, or None where locks are not supported."""
    waited = 0.0
    while True:
        has_lock = _try_lock(fd)
        refusal = _refusal(output, machine, has_lock, stale_seconds)
        if refusal is None:
            return fd if has_lock else None
        if not isinstance(refusal, LeaseBusyError) or waited >= wait_seconds:
            raise refusal
        if has_lock:
            fcntl.flock(fd, fcntl.LOCK_UN)
        machine.wait(POLL_SECONDS)
        waited += POLL_SECONDS


def _try_lock(fd: int) -> bool | None:
    """True: we have the lock. False: another has it. None: there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _refusal(
    output: Path, machine: Machine, has_lock: bool | None, stale_seconds: float
) -> LeaseError | None:
    """Why the folder may not be taken now; None if it may."""
    there = read_lease(output)
    if there is None:
        return (
            _busy(output, "is locked by a run that is just starting or ending") if has_lock is False else None
        )
    age = machine.now_utc() - there.heartbeat_utc
    if there.host != machine.host():
        is_fresh = has_lock is False or age < stale_seconds
        return _held(output, there, f"run is on node {there.host}", age) if is_fresh else None
    is_same_boot = there.boot_id == machine.boot_id()
    if is_same_boot and is_alive(machine, there.holder):
        return _held(output, there, "its process is alive", age)
    if has_lock is False or (is_same_boot and any(is_alive(machine, worker) for worker in there.workers)):
        who = f"run {there.run} (pid {there.holder.pid} on {there.host})"
        return _busy(output, f"is still written: {who} is gone, and its worker finishes a shard")
    return None


def _busy(output: Path, why: str) -> LeaseBusyError:
    return LeaseBusyError(f"{output} {why}", remedy="try again in a minute")


def _held(output: Path, there: LeaseRecord, why: str, age: float) -> LeaseError:
    return LeaseError(
        f"{output} belongs to run {there.run}, pid {there.holder.pid} on {there.host} "
        f"(last heard of {max(0.0, age):.0f} s ago): {why}",
        remedy=f"attach to that run, stop it on {there.host}, or choose another output.dir",
        code="lease_held",
    )


def _write_record(output: Path, record: LeaseRecord) -> None:
    path = output / names.LEASE
    try:
        atomic.replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise atomic.explain(error, path, "written") from error


def _check_won(output: Path, record: LeaseRecord) -> None:
    """Two runs may have found a stale lease at the same time: the one that wrote last has it."""
    there = read_lease(output)
    if there is not None and there.token != record.token:
        raise _held(output, there, "it was faster", 0.0)
