"""What supervisor and console say to each other: JSON over HTTP and a WebSocket on a Unix socket.

`GET /v1/run` answers with a `Snapshot`; `WS /v1/stream` sends one, then `Delta`s with the sections that have
changed; `POST /v1/actions/{name}` takes an `ActionRequest` and answers with an `ActionResult` or a `Refusal`.
Times `_utc` are seconds since the epoch. A value that cannot be had is `Unavailable`, with its reason,
never 0. Requests reject unknown fields, answers ignore them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from extractor.protocol.states import Action, Pause, State

API_VERSION = 1
VERSION_HEADER = "Tapdeck-Api"
"""Both sides name their `API_VERSION` in it; a mismatch is refused with both."""
ORIGIN_HEADER = "Tapdeck-Origin"
"""Where the person sits (SSH client address), for the audit; what the client says, not proven."""

Unavailability = Literal["not_supported", "no_permission", "transient", "lost", "no_driver", "not_yet"]


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    """A value that cannot be had, and why."""

    reason: Unavailability
    detail: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU at one moment.

    Attributes:
        rank: "REPLICA.RANK" of this run that computes on it, if one does.
        sampled_utc: when its values were read; each GPU on its own, since a driver call may block.
    """

    uuid: str
    index: int
    name: str
    busy_percent: float | Unavailable
    memory_used_bytes: float | Unavailable
    memory_total_bytes: float | Unavailable
    power_watts: float | Unavailable
    power_limit_watts: float | Unavailable
    temperature_celsius: float | Unavailable
    sampled_utc: float
    rank: str | None = None


class Host(msgspec.Struct, frozen=True, tag="host"):
    """The machine."""

    name: str
    num_cpus: int
    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    load_1m: float


class Telemetry(msgspec.Struct, frozen=True):
    """GPUs and host, sampled once per machine whatever the number of consoles.

    Attributes:
        gpus: by index, or why there are none.
        interval_s: after three of them without a new sample the values are stale.
    """

    gpus: tuple[Gpu, ...] | Unavailable
    host: Host | Unavailable
    sampled_utc: float
    interval_s: float


class Variable(msgspec.Struct, frozen=True):
    """One environment variable of the ranks that can change a run, and where it comes from."""

    name: str
    value: str
    origin: Literal["shell", "preset", "run.toml"]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is. Does not change while its supervisor lives, but for what `prepared` tells.

    Attributes:
        name: of the run; its folder is below the user's state folder.
        folder: the run folder.
        output: where the shards go.
        config_file: the run.toml in the run folder, as it was started.
        model: path or hub id.
        taps, ids_after, ids_before: the selection; empty until the run is prepared.
        bytes_per_token: on disk; 0 until prepared.
        nccl_preset: name of the preset.
    """

    name: str
    folder: str
    output: str
    config_file: str
    model: str
    device: str
    dtype: str = ""
    taps: tuple[str, ...] = ()
    ids_after: tuple[int, ...] = ()
    ids_before: tuple[int, ...] = ()
    bytes_per_token: int = 0
    nccl_preset: str = "none"
    environment: tuple[Variable, ...] = ()
    host: str
    supervisor_pid: int
    started_utc: float
    user: str
    tapdeck_version: str


class StateInfo(msgspec.Struct, frozen=True):
    """Where the run is and why.

    Attributes:
        why: one line for people: what it is doing or waiting for, or what went wrong and what to do.
    """

    state: State
    since_utc: float
    why: str
    pauses: tuple[Pause, ...] = ()


class Progress(msgspec.Struct, frozen=True):
    """How far the run is; counts of the whole data set, earlier starts included."""

    tokens_total: int
    tokens_done: int
    samples_total: int
    shards_total: int
    shards_done: int
    shards_running: int
    shards_failed: int
    rejected: int
    quarantined: int


class Rates(msgspec.Struct, frozen=True):
    """How fast it is. Pauses do not count.

    Attributes:
        tokens_per_s_now: over the last seconds; 0.0 when nothing was computed.
        tokens_per_s_mean: of this start; None before the first batch.
        history: tokens/s of the last intervals, oldest first; None where the run was paused or not loaded.
        history_interval_s: length of one.
        eta_s, eta_low_s, eta_high_s: seconds of computing left, with a band; None when not known.
        finish_utc: when it would be done; None while paused.
        running_s: seconds of computing in this start.
    """

    tokens_per_s_now: float
    tokens_per_s_mean: float | None
    history: tuple[float | None, ...]
    history_interval_s: float
    eta_s: float | None
    eta_low_s: float | None
    eta_high_s: float | None
    finish_utc: float | None
    running_s: float


class Disk(msgspec.Struct, frozen=True):
    """The output's file system.

    Attributes:
        run_bytes: of the finished shards of this run.
        needed_bytes: that the shards to do will take.
        write_bytes_per_s: of committed shards, mean of this start; None before the first.
        full_in_s: until the reserve is touched at that rate; None when not known or when the run ends before.
        is_enough: what is needed fits above the reserve.
        verdict: that in words.
    """

    path: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserve_bytes: int
    run_bytes: int
    needed_bytes: int
    write_bytes_per_s: float | None
    full_in_s: float | None
    is_enough: bool
    verdict: str


class ShardMap(msgspec.Struct, frozen=True):
    """One letter per shard, in order: `.` pending, `r` running, `d` done, `x` failed.

    Attributes:
        cells: the letters; for plans of more than `MAX_CELLS` shards one letter per `shards_per_cell`.
    """

    cells: str
    shards_per_cell: int


MAX_CELLS = 4096


class ReplicaInfo(msgspec.Struct, frozen=True):
    """One copy of the model.

    Attributes:
        phase: "none", "starting", "load", "proof", "warm-up", "ready", "held", "leaving", "waiting to restart".
        pid: of rank 0; None without a process.
        shard, batch: last batch that it reported.
        restarts: since the supervisor started.
        pids: of all ranks, in their order; none without processes.
    """

    name: str
    phase: str
    pid: int | None
    shard: int | None
    batch: int | None
    restarts: int
    load_s: float | None
    pids: tuple[int, ...] = ()


class EventLine(msgspec.Struct, frozen=True):
    """One line of events.jsonl, for people.

    Attributes:
        who: user of an action, "auto" for what the supervisor did by itself.
    """

    number: int
    time_utc: float
    event: str
    who: str
    text: str


class Clients(msgspec.Struct, frozen=True):
    """Consoles that are attached."""

    writers: int
    readers: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a console shows.

    Attributes:
        revision: grows with every accepted action and every automatic one that changes what the run does.
        actions: for each action None, or why it is not possible now.
    """

    api_version: int
    revision: int
    time_utc: float
    run: RunInfo
    state: StateInfo
    progress: Progress | None
    rates: Rates | None
    disk: Disk | None
    telemetry: Telemetry | None
    shards: ShardMap | None
    replicas: tuple[ReplicaInfo, ...]
    events: tuple[EventLine, ...]
    actions: dict[Action, str | None]
    clients: Clients


class StreamSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """First message of a stream."""

    seq: int
    snapshot: Snapshot


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta", omit_defaults=True):
    """What has changed since the message before: whole sections. Without any it is a sign of life."""

    seq: int
    time_utc: float
    revision: int | UnsetType = UNSET
    run: RunInfo | UnsetType = UNSET
    state: StateInfo | UnsetType = UNSET
    progress: Progress | UnsetType | None = UNSET
    rates: Rates | UnsetType | None = UNSET
    disk: Disk | UnsetType | None = UNSET
    telemetry: Telemetry | UnsetType | None = UNSET
    shards: ShardMap | UnsetType | None = UNSET
    replicas: tuple[ReplicaInfo, ...] | UnsetType = UNSET
    events: tuple[EventLine, ...] | UnsetType = UNSET
    actions: dict[Action, str | None] | UnsetType = UNSET
    clients: Clients | UnsetType = UNSET


StreamMessage = StreamSnapshot | Delta
SECTIONS = tuple(name for name in Delta.__struct_fields__ if name not in {"seq", "time_utc"})


def delta(old: Snapshot, new: Snapshot, *, seq: int) -> Delta:
    """What a client that has `old` needs to know."""
    changes: dict[str, Any] = {
        name: getattr(new, name) for name in SECTIONS if getattr(new, name) != getattr(old, name)
    }
    return Delta(seq=seq, time_utc=new.time_utc, **changes)


def apply(snapshot: Snapshot, change: Delta) -> Snapshot:
    """The snapshot after a delta."""
    values = {name: getattr(change, name) for name in SECTIONS}
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not UNSET}
    return msgspec.structs.replace(snapshot, time_utc=change.time_utc, **changes)


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/actions/{name}`.

    Attributes:
        depth: of `pause`; "hold" when not given.
        expected_revision: refused with 409 when the run has another; None: whatever it has.
        idempotency_key: a request with a key that was answered before gets that answer again.
    """

    depth: str | None = None
    expected_revision: int | None = None
    idempotency_key: str | None = None


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """An action was accepted.

    Attributes:
        message: what it means, for people.
        revision: of the run from now on.
        state: of the run from now on.
    """

    message: str
    revision: int
    state: State


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A request was refused; nothing has changed.

    Attributes:
        code: "read_only", "conflict", "not_possible", "bad_request", "no_such", "api_version".
        revision: of the run.
    """

    code: str
    message: str
    remedy: str | None = None
    revision: int = 0


class LogChunk(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/logs`: lines of one log file.

    Attributes:
        source: name of the log, one of `sources`.
        lines: without line ends; control characters are data.
        next_offset: where to go on reading, in bytes.
    """

    source: str
    sources: tuple[str, ...]
    lines: tuple[str, ...]
    next_offset: int


class SupervisorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`supervisor.json` of a run folder: where its supervisor is. Information; the lock decides.

    Attributes:
        pid, start_ticks, boot_id, host: identity of the process.
        socket: for operators.
        readonly_socket: everything that changes the run is refused on it.
    """

    pid: int
    start_ticks: int
    boot_id: str
    host: str
    socket: str
    readonly_socket: str
    started_utc: float
    tapdeck_version: str
    api_version: int
