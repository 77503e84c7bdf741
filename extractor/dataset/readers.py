"""Raw records out of files, one at a time, each with its file and line.

Owns the file formats: which one a file has is decided by its first bytes, never by its name. So far that
is JSON Lines; files of other known kinds are refused by name. Values inside a record are not looked at.

Invariants: lines end at LF and nowhere else (U+2028, U+2029 and U+0085 are ordinary characters of JSON
text); line numbers are 1-based and count blank lines, which are no records; a damaged line is one reject
and disturbs no other line; memory holds one line, never a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from extractor.dataset.rejects import Reject
from extractor.errors import AccessError, DatasetError, PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""A longer line is no conversation; without a bound one missing LF would take all memory."""

_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


class RawRecord(msgspec.Struct, frozen=True):
    """One decoded JSON value and where it stood."""

    source_file: str
    source_line: int
    value: Any  # Any: JSON that nobody has looked at yet


class RecordReader:
    """All records of several files, in order.

    Iterating raises what `open_data_file` raises, and DatasetError for a file of a kind that is not read.

    Attributes:
        bytes_total: size of all files.
        bytes_done: how much of that has been read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self.bytes_total = sum(path.stat().st_size for path in self._paths)
        self.bytes_done = 0

    def __iter__(self) -> Iterator[RawRecord | Reject]:
        """Starts from the first file."""
        self.bytes_done = 0
        for path in self._paths:
            with open_data_file(path) as file:
                _refuse_foreign(path, file.read(4096))
                file.seek(0)
                before = self.bytes_done
                for record in _read_json_lines(path.name, file):
                    self.bytes_done = before + file.tell()
                    yield record
                self.bytes_done = before + file.tell()


def check_files(paths: Sequence[Path]) -> None:
    """Refuses missing, unreadable and foreign files before any work is done; raises as `RecordReader`."""
    for path in paths:
        with open_data_file(path) as file:
            _refuse_foreign(path, file.read(4096))


def open_data_file(path: Path) -> BinaryIO:
    """Opens a data file for reading bytes.

    Raises:
        PreflightError: it is missing, or no file.
        AccessError: it may not be read.
    """
    try:
        return path.open("rb")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise PreflightError(
            f"{path}: {error.strerror}", remedy="name existing files in data.files"
        ) from error
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}", remedy="make the file readable") from error


def _read_json_lines(name: str, file: BinaryIO) -> Iterator[RawRecord | Reject]:
    decoder = msgspec.json.Decoder()
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            _skip_line(file)
            yield Reject(name, number, None, "record_too_long", f"more than {MAX_RECORD_BYTES} bytes")
            continue
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        try:
            value = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Reject(name, number, None, "json", str(error))
            continue
        yield RawRecord(name, number, value)


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def _refuse_foreign(path: Path, head: bytes) -> None:
    kind = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
    first_line = head.removeprefix(_BOM).lstrip().split(b"\n", 1)[0].rstrip()
    if kind is None and (first_line == b"[" or first_line.startswith(b"[{")):
        kind = "one JSON array"
    if kind is not None:
        raise DatasetError(
            f"{path} is {kind}, which is not read",
            remedy="convert it to JSON Lines: one JSON object per line, UTF-8",
            code="data_format",
        )
