"""Safetensors files as tapdeck writes them, byte for byte, and the plain reading of any such file.

A file is 8 bytes of header length, the header padded with blanks, then the data, which always starts at
byte 4096 (so it can be mapped by page and the header can be rewritten in place). A tap file holds one
tensor `states` [T, H]; rows are appended in order straight from the caller's memory, and the xxh3-128 of
the whole file grows with them, so nothing is read back. Nothing in a file depends on time or host.

Reading here never maps a file: a file that is cut while it is read gives an error, not SIGBUS.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from extractor.errors import BugError, StoreError
from extractor.store import names
from extractor.store.filesystem import FileSystem, write_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BufferedReader
    from pathlib import Path

    import numpy.typing as npt

DATA_OFFSET = 4096
"""Byte at which the data of every file starts: the header takes what is before it."""
CHUNK_BYTES = 4 << 20
"""Bytes hashed and written in one go: small enough to stay in the cache in between."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors README, "Format")."""

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per value of the types in which states are stored."""
_CODES: Mapping[str, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}
_NUMPY_TYPES: Mapping[str, str] = {"I64": "<i8", "I32": "<i4", "U8": "|u1", "F32": "<f4", "F16": "<f2"}
_BYTES = {"I64": 8, "F64": 8, "U64": 8, "I32": 4, "U32": 4, "F32": 4, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a file.

    Attributes:
        dtype: code of the format: `BF16`, `I64`, ...
        shape: its shape.
        start: first byte, counted from the start of the file.
        stop: byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first 4096 bytes of a file.

    Args:
        tensors: (name, dtype such as `int64`, shape) in the order of their data.

    Raises:
        BugError: the header would not fit.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        num_bytes = _BYTES[_CODES[dtype]]
        for extent in shape:
            num_bytes *= extent
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = msgspec.json.encode(header)
    room = DATA_OFFSET - 8
    if len(text) > room:
        raise BugError(f"a safetensors header of {len(text)} bytes does not fit in {room}")
    return struct.pack("<Q", room) + text.ljust(room)


def arrays_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """A whole file of small arrays, in the given order (wide types first, so that all are aligned)."""
    head = header_bytes([(name, array.dtype.name, array.shape) for name, array in arrays.items()])
    return head + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())


class StatesWriter:
    """Writes one tap file: `states` [T, H]. Used by one thread at a time.

    Rows come in order. When fewer come than planned (samples were quarantined), `finish` rewrites the
    header in place and hashes the file by reading it back; otherwise nothing is read.
    """

    def __init__(
        self, files: FileSystem, path: Path, *, num_tokens: int, hidden_size: int, dtype: str
    ) -> None:
        """Creates the file, reserves its space and writes the header. Blocking.

        Args:
            files: the file system.
            path: a name that is not taken.
            num_tokens: T as planned.
            hidden_size: H.
            dtype: a key of `ITEM_BYTES`.

        Raises:
            OSError: any of it failed; the file is closed.
        """
        self._files = files
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._planned_tokens = num_tokens
        self._row_bytes = hidden_size * ITEM_BYTES[dtype]
        self._size = DATA_OFFSET
        self._digest = xxhash.xxh3_128()
        self._fd = files.create(path)
        try:
            files.allocate(self._fd, DATA_OFFSET + num_tokens * self._row_bytes)
            head = header_bytes([self._tensor(num_tokens)])
            self._digest.update(head)
            write_all(files, self._fd, memoryview(head), 0)
        except BaseException:
            self.close()
            raise

    @property
    def num_tokens(self) -> int:
        """Rows written so far."""
        return (self._size - DATA_OFFSET) // self._row_bytes

    def append(self, rows: memoryview) -> None:
        """Writes the bytes of further rows, [t, H] contiguous, as uint8. Blocking; copies nothing.

        Raises:
            OSError: a write failed.
            BugError: these are no whole rows, or more than planned.
        """
        whole, rest = divmod(rows.nbytes, self._row_bytes)
        if rest or self.num_tokens + whole > self._planned_tokens:
            raise BugError(
                f"{rows.nbytes} bytes after row {self.num_tokens} of {self._planned_tokens}: "
                f"expected whole rows of {self._row_bytes} bytes within the plan"
            )
        for begin in range(0, rows.nbytes, CHUNK_BYTES):
            piece = rows[begin : begin + CHUNK_BYTES]
            self._digest.update(piece)
            write_all(self._files, self._fd, piece, self._size)
            self._size += piece.nbytes

    def finish(self) -> tuple[int, str]:
        """Completes, syncs and closes the file. Blocking.

        Returns:
            Its size in bytes and its xxh3-128 in hex, as `xxhsum -H2` prints it.

        Raises:
            OSError: any of it failed.
        """
        try:
            if self.num_tokens != self._planned_tokens:
                head = header_bytes([self._tensor(self.num_tokens)])
                write_all(self._files, self._fd, memoryview(head), 0)
                self._files.truncate(self._fd, self._size)
                self._digest = self._read_back()
            self._files.sync(self._fd)
        except BaseException:
            self.close()
            raise
        # Not in a `finally`: an error of close is an error of the write, and must not hide another one.
        fd, self._fd = self._fd, -1
        self._files.close(fd)
        return self._size, self._digest.hexdigest()

    def close(self) -> None:
        """Gives the file up; errors no longer matter and are dropped. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                self._files.close(fd)
            except OSError:
                return

    def _tensor(self, num_tokens: int) -> tuple[str, str, tuple[int, ...]]:
        return names.STATES_KEY, self._dtype, (num_tokens, self._hidden_size)

    def _read_back(self) -> xxhash.xxh3_128:
        digest = xxhash.xxh3_128()
        offset = 0
        while offset < self._size:
            piece = self._files.read_at(self._fd, min(CHUNK_BYTES, self._size - offset), offset)
            if not piece:
                raise OSError(f"the file ends at byte {offset}, {self._size} were written")
            digest.update(piece)
            offset += len(piece)
        return digest


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, with the file's size checked against them. Blocking.

    Raises:
        StoreError: the file is missing or damaged; `code` says how: `file_missing`, `file_unreadable`,
            `empty_file`, `header_truncated`, `header_invalid`, `data_truncated`, `trailing_bytes`.
    """
    with open_plain(path) as source:
        size = os.fstat(source.fileno()).st_size
        if size == 0:
            raise StoreError(f"{path}: the file is empty", code="empty_file")
        start = source.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or (length <= MAX_HEADER_BYTES and 8 + length > size):
            raise StoreError(
                f"{path}: the header is cut off: the file has {size} bytes", code="header_truncated"
            )
        if length > MAX_HEADER_BYTES:
            raise StoreError(
                f"{path}: no safetensors file: a header of {length} bytes", code="header_invalid"
            )
        text = source.read(length)
    tensors = _parse_header(path, text, 8 + length)
    expected = max((info.stop for info in tensors.values()), default=8 + length)
    if size < expected:
        raise StoreError(
            f"{path}: the data is cut off: {expected - size} of {expected} bytes are missing",
            code="data_truncated",
        )
    if size > expected:
        raise StoreError(f"{path}: {size - expected} bytes too many", code="trailing_bytes")
    return tensors


def read_array(path: Path, info: TensorInfo) -> npt.NDArray[Any]:
    """One tensor of a file by plain reads, for the types that numpy has. Blocking.

    Raises:
        StoreError: the file is shorter than its header says, or has another type.
    """
    if info.dtype not in _NUMPY_TYPES:
        raise StoreError(f"{path}: a tensor of type {info.dtype} is not expected here", code="header_invalid")
    with open_plain(path) as source:
        source.seek(info.start)
        data = source.read(info.stop - info.start)
    if len(data) != info.stop - info.start:
        raise StoreError(f"{path}: the data is cut off", code="data_truncated")
    return np.frombuffer(data, dtype=_NUMPY_TYPES[info.dtype]).reshape(info.shape)


def open_plain(path: Path) -> BufferedReader:
    """Opens a file for plain reads.

    Raises:
        StoreError: it is missing or may not be read.
    """
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise StoreError(f"{path}: the file is missing", code="file_missing") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", code="file_unreadable") from error


def dtype_code(dtype: str) -> str:
    """The format's code of a type name: `bfloat16` is `BF16`."""
    return _CODES[dtype]


class _RawInfo(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _parse_header(path: Path, text: bytes, data_start: int) -> dict[str, TensorInfo]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(value, type=_RawInfo) for name, value in raw.items()}
    except msgspec.DecodeError as error:
        raise StoreError(f"{path}: the header is damaged: {error}", code="header_invalid") from error
    tensors: dict[str, TensorInfo] = {}
    offset = 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        num_bytes = _BYTES.get(info.dtype, -1)
        for extent in info.shape:
            num_bytes *= extent
        begin, end = info.data_offsets
        if begin != offset or end - begin != num_bytes or min(info.shape, default=0) < 0:
            raise StoreError(
                f"{path}: the header is damaged: {name} {info.dtype} {info.shape} does not fit its bytes",
                code="header_invalid",
            )
        tensors[name] = TensorInfo(info.dtype, tuple(info.shape), data_start + begin, data_start + end)
        offset = end
    return tensors
