"""A file system that fails where it is told to: full disks, I/O errors, and a process that stops.

For tests, of ours and of those who build on the store; nothing in the product uses it. It wraps another
file system, counts its calls and lets a rule look at each before it happens. Invariant: once a rule has
raised `Killed`, every further call raises it too, as nothing happens after a process has died.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from extractor.store.filesystem import FileSystem, RealFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Killed(BaseException):
    """Stands for the end of the process: no `except OSError` may take it for an error of the disk."""


class Call(msgspec.Struct, frozen=True):
    """A call that is about to happen.

    Attributes:
        number: counted from 0 over the life of the file system.
        name: name of the method.
        path: what it is about; of a descriptor, the path it was created under.
        num_bytes: bytes to write; 0 for other calls.
    """

    number: int
    name: str
    path: str
    num_bytes: int = 0


class FaultyFileSystem:
    """Wraps a file system; see the module. Safe to use from several threads."""

    def __init__(self, rule: Callable[[Call], int | None], inner: FileSystem | None = None) -> None:
        """Wraps `inner` (None: the real one) and asks `rule` before every call."""
        self._rule = rule
        self._inner = inner or RealFileSystem()
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._is_dead = False
        self.calls: list[Call] = []

    def exists(self, path: Path) -> bool:
        """As the protocol says."""
        self._ask("exists", str(path))
        return self._inner.exists(path)

    def make_folder(self, path: Path) -> None:
        """As the protocol says."""
        self._ask("make_folder", str(path))
        self._inner.make_folder(path)

    def create(self, path: Path) -> int:
        """As the protocol says."""
        self._ask("create", str(path))
        fd = self._inner.create(path)
        self._paths[fd] = str(path)
        return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        """As the protocol says."""
        self._ask("allocate", self._paths[fd], num_bytes)
        self._inner.allocate(fd, num_bytes)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """As the protocol says; takes no more than the rule allows."""
        allowed = self._ask("write_at", self._paths[fd], data.nbytes)
        return self._inner.write_at(fd, data if allowed is None else data[:allowed], offset)

    def read_at(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """As the protocol says."""
        self._ask("read_at", self._paths[fd])
        return self._inner.read_at(fd, num_bytes, offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """As the protocol says."""
        self._ask("truncate", self._paths[fd])
        self._inner.truncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """As the protocol says."""
        self._ask("sync", self._paths[fd])
        self._inner.sync(fd)

    def close(self, fd: int) -> None:
        """Closes the file in any case, then asks: the kernel does so too, and tests must not leak."""
        path = self._paths.pop(fd)
        self._inner.close(fd)
        self._ask("close", path)

    def close_all(self) -> None:
        """Closes what a process that was killed left open."""
        while self._paths:
            self._inner.close(self._paths.popitem()[0])

    def sync_folder(self, path: Path) -> None:
        """As the protocol says."""
        self._ask("sync_folder", str(path))
        self._inner.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """As the protocol says."""
        self._ask("rename", str(source))
        self._inner.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        """As the protocol says."""
        self._ask("remove_tree", str(path))
        self._inner.remove_tree(path)

    def _ask(self, name: str, path: str, num_bytes: int = 0) -> int | None:
        with self._lock:
            if self._is_dead:
                raise Killed
            call = Call(len(self.calls), name, path, num_bytes)
            self.calls.append(call)
            try:
                return self._rule(call)
            except Killed:
                self._is_dead = True
                raise


def no_fault(_call: Call) -> None:
    """Lets every call happen."""


def kill_at(number: int) -> Callable[[Call], None]:
    """The process ends just before its call `number`."""

    def rule(call: Call) -> None:
        if call.number >= number:
            raise Killed

    return rule


def full_after(capacity_bytes: int) -> Callable[[Call], int | None]:
    """The disk takes `capacity_bytes` of writes, the last of them in part, then there is no space left."""
    left = capacity_bytes

    def rule(call: Call) -> int | None:
        nonlocal left
        if call.name != "write_at":
            return None
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)
        taken = min(left, call.num_bytes)
        left -= taken
        return taken

    return rule


def fail_on(
    name: str, contains: str = "", *, code: int = errno.EIO, times: int | None = None
) -> Callable[[Call], None]:
    """A method fails with an errno for paths that contain a text, always or the first `times` times."""
    left = times

    def rule(call: Call) -> None:
        nonlocal left
        if call.name != name or contains not in call.path or left == 0:
            return
        left = None if left is None else left - 1
        raise OSError(code, os.strerror(code), call.path)

    return rule
