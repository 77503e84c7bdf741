"""Processes known by pid, start time and boot, never by pid alone: who holds an output folder, who supervises.

Owns no file. `Machine` is the seam for tests: what the operating system says about this host, its
processes and the time. Invariant: a pid that was given to another process is not taken for the old one.
"""

from __future__ import annotations

import os
import pwd
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of one boot of one host.

    Attributes:
        pid: its process id.
        start_ticks: start time in clock ticks since boot (field 22 of /proc/PID/stat; see proc(5)).
    """

    pid: int
    start_ticks: int


class Machine(Protocol):
    """What a lease needs to know of the machine it is on."""

    def host(self) -> str:
        """Name of this host."""

    def boot_id(self) -> str:
        """Differs after every boot."""

    def start_ticks(self, pid: int) -> int | None:
        """Start of a process in clock ticks since boot; None if there is no such process."""

    def now_utc(self) -> float:
        """Seconds since the epoch: the only clock that two hosts share."""

    def wait(self, seconds: float) -> None:
        """Blocks for a while."""


class RealMachine:
    """This machine, through /proc."""

    def host(self) -> str:
        """Name of this host."""
        return socket.gethostname()

    def boot_id(self) -> str:
        """The kernel's boot id."""
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def start_ticks(self, pid: int) -> int | None:
        """Start of a process that has not ended; a zombie has ended."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The command name may hold blanks and brackets; what follows its last bracket is regular.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[19])

    def now_utc(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def wait(self, seconds: float) -> None:
        """Blocks for a while."""
        threading.Event().wait(seconds)


def user_name(uid: int) -> str:
    """Name of a user; containers run users that nobody has named."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def own_identity(machine: Machine) -> ProcessIdentity:
    """This process."""
    return ProcessIdentity(os.getpid(), machine.start_ticks(os.getpid()) or 0)


def is_alive(machine: Machine, process: ProcessIdentity) -> bool:
    """Whether this very process runs, on this boot of this host."""
    return machine.start_ticks(process.pid) == process.start_ticks
