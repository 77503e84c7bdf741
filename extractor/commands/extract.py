"""`tapdeck extract`: a whole run in the foreground, from a configuration to a complete data set.

Refusals come before weights are read. A run that is stopped, killed or failed is continued by the same
command: only shards that are committed and whole count as done.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from extractor import folders
from extractor.commands import job as jobs
from extractor.commands.conclude import conclude
from extractor.commands.progress import RunProgress
from extractor.errors import BugError, EngineError, LeaseBusyError, TapdeckError
from extractor.protocol import Ready
from extractor.quantities import bytes_words
from extractor.store import lease, listing, manifest
from extractor.supervisor.environment import worker_environment
from extractor.supervisor.events import Event, EventLog
from extractor.supervisor.foreground import ForegroundRun, Outcome
from extractor.supervisor.launcher import LocalLauncher
from extractor.supervisor.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from extractor.commands.job import Job
    from extractor.commands.output import Output
    from extractor.config import RunConfig
    from extractor.protocol import AnyReport
    from extractor.store.lease import Lease
    from extractor.store.scan import ScanResult
    from extractor.supervisor.launcher import Launcher

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
HEARTBEAT_S = 10.0
WORKER_WAIT_S = 60.0
"""How long to wait for the worker of a killed command to finish its shard."""


class ExtractResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `extract --json` prints.

    Attributes:
        run: the run folder (events, worker log).
        output: the output folder.
        samples, tokens, supervised_tokens, shards, bytes: of the data set as it is now.
        rejected: input records that did not become samples.
        quarantined: samples computed and not stored.
        shards_computed, tokens_computed: by this command.
        load_s: seconds until the model was ready (0 when nothing was to do).
        seconds: first batch to last commit.
        tokens_per_s: tokens_computed / seconds (0 when nothing was to do).
        peak_rss_bytes: of command and worker together.
        complete: every planned sample is stored or quarantined.
    """

    run: str
    output: str
    samples: int
    tokens: int
    supervised_tokens: int
    rejected: int
    quarantined: int
    shards: int
    bytes: int
    shards_computed: int
    tokens_computed: int
    load_s: float
    seconds: float
    tokens_per_s: float
    peak_rss_bytes: int
    complete: bool


def run(config: RunConfig, *, out: Output, launcher: Launcher | None = None) -> int:
    """The verb. Returns the exit code: 0, 7 when shards failed, 128+n when a signal stopped it.

    Raises:
        TapdeckError: the run was refused or failed.
    """
    with StopSignals() as stop:
        try:
            result = extract(config, out=out, stop=stop, launcher=launcher)
        except KeyboardInterrupt:
            out.note("stopped at once; the same command resumes")
            return stop.exit_code
        out.result(msgspec.to_builtins(result))
        if stop.number is not None and not result.complete:
            return stop.exit_code
    return 0 if result.complete else EngineError.exit_code


def extract(
    config: RunConfig, *, out: Output, stop: StopSignals, launcher: Launcher | None = None
) -> ExtractResult:
    """Runs to the end, or until `stop` says so. Blocking.

    Raises:
        TapdeckError: the run was refused or failed; what was committed stays.
        KeyboardInterrupt: a signal came while nothing was in hand, or a second one.
    """
    job = jobs.make(config, out=out)
    jobs.require_same_data_set(job)
    jobs.check_disk(job, jobs.scan_output(job))
    run_folder = folders.run_folder(job.output)
    is_new = not job.output.exists()
    held = _acquire(job.output, run_folder.name, out)
    try:
        # Again, now that nobody else writes: a worker may have committed a shard since.
        listing.clean_parts(job.output)
        found = jobs.scan_output(job)
        for line in jobs.describe_damages(found):
            out.note(line)
        out.note(f"{len(found.to_do)} of {len(job.shards)} shards to do")
        outcome = Outcome()
        with stop.after_the_batch() as event:
            if found.to_do:
                outcome = _compute(
                    job, found, run_folder, held, out=out, stop=event, launcher=launcher or LocalLauncher()
                )
            return _conclude(job, outcome, run_folder, out)
    finally:
        held.release(remove_if_empty=is_new)


class StopSignals:
    """SIGINT and SIGTERM while a command runs.

    Where nothing is in hand (data is prepared, a lease waited for) the first signal raises
    `KeyboardInterrupt`. Inside `after_the_batch` the first one asks to stop, and the second one raises.

    Attributes:
        number: the first signal that came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._event = threading.Event()
        self._is_polite = False
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a command ends with that the signal stopped."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> Self:
        """Installs the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the handlers."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def after_the_batch(self) -> Iterator[threading.Event]:
        """The first signal sets the event that this yields."""
        self._is_polite = True
        try:
            yield self._event
        finally:
            self._is_polite = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        is_first = self.number is None
        self.number = self.number or number
        if not (is_first and self._is_polite):
            raise KeyboardInterrupt
        self._event.set()


