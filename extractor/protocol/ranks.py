"""What the supervisor and a replica's ranks say to each other: messages, and the spec a rank starts from.

msgspec structs over pyzmq (one DEALER per rank, one ROUTER at the supervisor, identity "REPLICA.RANK").
Requests go to rank 0 alone, which leads the others (`extractor.engine.lockstep`); of these the supervisor hears
`Hello`, `Failed` and `Bye`.
Requests (supervisor to rank) reject unknown fields; reports (rank to supervisor) ignore them. Every
connection starts with `Hello`, which carries `PROTOCOL_VERSION`; a mismatch ends the connection with both
versions named. No torch, no sglang, no clock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from extractor.plan import Geometry
from extractor.taps import TapSelection

PROTOCOL_VERSION = 3

Dtype = Literal["bfloat16", "float16", "float32"]


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a rank needs to know before the first shard; a JSON file in the run folder.

    Attributes:
        model_folder: local folder of the model.
        trust_remote_code: as in run.toml.
        allow_unverified_sglang: as in run.toml.
        dtype: precision of the computation.
        device: "cuda" or "cpu".
        attention_backend: None takes SGLang's choice (on the CPU: torch_native).
        mem_fraction: upper bound on the share of GPU memory, or None.
        sglang_args: further `ServerArgs` fields.
        taps: what to store.
        hidden_size: H.
        store_dtype: precision on disk.
        geometry: token budgets of batch, chunk and shard.
        max_batch_samples: samples in the fullest batch of the plan.
        prepared: folder of the prepared data set.
        num_samples: how many of its samples the run takes.
        output: the output folder.
        fingerprint: identity of the data set, written into every shard.
        replica: name of the replica, for part folders.
        writer_threads: threads that write to disk.
        buffers: host memory for states, in batches; see `extractor.estimate.host_buffer_bytes`.
        endpoint: ZeroMQ address of the supervisor, a socket in a folder of this start of the replica.
        longest_sample: tokens of the longest sample of the plan; it is computed in chunks where that is more than
            a batch.
        tp: ranks of the replica, over which each layer is split.
        grace_s: how long a rank whose supervisor is gone may take to finish the shard in hand.
    """

    model_folder: str
    trust_remote_code: bool
    allow_unverified_sglang: bool
    dtype: Dtype
    device: Literal["cuda", "cpu"]
    attention_backend: str | None
    mem_fraction: float | None
    sglang_args: dict[str, Any]
    taps: TapSelection
    hidden_size: int
    store_dtype: Dtype
    geometry: Geometry
    max_batch_samples: int
    prepared: str
    num_samples: int
    output: str
    fingerprint: str
    replica: str
    writer_threads: int
    buffers: int
    endpoint: str
    longest_sample: int = 0
    tp: int = 1
    grace_s: float = 60.0

    @property
    def has_chunks(self) -> bool:
        """A sample of the plan is longer than a batch."""
        return self.longest_sample > self.geometry.max_tokens


class Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor to rank."""


class WorkShard(Request, frozen=True):
    """Compute, write and commit this shard of the plan."""

    shard: int


class Finish(Request, frozen=True):
    """No more shards will come: commit what is in hand, then exit."""


class Stop(Request, frozen=True):
    """Stop after the batch in flight: commit shards that are complete, drop the one that is not, exit."""


class Drain(Request, frozen=True):
    """Finish the shard in hand and begin no other, then exit. A rank that is held drops it instead."""


class Hold(Request, frozen=True):
    """Compute nothing more after the batch in flight, until `Resume`; everything stays loaded.

    Attributes:
        number: of the holds of this start; `Held` repeats it.
    """

    number: int = 0


class Resume(Request, frozen=True):
    """Go on after `Hold`, with the very next batch."""


class Compute(Request, frozen=True):
    """Compute one batch for a caller that reads the states itself (`extractor.engine.states_server`).

    Attributes:
        number: of this batch; larger than that of any before.
        lengths: tokens of each sequence, at least one each.
        tokens: token ids of all sequences one after the other, int32, little-endian.
    """

    number: int
    lengths: tuple[int, ...]
    tokens: bytes


class Taken(Request, frozen=True):
    """Of the batches up to this number the caller has read the states, or does not want them any more."""

    number: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Rank to supervisor."""


