"""`verify`: every shard of a data set, every byte of it, and whether the sums come out.

Reads plainly and in chunks: bounded memory, one open file at a time, no mapping, so that a file that is
cut while it is read is a finding. Invariant: a sample that was planned is stored once or quarantined
once; anything else is a finding or makes the data set incomplete, and both are said. What `dataset.json`
states about the shards is compared with what they say themselves; a difference is its damage, not theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extractor.errors import StoreError
from extractor.store import manifest, names
from extractor.store.damage import Damage, damage_of, read_tokens, shard_damages
from extractor.store.listing import shard_indices
from extractor.store.record import read_record
from extractor.taps import Tap, TapSelection, make_tap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from extractor.store.record import ShardRecord


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` found.

    Attributes:
        quick: checksums and values were not read.
        damages: everything that is wrong.
        missing_shards: planned shards that are not there.
        shards: sound shards.
        samples: stored in them.
        tokens: stored in them.
        supervised_tokens: of those.
        quarantined: samples left out of them.
        rejected: input records that did not become samples; None if `dataset.json` cannot be read.
        planned: planned samples; None if `dataset.json` cannot be read.
        bytes: of the files of sound shards.
    """

    quick: bool
    damages: tuple[Damage, ...]
    missing_shards: tuple[int, ...]
    shards: int
    samples: int
    tokens: int
    supervised_tokens: int
    quarantined: int
    rejected: int | None
    planned: int | None
    bytes: int

    @property
    def is_ok(self) -> bool:
        """Nothing is damaged. The data set may still be incomplete."""
        return not self.damages

    @property
    def is_complete(self) -> bool:
        """Nothing is damaged, and every planned sample is stored or quarantined."""
        return self.is_ok and not self.missing_shards and self.planned == self.samples + self.quarantined


def check(output: Path, *, quick: bool = False) -> VerifyReport:
    """Checks a data set. Blocking: reads all of it, unless `quick`.

    Args:
        output: the output folder.
        quick: read headers, sizes and tokens only.

    Raises:
        AccessError: the folder may not be read.
        StoreError: the folder cannot be read.
    """
    damages: list[Damage] = []
    dataset: manifest.Manifest | None = None
    try:
        dataset = manifest.read(output)
    except StoreError as error:
        damages.append(damage_of(output / names.DATASET, error))
    if dataset is not None and dataset.fingerprint != manifest.fingerprint(dataset):
        path = output / names.DATASET
        damages.append(Damage(str(path), "edited", f"{path}: was edited: its fingerprint is not its own"))
    if dataset is not None:
        damages.extend(_selection_damages(output, dataset))
    present = shard_indices(output)
    sound: list[ShardRecord] = []
    owner: dict[int, int] = {}
    for index in sorted(present):
        found, record = _check_shard(output, index, dataset, owner, quick=quick)
        damages.extend(found)
        if record is not None and not found:
            sound.append(record)
    if dataset is not None:
        damages.extend(_stated_damages(output, dataset, sound))
    totals = None if dataset is None else dataset.totals
    planned_shards = set() if totals is None else set(range(totals.shards))
    damages.extend(
        _sum_damages(output, sound, dataset, is_whole=len(sound) == len(planned_shards) == len(present))
    )
    return VerifyReport(
        quick=quick,
        damages=tuple(damages),
        missing_shards=tuple(sorted(planned_shards - present)),
        shards=len(sound),
        samples=sum(record.num_samples for record in sound),
        tokens=sum(record.num_tokens for record in sound),
        supervised_tokens=sum(record.num_supervised_tokens for record in sound),
        quarantined=sum(len(record.quarantined) for record in sound),
        rejected=None if totals is None else totals.rejected,
        planned=None if totals is None else totals.samples,
        bytes=sum(record.num_bytes for record in sound),
    )


def _check_shard(
    output: Path, index: int, dataset: manifest.Manifest | None, owner: dict[int, int], *, quick: bool
) -> tuple[list[Damage], ShardRecord | None]:
    """Findings and record of one shard; `owner` (sample -> shard) grows by its samples."""
    folder = names.shard_folder(output, index)
    try:
        record = read_record(folder)
    except StoreError as error:
        return [damage_of(folder / names.RECORD, error)], None
    fingerprint = None if dataset is None else dataset.fingerprint
    found = shard_damages(folder, index=index, fingerprint=fingerprint, checksums=not quick, record=record)
    if found:
        return found, record
    try:
        stored = [int(sample) for sample in read_tokens(folder).sample_index]
    except StoreError as error:
        return [damage_of(folder / names.TOKENS, error)], record
    for sample in [*stored, *(entry.sample_index for entry in record.quarantined)]:
        other = owner.setdefault(sample, index)
        is_planned = dataset is None or 0 <= sample < dataset.totals.samples
        if other != index or not is_planned:
            path = folder / names.TOKENS
            why = f"is also in shard {other}" if other != index else "is not in the plan"
            found.append(Damage(str(path), "wrong_samples", f"{path}: sample {sample} {why}"))
    if len({*stored, *(entry.sample_index for entry in record.quarantined)}) != len(stored) + len(
        record.quarantined
    ):
        path = folder / names.RECORD
        found.append(Damage(str(path), "wrong_samples", f"{path}: a sample is both stored and quarantined"))
    return found, record


