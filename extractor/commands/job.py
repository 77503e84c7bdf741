"""From a configuration to a job: prepared samples, plan, sizes, manifest. Shared by the verbs that run.

Reads and prepares the data set; loads no model and writes nothing into the output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from extractor import families, folders, plan, preflight
from extractor.commands.prepare import ProgressNotes
from extractor.config import RunConfig
from extractor.dataset.prepare import prepare
from extractor.dataset.prepared import PreparedDataset
from extractor.errors import LeaseError
from extractor.estimate import SizeEstimate, host_buffer_bytes, size, states_bytes_per_token
from extractor.plan import Geometry, Shard
from extractor.preflight import Facts
from extractor.protocol import EngineSpec
from extractor.store import manifest as manifests
from extractor.store.manifest import Manifest, ModelRecord, TapsRecord, Totals
from extractor.store.scan import committed, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extractor.commands.output import Output
    from extractor.store.scan import ScanResult


class Job(msgspec.Struct, frozen=True):
    """A run that is ready to start.

    Attributes:
        config: as given.
        facts: what it means on this machine.
        prepared: the samples; `prepared.num_samples` of them are taken.
        geometry: what the plan depends on.
        shards: the plan.
        size: what will be written.
        manifest: dataset.json as it will be written (without versions and settings).
    """

    config: RunConfig
    facts: Facts
    prepared: PreparedDataset
    geometry: Geometry
    shards: list[Shard]
    size: SizeEstimate
    manifest: Manifest

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.config.output.dir)

    @property
    def host_buffer_bytes(self) -> int:
        """Host memory for states between the engine and the writers, of all ranks together."""
        num_taps, tp = len(self.facts.taps.taps), self.config.model.tp
        return sum(
            host_buffer_bytes(
                buffers=self.config.writer.buffers,
                max_tokens=self.geometry.max_tokens,
                longest=self.size.largest_sample_tokens,
                hidden_size=self.facts.model.hidden_size,
                num_taps=num_taps,
                num_own=len(range(rank, num_taps, tp)),
                dtype=self.facts.store_dtype,
            )
            for rank in range(tp)
        )

    @property
    def num_chunked(self) -> int:
        """Samples that are longer than a batch."""
        return int((self.prepared.lengths > self.geometry.max_tokens).sum())


def make(config: RunConfig, *, out: Output, show_taps: bool = True) -> Job:
    """Checks the configuration, prepares the samples and plans the run. Blocking: reads all data.

    Args:
        config: the run.
        out: told of progress.
        show_taps: also told which taps are selected, before the data is read.

    Raises:
        TapdeckError: see `preflight.check` and `prepare`.
    """
    facts = preflight.check(config)
    for line in describe_taps(facts) if show_taps else ():
        out.note(line)
    prepared = prepare(
        config.data,
        facts.model.folder,
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=folders.cache_folder(),
        on_progress=ProgressNotes(out),
    )
    geometry = _geometry(config, facts)
    lengths = prepared.lengths.tolist()
    shards = plan.plan_shards(lengths, geometry)
    estimate = size(
        hidden_size=facts.model.hidden_size,
        num_taps=len(facts.taps.taps),
        dtype=facts.store_dtype,
        num_tokens=sum(lengths),
        num_samples=len(lengths),
        num_shards=len(shards),
        longest=max(lengths),
    )
    return Job(
        config,
        facts,
        prepared,
        geometry,
        shards,
        estimate,
        _manifest(config, facts, prepared, geometry, shards),
    )


def describe_taps(facts: Facts) -> Sequence[str]:
    """The selection in both conventions, and what to put into a draft model's configuration."""
    taps = facts.taps
    chosen = "default selection" if taps.is_default else "selection"
    return (
        f"taps ({chosen}): {', '.join(taps.names)} of {taps.num_layers} layers, hidden size {facts.model.hidden_size}",
        f'  ids "after" (SGLang, speculators < 0.5): {list(taps.ids("after"))};'
        f' ids "before" (vLLM, speculators >= 0.5): {list(taps.ids("before"))}',
        f"  draft model configuration: SGLang {list(taps.auxiliary_ids('after'))},"
        f" vLLM {list(taps.auxiliary_ids('before'))}",
        *([_describe_served(facts)] if taps.as_served else []),
    )


def _describe_served(facts: Facts) -> str:
    words = {
        "boundary": "the residual stream, as without it",
        "branch": "the last branch's output WITHOUT the residual",
    }
    return f"  as served by SGLang: {words[families.family_of(facts.model.architecture).served]}"


def engine_spec(job: Job, endpoint: str, *, start: str = "") -> EngineSpec:
    """What the worker is started from.

    Args:
        job: the run.
        endpoint: ZeroMQ address of the supervisor.
        start: word that no other start has. It is part of the replica's name, and so of its part folders: a
            worker that should be gone and still writes never shares one with its successor.
    """
    config, facts = job.config, job.facts
    return EngineSpec(
        model_folder=str(facts.model.folder),
        trust_remote_code=config.model.trust_remote_code,
        allow_unverified_sglang=config.model.allow_unverified_sglang,
        dtype=facts.dtype,
        device=facts.device,
        attention_backend=config.model.attention_backend,
        mem_fraction=config.model.mem_fraction,
        sglang_args=config.model.sglang,
        taps=facts.taps,
        hidden_size=facts.model.hidden_size,
        store_dtype=facts.store_dtype,
        geometry=job.geometry,
        max_batch_samples=max(len(batch) for shard in job.shards for batch in shard.batches),
        longest_sample=job.size.largest_sample_tokens,
        prepared=str(job.prepared.path),
        num_samples=len(job.prepared),
        output=str(job.output.resolve()),
        fingerprint=manifests.fingerprint(job.manifest),
        replica=replica_name(start),
        writer_threads=config.writer.threads,
        buffers=config.writer.buffers,
        endpoint=endpoint,
        tp=config.model.tp,
    )