class Hello(Report, frozen=True):
    """First message of a rank.

    Attributes:
        pid: process id.
        start_time: start of the process in seconds since the epoch (with pid: its identity).
        rank: its number within the replica.
    """

    protocol: int
    pid: int
    start_time: float
    rank: int = 0


class Stage(Report, frozen=True):
    """Where a rank is on its way to Ready: "load", "proof", "warm-up"."""

    name: str


class ProofLine(msgspec.Struct, frozen=True):
    """One check of the start-up proof: its largest per-token error and the bound it stayed under."""

    subject: str
    max_rel_err: float
    bound: float


class Ready(Report, frozen=True):
    """The model is loaded and the start-up proof has passed.

    Attributes:
        load_s: seconds from process start to here.
        proof: the checks that passed.
        settings: the SGLang settings in force that matter, for dataset.json.
        versions: of python, torch, sglang and what else the states depend on.
        buffer_bytes: host memory of the buffer pools of all ranks.
        gpu_uuids: of the GPUs that the ranks compute on, in their order, as NVML names them; none on the CPU.
    """

    load_s: float
    proof: tuple[ProofLine, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    buffer_bytes: int
    gpu_uuids: tuple[str, ...] = ()


class ShardStarted(Report, frozen=True):
    """The rank begins to compute a shard: what it dies of from here on is this shard's doing."""

    shard: int


class Held(Report, frozen=True):
    """No batch is in flight and none will be until `Resume`.

    Attributes:
        shard: the shard in hand, of which some batches are computed; None between two shards.
        number: of the `Hold` that this answers: one that was lifted meanwhile says nothing of the next.
    """

    shard: int | None
    number: int = 0


class BatchDone(Report, frozen=True):
    """A batch was computed and handed to the writers.

    Attributes:
        shard: its shard.
        batch: its number within the shard.
        num_tokens: its tokens.
    """

    shard: int
    batch: int
    num_tokens: int


class ShardDone(Report, frozen=True):
    """A shard has its final name.

    Attributes:
        num_bytes: of all its files.
        quarantined: samples left out of it.
    """

    shard: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_bytes: int
    quarantined: int


class ShardFailed(Report, frozen=True):
    """A shard could not be written; nothing of it has a final name.

    Attributes:
        error: what happened, with the file.
        errno_name: symbolic name of the operating system's error ("ENOSPC"), if it was one.
    """

    shard: int
    error: str
    errno_name: str | None


class StatesReady(Report, frozen=True):
    """The states of a `Compute` are in the shared memory, [taps, tokens, H], until `Taken` says otherwise.

    Attributes:
        number: of the `Compute`.
        num_tokens: rows of each tap.
        verdicts: per sequence None, or why its values may not be used.
    """

    number: int
    num_tokens: int
    verdicts: tuple[str | None, ...]


class Failed(Report, frozen=True):
    """The rank cannot go on: an error that is the same for every shard.

    Attributes:
        rank: its number within the replica.
        at_s: when it was raised, on the monotonic clock that all processes of a machine share: of several ranks
            the one that failed first says why.
    """

    code: str
    exit_code: int
    message: str
    remedy: str | None
    trace: str
    rank: int = 0
    at_s: float = 0.0


class Bye(Report, frozen=True):
    """Last message of a rank."""

    peak_rss_bytes: int
    rank: int = 0


AnyRequest = WorkShard | Finish | Stop | Drain | Hold | Resume | Compute | Taken
AnyReport = (
    Hello
    | Stage
    | Ready
    | ShardStarted
    | Held
    | BatchDone
    | ShardDone
    | ShardFailed
    | StatesReady
    | Failed
    | Bye
)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_report = msgspec.msgpack.Decoder(AnyReport).decode
