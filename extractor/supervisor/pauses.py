"""The pauses of a run and its revision: the part of its state that survives a restart of everything.

Owns `pauses.json` of the run folder. Invariants: it is on the disk before anybody is told of a change; a
pause is lifted by its own reason's rule or by an operator, never by another reason; a file that cannot be
read is moved aside and taken for a pause, so that a person looks before work goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extractor.protocol.states import Depth, Pause, Reason, deepest
from extractor.store import atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILE_VERSION = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    revision: int
    pauses: tuple[Pause, ...]


class PauseBook:
    """The pauses in force, at most one of each reason.

    Attributes:
        revision: grows with every change of what the run shall do.
    """

    def __init__(self, path: Path, *, now_utc: Callable[[], float]) -> None:
        """Reads what was in force before. Blocking, short."""
        self._path = path
        self._now_utc = now_utc
        self._pauses: dict[Reason, Pause] = {}
        self.revision = 0
        self.unreadable: Path | None = None
        """The file that could not be read, moved aside; None when all was well."""
        self._read()

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """Those in force, oldest first."""
        return tuple(sorted(self._pauses.values(), key=lambda pause: pause.since_utc))

    @property
    def depth(self) -> Depth | None:
        """The deepest one."""
        return deepest(self._pauses.values())

    def has(self, reason: Reason) -> bool:
        """Whether a pause of this reason is in force."""
        return reason in self._pauses

    def add(self, reason: Reason, depth: Depth, *, by: str, note: str = "") -> None:
        """Puts a pause in force, in place of one of the same reason. Blocking, short.

        Raises:
            StoreError: it cannot be written; then nothing has changed.
        """
        old = self._pauses.get(reason)
        since = old.since_utc if old is not None else self._now_utc()
        self._change(self._pauses | {reason: Pause(reason, depth, since, by, note)})

    def lift(self, *reasons: Reason) -> None:
        """Ends the pauses of these reasons. Blocking, short.

        Raises:
            StoreError: it cannot be written; then nothing has changed.
        """
        self._change({r: pause for r, pause in self._pauses.items() if r not in reasons})

    def touch(self) -> None:
        """A change that is no pause: only the revision grows. Blocking, short."""
        self._change(self._pauses)

    def _change(self, pauses: dict[Reason, Pause]) -> None:
        file = _File(FILE_VERSION, self.revision + 1, tuple(pauses.values()))
        try:
            atomic.replace_file(self._path, msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
        except OSError as error:
            raise atomic.explain(error, self._path, "written") from error
        self._pauses = dict(pauses)
        self.revision += 1

    def _read(self) -> None:
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
            if file.version != FILE_VERSION:
                raise msgspec.ValidationError(f"version {file.version}")
        except FileNotFoundError:
            return
        except msgspec.DecodeError as error:
            aside = self._path.with_suffix(".unreadable")
            self._path.replace(aside)
            self.unreadable = aside
            self.add(
                Reason.FAULT,
                Depth.HOLD,
                by="auto",
                note=f"{self._path.name} could not be read ({error}) and was moved to {aside}: was this run "
                "paused? Resume when it may go on",
            )
            return
        self.revision = file.revision
        self._pauses = {pause.reason: pause for pause in file.pauses}
