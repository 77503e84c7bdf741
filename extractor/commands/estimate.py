"""`tapdeck estimate`: what a run will write and whether it fits; loads no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import humanize
import msgspec

from extractor import preflight
from extractor.commands import job as jobs
from extractor.errors import DiskSpaceError
from extractor.store import manifest, scan

if TYPE_CHECKING:
    from extractor.commands.output import Output
    from extractor.config import RunConfig


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
    fill = totals.tokens / (len(batches) * config.max_tokens)
    out.line(
        f"samples {totals.samples:,}, tokens {totals.tokens:,} ({totals.supervised_tokens:,} supervised)"
    )
    out.line(
        f"shards {len(job.shards):,} ({len(found.done):,} done), batches {len(batches):,}, {fill:.1%} full"
    )
    out.line(
        f"{job.size.bytes_per_token:,} bytes per token, largest sample "
        f"{humanize.naturalsize(job.size.largest_sample_bytes)}, total {humanize.naturalsize(job.size.total_bytes)}"
    )
    out.line(
        f"disk: needs {humanize.naturalsize(disk.needed_bytes)} more, {humanize.naturalsize(disk.free_bytes)} free, "
        f"{humanize.naturalsize(disk.reserve_bytes)} reserved: "
        + ("enough" if not disk.missing_bytes else f"{humanize.naturalsize(disk.missing_bytes)} too little")
    )
    out.result(
        {
            "samples": totals.samples,
            "tokens": totals.tokens,
            "supervised_tokens": totals.supervised_tokens,
            "rejected": totals.rejected,
            "shards_done": len(found.done),
            "batches": len(batches),
            "batch_fill": round(fill, 4),
            "taps": list(job.facts.taps.names),
            "ids_after": list(job.facts.taps.ids("after")),
            "ids_before": list(job.facts.taps.ids("before")),
            **msgspec.to_builtins(job.size),
            **msgspec.to_builtins(disk),
            "fits": not disk.missing_bytes,
        }
    )
    return DiskSpaceError.exit_code if disk.missing_bytes else 0
