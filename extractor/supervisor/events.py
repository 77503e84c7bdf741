"""`events.jsonl` of a run folder: what happened to a run, one JSON object a line.

Append only; each line is flushed before the call returns. Times are UTC.
"""

from __future__ import annotations

import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Event(StrEnum):
    """What can happen to a run."""

    STARTED = "started"
    READY = "ready"
    SHARD_DONE = "shard_done"
    SHARD_RETRY = "shard_retry"
    SHARD_FAILED = "shard_failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class EventLog:
    """The log of one run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def add(self, event: Event, **fields: Any) -> None:
        """Appends one event. Blocking, short."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._file.write(self._encoder.encode({"time_utc": now, "event": event.value, **fields}) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
