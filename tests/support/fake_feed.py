"""A feed that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from console.feed import Update
from extractor.errors import NoRunError, TapdeckError
from extractor.protocol import api
from extractor.protocol.states import Action, Depth, State
from tests.support.console_snapshots import NAME


@dataclass
class Asked:
    """One call of `act`."""

    action: Action
    depth: Depth | None
    expected_revision: int | None


@dataclass
class FakeFeed:
    """Says `first`, then whatever `say` is given.

    Attributes:
        refuse_with: what the next action is refused with.
        logs: lines of each source.
    """

    first: Update | None = None
    name: str = NAME
    read_only: bool = False
    interval_s: float = 1.0
    asked: list[Asked] = field(default_factory=list)
    refuse_with: TapdeckError | None = None
    logs: dict[str, list[str]] = field(default_factory=dict)
    _queue: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)

    def say(self, update: Update) -> None:
        self._queue.put_nowait(update)

    async def updates(self):
        if self.first is not None:
            yield self.first
        while True:
            yield await self._queue.get()

    async def act(
        self, action: Action, *, depth: Depth | None = None, expected_revision: int | None = None
    ) -> api.ActionResult:
        self.asked.append(Asked(action, depth, expected_revision))
        if self.refuse_with is not None:
            raise self.refuse_with
        return api.ActionResult(message=f"{action} accepted", revision=42, state=State.RUNNING)

    async def log(self, source: str, *, offset: int | None = None, lines: int = 200) -> api.LogChunk:
        if source not in self.logs:
            raise NoRunError(f"no log {source!r}", code="no_such")
        found = self.logs[source]
        start = max(0, len(found) - lines) if offset is None else offset
        return api.LogChunk(source, tuple(sorted(self.logs)), tuple(found[start:]), len(found))
