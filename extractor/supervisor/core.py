"""The supervisor of one run: what it knows, what it wants, and the loop that makes the one follow the other.

Owns the run from its preparation to its end, and the starts and ends of its replica. The state is derived from
facts (`lifecycle`), never set. Shards are kept by `work`, the output folder by `lease_keeper`, the disk by
`disk_policy`. It serves nobody (`server`), prints nothing, and imports neither torch nor SGLang nor a tokenizer:
what needs those runs in processes of its own.

Invariants: a shard that was reported as done is never computed again; a rank that dies costs its shard one
of three attempts and nothing else; a pause in force starts no process; every change of state is an event.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import msgspec

from extractor import protocol
from extractor.errors import BugError, EngineError, StoreError, TapdeckError
from extractor.protocol.states import Depth, State
from extractor.store import listing, manifest
from extractor.supervisor import lifecycle, prepared_run
from extractor.supervisor.disk_policy import DISK_ERRORS, DiskPolicy, is_disk_error
from extractor.supervisor.engine_control import EngineControl, Wish
from extractor.supervisor.events import Event
from extractor.supervisor.lease_keeper import LeaseKeeper
from extractor.supervisor.lifecycle import EnginePhase, Facts
from extractor.supervisor.replica import Replica
from extractor.supervisor.waiting import until_set
from extractor.supervisor.work import Work

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from extractor.errors import LeaseError
    from extractor.folders import RunFolder
    from extractor.protocol import AnyReport, EngineSpec
    from extractor.store.lease import Lease
    from extractor.supervisor.events import EventLog
    from extractor.supervisor.launcher import Launcher
    from extractor.supervisor.meter import Meter
    from extractor.supervisor.pauses import PauseBook
    from extractor.supervisor.prepared_run import Conclusion
    from extractor.supervisor.tasks import Tasks
    from extractor.telemetry.sampler import Sampler

T = TypeVar("T")
AHEAD = 2
"""Shards in the hands of the replica: one that it computes and one to go on with at once."""
POLL_S = 1.0
"""Longest time between two looks at what is; reports and actions wake the loop at once."""
MAX_BLAMELESS_DEATHS = 3
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Before the next start of a replica, by how many have died since a shard was done; the last from then on."""


class Stop(IntEnum):
    """How a run is ended; a later request may only be more urgent."""

    DRAIN = 1
    NOW = 2
    KILL = 3