class _Watcher:
    """Progress, the lease's heartbeat, and dataset.json as soon as the model is proven."""

    def __init__(
        self, job: Job, held: Lease, progress: RunProgress, stop: threading.Event, out: Output
    ) -> None:
        self._job = job
        self._out = out
        self._held = held
        self._progress = progress
        self._stop = stop
        self._said_stop = False
        self._beat_at = time.monotonic()

    def on_report(self, report: AnyReport) -> None:
        """See `extractor.supervisor.foreground.Watcher`."""
        if isinstance(report, Ready):
            self._write_manifest(report)
        self._progress.on_report(report)

    def _write_manifest(self, ready: Ready) -> None:
        output = self._job.output
        now = msgspec.structs.replace(self._job.manifest, sglang=ready.settings, versions=ready.versions)
        resumed, changes = manifest.with_environment(manifest.read_if_any(output), now)
        if changes:
            self._out.note(f"not as when this output was last written: {'; '.join(changes)}")
        manifest.write(output, resumed)

    def on_tick(self) -> None:
        """See `extractor.supervisor.foreground.Watcher`."""
        if self._stop.is_set() and not self._said_stop:
            self._said_stop = True
            self._progress.stopping()
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._held.heartbeat()


def _acquire(output: Path, run: str, out: Output) -> Lease:
    """The lease; says why it waits when the worker of a killed command still writes."""
    try:
        return lease.acquire(output, run)
    except LeaseBusyError as busy:
        out.note(f"{busy.message}; waiting for up to {WORKER_WAIT_S:.0f} s")
    return lease.acquire(output, run, wait_seconds=WORKER_WAIT_S)


def _compute(
    job: Job,
    found: ScanResult,
    run_folder: Path,
    held: Lease,
    *,
    out: Output,
    stop: threading.Event,
    launcher: Launcher,
) -> Outcome:
    environment, variables = worker_environment(
        os.environ,
        job.config.nccl,
        device=job.facts.device,
        package_root=PACKAGE_ROOT,
        gpus=job.config.model.gpus,
    )
    for variable in variables:
        out.note(f"environment: {variable.name}={variable.value} (from {variable.origin})")
    env_record = {v.name: manifest.EnvVariable(v.value, v.origin) for v in variables}
    job = msgspec.structs.replace(job, manifest=msgspec.structs.replace(job.manifest, env=env_record))
    tokens = sum(job.shards[shard].num_tokens for shard in found.to_do)
    events = EventLog(run_folder / "events.jsonl")
    start = held.record.token[:8]
    with (
        contextlib.closing(events),
        _no_leftovers(job, start),
        RunProgress(
            out, device=job.facts.device, total_tokens=tokens, total_shards=len(found.to_do)
        ) as progress,
        Replica(
            lambda endpoint: jobs.engine_spec(job, endpoint, start=start),
            launcher=launcher,
            run_folder=run_folder,
            environment=environment,
            keep_fds=() if held.lock_fd is None else (held.lock_fd,),
        ) as replica,
    ):
        for pid in replica.pids:
            held.add_worker(pid)
        out.note(f"worker: pid {', '.join(map(str, replica.pids))}, log {replica.log}")
        watcher = _Watcher(job, held, progress, stop, out)
        outcome = ForegroundRun(replica, found.to_do, events=events, watcher=watcher, stop=stop).run()
        events.add(Event.STOPPED if outcome.was_stopped else Event.FINISHED, shards=len(outcome.done))
    return outcome


@contextlib.contextmanager
def _no_leftovers(job: Job, start: str) -> Iterator[None]:
    """Removes what ranks that were ended had in the making; of this start alone, as the lease may be lost."""
    try:
        yield
    finally:
        # What cannot be removed is removed at the next start.
        with contextlib.suppress(TapdeckError):
            listing.clean_parts(job.output, replica=jobs.replica_name(start))


def _conclude(job: Job, outcome: Outcome, run_folder: Path, out: Output) -> ExtractResult:
    """Index files and totals, from what is really on the disk."""
    conclusion, there = conclude(job.output, job.shards, job.manifest, job.prepared, job.facts.taps.names)
    lost = sorted(set(outcome.done) - there)
    if lost:
        raise BugError(f"shards {lost} were reported as committed and are not on the disk")
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = ExtractResult(
        run=str(run_folder),
        output=str(job.output),
        samples=conclusion.samples,
        tokens=conclusion.tokens,
        supervised_tokens=conclusion.supervised_tokens,
        rejected=conclusion.rejected,
        quarantined=conclusion.quarantined,
        shards=conclusion.shards,
        bytes=conclusion.bytes,
        shards_computed=len(outcome.done),
        tokens_computed=outcome.num_tokens,
        load_s=round(outcome.load_s, 3),
        seconds=round(outcome.seconds, 3),
        tokens_per_s=round(outcome.num_tokens / outcome.seconds, 1) if outcome.seconds else 0.0,
        peak_rss_bytes=own_peak + outcome.peak_rss_bytes,
        complete=not conclusion.missing,
    )
    _report(result, job, outcome, out)
    return result


def _report(result: ExtractResult, job: Job, outcome: Outcome, out: Output) -> None:
    if outcome.num_tokens:
        out.line(
            f"computed {result.shards_computed} shards, {result.tokens_computed:,} tokens in {result.seconds:.1f} s: "
            f"{result.tokens_per_s:,.0f} tokens/s"
        )
    for shard, error in sorted(outcome.failed.items()):
        out.line(f"FAILED shard {shard}: {error}")
    out.line(
        f"{result.output}: {result.shards} of {len(job.shards)} shards, {result.samples:,} samples, "
        f"{result.tokens:,} tokens ({result.supervised_tokens:,} supervised), {bytes_words(result.bytes)}"
    )
    if result.rejected or result.quarantined:
        out.line(
            f"rejected records: {result.rejected} (rejected.jsonl), quarantined samples: {result.quarantined}"
        )
    if result.complete:
        out.line(
            "complete: every planned sample is stored" + (" or quarantined" if result.quarantined else "")
        )
    else:
        out.line("not complete: run the same command again to resume")
