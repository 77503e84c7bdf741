"""Snapshots as a supervisor would send them: one for each situation an operator may meet, at a fixed time."""

from __future__ import annotations

import math

import msgspec

from extractor.protocol import api
from extractor.protocol.states import Action, Depth, Pause, Reason, State, refusal

NOW = 1_893_456_000.0 - 3 * 3600
"""2029-12-31 21:00:00 UTC, a Monday."""
NAME = "kimi-k25-eagle3"
GB = 1_000_000_000
TB = 1_000 * GB
SHARDS = 2310
_HISTORY = [4700.0 + 600 * math.sin(i / 5) for i in range(60)]
_HISTORY[30:34] = [None] * 4


def run_info(*, device="cuda", taps=True) -> api.RunInfo:
    return api.RunInfo(
        name=NAME,
        folder=f"/home/ops1/.local/state/tapdeck/runs/{NAME}",
        output=f"/data/{NAME}",
        config_file=f"/home/ops1/.local/state/tapdeck/runs/{NAME}/run.toml",
        model="moonshotai/Kimi-K2.5",
        device=device,
        dtype="bfloat16",
        taps=("layer_002", "layer_030", "layer_058", "final") if taps else (),
        ids_after=(2, 30, 58, 60) if taps else (),
        ids_before=(3, 31, 59, 61) if taps else (),
        bytes_per_token=57_349 if taps else 0,
        nccl_preset="pcie-blackwell" if device == "cuda" else "none",
        environment=(
            api.Variable("NCCL_ALGO", "Ring", "preset"),
            api.Variable("NCCL_P2P_LEVEL", "SYS", "preset"),
            api.Variable("NCCL_PROTO", "LL", "preset"),
        )
        if device == "cuda"
        else (),
        host="gpu-box-3",
        supervisor_pid=4411,
        started_utc=NOW - 3 * 3600 - 720,
        user="ops1",
        tapdeck_version="0.2.0",
    )


def gpu(index: int, second: int = 0) -> api.Gpu:
    wave = math.sin(second * 0.9 + index)
    return api.Gpu(
        uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000",
        index=index,
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        busy_percent=float(round(95 + 4 * wave)),
        memory_used_bytes=88.1e9 + 2e8 * wave,
        memory_total_bytes=95.6e9,
        power_watts=402.0 + 30 * wave,
        power_limit_watts=600.0,
        temperature_celsius=float(round(71 + 2 * wave)),
        sampled_utc=NOW + second - 1,
        rank=f"0.{index}",
    )


def host() -> api.Host:
    return api.Host(
        name="gpu-box-3",
        num_cpus=128,
        cpu_percent=23.0,
        memory_used_bytes=547 * GB,
        memory_total_bytes=1006 * GB,
        load_1m=31.2,
    )


def telemetry(gpus: tuple[api.Gpu, ...] | api.Unavailable, second: int = 0) -> api.Telemetry:
    return api.Telemetry(gpus=gpus, host=host(), sampled_utc=NOW + second - 1, interval_s=1.0)


def shard_map(done: int, failed: int = 0, running: int = 2, total: int = SHARDS) -> api.ShardMap:
    cells = ["d"] * done + ["r"] * running + ["."] * (total - done - running)
    for position in range(failed):
        cells[100 + 37 * position] = "x"
    return api.ShardMap("".join(cells)[:total], 1)


def disk(*, is_enough=True, free=2_310 * GB) -> api.Disk:
    return api.Disk(
        path=f"/data/{NAME}",
        total_bytes=7_680 * GB,
        used_bytes=7_680 * GB - free,
        free_bytes=free,
        reserve_bytes=100 * GB,
        run_bytes=711 * GB,
        needed_bytes=1_010 * GB,
        write_bytes_per_s=286e6,
        full_in_s=None if is_enough else 8_040.0,
        is_enough=is_enough,
        verdict="enough, 1.20 TB to spare" if is_enough else "1.01 TB too little: holds in about 2 h 14 min",
    )


def events() -> tuple[api.EventLine, ...]:
    return (
        api.EventLine(11, NOW - 12_000, "run_started", "ops1", "run started on cuda, 2,310 shards"),
        api.EventLine(12, NOW - 11_800, "replica_ready", "auto", "replica 0 ready: 22 min 4 s, proof passed"),
        api.EventLine(13, NOW - 5_300, "paused", "auto", "held by disk: 99.6 GB free, reserve 100 GB"),
        api.EventLine(14, NOW - 3_480, "resumed", "auto", "disk has room again: 105 GB free"),
        api.EventLine(15, NOW - 900, "shard_failed", "auto", "shard 100 failed 3 times: CUDA error"),
        api.EventLine(16, NOW - 60, "attached", "ops2", "attached from ssh 10.0.0.7"),
    )


def actions(state: State, pauses: tuple[Pause, ...]) -> dict[Action, str | None]:
    return {action: refusal(action, state, pauses) for action in Action}


def rates(second: int = 0) -> api.Rates:
    shift = second % 60
    history = tuple(_HISTORY[shift:] + _HISTORY[:shift])
    return api.Rates(
        tokens_per_s_now=4_980.0 + 40 * math.sin(second),
        tokens_per_s_mean=4_874.0,
        history=history,
        history_interval_s=5.0,
        eta_s=3_620.0 - second,
        eta_low_s=3_000.0 - second,
        eta_high_s=4_300.0 - second,
        finish_utc=NOW + 3_620,
        running_s=11_000.0 + second,
    )


