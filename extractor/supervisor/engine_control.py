"""One start of a replica under the supervisor's hand: from the start of its processes to their end.

Turns a wish (run, hold, leave) into the messages that are still to be sent, and reports into a phase. It
knows nothing of shards beyond which one was begun last, and decides nothing.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from extractor import protocol
from extractor.errors import EngineError
from extractor.supervisor.lifecycle import EnginePhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.protocol import AnyReport, AnyRequest
    from extractor.supervisor.replica import Replica

LISTEN_S = 0.5
"""A process that died is noticed after so long at the latest."""


class Wish(Enum):
    """What a replica shall do."""

    RUN = "run"
    HOLD = "hold"
    FINISH = "finish"
    """Commit what is in hand and leave; there is no more work."""
    DRAIN = "drain"
    """Finish the shard in hand and leave."""
    NOW = "now"
    """Leave after the batch in flight."""
    KILL = "kill"


_LEAVING: dict[Wish, AnyRequest] = {
    Wish.FINISH: protocol.Finish(),
    Wish.DRAIN: protocol.Drain(),
    Wish.NOW: protocol.Stop(),
}
_URGENCY = [Wish.FINISH, Wish.DRAIN, Wish.NOW, Wish.KILL]


class EngineControl:
    """A started replica.

    Attributes:
        replica: its process and socket.
        phase: what it is doing.
        stage: the same in a word, for people.
        pids: of all ranks, in their order.
        started_shard: the last one whose computation began.
        batch: the last one reported, with its shard.
        load_s: seconds until it was ready; None before.
        death: how the process ended, when nobody asked it to.
        failure: what the rank itself reported as its end.
        fault: an error of ours that ended the listening.
        peak_rss_bytes: of the processes together, known at their end.
    """

    def __init__(self, replica: Replica, on_report: Callable[[AnyReport], None], wake: asyncio.Event) -> None:
        """Begins to listen; needs a running event loop.

        Args:
            replica: just started.
            on_report: called in the loop with each report, after it was taken note of here.
            wake: set after each of them.
        """
        self.replica = replica
        self.phase = EnginePhase.LOADING
        self.stage = "starting"
        self.pids = replica.pids
        self.started_shard: int | None = None
        self.batch: tuple[int, int] | None = None
        self.load_s: float | None = None
        self.death: str | None = None
        self.failure: protocol.Failed | None = None
        self.fault: Exception | None = None
        self.peak_rss_bytes = 0
        self._on_report = on_report
        self._wake = wake
        self._can_hear = False
        self._is_told_to_hold = False
        self._hold_number = -1
        self._told_to_leave: Wish | None = None
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self.pids[0]

    @property
    def is_ready(self) -> bool:
        """The model is loaded and proven, and it was not told to leave."""
        return self.load_s is not None and self._told_to_leave is None

    @property
    def was_told_to_leave(self) -> bool:
        """Its end is what we wanted."""
        return self._told_to_leave is not None

    @property
    def has_ended(self) -> bool:
        """The process is gone, or has said its last word."""
        return self._listener.done()

    def steer(self, wish: Wish) -> None:
        """Sends what is still to be said for a wish; may be called as often as one likes."""
        if self.has_ended:
            return
        if wish in _URGENCY:
            self._leave(wish)
        elif self._told_to_leave is None and self._can_hear:
            self._hold_or_run(wish)

    def work(self, shard: int) -> None:
        """Hands it a shard."""
        if shard == self.started_shard:
            # It comes a second time, and has not begun again.
            self.started_shard = None
        self.replica.send(protocol.WorkShard(shard))

    async def leave(self) -> None:
        """Lets a process that said its last word end by itself, for a while."""
        if self.replica.has_left:
            await asyncio.to_thread(self.replica.wait)

    async def close(self) -> None:
        """Ends process and socket."""
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        await asyncio.to_thread(self.replica.kill)
        self.replica.__exit__(None, None, None)

    def _hold_or_run(self, wish: Wish) -> None:
        if wish == Wish.HOLD and not self._is_told_to_hold:
            self._hold_number += 1
            self.replica.send(protocol.Hold(self._hold_number))
            self._is_told_to_hold = True
        elif wish == Wish.RUN and self._is_told_to_hold:
            self.replica.send(protocol.Resume())
            self._is_told_to_hold = False
            if self.phase == EnginePhase.HELD:
                self.phase = EnginePhase.WORKING
                self.stage = "ready"

    def _leave(self, wish: Wish) -> None:
        told = self._told_to_leave
        if told is not None and _URGENCY.index(told) >= _URGENCY.index(wish):
            return
        self._told_to_leave = wish
        if wish == Wish.KILL or self.load_s is None:
            # Nothing is in hand while the model loads, and loading cannot be interrupted politely.
            self.replica.kill(wait=False)
        else:
            if wish == Wish.FINISH and self._is_told_to_hold:
                self.replica.send(protocol.Resume())
            self.replica.send(_LEAVING[wish])
        self.phase = EnginePhase.LEAVING
        self.stage = "leaving"

    def _is_answer(self, held: protocol.Held) -> bool:
        """Whether the rank is held now, and not by a hold that was lifted meanwhile."""
        return (
            self._is_told_to_hold and held.number == self._hold_number and self.phase == EnginePhase.WORKING
        )

    async def _listen(self) -> None:
        try:
            while not self.replica.has_left:
                await self.replica.arrival(LISTEN_S)
                for report in self.replica.reports(0):
                    self._note(report)
                    self._on_report(report)
                    self._wake.set()
        except EngineError as error:
            if self._told_to_leave is None:
                self.death = error.message
        except msgspec.DecodeError as error:
            if self._told_to_leave is None:
                self.death = f"the rank said what cannot be understood: {error}"
        except Exception as error:  # noqa: BLE001 - a task that nobody awaits: the supervisor raises it
            self.fault = error
        finally:
            self._wake.set()

    def _note(self, report: AnyReport) -> None:
        match report:
            case protocol.Hello() if report.rank == 0:
                self._can_hear = True
            case protocol.Stage() if self.phase == EnginePhase.LOADING:
                self.stage = report.name
            case protocol.Ready():
                # Also of one that was told to leave meanwhile: what it dies of later is not of the loading.
                self.load_s = report.load_s
                if self.phase == EnginePhase.LOADING:
                    self.phase = EnginePhase.WORKING
                    self.stage = "ready"
            case protocol.ShardStarted():
                self.started_shard = report.shard
            case protocol.BatchDone():
                self.batch = (report.shard, report.batch)
            case protocol.Held() if self._is_answer(report):
                self.phase = EnginePhase.HELD
                self.stage = "held"
            case protocol.Failed():
                self.failure = report
            case protocol.Bye():
                self.peak_rss_bytes = report.peak_rss_bytes
            case _:
                pass
