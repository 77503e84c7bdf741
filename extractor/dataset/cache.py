"""The cache of prepared data sets: what an entry's key covers, and how an entry appears.

Invariants: the key covers the contents of all inputs, the version of this code and every option that
changes the result, and nothing else (no folder, no time of modification, no GPU); an entry appears under
its name by one rename, whole; of two processes that want the same entry one builds and the other waits, or,
where the file system has no locks, both build and the first to finish wins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from extractor.dataset.masks import MaskOptions
from extractor.dataset.prepared import PreparedDataset, SourceFile
from extractor.dataset.readers import open_data_file
from extractor.dataset.writer import sync_folder
from extractor.errors import AccessError, DiskSpaceError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PREPARE_VERSION = 1
"""Raised by every change of this package that changes ids, masks, ids of samples or rejects."""

_BLOCK_BYTES = 1 << 24
_TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "config.json",
)


class KeyParts(msgspec.Struct, frozen=True):
    """All that a prepared data set depends on.

    Attributes:
        version: of this package's code.
        libraries: package -> version, of what renders and tokenizes.
        files: the data.
        tokenizer_hash: see `hash_tokenizer`.
        template_hash: of the template's text.
        template_date: what the template takes for today.
        template_args, trust_remote_code, mask, max_len, min_supervised, limit, format: the options.
    """

    version: int
    files: tuple[SourceFile, ...]
    libraries: dict[str, str]
    tokenizer_hash: str
    template_hash: str
    template_args: dict[str, Any]  # Any: TOML values
    template_date: str
    trust_remote_code: bool
    mask: MaskOptions
    max_len: int
    min_supervised: int
    limit: int | None
    format: Literal["auto", "messages", "sharegpt"]

    def key(self) -> str:
        """xxh3-128 of the parts, as hex."""
        return hash_text(msgspec.json.encode(self, order="sorted").decode())


def hash_text(text: str) -> str:
    """xxh3-128 of a text in UTF-8, as hex."""
    return str(xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")))


def hash_data_file(path: Path, on_bytes: Callable[[int], None]) -> SourceFile:
    """Name, size and checksum of a data file; calls `on_bytes` with the size of each block read."""
    digest = xxhash.xxh3_128()
    size = 0
    with open_data_file(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            on_bytes(len(block))
    return SourceFile(path.name, size, digest.hexdigest())


def hash_tokenizer(folder: Path, *, trust_remote_code: bool) -> str:
    """xxh3-128 over names and bytes of the files that decide how text becomes tokens.

    Args:
        folder: the model's folder.
        trust_remote_code: code in the folder may run, and may import any other there: all of it counts.
    """
    paths = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    if trust_remote_code:
        paths |= {path for path in folder.rglob("*.py") if path.is_file()}
    digest = xxhash.xxh3_128()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return str(digest.hexdigest())


def hash_files(files: Sequence[SourceFile]) -> str:
    """xxh3-128 over names and contents of all data files, in order."""
    return hash_text("\0".join(f"{file.name}\0{file.checksum}" for file in files))


def open_or_build(cache_dir: Path, key: str, build: Callable[[Path], None]) -> PreparedDataset:
    """The entry of a key; builds it if it is missing or damaged.

    Args:
        cache_dir: folder of all entries; made if missing.
        key: name of the entry.
        build: fills an empty folder, `meta.json` last.

    Raises:
        DiskSpaceError: the file system is full.
        AccessError: the folder may not be written.
        StoreError: another fault of the file system.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{key}.lock") as locked:
            if locked:
                for stale in cache_dir.glob(f".{key}.*.part"):
                    shutil.rmtree(stale, ignore_errors=True)
            found = _open_whole(cache_dir / key)
            return found if found is not None else _build(cache_dir, key, build)
    except OSError as error:
        where = error.filename or cache_dir
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"{where}: {error.strerror}", remedy="free space, or use another cache folder"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessError(
                f"{where}: {error.strerror}", remedy="make the cache folder writable"
            ) from error
        raise StoreError(
            f"{where}: {error.strerror}", remedy="check the file system, then try again"
        ) from error


def _build(cache_dir: Path, key: str, build: Callable[[Path], None]) -> PreparedDataset:
    part = cache_dir / f".{key}.{uuid.uuid4().hex}.part"
    part.mkdir()
    try:
        build(part)
        return _publish(part, cache_dir / key)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _publish(part: Path, entry: Path) -> PreparedDataset:
    """Gives a finished folder its name; an entry that another process finished first is as good."""
    while True:
        try:
            part.rename(entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            found = _open_whole(entry)
            if found is not None:
                return found
            continue
        sync_folder(entry.parent)
        return PreparedDataset.open(entry)


def _open_whole(entry: Path) -> PreparedDataset | None:
    """An entry that passes all checks; a damaged one is removed."""
    if not entry.exists():
        return None
    try:
        found = PreparedDataset.open(entry, verify=True)
    except StoreError:
        found = None
    if found is not None and found.meta.key == entry.name:
        return found
    aside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.part")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return None
    shutil.rmtree(aside, ignore_errors=True)
    return None


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds a file lock; False where the file system has none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
