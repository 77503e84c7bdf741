"""`tapdeck estimate`: what a run will write and whether it fits; loads no weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from extractor import folders, preflight
from extractor.commands import job as jobs
from extractor.errors import DiskSpaceError
from extractor.quantities import bytes_words
from extractor.store import manifest, scan
from extractor.supervisor.environment import worker_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extractor.commands.output import Output
    from extractor.config import RunConfig
    from extractor.protocol.api import Variable


def run(config: RunConfig, *, out: Output) -> int:
    """The verb. Returns 0 when the output fits, else the exit code of `DiskSpaceError`.

    Raises:
        TapdeckError: the run would be refused.
    """
    job = jobs.make(config, out=out)
    found = scan.scan(job.output, job.shards, manifest.fingerprint(job.manifest), taps=job.facts.taps.names)
    left = sum(job.shards[shard].num_tokens for shard in found.to_do)
    disk = preflight.disk_verdict(job.output, left * job.size.bytes_per_token, config.output.reserve_bytes)
    totals = job.manifest.totals
    batches = [batch for shard in job.shards for batch in shard.batches]
    fill = _fill(job)
    out.line(
        f"samples {totals.samples:,}, tokens {totals.tokens:,} ({totals.supervised_tokens:,} supervised)"
    )
    out.line(
        f"shards {len(job.shards):,} ({len(found.done):,} done), batches {len(batches):,}, {fill:.1%} full"
    )
    if job.num_chunked:
        out.line(
            f"samples longer than a batch of {job.geometry.max_tokens:,} tokens: {job.num_chunked:,}, "
            f"computed in chunks of {config.chunk_tokens:,}"
        )
    out.line(
        f"{job.size.bytes_per_token:,} bytes per token, total {bytes_words(job.size.total_bytes)}; largest sample: "
        f"{job.size.largest_sample_tokens:,} tokens, {bytes_words(job.size.largest_sample_bytes)}; "
        f"host buffers: {bytes_words(job.host_buffer_bytes)}"
    )
    out.line(
        f"disk: needs {bytes_words(disk.needed_bytes)} more, {bytes_words(disk.free_bytes)} free, "
        f"{bytes_words(disk.reserve_bytes)} reserved: "
        + ("enough" if not disk.missing_bytes else f"{bytes_words(disk.missing_bytes)} too little")
    )
    environment = environment_of(config, job.facts.device)
    for line in describe_environment(config, environment):
        out.line(line)
    out.result(
        {
            "run": folders.run_folder_of(job.output).name,
            "model": config.model.path,
            "output": str(job.output),
            "device": job.facts.device,
            "dtype": job.facts.store_dtype,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "supervised_tokens": totals.supervised_tokens,
            "rejected": totals.rejected,
            "shards_done": len(found.done),
            "batches": len(batches),
            "batch_fill": round(fill, 4),
            "chunked_samples": job.num_chunked,
            "host_buffer_bytes": job.host_buffer_bytes,
            "taps": list(job.facts.taps.names),
            "ids_after": list(job.facts.taps.ids("after")),
            "ids_before": list(job.facts.taps.ids("before")),
            **msgspec.to_builtins(job.size),
            **msgspec.to_builtins(disk),
            "fits": not disk.missing_bytes,
            "nccl_preset": config.nccl.preset,
            "environment": [msgspec.to_builtins(variable) for variable in environment],
        }
    )
    return DiskSpaceError.exit_code if disk.missing_bytes else 0


def _fill(job: jobs.Job) -> float:
    """How full the batches are, 0 to 1; a sample that is computed in chunks counts for none."""
    budget, lengths = job.geometry.max_tokens, job.prepared.lengths
    tokens = [sum(int(lengths[i]) for i in batch) for shard in job.shards for batch in shard.batches]
    whole = [number for number in tokens if number <= budget]
    return sum(whole) / (len(whole) * budget) if whole else 1.0


def environment_of(config: RunConfig, device: str) -> list[Variable]:
    """The variables that would be in force and can change the run, each with its origin."""
    return worker_environment(
        os.environ, config.nccl, device=device, package_root="", gpus=config.model.gpus
    )[1]


def describe_environment(config: RunConfig, variables: Sequence[Variable]) -> list[str]:
    """The preset and one line for each variable."""
    lines = [
        f"NCCL preset: {config.nccl.preset}" + ("" if variables else "; no NCCL or CUDA variable is set")
    ]
    return lines + [f"  {v.name}={v.value} (from {v.origin})" for v in variables]
