"""Keeps a run from filling its disk: holds it before the reserve is touched, and lets it go on when there is room.

Owns the pause with the reason `disk` and no other. It needs no sample to be true: without one, or with an old
one, the write fails, and that holds the run as well.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from extractor.errors import TapdeckError
from extractor.protocol.states import Depth, Reason
from extractor.supervisor.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.supervisor.events import EventLog
    from extractor.supervisor.pauses import PauseBook
    from extractor.supervisor.work import Work
    from extractor.telemetry.sampler import Sampler

DISK_ERRORS = {"ENOSPC", "EDQUOT", "EROFS"}
"""Write errors that the next shard would meet as well."""
DISK_RETRY_S = 30.0


class DiskPolicy:
    """The policy of one run.

    Attributes:
        unrecorded: a pause that could not be written, for the disk of the run folder is full as well.
    """

    def __init__(
        self,
        pauses: PauseBook,
        sampler: Sampler,
        events: EventLog,
        *,
        note_once: Callable[[str], None],
        now_utc: Callable[[], float],
    ) -> None:
        self.unrecorded: str | None = None
        self._pauses = pauses
        self._sampler = sampler
        self._events = events
        self._note_once = note_once
        self._now_utc = now_utc

    def allows_next(self, work: Work) -> bool:
        """Whether another shard may be handed out."""
        return self.unrecorded is None and self._has_room(work)

    def look(self, work: Work) -> None:
        """Holds the run, or lets it go on, as the disk is now."""
        if self._pauses.has(Reason.DISK):
            since = next(p.since_utc for p in self._pauses.pauses if p.reason == Reason.DISK)
            if self._has_room(work) and abs(self._now_utc() - since) >= DISK_RETRY_S:
                self._lift()
        elif self.unrecorded is not None:
            self.hold(self.unrecorded)
        elif work.queue.has_pending and not work.queue.leased and not self._has_room(work):
            usage = self._sampler.disk()
            free = 0.0 if usage is None else usage.free_bytes / 1e9
            self.hold(
                f"{free:.2f} GB free, the next shard must leave {work.prepared.reserve_bytes / 1e9:.2f} GB "
                "(output.reserve_bytes); goes on by itself when there is room"
            )

    def hold(self, note: str) -> None:
        """Puts the pause in force, unless it is."""
        if self._pauses.has(Reason.DISK):
            return
        try:
            self._pauses.add(Reason.DISK, Depth.HOLD, by="auto", note=note)
        except TapdeckError as error:
            # No shard is handed out until the pause is on the disk.
            self.unrecorded = note
            self._note_once(f"{note}; and that could not be recorded: {error.message}")
            return
        self.unrecorded = None
        self._events.add(Event.PAUSED, reason=Reason.DISK, note=note)

    def _lift(self) -> None:
        try:
            self._pauses.lift(Reason.DISK)
        except TapdeckError as error:
            self._note_once(error.message)
            return
        self._events.add(Event.RESUMED, reason=Reason.DISK, note="there is room again")

    def _has_room(self, work: Work) -> bool:
        """Whether the next shard fits above the reserve, with those that are in hand."""
        usage, needed = self._sampler.disk(), work.next_bytes
        if usage is None or not needed:
            return True
        return usage.free_bytes >= work.prepared.reserve_bytes + needed


def is_disk_error(error: TapdeckError) -> bool:
    """Whether an error comes of a disk that is full or read-only."""
    cause = error.__cause__
    return isinstance(cause, OSError) and errno.errorcode.get(cause.errno or 0) in DISK_ERRORS