def running(second: int = 0) -> api.Snapshot:
    """Eight GPUs, 2,310 shards; every second everything that moves has moved."""
    done = 953 + second // 6
    return api.Snapshot(
        api_version=api.API_VERSION,
        revision=41,
        time_utc=NOW + second,
        run=run_info(),
        state=api.StateInfo(State.RUNNING, NOW - 11_520, "computing shards 953 and 954"),
        progress=api.Progress(
            tokens_total=30_000_000,
            tokens_done=12_400_000 + 4_980 * second,
            samples_total=15_000,
            shards_total=SHARDS,
            shards_done=done,
            shards_running=2,
            shards_failed=1,
            rejected=12,
            quarantined=2,
        ),
        rates=rates(second),
        disk=msgspec.structs.replace(
            disk(), free_bytes=2_310 * GB - 286_000_000 * second, run_bytes=711 * GB + 286_000_000 * second
        ),
        telemetry=telemetry(tuple(gpu(index, second) for index in range(8)), second),
        shards=shard_map(done, failed=1),
        replicas=(
            api.ReplicaInfo(
                name="0", phase="ready", pid=5001, shard=done, batch=3 + second, restarts=0, load_s=1_324.0
            ),
        ),
        events=events(),
        actions=actions(State.RUNNING, ()),
        clients=api.Clients(writers=1, readers=2),
    )


def _changed(**changes) -> api.Snapshot:
    return msgspec.structs.replace(running(), **changes)


def _in_state(state: State, why: str, pauses: tuple[Pause, ...] = (), **changes) -> api.Snapshot:
    return _changed(
        state=api.StateInfo(state, NOW - 240, why, pauses), actions=actions(state, pauses), **changes
    )


def preparing() -> api.Snapshot:
    return _in_state(
        State.PREPARING,
        "tokenizing 15,000 samples: 9,200 done",
        run=run_info(taps=False),
        progress=None,
        rates=None,
        disk=None,
        shards=None,
        replicas=(),
        events=events()[:1],
    )


def loading() -> api.Snapshot:
    return _in_state(
        State.LOADING,
        "replica 0 loads 96 weight files, about 18 min to go",
        progress=msgspec.structs.replace(running().progress, tokens_done=0, shards_done=0, shards_running=0),
        rates=api.Rates(
            tokens_per_s_now=0.0,
            tokens_per_s_mean=None,
            history=(None,) * 12,
            history_interval_s=5.0,
            eta_s=None,
            eta_low_s=None,
            eta_high_s=None,
            finish_utc=None,
            running_s=0.0,
        ),
        shards=shard_map(0, running=0),
        replicas=(
            api.ReplicaInfo(
                name="0", phase="load", pid=5001, shard=None, batch=None, restarts=0, load_s=None
            ),
        ),
    )


def on_cpu() -> api.Snapshot:
    no_gpu = api.Unavailable("no_driver", "NVIDIA driver is not loaded on this machine")
    return _changed(
        run=run_info(device="cpu"),
        telemetry=telemetry(no_gpu),
        progress=api.Progress(
            tokens_total=50_000,
            tokens_done=21_000,
            samples_total=64,
            shards_total=13,
            shards_done=5,
            shards_running=1,
            shards_failed=0,
            rejected=0,
            quarantined=0,
        ),
        shards=shard_map(5, running=1, total=13),
    )


def _paused_rates() -> api.Rates:
    return msgspec.structs.replace(rates(), tokens_per_s_now=0.0, finish_utc=None)


def held_by_operator() -> api.Snapshot:
    pause = Pause(Reason.OPERATOR, Depth.HOLD, NOW - 240, "ops2 (pid 7001)")
    return _in_state(
        State.HELD,
        "paused by ops2 (pid 7001); R resumes",
        (pause,),
        rates=_paused_rates(),
        shards=shard_map(953, failed=1, running=0),
    )


def held_by_disk() -> api.Snapshot:
    pause = Pause(Reason.DISK, Depth.HOLD, NOW - 240, "auto", "99.6 GB free on /data, reserve 100 GB")
    return _in_state(
        State.HELD,
        "99.6 GB free on /data, reserve 100 GB; goes on by itself when 5 GB more are free",
        (pause,),
        rates=_paused_rates(),
        disk=disk(is_enough=False, free=99_600_000_000),
        shards=shard_map(953, failed=1, running=0),
    )


def failed() -> api.Snapshot:
    return _in_state(
        State.FAILED,
        "replica 0 died 3 times on shard 1204: CUDA error: an illegal memory access was encountered "
        f"(replica-0.log). What to do: read the log (2), then tapdeck start {NAME}.toml goes on with it",
        rates=_paused_rates(),
        replicas=(),
    )


def finished() -> api.Snapshot:
    whole = running()
    return _in_state(
        State.FINISHED,
        "all 2,310 shards are written; tapdeck verify checks them",
        progress=msgspec.structs.replace(
            whole.progress, tokens_done=30_000_000, shards_done=SHARDS, shards_running=0, shards_failed=0
        ),
        rates=_paused_rates(),
        shards=shard_map(SHARDS, running=0),
        disk=msgspec.structs.replace(
            disk(), run_bytes=1_721 * GB, needed_bytes=0, verdict="all shards are written"
        ),
        replicas=(),
    )
