"""The few file calls that make a shard, behind a protocol so that tests can let any of them fail.

Owns no state. `RealFileSystem` adds nothing to the system calls but two decisions: space is reserved only
where the file system does that without writing zeros, and a file system that cannot sync a folder is
taken as it is. Every other error is raised as the `OSError` it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class FileSystem(Protocol):
    """What the writer needs of a file system. Every call blocks and may raise OSError."""

    def exists(self, path: Path) -> bool:
        """Whether there is anything at `path`."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder and its parents; it may be there already."""

    def create(self, path: Path) -> int:
        """Opens a new file for reading and writing; fails when the name is taken."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserves space for a file of `num_bytes`, where the file system can."""

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes at `offset`; returns how many bytes were taken, which may be fewer."""

    def read_at(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Reads at most `num_bytes` at `offset`."""

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Sets the size of a file."""

    def sync(self, fd: int) -> None:
        """Returns when the contents of a file are on the disk."""

    def close(self, fd: int) -> None:
        """Closes a file."""

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk."""

    def rename(self, source: Path, target: Path) -> None:
        """Renames within one file system, atomically."""

    def remove_tree(self, path: Path) -> None:
        """Removes a folder and what is in it; none there is no error."""


class RealFileSystem:
    """The operating system's file system."""

    def exists(self, path: Path) -> bool:
        """Whether there is anything at `path`, also a dangling link."""
        return os.path.lexists(path)

    def make_folder(self, path: Path) -> None:
        """Makes a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Opens a new file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserves space with fallocate(2); without effect where that is not supported."""
        if num_bytes > 0:
            _fallocate(fd, num_bytes)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """pwrite(2), which lets other threads run."""
        return os.pwrite(fd, data, offset)

    def read_at(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """pread(2)."""
        return os.pread(fd, num_bytes, offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """ftruncate(2)."""
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """fsync(2)."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes a file; on network file systems this too can report a failed write."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """fsync(2) of a folder; file systems that refuse it (some FUSE and SMB mounts) are let be."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Renames within one file system, atomically."""
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Removes a folder and what is in it."""
        if os.path.lexists(path):
            shutil.rmtree(path)


# os.posix_fallocate is not used: where the file system cannot reserve space, the C library imitates it by
# writing into every block, which doubles the writes on network file systems.
_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def _fallocate(fd: int, num_bytes: int) -> None:
    call = getattr(_libc, "fallocate64", None)
    if call is None:
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _UNSUPPORTED:
            return
        raise OSError(code, os.strerror(code))


def write_whole(files: FileSystem, path: Path, data: bytes) -> None:
    """Writes a new small file and syncs it. Blocking.

    Raises:
        OSError: any step failed; the file may then be there in part.
    """
    fd = files.create(path)
    try:
        write_all(files, fd, memoryview(data), 0)
        files.sync(fd)
    finally:
        files.close(fd)


def write_all(files: FileSystem, fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however often the system takes only a part of it.

    Raises:
        OSError: a write failed, or nothing was taken.
    """
    while data.nbytes:
        taken = files.write_at(fd, data, offset)
        if taken <= 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        data = data[taken:]
        offset += taken