def _selection_damages(output: Path, dataset: manifest.Manifest) -> list[Damage]:
    """Whether the taps that `dataset.json` states can be, and its ids are those of its taps."""
    stated, n = dataset.taps, dataset.model.num_layers
    possible = {make_tap(k, n) for k in range(n + 1)} | {Tap(n, True, "normed")}
    reasons = [
        f"states a tap that a model of {n} layers does not have: {tap.name}, boundary {tap.boundary}"
        + (", normed" if tap.is_normed else "")
        for tap in stated.taps
        if tap not in possible
    ]
    if not stated.taps:
        reasons.append("states no tap")
    order = [(tap.is_normed, tap.boundary) for tap in stated.taps]
    if order != sorted(set(order)):
        reasons.append(f"states taps out of order or twice: {_listed(stated.taps)}")
    own = manifest.TapsRecord.of(TapSelection(stated.taps, n, stated.is_default, stated.as_served))
    reasons.extend(
        f"{name} is {said}, but its taps ({_listed(stated.taps)}) give {derived}"
        for name, said, derived in (
            ("ids_after", list(stated.ids_after), list(own.ids_after)),
            ("ids_before", list(stated.ids_before), list(own.ids_before)),
            ("draft_config", _lists(stated.draft_config), _lists(own.draft_config)),
        )
        if said != derived
    )
    return _dataset_damages(output, "wrong_taps", reasons)


def _stated_damages(output: Path, dataset: manifest.Manifest, sound: list[ShardRecord]) -> list[Damage]:
    """Whether `dataset.json` states what its shards say about themselves; one finding per difference."""
    stated = {
        "taps": _listed(dataset.taps.taps),
        "dtype": dataset.dtype,
        "hidden_size": str(dataset.model.hidden_size),
    }
    shards: dict[tuple[str, str], list[int]] = {}
    for record in sound:
        # Taps count as a whole: their names, and the boundaries that the names stand for.
        said = {"taps": _listed(record.taps), "dtype": record.dtype, "hidden_size": str(record.hidden_size)}
        for key, value in said.items():
            if value != stated[key]:
                shards.setdefault((key, value), []).append(record.index)
    reasons = [
        f"{key} is {stated[key]}, but {len(indices)} shards (the first is {indices[0]}) say {value}"
        for (key, value), indices in shards.items()
    ]
    held = {record.index: tuple(tap.name for tap in record.taps) for record in sound}
    for part in dataset.shards:
        wrong = [i for i in sorted(held) if part.first <= i <= part.last and held[i] != part.taps]
        if wrong:
            reasons.append(
                f"shards {part.first} to {part.last} are stated to hold {', '.join(part.taps)}, but shard "
                f"{wrong[0]} says {', '.join(held[wrong[0]])}"
            )
    return _dataset_damages(output, "differs_from_shards", reasons)


def _dataset_damages(output: Path, kind: str, reasons: list[str]) -> list[Damage]:
    path = output / names.DATASET
    return [Damage(str(path), kind, f"{path}: {reason}") for reason in reasons]


def _listed(taps: Sequence[Tap]) -> str:
    return ", ".join(f"{tap.name} = {'norm of ' if tap.is_normed else ''}B({tap.boundary})" for tap in taps)


def _lists(ids: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {server: list(values) for server, values in sorted(ids.items())}


def _sum_damages(
    output: Path, sound: list[ShardRecord], dataset: manifest.Manifest | None, *, is_whole: bool
) -> list[Damage]:
    """Whether the sums come out, once every planned shard is there and sound."""
    if dataset is None or not is_whole:
        return []
    path = output / names.DATASET
    samples = sum(record.num_samples + len(record.quarantined) for record in sound)
    if samples != dataset.totals.samples:
        return [
            Damage(
                str(path),
                "wrong_totals",
                f"{path}: {dataset.totals.samples} samples were planned; {samples} are stored or quarantined",
            )
        ]
    tokens = sum(record.num_tokens for record in sound)
    if not any(record.quarantined for record in sound) and tokens != dataset.totals.tokens:
        reason = f"{dataset.totals.tokens} tokens were planned; {tokens} are stored"
        return [Damage(str(path), "wrong_totals", f"{path}: {reason}")]
    return []
