"""Reading the logs of a run folder piece by piece: bounded, whatever is in them. Lines are data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from extractor.protocol.api import LogChunk

if TYPE_CHECKING:
    from extractor.folders import RunFolder

MAX_LINES = 2000
MAX_BYTES = 256 * 1024
"""Of one answer."""


def read(folder: RunFolder, source: str, offset: int | None, lines: int) -> LogChunk | None:
    """Lines of a log. Blocking.

    Args:
        folder: of the run.
        source: name of the log; must be one of those that are there.
        offset: where to begin, in bytes; None: so that the last `lines` come.
        lines: how many at most.

    Returns:
        None when there is no such log. A line that is still being written is left for the next time, unless it
        is longer than any line should be.
    """
    sources = tuple(folder.logs())
    if source not in sources:
        return None
    with folder.log(source).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - MAX_BYTES) if offset is None else min(offset, size)
        file.seek(begin)
        data = file.read(MAX_BYTES)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == MAX_BYTES:
        end = len(data)
    whole = data[:end].splitlines(keepends=True)
    if offset is None:
        # The first one may have been cut.
        whole = whole[1:] if begin else whole
        taken, used = whole[-lines:], end
    else:
        taken = whole[:lines]
        used = sum(map(len, taken))
    texts = tuple(line.rstrip(b"\r\n").decode(errors="replace") for line in taken)
    return LogChunk(source, sources, texts, begin + used)
