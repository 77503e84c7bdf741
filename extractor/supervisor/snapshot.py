"""What consoles are told of a run: a `Snapshot`, made from the supervisor's facts. Reads, changes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from extractor.estimate import disk_forecast
from extractor.protocol import api
from extractor.protocol.states import Action, Reason, State, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.supervisor.core import Supervisor

EVENTS_SHOWN = 20
SILENT_S = 60.0


class SnapshotMaker:
    """Makes snapshots of one run."""

    def __init__(
        self,
        supervisor: Supervisor,
        run: api.RunInfo,
        *,
        clients: Callable[[], api.Clients],
        now_utc: Callable[[], float] = time.time,
    ) -> None:
        """Args are kept.

        Args:
            supervisor: of the run.
            run: what does not change.
            clients: counts those attached.
            now_utc: seconds since the epoch.
        """
        self._supervisor = supervisor
        self._run = run
        self._clients = clients
        self._now_utc = now_utc

    def make(self) -> api.Snapshot:
        """The run as it is now."""
        supervisor, work = self._supervisor, self._supervisor.work
        rates = self._rates()
        return api.Snapshot(
            api_version=api.API_VERSION,
            revision=supervisor.pauses.revision,
            time_utc=self._now_utc(),
            run=self._run_info(),
            state=api.StateInfo(
                supervisor.state, supervisor.state_since_utc, why(supervisor), supervisor.pauses.pauses
            ),
            progress=None if work is None else work.progress(),
            rates=rates,
            disk=self._disk(rates),
            telemetry=supervisor.sampler.latest(),
            shards=None if work is None else work.board.as_map(),
            replicas=(self._replica(),),
            events=tuple(supervisor.events.tail)[-EVENTS_SHOWN:],
            actions={
                action: refusal(action, supervisor.state, supervisor.pauses.pauses) for action in Action
            },
            clients=self._clients(),
        )

    def _run_info(self) -> api.RunInfo:
        work = self._supervisor.work
        if work is None or self._run.taps:
            return self._run
        prepared = work.prepared
        self._run = msgspec.structs.replace(
            self._run,
            device=prepared.spec.device,
            dtype=prepared.manifest.dtype,
            taps=prepared.spec.taps.names,
            ids_after=prepared.ids_after,
            ids_before=prepared.ids_before,
            bytes_per_token=prepared.bytes_per_token,
        )
        return self._run

    def _rates(self) -> api.Rates | None:
        supervisor = self._supervisor
        work = supervisor.work
        if work is None:
            return None
        supervisor.meter.tick()
        return supervisor.meter.rates(work.tokens_total - work.tokens_done, self._now_utc())

    def _disk(self, rates: api.Rates | None) -> api.Disk | None:
        supervisor, work = self._supervisor, self._supervisor.work
        usage = supervisor.sampler.disk()
        if usage is None:
            return None
        reserve = 0 if work is None else work.prepared.reserve_bytes
        needed = 0 if work is None else work.needed_bytes
        written = 0 if work is None else work.started_bytes
        running_s = 0.0 if rates is None else rates.running_s
        rate = written / running_s if written and running_s else None
        forecast = disk_forecast(
            free_bytes=usage.free_bytes,
            reserve_bytes=reserve,
            needed_bytes=needed,
            write_bytes_per_s=rate,
            eta_s=None if rates is None else rates.eta_s,
        )
        return api.Disk(
            path=str(supervisor.output),
            total_bytes=usage.total_bytes,
            used_bytes=usage.used_bytes,
            free_bytes=usage.free_bytes,
            reserve_bytes=reserve,
            run_bytes=0 if work is None else work.done_bytes,
            needed_bytes=needed,
            write_bytes_per_s=rate,
            full_in_s=forecast.full_in_s,
            is_enough=forecast.is_enough,
            verdict=forecast.verdict if work is not None else "not known before the run is prepared",
        )

    def _replica(self) -> api.ReplicaInfo:
        supervisor = self._supervisor
        engine = supervisor.engine
        if engine is None:
            phase = "waiting to restart" if supervisor.restart_in_s else "none"
            return api.ReplicaInfo("0", phase, None, None, None, supervisor.restarts, supervisor.load_s)
        shard, batch = engine.batch or (None, None)
        return api.ReplicaInfo(
            "0",
            engine.stage,
            engine.pid,
            shard,
            batch,
            supervisor.restarts,
            supervisor.load_s,
            engine.pids,
        )


STAGES = {
    "starting": "starting the rank",
    "load": "loading the model",
    "proof": "proving the capture",
    "warm-up": "warming up the kernels",
}


def why(supervisor: Supervisor) -> str:
    """One line: what the run is doing or waiting for, what went wrong and what to do."""
    match supervisor.state:
        case State.FAILED if supervisor.failure is not None:
            remedy = f" What to do: {supervisor.failure.remedy}" if supervisor.failure.remedy else ""
            return supervisor.failure.message + remedy
        case State.DRAINING if supervisor.failure is not None:
            return supervisor.failure.message
        case State.DRAINING:
            doing = supervisor.note or _in_hand(supervisor)
            return f"asked to stop by {supervisor.stopped_by}; {doing}"
        case State.STOPPED:
            return f"stopped by {supervisor.stopped_by}; started again, it goes on where it was"
        case State.LOADING:
            return _loading(supervisor)
        case State.HELD | State.HOLDING | State.UNLOADING | State.UNLOADED:
            return _paused(supervisor)
        case State.FINISHED if supervisor.conclusion is not None:
            return f"all {supervisor.conclusion.samples:,} samples are stored" + (
                f", {supervisor.conclusion.quarantined} quarantined"
                if supervisor.conclusion.quarantined
                else ""
            )
        case State.RUNNING if supervisor.is_computing and supervisor.silent_s > SILENT_S:
            # Told, not acted upon: a batch of a large model on a slow machine may take as long.
            return (
                f"no batch for {supervisor.silent_s:.0f} s; if the rank hangs, `tapdeck kill` ends it and a new start "
                "goes on"
            )
        case _:
            return supervisor.disk.unrecorded or supervisor.note


def _loading(supervisor: Supervisor) -> str:
    if supervisor.engine is None:
        wait = supervisor.restart_in_s
        return f"{supervisor.note}; started again in {wait:.0f} s" if wait else supervisor.note
    if supervisor.engine.was_told_to_leave:
        return "the processes of before still leave; the model is loaded again then"
    stage = STAGES.get(supervisor.engine.stage, supervisor.engine.stage)
    return f"{stage} ({supervisor.note})" if supervisor.note else stage


def _in_hand(supervisor: Supervisor) -> str:
    engine = supervisor.engine
    if engine is None or engine.load_s is None:
        return "nothing is in hand"
    return "the shard in hand is finished first" + (
        f" (shard {engine.started_shard})" if engine.started_shard is not None else ""
    )


def _paused(supervisor: Supervisor) -> str:
    reasons = [
        f"{pause.reason}, {pause.by}" + (f": {pause.note}" if pause.note else "")
        for pause in supervisor.pauses.pauses
    ]
    text = "; ".join(reasons)
    match supervisor.state:
        case State.HOLDING:
            loading = supervisor.engine is not None and supervisor.engine.load_s is None
            doing = "the model is loaded first" if loading else "the batch in flight is finished first"
            return f"paused ({text}); {doing}"
        case State.UNLOADING:
            return f"paused ({text}); {_in_hand(supervisor)}"
        case State.UNLOADED:
            return f"paused ({text}); nothing is loaded, the GPUs are free" + _how_to_go_on(supervisor)
        case _:
            return f"paused ({text})" + _how_to_go_on(supervisor)


def _how_to_go_on(supervisor: Supervisor) -> str:
    reasons = {pause.reason for pause in supervisor.pauses.pauses}
    return "" if reasons == {Reason.DISK} else "; stays so until an operator resumes it"
