"""A supervisor in this process whose ranks are scripted, whose tasks are played and whose disk and clocks are given.

Everything else is real: the loop, the lease, the pauses, the event log, the sockets of the ranks.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extractor import protocol
from extractor.errors import EngineError, TapdeckError
from extractor.folders import RunFolder
from extractor.plan import Geometry
from extractor.protocol import EngineSpec
from extractor.protocol.states import Depth, Reason, State
from extractor.store import manifest
from extractor.supervisor import lifecycle, prepared_run
from extractor.supervisor.core import Stop, Supervisor
from extractor.supervisor.events import EventLog
from extractor.supervisor.meter import Meter
from extractor.supervisor.pauses import PauseBook
from extractor.supervisor.prepared_run import Conclusion, PreparedRun
from extractor.taps import TapSelection, select
from extractor.telemetry.disk import DiskUsage
from tests.support.scripted_rank import ScriptedLauncher

DEADLINE_S = 10.0
BYTES_PER_TOKEN = 100
RESERVE_BYTES = 10_000
PLENTY = 1 << 40
GEOMETRY = Geometry(max_tokens=16, shard_tokens=64)


def _taps() -> TapSelection:
    return select(num_layers=8, layers=(1, 3), embed=False, final=True, normed=False, convention="after")


def prepared(output: Path, *, shards: int, tokens: int, done: tuple[int, ...]) -> PreparedRun:
    """job.json of a run with equal shards."""
    spec = EngineSpec(
        model_folder="/models/tiny",
        trust_remote_code=False,
        allow_unverified_sglang=False,
        dtype="bfloat16",
        device="cpu",
        attention_backend=None,
        mem_fraction=None,
        sglang_args={},
        taps=_taps(),
        hidden_size=8,
        store_dtype="bfloat16",
        geometry=GEOMETRY,
        max_batch_samples=1,
        prepared="/cache/prepared",
        num_samples=shards,
        output=str(output),
        fingerprint="f",
        replica="",
        writer_threads=1,
        buffers=1,
        endpoint="",
    )
    record = manifest.Manifest(
        model=manifest.ModelRecord(
            path="/models/tiny",
            revision=None,
            config_hash="c",
            weights_hash="w",
            architecture="LlamaForCausalLM",
            num_layers=8,
            hidden_size=8,
        ),
        tokenizer_hash="t",
        template_hash="p",
        data_hash="d",
        samples_hash="s",
        prepared_key="k",
        data={},
        mask={},
        geometry=GEOMETRY,
        taps=manifest.TapsRecord.of(_taps()),
        dtype="bfloat16",
        compute_dtype="bfloat16",
        device="cpu",
        attention_backend=None,
        sglang_args={},
        totals=manifest.Totals(
            samples=shards, tokens=shards * tokens, supervised_tokens=0, shards=shards, rejected=0
        ),
    )
    return PreparedRun(
        spec=spec,
        manifest=record,
        shard_tokens=(tokens,) * shards,
        shard_samples=(1,) * shards,
        done=done,
        done_bytes=len(done) * tokens * BYTES_PER_TOKEN,
        quarantined=0,
        bytes_per_token=BYTES_PER_TOKEN,
        reserve_bytes=RESERVE_BYTES,
        ids_after=(1, 3, 7),
        ids_before=(2, 4, 8),
        notes=("a note of the preparation",),
    )


class PlayedTasks:
    """Prepares and concludes when it may, as it is told to.

    Attributes:
        may_prepare, may_conclude: set as long as the test does not clear them.
        prepare_error, conclude_error: raised instead.
        conclude_deaths: so many times the process of a conclusion is killed before one lives.
        lost: samples that turn out to be missing in the end.
    """

    def __init__(self, run: PlayedRun) -> None:
        self._run = run
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.may_conclude = asyncio.Event()
        self.may_conclude.set()
        self.prepare_error: Exception | None = None
        self.conclude_error: Exception | None = None
        self.conclude_deaths = 0
        self.lost = 0
        self.now: list[str] = []
        self.conclusions = 0

    async def prepare(self, on_note: Callable[[str], None]) -> None:
        on_note("reading")
        await self._do("prepare", self.may_prepare)
        if self.prepare_error is not None:
            raise self.prepare_error
        prepared_run.write(self._run.folder.job, self._run.job)

    async def conclude(self, on_note: Callable[[str], None]) -> Conclusion:
        on_note("listing")
        await self._do("conclude", self.may_conclude)
        if self.conclude_deaths:
            self.conclude_deaths -= 1
            raise EngineError("conclude was ended by SIGKILL")
        if self.conclude_error is not None:
            raise self.conclude_error
        self.conclusions += 1
        there = len(set(self._run.launcher.committed) | set(self._run.job.done))
        return Conclusion(
            samples=there,
            tokens=0,
            supervised_tokens=0,
            shards=there,
            bytes=0,
            rejected=0,
            quarantined=0,
            missing=len(self._run.job.shard_tokens) - there + self.lost,
        )

    async def _do(self, what: str, may: asyncio.Event) -> None:
        self.now.append(what)
        try:
            await may.wait()
        finally:
            self.now.remove(what)


class FixedSampler:
    """Says what the test gives it."""

    def __init__(self) -> None:
        self.free_bytes: int | None = PLENTY
        self.ranks: dict[str, str | None] = {}

    def set_rank(self, uuid: str, rank: str | None) -> None:
        self.ranks[uuid] = rank

    def latest(self) -> None:
        return None

    def disk(self) -> DiskUsage | None:
        return None if self.free_bytes is None else DiskUsage(2 * PLENTY, PLENTY, self.free_bytes, 1.0)


class PlayedRun:
    """A supervised run. Use as an async context manager: leaving it ends the run and checks what must always hold.

    Attributes:
        launcher, tasks, sampler, supervisor: its parts.
        complaints: what asyncio could tell nobody else.
    """

    def __init__(
        self, folder: Path, *, shards: int = 4, batches: int = 3, done: tuple[int, ...] = ()
    ) -> None:
        self.folder = RunFolder(folder / "run")
        self.folder.path.mkdir(exist_ok=True)
        self.output = folder / "output"
        self.is_new_output = not self.output.exists()
        self.launcher = ScriptedLauncher(batches=batches)
        self.job = prepared(
            self.output, shards=shards, tokens=batches * self.launcher.batch_tokens, done=done
        )
        self.skipped_s = 0.0
        self.complaints: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None

    def skip(self, seconds: float) -> None:
        """Both clocks go on at once."""
        self.skipped_s += seconds
        self.supervisor.changed()

    async def __aenter__(self) -> PlayedRun:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.complaints.append(context))
        self.tasks = PlayedTasks(self)
        self.sampler = FixedSampler()
        self.log = EventLog(self.folder.events)
        self.pauses = PauseBook(self.folder.pauses, now_utc=self._now_utc)
        self.supervisor = Supervisor(
            self.folder,
            output=self.output,
            launcher=self.launcher,
            tasks=lambda _: self.tasks,
            environment={},
            env_record={},
            events=self.log,
            pauses=self.pauses,
            meter=Meter(),
            sampler=self.sampler,
            is_new_output=self.is_new_output,
            clock=lambda: time.monotonic() + self.skipped_s,
            now_utc=self._now_utc,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.task is not None and not self.task.done():
                self.supervisor.request_stop(Stop.KILL, by="end of the test")
                await self.end()
        finally:
            self.launcher.close()
            self.log.close()
        if kind is None:
            gc.collect()
            await asyncio.sleep(0)
            assert self.complaints == []
            if self.task is not None:
                self.require_ended_well()

    def _now_utc(self) -> float:
        return time.time() + self.skipped_s

    def start(self) -> None:
        """Takes the lease and begins, as the daemon does."""
        self.supervisor.lease.take()
        self.task = asyncio.create_task(self.supervisor.run())

    async def to_state(self, *states: State) -> None:
        await self.until(lambda: self.state in states, f"state {' or '.join(states)}")

    async def to_held(self) -> None:
        """Waits until a hold has reached the rank, and lets the batch in flight through."""
        await self.until(
            lambda: self.launcher.ranks and self.launcher.rank.heard[-1:] == [protocol.Hold()],
            "hold at the rank",
        )
        self.launcher.allow(1)
        await self.to_state(State.HELD)

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of a condition; fails with what happened so far."""
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"no {what}; {self.describe()}"
            await asyncio.sleep(0.001)
        return value

    async def end(self) -> None:
        """Waits for the end of the run."""
        assert self.task is not None
        done, _ = await asyncio.wait({self.task}, timeout=DEADLINE_S)
        assert done, f"the run does not end; {self.describe()}"
        await self.task

    async def finish(self) -> None:
        """Lets every batch pass and waits for the end."""
        self.launcher.allow()
        await self.end()

    async def shard_in_flight(self, shard: int) -> None:
        """Waits until the supervisor knows that a shard is being computed."""
        await self.until(
            lambda: self.supervisor.engine is not None and self.supervisor.engine.started_shard == shard,
            f"start of shard {shard}",
        )

    def pause(self, depth: Depth, reason: Reason = Reason.OPERATOR) -> None:
        self.pauses.add(reason, depth, by="ops1")
        self.supervisor.changed()

    def resume(self, reason: Reason = Reason.OPERATOR) -> None:
        self.pauses.lift(reason)
        self.supervisor.changed()

    @property
    def state(self) -> State:
        return self.supervisor.state

    @property
    def cells(self) -> str:
        assert self.supervisor.work is not None
        return self.supervisor.work.board.as_map().cells

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Lines of the log, all or of some kinds."""
        lines = [json.loads(line) for line in self.folder.events.read_bytes().splitlines()]
        return [line for line in lines if not kinds or line["event"] in kinds]

    def states(self) -> list[str]:
        """Those that the run went through."""
        changes = self.events("state")
        return [changes[0]["old"], *(change["new"] for change in changes)]

    def describe(self) -> str:
        engine = self.supervisor.engine
        return (
            f"state {self.state}, engine {None if engine is None else (engine.phase, engine.stage)}, failure "
            f"{self.supervisor.failure}, tasks {self.tasks.now}, complaints {self.complaints}, heard "
            f"{[rank.heard for rank in self.launcher.ranks[-2:]]}\n"
            + "\n".join(map(str, self.events()[-15:]))
        )

    def require_ended_well(self) -> None:
        """What holds at the end of every run, whatever happened."""
        assert self.state.is_terminal, self.describe()
        assert self.launcher.living == []
        assert not (self.output / "lease.json").exists()
        changes = self.events("state")
        for before, after in itertools.pairwise(changes):
            assert before["new"] == after["old"]
        for change in changes:
            lifecycle.check(State(change["old"]), State(change["new"]))
        done = [event["shard"] for event in self.events("shard_done")]
        assert len(done) == len(set(done))
        assert not set(done) & set(self.job.done)

    def refuse(self, error: TapdeckError) -> None:
        """The preparation ends with this."""
        self.tasks.prepare_error = error
