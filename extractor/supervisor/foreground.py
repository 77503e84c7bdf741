"""A run in the foreground: one replica, a queue of shards, until all are done or somebody stops it.

The loop knows shards, retries and the end of a run. It prints nothing; whoever watches passes a
`Watcher`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from extractor import protocol
from extractor.errors import BugError, EngineError
from extractor.supervisor.events import Event, EventLog
from extractor.supervisor.queue import ShardQueue

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from extractor.protocol import AnyReport
    from extractor.supervisor.replica import Replica

AHEAD = 2
"""Shards in the hands of the replica: one that it computes and one to go on with at once."""
POLL_S = 0.2
HOPELESS = {"ENOSPC", "EDQUOT", "EROFS"}
"""Write errors that the next shard would meet as well."""


class Watcher(Protocol):
    """Sees every report as it arrives. Its methods are called in the loop and must not block for long."""

    def on_report(self, report: AnyReport) -> None:
        """A report; called before the run acts on it."""

    def on_tick(self) -> None:
        """Called several times a second."""


class Outcome(msgspec.Struct):
    """How a run ended.

    Attributes:
        done: shards committed by this run.
        failed: shards given up, with their last error.
        was_stopped: it was asked to stop before all shards were done.
        num_tokens: tokens of the shards committed by this run.
        num_bytes: bytes of their files.
        quarantined: samples left out of them.
        load_s: seconds until the model was ready.
        seconds: first batch asked for, to last commit.
        peak_rss_bytes: of the worker.
    """

    done: list[int] = []
    failed: dict[int, str] = {}
    was_stopped: bool = False
    num_tokens: int = 0
    num_bytes: int = 0
    quarantined: int = 0
    load_s: float = 0.0
    seconds: float = 0.0
    peak_rss_bytes: int = 0


class ForegroundRun:
    """Drives one replica through the shards of a run."""

    def __init__(
        self,
        replica: Replica,
        todo: Sequence[int],
        *,
        events: EventLog,
        watcher: Watcher,
        stop: threading.Event,
    ) -> None:
        self._replica = replica
        self._queue = ShardQueue(todo)
        self._events = events
        self._watcher = watcher
        self._stop = stop
        self._outcome = Outcome()
        self._is_ready = False
        self._told_to_end = False
        self._ready_at = 0.0

    def run(self) -> Outcome:
        """Blocks until the replica has left.

        Raises:
            EngineError: the replica failed, or died.
        """
        while not self._replica.has_left:
            for report in self._replica.reports(POLL_S):
                self._watcher.on_report(report)
                self._handle(report)
            self._watcher.on_tick()
            if self._is_ready:
                self._direct()
            elif self._stop.is_set():
                # Nothing is in hand while the model loads, and loading cannot be interrupted politely.
                self._replica.kill()
                self._events.add(Event.STOPPED)
                self._outcome.was_stopped = True
                return self._outcome
        if self._replica.wait() is None:
            self._events.add(Event.FAILED, error="the worker did not exit; killed")
        self._outcome.failed = dict(self._queue.failed)
        self._outcome.was_stopped = self._stop.is_set() and not self._queue.is_finished
        return self._outcome

    def _direct(self) -> None:
        """Tells the replica what to do next."""
        if self._told_to_end:
            return
        if self._stop.is_set():
            self._events.add(Event.STOPPING)
            self._replica.send(protocol.Stop())
            self._told_to_end = True
            return
        while self._queue.has_pending and self._queue.num_leased(self._replica.name) < AHEAD:
            self._replica.send(protocol.WorkShard(self._queue.lease(self._replica.name)))
        if self._queue.is_finished:
            self._replica.send(protocol.Finish())
            self._told_to_end = True

    def _handle(self, report: AnyReport) -> None:
        match report:
            case protocol.Hello():
                self._events.add(
                    Event.STARTED, pid=report.pid, start_time=report.start_time, rank=report.rank
                )
            case protocol.Ready():
                self._on_ready(report)
            case protocol.ShardDone():
                self._on_done(report)
            case protocol.ShardFailed():
                self._on_failed_shard(report)
            case protocol.Failed():
                self._events.add(Event.FAILED, code=report.code, error=report.message)
                raise EngineError(
                    report.message,
                    remedy=report.remedy or f"see {self._replica.log}",
                    code=report.code,
                    exit_code=report.exit_code,
                )
            case protocol.Bye():
                self._outcome.peak_rss_bytes = report.peak_rss_bytes
            case protocol.Stage() | protocol.ShardStarted() | protocol.BatchDone():
                pass
            case _:
                raise BugError(f"unknown report {report!r}")

    def _on_ready(self, report: protocol.Ready) -> None:
        self._is_ready = True
        self._ready_at = time.monotonic()
        self._outcome.load_s = report.load_s
        self._events.add(Event.READY, load_s=report.load_s)

    def _on_done(self, report: protocol.ShardDone) -> None:
        self._queue.complete(report.shard)
        outcome = self._outcome
        outcome.done.append(report.shard)
        outcome.num_tokens += report.num_tokens
        outcome.num_bytes += report.num_bytes
        outcome.quarantined += report.quarantined
        outcome.seconds = time.monotonic() - self._ready_at
        self._events.add(Event.SHARD_DONE, shard=report.shard, num_bytes=report.num_bytes)

    def _on_failed_shard(self, report: protocol.ShardFailed) -> None:
        if report.errno_name in HOPELESS:
            self._events.add(Event.FAILED, shard=report.shard, error=report.error)
            raise EngineError(
                f"shard {report.shard} could not be written: {report.error}",
                remedy="free space (or make the folder writable), then run the same command again: it resumes; "
                "nothing half-written was kept",
                code="write_failed",
            )
        again = self._queue.fail(report.shard, report.error)
        self._events.add(
            Event.SHARD_RETRY if again else Event.SHARD_FAILED, shard=report.shard, error=report.error
        )
