"""`events.jsonl` of a run folder: what happened to a run and who did it, one JSON object a line.

Append only; each line is flushed before the call returns. Times are UTC. Actions, also refused and automatic
ones, are lines like all others: this file is the audit.
"""

from __future__ import annotations

import datetime
import os
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from extractor.protocol.api import EventLine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEPT_LINES = 50
TAIL_BYTES = 64 * 1024
MAX_TEXT = 400
AUTO = "auto"
"""Who did what nobody asked for."""


class Event(StrEnum):
    """What can happen to a run."""

    SUPERVISOR_STARTED = "supervisor_started"
    SUPERVISOR_ENDED = "supervisor_ended"
    PREPARED = "prepared"
    NOTE = "note"
    STATE = "state"
    ACTION = "action"
    STARTED = "started"
    READY = "ready"
    SHARD_DONE = "shard_done"
    SHARD_RETRY = "shard_retry"
    SHARD_FAILED = "shard_failed"
    RANK_DIED = "rank_died"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class Who(msgspec.Struct, frozen=True, omit_defaults=True):
    """The other end of a request.

    Attributes:
        uid, pid: of the peer process, from the kernel (SO_PEERCRED).
        origin: where the person sits, as the client says.
    """

    user: str
    uid: int | None = None
    pid: int | None = None
    origin: str | None = None


class EventLog:
    """The log of one run.

    Attributes:
        tail: the last lines, for consoles.
    """

    def __init__(self, path: Path) -> None:
        """Opens the log and reads its end. Blocking, short."""
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self.tail: deque[EventLine] = deque(maxlen=KEPT_LINES)
        self._number = 0
        self._num_lost = 0
        for line in _last_lines(path):
            self._remember(line)
        self._end_broken_line(path)

    def add(self, event: Event, *, who: Who | None = None, **fields: Any) -> None:
        """Appends one event. Blocking, short."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        values = {"time_utc": now, "number": self._number + 1, "event": event.value}
        if who is not None:
            values["who"] = msgspec.to_builtins(who)
        values |= fields
        self._write(self._encoder.encode(values) + b"\n")
        self._remember(values)

    def _write(self, line: bytes) -> None:
        """All of a line, or, on a full disk, none of it: the run matters more than its log.

        Consoles are told all the same, and the next line that can be written says how many are missing.
        """
        if self._num_lost:
            lost = {
                "event": Event.NOTE.value,
                "text": f"{self._num_lost} events could not be written: disk full",
            }
            line = self._encoder.encode(lost) + b"\n" + line
        begin = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
        except OSError:
            self._num_lost += 1
            return
        if written < len(line):
            self._file.truncate(begin)
            self._num_lost += 1
        else:
            self._num_lost = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _remember(self, values: Mapping[str, Any]) -> None:
        number = values.get("number")
        self._number = max(self._number + 1, number if isinstance(number, int) else 0)
        self.tail.append(as_line(values, self._number))

    def _end_broken_line(self, path: Path) -> None:
        """A line that a power cut left without its end must not swallow the next one."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    self._file.write(b"\n")


def as_line(values: Mapping[str, Any], number: int) -> EventLine:
    """One event for people. Pure; takes lines of any version."""
    event = str(values.get("event", "?"))
    who = values.get("who")
    name = str(who.get("user", "?")) if isinstance(who, dict) else AUTO
    try:
        time_utc = datetime.datetime.fromisoformat(str(values.get("time_utc"))).timestamp()
    except ValueError:
        time_utc = 0.0
    # The whole of a long error is in the file; a line for people is one line.
    lines = _text(event, values).splitlines() or [""]
    text = lines[0] + (" ..." if len(lines) > 1 else "")
    return EventLine(number, time_utc, event, name, text[:MAX_TEXT])


def _text(event: str, values: Mapping[str, Any]) -> str:
    match event:
        case Event.ACTION:
            change = f"{values.get('old')} -> {values.get('new')}"
            asked = f"{values.get('action')} {values.get('depth') or ''}".strip()
            result = values.get("result")
            return f"{asked}: {change}" if result == "ok" else f"{asked} refused: {result}"
        case Event.STATE:
            why = values.get("why")
            return f"{values.get('old')} -> {values.get('new')}" + (f": {why}" if why else "")
        case Event.SHARD_DONE:
            return f"shard {values.get('shard')} done"
        case Event.SHARD_RETRY | Event.SHARD_FAILED:
            verb = "failed, tried again" if event == Event.SHARD_RETRY else "given up"
            return f"shard {values.get('shard')} {verb}: {values.get('error')}"
        case Event.PAUSED | Event.RESUMED:
            note = values.get("note")
            return f"{event} ({values.get('reason')})" + (f": {note}" if note else "")
        case Event.READY:
            load_s = values.get("load_s")
            return "model ready" + (f" after {load_s:.0f} s" if isinstance(load_s, int | float) else "")
        case Event.STARTED:
            rank = f" {values['rank']}" if values.get("rank") else ""
            return f"rank{rank} started, pid {values.get('pid')}"
        case _:
            detail = values.get("error") or values.get("text")
            return event.replace("_", " ") + (f": {detail}" if detail else "")


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The events at the end of the file; what is no event is left out."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    if size > TAIL_BYTES:
        lines = lines[1:]
    found = []
    for line in lines[-KEPT_LINES - 1 :]:
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            continue
    return found
