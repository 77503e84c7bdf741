"""Lines of a file that grows: its end, and what is added. For logs and events of a run, live or ended.

Owns no file: each look opens it anew, so one that does not exist yet, or was begun again, is no error. Bytes that
are no UTF-8 are shown as escapes. Invariant: followed, every line is given once and whole; only `rest` gives a
line that has no end yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 64 * 1024


class GrowingFile:
    """One file, and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def last(self, num_lines: int | None) -> list[str]:
        """The last whole lines, or all; `new` goes on after them. Blocking."""
        try:
            with self._path.open("rb") as file:
                start = 0 if num_lines is None else _start_of_last(file, num_lines)
                file.seek(start)
                lines = self._take(start, file.read())
        except FileNotFoundError:
            return []
        return lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]

    def new(self) -> list[str]:
        """The lines that were completed since the last look. Blocking."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                return self._take(self._offset, file.read())
        except FileNotFoundError:
            return []

    def rest(self) -> list[str]:
        """The last line, if it has no end yet."""
        text, self._rest = self._rest, b""
        return [_decoded(text)] if text else []

    def _take(self, start: int, data: bytes) -> list[str]:
        self._offset = start + len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_decoded(line) for line in lines]


def _start_of_last(file: BinaryIO, num_lines: int) -> int:
    """Where to begin reading so as to see at least the last lines."""
    position = file.seek(0, 2)
    num_ends = 0
    while position > 0 and num_ends <= num_lines:
        size = min(BLOCK_BYTES, position)
        position -= size
        file.seek(position)
        num_ends += file.read(size).count(b"\n")
    return position


def _decoded(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", errors="backslashreplace")
