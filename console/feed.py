"""Where the console's truth comes from: a stream of what the supervisor says, and a way to ask it to act.

`Feed` is the seam: `LiveFeed` talks to a supervisor, tests and benchmarks bring their own. A live feed never
ends by itself: when the supervisor is gone it says so, and looks for it again with growing pauses. It holds no
truth of its own and repeats no action.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from extractor.errors import NoRunError, TapdeckError, UnreachableError
from extractor.protocol import api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from console.client import Client
    from extractor.folders import RunFolder
    from extractor.protocol.states import Action, Depth

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 8.0
LOG_READ_BYTES = 256 * 1024
"""Read at most of a log file of a run that has no supervisor."""
EVENTS = "events"
"""Name of the log source that is the list of events."""


@dataclass(frozen=True)
class Heard:
    """The supervisor spoke."""

    snapshot: api.Snapshot


@dataclass(frozen=True)
class Lost:
    """There is no word from the supervisor.

    Attributes:
        why: in words.
        pid: of the last supervisor that is known.
        is_alive: whether that very process still runs; None when nothing is known of it.
        snapshot: what the run folder has, if the feed has heard nothing yet.
    """

    why: str
    pid: int | None = None
    is_alive: bool | None = None
    snapshot: api.Snapshot | None = None


@dataclass(frozen=True)
class Ended:
    """The run is over and nothing supervises it; its last snapshot."""

    snapshot: api.Snapshot


Update = Heard | Lost | Ended


class Feed(Protocol):
    """One run, as the console sees it."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def read_only(self) -> bool:
        """Whether the supervisor refuses everything that changes the run."""

    @property
    def interval_s(self) -> float:
        """How often it speaks at least, while all is well."""

    def updates(self) -> AsyncIterator[Update]:
        """What happens, for as long as the console wants to know. One reader."""

    async def act(
        self, action: Action, *, depth: Depth | None = None, expected_revision: int | None = None
    ) -> api.ActionResult:
        """Asks once; see `console.client.Client.act`.

        Raises:
            TapdeckError: refused, or no answer.
        """

    async def log(self, source: str, *, offset: int | None = None, lines: int = 200) -> api.LogChunk:
        """Lines of a log; see `console.client.Client.log`.

        Raises:
            TapdeckError: there is no such log, or no answer.
        """


def _load_client() -> type[Client]:
    from console.client import Client

    return Client


class LiveFeed:
    """A run of this machine, live or not."""

    def __init__(self, run: RunFolder, *, read_only: bool = False, interval_s: float = 1.0) -> None:
        self.run = run
        self.read_only = read_only
        self.interval_s = interval_s
        self._client: Client | None = None
        self._has_heard = False

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.run.name

    async def updates(self) -> AsyncIterator[Update]:
        """Follows the run: through its supervisor while there is one, else what its folder says."""
        # The HTTP library takes a quarter of a second to load: not before the first paint, nor in its way.
        client_type = await asyncio.to_thread(_load_client)
        pause_s = FIRST_RETRY_S
        while True:
            why = "its supervisor ended"
            try:
                async with client_type(self.run, read_only=self.read_only) as client:
                    self._client = client
                    async for snapshot in client.stream(interval_s=self.interval_s):
                        pause_s = FIRST_RETRY_S
                        self._has_heard = True
                        yield Heard(snapshot)
            except NoRunError:
                why = "it has no supervisor"
            except TapdeckError as error:
                why = error.message
            finally:
                self._client = None
            yield await asyncio.to_thread(self._silence, why)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_RETRY_S)

    def _silence(self, why: str) -> Update:
        from console.client import last_snapshot, last_supervisor_of, supervisor_of

        record = last_supervisor_of(self.run)
        is_alive = record is not None and supervisor_of(self.run) is not None
        snapshot = last_snapshot(self.run)
        if not is_alive and snapshot is not None and snapshot.state.state.is_terminal:
            return Ended(snapshot)
        return Lost(
            why,
            pid=record.pid if record else None,
            is_alive=is_alive if record else None,
            snapshot=None if self._has_heard else snapshot,
        )

    async def act(
        self, action: Action, *, depth: Depth | None = None, expected_revision: int | None = None
    ) -> api.ActionResult:
        """Asks the supervisor once.

        Raises:
            TapdeckError: refused, or no answer.
        """
        if self._client is None:
            raise UnreachableError("no word from the supervisor; nothing was sent")
        return await self._client.act(
            action, depth=depth, expected_revision=expected_revision, idempotency_key=uuid.uuid4().hex
        )

    async def log(self, source: str, *, offset: int | None = None, lines: int = 200) -> api.LogChunk:
        """Lines of a log, from the supervisor or, when there is none, from the run folder.

        Raises:
            TapdeckError: there is no such log, or no answer.
        """
        if self._client is not None:
            return await self._client.log(source, offset=offset, lines=lines)
        return await asyncio.to_thread(self._read_log, source, offset, lines)

    def _read_log(self, source: str, offset: int | None, lines: int) -> api.LogChunk:
        sources = tuple(self.run.logs())
        if source not in sources:
            raise NoRunError(f"{self.name} has no log {source!r}", code="no_such")
        data = b""
        with contextlib.suppress(FileNotFoundError), self.run.log(source).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - LOG_READ_BYTES) if offset is None else min(offset, size)
            file.seek(start)
            data = file.read(LOG_READ_BYTES)
            offset = start + len(data)
        text = data.decode("utf-8", errors="replace")
        found = text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
        return api.LogChunk(source, sources, tuple(found[-lines:]) if text else (), offset or 0)
