"""The supervisor of one run: what it knows, what it wants, and the loop that makes the one follow the other.

Owns the run from its preparation to its end: queue, pauses, restarts of the replica, disk policy. The state
is derived from facts (`lifecycle`), never set. It serves nobody (`server`), prints nothing, and imports
neither torch nor SGLang nor a tokenizer: what needs those runs in processes of its own.

Invariants: a shard that was reported as done is never computed again; a rank that dies costs its shard one
of three attempts and nothing else; a pause in force starts no process; every change of state is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import msgspec

from extractor import protocol
from extractor.errors import BugError, EngineError, LeaseBusyError, LeaseError, StoreError, TapdeckError
from extractor.protocol.states import Depth, Reason, State
from extractor.store import lease, listing, manifest
from extractor.supervisor import lifecycle, prepared_run
from extractor.supervisor.board import DONE, FAILED, PENDING, RUNNING, ShardBoard
from extractor.supervisor.engine_control import EngineControl, Wish
from extractor.supervisor.events import Event
from extractor.supervisor.lifecycle import EnginePhase, Facts
from extractor.supervisor.queue import ShardQueue
from extractor.supervisor.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from extractor.folders import RunFolder
    from extractor.protocol import AnyReport, EngineSpec
    from extractor.store.lease import Lease
    from extractor.supervisor.events import EventLog
    from extractor.supervisor.launcher import Launcher
    from extractor.supervisor.meter import Meter
    from extractor.supervisor.pauses import PauseBook
    from extractor.supervisor.prepared_run import Conclusion, PreparedRun
    from extractor.supervisor.tasks import Tasks
    from extractor.telemetry.sampler import Sampler

T = TypeVar("T")
AHEAD = 2
"""Shards in the hands of the replica: one that it computes and one to go on with at once."""
POLL_S = 1.0
"""Longest time between two looks at what is; reports and actions wake the loop at once."""
HEARTBEAT_S = 10.0
LEASE_WAIT_S = 120.0
"""How long the ranks of a former supervisor may take to leave the output."""
LEASE_POLL_S = 0.5
DISK_ERRORS = {"ENOSPC", "EDQUOT", "EROFS"}
"""Write errors that the next shard would meet as well."""
DISK_RETRY_S = 30.0
MAX_BLAMELESS_DEATHS = 3
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


class Stop(IntEnum):
    """How a run is ended; a later request may only be more urgent."""

    DRAIN = 1
    NOW = 2
    KILL = 3


class Failure(msgspec.Struct, frozen=True):
    """Why a run cannot go on."""

    code: str
    exit_code: int
    message: str
    remedy: str | None


class Supervisor:
    """One run under supervision. All methods are called in its event loop.

    Attributes:
        prepared: the plan; None until it is known.
        queue, board: of its shards; None until then.
        engine: the replica that runs; None when none does.
        failure: why it cannot go on.
        stop: how it is being ended.
        conclusion: what the output holds, once it has ended.
        restarts: of the replica, not asked for.
        quarantined, done_tokens, done_bytes: of the finished shards.
        started_bytes: of the shards finished since the start.
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
        self.prepared: PreparedRun | None = None
        self.queue: ShardQueue | None = None
        self.board: ShardBoard | None = None
        self.engine: EngineControl | None = None
        self.failure: Failure | None = None
        self.stop: Stop | None = None
        self.stopped_by = ""
        self.conclusion: Conclusion | None = None
        self.restarts = 0
        self.quarantined = 0
        self.done_tokens = 0
        self.done_bytes = 0
        self.started_bytes = 0
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
        self._lease: Lease | None = None
        self._has_ended = False
        self._batch_at = self._state_at = clock()
        self._ready: protocol.Ready | None = None
        self._in_hand: dict[int, int] = {}
        self._gpu_uuid: str | None = None
        self._blameless_deaths = 0
        self._not_before = 0.0
        self._beats: asyncio.Task[None] | None = None
        self._lease_lock = asyncio.Lock()
        self._is_lease_lost = False
        self._unrecorded_pause: str | None = None
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
    def tokens_done(self) -> int:
        """Tokens of finished shards and of the batches in hand."""
        return self.done_tokens + sum(self._in_hand.values())

    @property
    def needed_bytes(self) -> int:
        """That the shards to do will still take on the disk."""
        if self.prepared is None:
            return 0
        left = sum(self.prepared.shard_tokens) - self.done_tokens
        return left * self.prepared.bytes_per_token

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

    def take_lease(self) -> None:
        """Takes the output folder, before anybody is told that the run has started. Blocking.

        Raises:
            LeaseError: another run has it. When only the last worker of a former start still writes, nothing is
                raised: `run` waits for it.
            TapdeckError: the folder cannot be written.
        """
        with contextlib.suppress(LeaseBusyError):
            self._lease = lease.acquire(self.output, self.folder.name)

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
        if self._lease is None:
            self.note = "waiting for the ranks of the former supervisor to leave the output"
            self.events.add(Event.NOTE, text=self.note)
        end = self._clock() + LEASE_WAIT_S
        while self._lease is None and not self._is_stopping:
            # One look at a time: a thread that waits could take the lease when nobody wants it any more.
            try:
                self._lease = await asyncio.to_thread(lease.acquire, self.output, self.folder.name)
            except LeaseBusyError:
                if self._clock() >= end:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_event.wait(), LEASE_POLL_S)
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    async def _prepare(self) -> None:
        if self._lease is None:
            return
        self.note = "reading the data and the model's configuration"
        await self._unless_stopped(self._make_tasks(self._lease).prepare(self._take_note))
        if self._is_stopping or self._is_lease_lost:
            return
        prepared = prepared_run.read(self.folder.job)
        self.prepared = prepared
        done = set(prepared.done)
        todo = [shard for shard in range(len(prepared.shard_tokens)) if shard not in done]
        self.queue = ShardQueue(todo)
        self.board = ShardBoard(len(prepared.shard_tokens), prepared.done)
        self.quarantined = prepared.quarantined
        self.done_tokens = sum(prepared.shard_tokens[shard] for shard in prepared.done)
        self.done_bytes = prepared.done_bytes
        self.note = ""
        for text in prepared.notes:
            self.events.add(Event.NOTE, text=text)
        self.events.add(Event.PREPARED, text=f"{len(todo)} of {len(prepared.shard_tokens)} shards to do")
        self.changed()

    async def _compute(self) -> None:
        while self.queue is not None and not self._is_over():
            # Before the facts are read: whatever comes in while we act leads to another look.
            self._wake.clear()
            self._apply_disk_policy()
            await self._steer()
            self._refresh()
            if not self._is_over():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._pause_s())

    async def _conclude(self) -> None:
        """The lists of the data set, from what is on the disk; not after a kill, which must not wait."""
        if self._lease is None or self.prepared is None or self.stop == Stop.KILL or self._is_lease_lost:
            return
        self.note = "writing the lists of the data set"
        self.changed()
        tasks = self._make_tasks(self._lease)
        try:
            self.conclusion = await self._unless_stopped(tasks.conclude(self._take_note), level=Stop.KILL)
        except EngineError as error:
            # A process that is killed once (by the out-of-memory killer, say) may well live the next time.
            self.events.add(Event.NOTE, text=error.message)
            self.conclusion = await self._unless_stopped(tasks.conclude(self._take_note), level=Stop.KILL)
        queue = self.queue
        if queue is not None and queue.failed and self.failure is None:
            first = min(queue.failed)
            raise EngineError(
                f"{len(queue.failed)} shards could not be done; the first is shard {first}: {queue.failed[first]}",
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
        if self._lease is not None:
            try:
                await self._end_beats()
                await asyncio.to_thread(self._lease.release, remove_if_empty=self._is_new_output)
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
        is_done = self.queue is None or self.queue.is_finished
        return is_done or self.stop is not None or self.failure is not None

    def _pause_s(self) -> float:
        # Looked at once: what is over by now was perhaps not when a rank would have been started.
        wait_s = self.restart_in_s
        if wait_s > 0.0:
            return min(POLL_S, wait_s)
        return 0.0 if self.engine is None and self._may_start() else POLL_S

    async def _beat(self) -> None:
        """Says that we live, from the first moment to the last: preparing takes longer than a lease lasts."""
        while self._lease is not None:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                async with self._lease_lock:
                    await asyncio.to_thread(self._lease.heartbeat)
            except LeaseError as error:
                self._is_lease_lost = True
                self._fail(error)
                self._stop_event.set()
                return
            except TapdeckError as error:
                self._note_once(error.message)

    async def _end_beats(self) -> None:
        if self._beats is not None:
            # Not while one is being written: it would be there after the lease was given up.
            async with self._lease_lock:
                self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)

    async def _steer(self) -> None:
        if self.engine is None:
            if self._may_start():
                await self._start_engine()
            return
        if self.engine.has_ended:
            await self._reap()
            return
        if self._ready is not None and self._wish() == Wish.RUN:
            await self._write_manifest(self._ready)
        # Only now: a pause may have come while that was written.
        wish = self._wish()
        self.engine.steer(wish)
        if wish == Wish.RUN and self.engine.is_ready and self._ready is None:
            self._hand_out(self.engine)

    def _wish(self) -> Wish:
        if self.stop == Stop.KILL or self.failure is not None:
            return Wish.KILL
        if self.stop is not None:
            return Wish.NOW if self.stop == Stop.NOW else Wish.DRAIN
        if self.queue is not None and self.queue.is_finished:
            return Wish.FINISH
        if self.depth == Depth.UNLOAD:
            return Wish.DRAIN
        return Wish.HOLD if self.depth is not None else Wish.RUN

    def _may_start(self) -> bool:
        is_wanted = self.queue is not None and not self.queue.is_finished and self._lease is not None
        is_allowed = self.depth is None and self.stop is None and self.failure is None
        return is_wanted and is_allowed and self.restart_in_s == 0.0

    async def _start_engine(self) -> None:
        held = self._lease
        if held is None:
            return
        try:
            replica = Replica(
                self._spec,
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
        try:
            async with self._lease_lock:
                await asyncio.to_thread(held.add_worker, replica.process.pid)
        except LeaseError:
            raise
        except TapdeckError as error:
            # A full disk is no reason to end the run: the lock that the rank has inherited says the same.
            if held.lock_fd is None:
                raise
            self._note_once(error.message)

    def _spec(self, endpoint: str) -> EngineSpec:
        if self.prepared is None or self._lease is None:
            raise EngineError("a rank was to be started before the run was prepared", code="bug")
        # The word of this start is part of the replica's name, and so of its part folders: a rank that
        # should be gone and still writes never shares one with its successor.
        name = f"0-{self._lease.record.token[:8]}-{self.restarts}-{self._now_utc():.0f}"
        return msgspec.structs.replace(self.prepared.spec, endpoint=endpoint, replica=name)

    def _hand_out(self, engine: EngineControl) -> None:
        queue, board = self.queue, self.board
        if queue is None or board is None:
            return
        name = engine.replica.name
        if self._unrecorded_pause is not None:
            return
        while queue.has_pending and queue.num_leased(name) < AHEAD and self._has_room():
            engine.work(queue.lease(name))

    async def _reap(self) -> None:
        """The process has ended: its shards go back, and what it died of is taken note of."""
        engine, queue = self.engine, self.queue
        if engine is None or queue is None:
            return
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
        if self._gpu_uuid is not None:
            self.sampler.set_rank(self._gpu_uuid, None)
        self.peak_rss_bytes = max(self.peak_rss_bytes, engine.peak_rss_bytes)
        self._judge_end(engine, queue)
        for shard in queue.give_back(engine.replica.name):
            self._set_cell(shard, PENDING)
        self._in_hand.clear()
        self.changed()

    def _judge_end(self, engine: EngineControl, queue: ShardQueue) -> None:
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
        self._not_before = self._clock() + BACKOFF_S[min(self._blameless_deaths, len(BACKOFF_S) - 1)]
        self.note = f"the rank died: {death.splitlines()[0]}"
        if engine.started_shard in queue.leased:
            self._blame(queue, engine.started_shard, death)
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

    def _blame(self, queue: ShardQueue, shard: int, error: str) -> None:
        """One attempt less for a shard."""
        again = queue.fail(shard, error)
        self._in_hand.pop(shard, None)
        self._set_cell(shard, PENDING if again else FAILED)
        self.events.add(Event.SHARD_RETRY if again else Event.SHARD_FAILED, shard=shard, error=error)

    async def _end_engine(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await engine.close()

    # -- disk ------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether the next shard fits above the reserve, with those that are in hand."""
        prepared, queue, usage = self.prepared, self.queue, self.sampler.disk()
        if prepared is None or queue is None or queue.next_pending is None or usage is None:
            return True
        tokens = sum(prepared.shard_tokens[shard] - self._in_hand.get(shard, 0) for shard in queue.leased)
        tokens += prepared.shard_tokens[queue.next_pending]
        return usage.free_bytes >= prepared.reserve_bytes + tokens * prepared.bytes_per_token

    def _apply_disk_policy(self) -> None:
        queue = self.queue
        if queue is None or self.prepared is None:
            return
        if self.pauses.has(Reason.DISK):
            since = next(p.since_utc for p in self.pauses.pauses if p.reason == Reason.DISK)
            if self._has_room() and abs(self._now_utc() - since) >= DISK_RETRY_S:
                self._lift_disk_pause()
        elif self._unrecorded_pause is not None:
            self._pause_for_disk(self._unrecorded_pause)
        elif queue.has_pending and not queue.leased and not self._has_room():
            usage = self.sampler.disk()
            free = 0.0 if usage is None else usage.free_bytes / 1e9
            self._pause_for_disk(
                f"{free:.2f} GB free, the next shard must leave {self.prepared.reserve_bytes / 1e9:.2f} GB "
                "(output.reserve_bytes); goes on by itself when there is room"
            )

    def _pause_for_disk(self, note: str) -> None:
        if self.pauses.has(Reason.DISK):
            return
        try:
            self.pauses.add(Reason.DISK, Depth.HOLD, by="auto", note=note)
        except TapdeckError as error:
            # The disk of the run folder is full as well: no shard is handed out until the pause is on it.
            self._unrecorded_pause = self.note = note
            self._note_once(f"{note}; and that could not be recorded: {error.message}")
            return
        self._unrecorded_pause = None
        self.note = ""
        self.events.add(Event.PAUSED, reason=Reason.DISK, note=note)

    def _lift_disk_pause(self) -> None:
        try:
            self.pauses.lift(Reason.DISK)
        except TapdeckError as error:
            self._note_once(error.message)
            return
        self.events.add(Event.RESUMED, reason=Reason.DISK, note="there is room again")

    # -- reports ---------------------------------------------------------------------------------------

    def _on_report(self, report: AnyReport) -> None:
        match report:
            case protocol.Hello():
                self.events.add(Event.STARTED, pid=report.pid, start_time=report.start_time)
            case protocol.Ready():
                self._ready = report
                self.load_s = report.load_s
                self.note = ""
                self.events.add(Event.READY, load_s=report.load_s)
                if report.gpu_uuid is not None:
                    self._gpu_uuid = report.gpu_uuid
                    self.sampler.set_rank(report.gpu_uuid, "0.0")
            case protocol.ShardStarted():
                self._on_started(report)
            case protocol.BatchDone():
                self._on_batch(report)
            case protocol.ShardDone():
                self._on_done(report)
            case protocol.ShardFailed():
                self._on_failed_shard(report)
            case _:
                pass
        if not isinstance(report, protocol.BatchDone):
            self.changed()

    def _on_started(self, report: protocol.ShardStarted) -> None:
        if self._is_leased(report.shard):
            self._in_hand[report.shard] = 0
            self._set_cell(report.shard, RUNNING)

    def _on_batch(self, report: protocol.BatchDone) -> None:
        self._blameless_deaths = 0
        self._batch_at = self._clock()
        self.meter.on_tokens(report.num_tokens)
        # A shard whose writing has failed may still be computed for a while.
        if report.shard in self._in_hand:
            self._in_hand[report.shard] += report.num_tokens

    def _on_done(self, report: protocol.ShardDone) -> None:
        if self.queue is None or self.prepared is None or not self._is_leased(report.shard):
            return
        self.queue.complete(report.shard)
        self._in_hand.pop(report.shard, None)
        self._set_cell(report.shard, DONE)
        self.done_tokens += self.prepared.shard_tokens[report.shard]
        self.done_bytes += report.num_bytes
        self.started_bytes += report.num_bytes
        self.quarantined += report.quarantined
        self.events.add(Event.SHARD_DONE, shard=report.shard, num_bytes=report.num_bytes)

    def _on_failed_shard(self, report: protocol.ShardFailed) -> None:
        if self.queue is None or not self._is_leased(report.shard):
            return
        if report.errno_name not in DISK_ERRORS:
            self._blame(self.queue, report.shard, report.error)
            return
        self.queue.put_back(report.shard)
        self._in_hand.pop(report.shard, None)
        self._set_cell(report.shard, PENDING)
        self._pause_for_disk(
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
            is_prepared=self.prepared is not None,
            engine=EnginePhase.NONE if self.engine is None else self.engine.phase,
            is_done=self.queue is not None and self.queue.is_finished,
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
    def _is_complete(self) -> bool:
        return self.conclusion is not None and self.conclusion.missing == 0

    def _is_leased(self, shard: int) -> bool:
        """Whether it is in hand; what is said of one that is not changes nothing."""
        return self.queue is not None and shard in self.queue.leased

    def _set_cell(self, shard: int, letter: int) -> None:
        if self.board is not None:
            self.board.set(shard, letter)

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
            self.failure = Failure(error.code, error.exit_code, error.message, error.remedy)
        self.changed()

    async def _write_manifest(self, ready: protocol.Ready) -> None:
        """dataset.json, when the model is proven and before the first shard of this start; not on a full disk."""
        if self.prepared is None:
            return
        now = msgspec.structs.replace(
            self.prepared.manifest, sglang=ready.settings, versions=ready.versions, env=self._env_record
        )
        old = await asyncio.to_thread(manifest.read_if_any, self.output)
        resumed, changes = manifest.with_environment(old, now)
        try:
            await asyncio.to_thread(manifest.write, self.output, resumed)
        except TapdeckError as error:
            if not _is_disk_error(error):
                raise
            self._pause_for_disk(f"{error.message}; goes on by itself when there is room")
            return
        self._ready = None
        if changes:
            text = f"not as when this output was last written: {'; '.join(changes)}"
            self.events.add(Event.NOTE, text=text)

    async def _unless_stopped(self, work: Awaitable[T], *, level: Stop = Stop.DRAIN) -> T | None:
        """The result, or None when the run is ended (at least as urgently as `level`) before it is there."""
        task = asyncio.ensure_future(work)
        while not task.done():
            if self._is_lease_lost or (self.stop is not None and self.stop >= level):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            self._stop_event.clear()
            stop = asyncio.ensure_future(self._stop_event.wait())
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        return await task


def _is_disk_error(error: TapdeckError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and errno.errorcode.get(cause.errno or 0) in DISK_ERRORS