def replica_name(start: str) -> str:
    """Name of the replica of one start, and so of its part folders."""
    return f"0-{start}" if start else "0"


def scan_output(job: Job) -> ScanResult:
    """What of the plan is there already, whole and with the prepared tokens. Blocking."""
    return scan(
        job.output,
        job.shards,
        manifests.fingerprint(job.manifest),
        taps=job.facts.taps.names,
        sample=job.prepared.sample,
    )


def check_disk(job: Job, found: ScanResult) -> None:
    """Refuses a run of which the rest does not fit.

    Raises:
        DiskSpaceError: with the figures.
    """
    left = sum(job.shards[shard].num_tokens for shard in found.to_do)
    preflight.check_disk(job.output, left * job.size.bytes_per_token, job.config.output.reserve_bytes)


def describe_damages(found: ScanResult) -> list[str]:
    """A line for each damaged shard: the first damage, whose reason names its file, and how many more."""
    lines = []
    for shard, damages in found.bad.items():
        more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
        lines.append(f"shard {shard} is damaged and will be computed again: {damages[0].reason}{more}")
    return lines


def require_same_data_set(job: Job) -> None:
    """Refuses an output folder that holds something else.

    Raises:
        LeaseError: with the differences.
        StoreError: its dataset.json cannot be read.
    """
    old = manifests.read_if_any(job.output)
    if old is None:
        _require_no_foreign_shards(job)
        return
    manifests.require_same(old, job.manifest, job.output)
    _require_same_taps(old, job.facts, job.output)


def require_same_settings(config: RunConfig, facts: Facts) -> None:
    """As `require_same_data_set`, as far as it can be said before the data is read. Blocking, short.

    Raises:
        LeaseError: with the differences.
        StoreError: dataset.json cannot be read.
    """
    output = Path(config.output.dir)
    old = manifests.read_if_any(output)
    if old is None:
        return
    # First: other taps also change the plan, which says less.
    _require_same_taps(old, facts, output)
    now = msgspec.structs.replace(
        old,
        model=_model_record(config, facts),
        data=_data_record(config),
        mask=config.data.mask.model_dump(),
        geometry=_geometry(config, facts),
        dtype=facts.store_dtype,
        compute_dtype=facts.dtype,
        device=facts.device,
        attention_backend=config.model.attention_backend,
        sglang_args=config.model.sglang,
        tp=config.model.tp,
    )
    manifests.require_same(old, now, output)


def _require_same_taps(old: Manifest, facts: Facts, output: Path) -> None:
    before, now = [tap.name for tap in old.taps.taps], list(facts.taps.names)
    if before != now:
        raise LeaseError(
            f"{output} holds the taps {', '.join(before)}; this run asks for {', '.join(now)}",
            remedy="choose another output.dir, or the taps that are there",
            code="output_differs",
        )


def _require_no_foreign_shards(job: Job) -> None:
    """Without dataset.json only the shards themselves say what they belong to."""
    fingerprint = manifests.fingerprint(job.manifest)
    planned = {shard.index for shard in job.shards}
    foreign = [
        record.index
        for _, record in committed(job.output)
        if record.fingerprint != fingerprint or record.index not in planned
    ]
    if foreign:
        raise LeaseError(
            f"{job.output} has no dataset.json, and {len(foreign)} of its shards belong to another data set "
            f"(the first is {min(foreign)})",
            remedy="restore dataset.json and the settings it names, or choose another output.dir",
            code="output_differs",
        )


def _geometry(config: RunConfig, facts: Facts) -> Geometry:
    states = states_bytes_per_token(facts.model.hidden_size, len(facts.taps.taps), facts.store_dtype)
    return Geometry(
        max_tokens=config.max_tokens,
        shard_tokens=plan.shard_tokens_for(config.output.shard_bytes, states),
        seed=config.data.seed,
        chunk_tokens=msgspec.UNSET if config.chunk_tokens is None else config.chunk_tokens,
    )


def _model_record(config: RunConfig, facts: Facts) -> ModelRecord:
    return ModelRecord(
        path=config.model.path,
        revision=facts.model.revision,
        config_hash=facts.model.config_hash,
        weights_hash=facts.model.weights_hash,
        architecture=facts.model.architecture,
        num_layers=facts.model.num_layers,
        hidden_size=facts.model.hidden_size,
    )


def _data_record(config: RunConfig) -> dict[str, Any]:
    return config.data.model_dump(include={"format", "template_args", "max_len", "min_supervised", "limit"})


def _manifest(
    config: RunConfig, facts: Facts, prepared: PreparedDataset, geometry: Geometry, shards: list[Shard]
) -> Manifest:
    meta = prepared.meta
    return Manifest(
        model=_model_record(config, facts),
        tokenizer_hash=meta.tokenizer_hash,
        template_hash=meta.template_hash,
        data_hash=meta.data_hash,
        samples_hash=meta.samples_hash,
        prepared_key=meta.key,
        data=_data_record(config),
        mask=config.data.mask.model_dump(),
        geometry=geometry,
        taps=TapsRecord.of(facts.taps, served=families.family_of(facts.model.architecture).served),
        dtype=facts.store_dtype,
        compute_dtype=facts.dtype,
        device=facts.device,
        attention_backend=config.model.attention_backend,
        sglang_args=config.model.sglang,
        tp=config.model.tp,
        totals=Totals(
            samples=len(prepared),
            tokens=int(prepared.lengths.sum()),
            supervised_tokens=int(prepared.supervised.sum()),
            shards=len(shards),
            rejected=sum(meta.counts.rejected.values()),
        ),
    )
