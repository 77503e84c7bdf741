"""The end of a run: the lists of the data set and its totals, from what is really on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extractor.store import index, manifest, scan
from extractor.supervisor.prepared_run import Conclusion

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from extractor.dataset.prepared import PreparedDataset
    from extractor.plan import Shard
    from extractor.store.manifest import Manifest


def conclude(
    output: Path, shards: Sequence[Shard], planned: Manifest, prepared: PreparedDataset, taps: Sequence[str]
) -> tuple[Conclusion, set[int]]:
    """Writes `samples.parquet`, `rejected.jsonl`, `quarantine.jsonl` and what `dataset.json` says of shards.

    Blocking; reads the tokens of all shards.

    Args:
        output: the output folder.
        shards: the plan.
        planned: dataset.json as the plan has it.
        prepared: the samples.
        taps: names of the stored taps.

    Returns:
        The totals, and the shards that are there.

    Raises:
        TapdeckError: a file cannot be read or written.
    """
    found = scan.scan(output, shards, manifest.fingerprint(planned), taps=taps, sample=prepared.sample)
    records = [found.done[shard] for shard in sorted(found.done)]
    if records:
        index.rebuild(output, records, prepared.sample, prepared.rejected_path)
        # Lost with all shards complete, it is written anew; what it says of totals is the plan's word.
        written = manifest.read_if_any(output) or planned
        ranges = manifest.shard_ranges((r.index, [tap.name for tap in r.taps]) for r in records)
        manifest.write(output, msgspec.structs.replace(written, shards=ranges, totals=planned.totals))
    stored = sum(record.num_samples for record in records)
    quarantined = sum(len(record.quarantined) for record in records)
    conclusion = Conclusion(
        samples=stored,
        tokens=sum(record.num_tokens for record in records),
        supervised_tokens=sum(record.num_supervised_tokens for record in records),
        shards=len(records),
        bytes=sum(file.bytes for record in records for file in record.files.values()),
        rejected=planned.totals.rejected,
        quarantined=quarantined,
        missing=planned.totals.samples - stored - quarantined,
    )
    return conclusion, set(found.done)