class Supervisor:
    """One run under supervision. All methods are called in its event loop.

    Attributes:
        work: its shards; None until the run is prepared.
        lease: its hold on the output folder.
        disk: what keeps it from filling the disk.
        engine: the replica that runs; None when none does.
        failure: why it cannot go on.
        stop: how it is being ended.
        conclusion: what the output holds, once it has ended.
        restarts: of the replica, not asked for.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        output: Path,
        launcher: Launcher,
        tasks: Callable[[Lease], Tasks],
        environment: Mapping[str, str],
        env_record: Mapping[str, manifest.EnvVariable],
        events: EventLog,
        pauses: PauseBook,
        meter: Meter,
        sampler: Sampler,
        is_new_output: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now_utc: Callable[[], float] = time.time,
    ) -> None:
        """Begins nothing; see `run`.

        Args:
            folder: the run folder.
            output: where the shards go.
            launcher: starts ranks.
            tasks: makes what prepares and concludes, once the lease is held.
            environment: of the ranks, whole.
            env_record: the part of it that is recorded in dataset.json.
            events: the log of the run.
            pauses: those in force.
            meter: measures the rate.
            sampler: GPUs, host and disk.
            is_new_output: the output folder did not exist: it is removed again if nothing comes of it.
            clock: monotonic seconds.
            now_utc: seconds since the epoch.
        """
        self.folder = folder
        self.output = output
        self.events = events
        self.pauses = pauses
        self.meter = meter
        self.sampler = sampler
        self.work: Work | None = None
        self.lease = LeaseKeeper(
            output, folder.name, clock=clock, on_lost=self._on_lease_lost, note_once=self._note_once
        )
        self.disk = DiskPolicy(pauses, sampler, events, note_once=self._note_once, now_utc=now_utc)
        self.engine: EngineControl | None = None
        self.failure: TapdeckError | None = None
        self.stop: Stop | None = None
        self.stopped_by = ""
        self.conclusion: Conclusion | None = None
        self.restarts = 0
        self.note = ""
        self.load_s: float | None = None
        self.peak_rss_bytes = 0
        self.state = State.CREATED
        self.state_since_utc = now_utc()
        self._clock = clock
        self._now_utc = now_utc
        self._launcher = launcher
        self._make_tasks = tasks
        self._environment = environment
        self._env_record = dict(env_record)
        self._is_new_output = is_new_output
        self._has_ended = False
        self._batch_at = self._state_at = clock()
        self._ready: protocol.Ready | None = None
        self._gpu_uuids: tuple[str, ...] = ()
        self._blameless_deaths = 0
        self._deaths_in_a_row = 0
        self._not_before = 0.0
        self._noted = ""
        self._wake = asyncio.Event()
        self._stop_event = asyncio.Event()
        self._watchers: set[asyncio.Event] = set()

    # -- what others may ask ---------------------------------------------------------------------------

    @property
    def depth(self) -> Depth | None:
        """The depth of pause in force."""
        return self.pauses.depth

    @property
    def silent_s(self) -> float:
        """Seconds since the last batch was reported, or since batches could be: how long a rank may have hung."""
        return self._clock() - max(self._batch_at, self._state_at)

    @property
    def restart_in_s(self) -> float:
        """Seconds until the replica is started again; 0 when nothing waits for that."""
        return max(0.0, self._not_before - self._clock()) if self.engine is None else 0.0

    def watch(self) -> asyncio.Event:
        """An event that is set whenever the state changes; give it back to `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Forgets a watcher."""
        self._watchers.discard(event)

    def wake_watchers(self) -> None:
        """Has everybody who watches look again."""
        for watcher in self._watchers:
            watcher.set()

    # -- what others may do ----------------------------------------------------------------------------

    def request_stop(self, how: Stop, *, by: str) -> None:
        """Ends the run; not the pauses, which are in force again at the next start. Does nothing after its end."""
        self.note_stop(how, by=by)
        self.changed()

    def note_stop(self, how: Stop, *, by: str) -> None:
        """As `request_stop`, for those who call `changed` themselves."""
        if not self._has_ended:
            if self.stop is None or how > self.stop:
                self.stop = how
                self.stopped_by = self.stopped_by or by
            self._stop_event.set()

    @property
    def next_state(self) -> State:
        """What `changed` would make the state now."""
        return lifecycle.derive(self._facts())

    def changed(self) -> None:
        """Derives the state anew, tells those who watch, and wakes the loop. Call after each change of a fact."""
        self._refresh()
        self._wake.set()

    def _refresh(self) -> None:
        old, new = self.state, lifecycle.derive(self._facts())
        lifecycle.check(old, new)
        if new != old:
            self.state = new
            self.state_since_utc = self._now_utc()
            self._state_at = self._clock()
            self.events.add(Event.STATE, old=old, new=new)
            self.wake_watchers()
        self.meter.set_active(new == State.RUNNING and self.is_computing)

    async def run(self) -> None:
        """Supervises the run to its end. Returns when no process is left; never raises what the run met."""
        try:
            self.changed()
            await self._hold_lease()
            await self._prepare()
            await self._compute()
            await self._conclude()
        except TapdeckError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self.request_stop(Stop.KILL, by="the end of the process")
            raise
        except Exception as error:  # noqa: BLE001 - the border of a run: it fails, and leaves nothing behind
            traceback.print_exc()
            self._fail(BugError(f"{type(error).__name__}: {error}", remedy="please report this"))
        finally:
            try:
                await self._end_engine()
            finally:
                await self._end()

    # -- phases ----------------------------------------------------------------------------------------

    async def _hold_lease(self) -> None:
        if self.lease.held is None:
            self.note = "waiting for the ranks of the former supervisor to leave the output"
            self.events.add(Event.NOTE, text=self.note)
            await self.lease.wait(lambda: not self._is_stopping, self._stop_event)
        self.lease.begin_beats()

    async def _prepare(self) -> None:
        if self.lease.held is None:
            return
        self.note = "reading the data and the model's configuration"
        await self._unless_stopped(self._make_tasks(self.lease.held).prepare(self._take_note))
        if self._is_stopping or self.lease.is_lost:
            return
        prepared = prepared_run.read(self.folder.job)
        self.work = Work(prepared)
        self.note = ""
        for text in prepared.notes:
            self.events.add(Event.NOTE, text=text)
        num_shards = len(prepared.shard_tokens)
        text = f"{num_shards - len(prepared.done)} of {num_shards} shards to do"
        self.events.add(Event.PREPARED, text=text)
        self.changed()

    async def _compute(self) -> None:
        while self.work is not None and not self._is_over():
            # Before the facts are read: whatever comes in while we act leads to another look.
            self._wake.clear()
            self.disk.look(self.work)
            await self._steer(self.work)
            self._refresh()
            if not self._is_over():
                await until_set(self._wake, self._pause_s())

    async def _conclude(self) -> None:
        """The lists of the data set, from what is on the disk; not after a kill, which must not wait."""
        held, work = self.lease.held, self.work
        if held is None or work is None or self.stop == Stop.KILL or self.lease.is_lost:
            return
        self.note = "writing the lists of the data set"
        self.changed()
        tasks = self._make_tasks(held)
        try:
            self.conclusion = await self._unless_stopped(tasks.conclude(self._take_note), level=Stop.KILL)
        except EngineError as error:
            # A process that is killed once (by the out-of-memory killer, say) may well live the next time.
            self.events.add(Event.NOTE, text=error.message)
            self.conclusion = await self._unless_stopped(tasks.conclude(self._take_note), level=Stop.KILL)
        failed = work.queue.failed
        if failed and self.failure is None:
            first = min(failed)
            raise EngineError(
                f"{len(failed)} shards could not be done; the first is shard {first}: {failed[first]}",
                remedy=f"see {self.folder.log('replica-0')}; started again, the run tries them anew",
                code="shards_failed",
            )
        lost = 0 if self.conclusion is None or self.stop is not None else self.conclusion.missing
        if lost and self.failure is None:
            raise StoreError(
                f"{lost} samples are neither stored nor quarantined, though their shards were reported as done",
                remedy=f"tapdeck verify {self.output} says which; started again, the run computes them anew",
                code="samples_missing",
            )

    async def _end(self) -> None:
        try:
            await self.lease.release(remove_if_empty=self._is_new_output)
        except TapdeckError as error:
            self.events.add(Event.NOTE, text=error.message)
        self._has_ended = True
        self.note = ""
        self.changed()
        kinds = {State.FINISHED: Event.FINISHED, State.STOPPED: Event.STOPPED, State.FAILED: Event.FAILED}
        self.events.add(kinds[self.state], error=self.failure.message if self.failure else None)

    # -- the loop's steps ------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self.engine is not None:
            return False
        is_done = self.work is None or self.work.queue.is_finished
        return is_done or self.stop is not None or self.failure is not None

    def _pause_s(self) -> float:
        # Looked at once: what is over by now was perhaps not when a rank would have been started.
        wait_s = self.restart_in_s
        if wait_s > 0.0:
            return min(POLL_S, wait_s)
        return 0.0 if self.engine is None and self._may_start() else POLL_S

    def _on_lease_lost(self, error: LeaseError) -> None:
        self._fail(error)
        self._stop_event.set()

    async def _steer(self, work: Work) -> None:
        if self.engine is None:
            if self._may_start():
                await self._start_engine(work)
            return
        if self.engine.has_ended:
            await self._reap(self.engine, work)
            return
        if self._ready is not None and self._wish() == Wish.RUN:
            await self._write_manifest(self._ready, work)
        # Only now: a pause may have come while that was written.
        wish = self._wish()
        self.engine.steer(wish)
        if wish == Wish.RUN and self.engine.is_ready and self._ready is None:
            self._hand_out(self.engine, work)

    def _wish(self) -> Wish:
        if self.stop == Stop.KILL or self.failure is not None:
            return Wish.KILL
        if self.stop is not None:
            return Wish.NOW if self.stop == Stop.NOW else Wish.DRAIN
        if self._is_done:
            return Wish.FINISH
        if self.depth == Depth.UNLOAD:
            return Wish.DRAIN
        return Wish.HOLD if self.depth is not None else Wish.RUN

    def _may_start(self) -> bool:
        is_wanted = self.work is not None and not self._is_done and self.lease.held is not None
        is_allowed = self.depth is None and self.stop is None and self.failure is None
        return is_wanted and is_allowed and self.restart_in_s == 0.0

    async def _start_engine(self, work: Work) -> None:
        held = self.lease.held
        if held is None:
            return
        try:
            replica = Replica(
                lambda endpoint: self._spec(work, held, endpoint),
                launcher=self._launcher,
                run_folder=self.folder.path,
                environment=self._environment,
                keep_fds=() if held.lock_fd is None else (held.lock_fd,),
            )
        except OSError as error:
            raise EngineError(
                f"the rank could not be started: {error}",
                remedy=f"see {self.folder.log('supervisor')}; start the run again when the cause is gone",
                code="not_started",
            ) from error
        self.engine = EngineControl(replica, self._on_report, self._wake)
        for pid in replica.pids:
            await self.lease.add_worker(pid)

    def _spec(self, work: Work, held: Lease, endpoint: str) -> EngineSpec:
        # The word of this start is part of the replica's name, and so of its part folders: a rank that
        # should be gone and still writes never shares one with its successor.
        name = f"0-{held.record.token[:8]}-{self.restarts}-{self._now_utc():.0f}"
        return msgspec.structs.replace(work.prepared.spec, endpoint=endpoint, replica=name)

    def _hand_out(self, engine: EngineControl, work: Work) -> None:
        name, queue = engine.replica.name, work.queue
        while queue.has_pending and queue.num_leased(name) < AHEAD and self.disk.allows_next(work):
            engine.work(queue.lease(name))

    async def _reap(self, engine: EngineControl, work: Work) -> None:
        """The process has ended: its shards go back, and what it died of is taken note of."""
        await self._unless_stopped(engine.leave(), level=Stop.KILL)
        await engine.close()
        # What it had in the making is nobody's any more. Its parts alone: others may still write.
        try:
            await asyncio.to_thread(listing.clean_parts, self.output, replica=engine.replica.name)
        except TapdeckError as error:
            self._note_once(error.message)
        # From here on without a pause: nobody may see a half of it.
        self.engine = None
        self._ready = None
        for uuid in self._gpu_uuids:
            self.sampler.set_rank(uuid, None)
        self._gpu_uuids = ()
        self.peak_rss_bytes = max(self.peak_rss_bytes, engine.peak_rss_bytes)
        self._judge_end(engine, work)
        work.give_back(engine.replica.name)
        self.changed()

    def _judge_end(self, engine: EngineControl, work: Work) -> None:
        if engine.fault is not None:
            # Of ours, not of the rank.
            raise engine.fault
        failed = engine.failure
        is_crash = failed is not None and failed.code == "crash" and engine.load_s is not None
        if failed is not None and not is_crash:
            self._fail(
                EngineError(
                    failed.message,
                    remedy=failed.remedy or f"see {engine.replica.log}",
                    code=failed.code,
                    exit_code=failed.exit_code,
                )
            )
            return
        death = failed.message if failed is not None else engine.death
        if death is None:
            if engine.was_told_to_leave:
                return
            death = "the rank left without being told to"
        self.restarts += 1
        self.events.add(Event.RANK_DIED, pid=engine.pid, shard=engine.started_shard, error=death)
        self._not_before = self._clock() + BACKOFF_S[min(self._deaths_in_a_row, len(BACKOFF_S) - 1)]
        self._deaths_in_a_row += 1
        self.note = f"the rank died: {death.splitlines()[0]}"
        if engine.started_shard is not None and self._blame(work, engine.started_shard, death):
            self._blameless_deaths = 0
            return
        self._blameless_deaths += 1
        if self._blameless_deaths >= MAX_BLAMELESS_DEATHS:
            self._fail(
                EngineError(
                    f"the rank died {self._blameless_deaths} times before it computed anything: {death}",
                    remedy=f"see {engine.replica.log}; start the run again when the cause is gone",
                    code="worker_died",
                )
            )

    def _blame(self, work: Work, shard: int, error: str) -> bool:
        """One attempt less for a shard; returns whether it was in hand."""
        again = work.fail(shard, error)
        if again is None:
            return False
        self.events.add(Event.SHARD_RETRY if again else Event.SHARD_FAILED, shard=shard, error=error)
        return True

    async def _end_engine(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await engine.close()

    # -- reports ---------------------------------------------------------------------------------------

    def _on_report(self, report: AnyReport) -> None:
        work = self.work
        if work is None:
            raise BugError(f"a rank speaks before the run was prepared: {report!r}")
        match report:
            case protocol.Hello():
                self.events.add(Event.STARTED, pid=report.pid, start_time=report.start_time, rank=report.rank)
            case protocol.Ready():
                self._on_ready(report)
            case protocol.ShardStarted():
                work.begin(report.shard)
            case protocol.BatchDone():
                self._on_batch(report, work)
            case protocol.ShardDone():
                if work.complete(report):
                    self._deaths_in_a_row = 0
                    self.events.add(Event.SHARD_DONE, shard=report.shard, num_bytes=report.num_bytes)
            case protocol.ShardFailed():
                self._on_failed_shard(report, work)
            case _:
                pass
        if not isinstance(report, protocol.BatchDone):
            self.changed()

    def _on_ready(self, report: protocol.Ready) -> None:
        self._ready = report
        self.load_s = report.load_s
        self.note = ""
        self.events.add(Event.READY, load_s=report.load_s)
        self._gpu_uuids = report.gpu_uuids
        for rank, uuid in enumerate(report.gpu_uuids):
            self.sampler.set_rank(uuid, f"0.{rank}")

    def _on_batch(self, report: protocol.BatchDone, work: Work) -> None:
        self._blameless_deaths = 0
        self._batch_at = self._clock()
        self.meter.on_tokens(report.num_tokens)
        work.add_batch(report.shard, report.num_tokens)

    def _on_failed_shard(self, report: protocol.ShardFailed, work: Work) -> None:
        if report.errno_name not in DISK_ERRORS:
            self._blame(work, report.shard, report.error)
        elif work.put_back(report.shard):
            self.disk.hold(
                f"shard {report.shard} could not be written: {report.error}; nothing half-written was kept; goes on by "
                "itself when there is room"
            )

    # -- small things ----------------------------------------------------------------------------------

    @property
    def is_computing(self) -> bool:
        """The model is loaded, and not held."""
        return self.engine is not None and self.engine.phase in {EnginePhase.WORKING, EnginePhase.LEAVING}

    def _facts(self) -> Facts:
        return Facts(
            is_prepared=self.work is not None,
            engine=EnginePhase.NONE if self.engine is None else self.engine.phase,
            is_done=self._is_done,
            depth=self.depth,
            # Asked to stop with nothing left to do, a run has finished all the same; but not before its end.
            is_stopping=self.stop is not None and not (self._has_ended and self._is_complete),
            is_failed=self.failure is not None,
            has_ended=self._has_ended,
        )

    @property
    def _is_stopping(self) -> bool:
        return self.stop is not None

    @property
    def _is_done(self) -> bool:
        return self.work is not None and self.work.queue.is_finished

    @property
    def _is_complete(self) -> bool:
        return self.conclusion is not None and self.conclusion.missing == 0

    def _note_once(self, text: str) -> None:
        """An event of what may go on for hours."""
        if text != self._noted:
            self._noted = text
            self.events.add(Event.NOTE, text=text)

    def _take_note(self, text: str) -> None:
        self.note = text
        self.changed()

    def _fail(self, error: TapdeckError) -> None:
        if self.failure is None:
            self.failure = error
        self.changed()

    async def _write_manifest(self, ready: protocol.Ready, work: Work) -> None:
        """dataset.json, when the model is proven and before the first shard of this start; not on a full disk."""
        now = msgspec.structs.replace(
            work.prepared.manifest, sglang=ready.settings, versions=ready.versions, env=self._env_record
        )
        old = await asyncio.to_thread(manifest.read_if_any, self.output)
        resumed, changes = manifest.with_environment(old, now)
        try:
            await asyncio.to_thread(manifest.write, self.output, resumed)
        except TapdeckError as error:
            if not is_disk_error(error):
                raise
            self.disk.hold(f"{error.message}; goes on by itself when there is room")
            return
        self._ready = None
        if changes:
            text = f"not as when this output was last written: {'; '.join(changes)}"
            self.events.add(Event.NOTE, text=text)

    async def _unless_stopped(self, work: Awaitable[T], *, level: Stop = Stop.DRAIN) -> T | None:
        """The result, or None when the run is ended (at least as urgently as `level`) before it is there."""
        task = asyncio.ensure_future(work)
        while not task.done():
            if self.lease.is_lost or (self.stop is not None and self.stop >= level):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            self._stop_event.clear()
            stop = asyncio.ensure_future(self._stop_event.wait())
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        return await task
