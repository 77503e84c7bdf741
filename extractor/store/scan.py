"""What of a plan is on the disk already: the truth that a resume starts from.

Reads only. Invariants: nothing counts as done by its name alone; a damaged shard is never touched here, it is
replaced when its successor is complete (`extractor.store.folder`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from extractor.errors import StoreError
from extractor.store import listing, names
from extractor.store.damage import Damage, damage_of, read_tokens, shard_damages
from extractor.store.record import ShardRecord, read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from extractor.plan import Shard
    from extractor.store.damage import Tokens


class PlannedSample(Protocol):
    """What a stored sample must be."""

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """int32 [t]."""

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [t]."""


class ScanResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        done: shard index -> record of the shards that are complete and as planned.
        bad: shard index -> what is wrong, of shards that have their final name and are not done.
        missing: planned shards of which nothing has its final name.
        unplanned: folders with the name of a shard that the plan does not know.
        parts: folders left behind by writers that stopped.
    """

    done: dict[int, ShardRecord]
    bad: dict[int, tuple[Damage, ...]]
    missing: tuple[int, ...]
    unplanned: tuple[int, ...]
    parts: tuple[Path, ...]

    @property
    def to_do(self) -> tuple[int, ...]:
        """Planned shards that must be computed, ascending."""
        return tuple(sorted([*self.bad, *self.missing]))


def scan(
    output: Path,
    planned: Sequence[Shard],
    fingerprint: str,
    *,
    taps: Sequence[str] | None = None,
    sample: Callable[[int], PlannedSample] | None = None,
    checksums: bool = False,
) -> ScanResult:
    """Compares the plan with the disk. Blocking; reads headers and tokens, and all if `checksums` is set.

    Args:
        output: the output folder; it need not exist.
        planned: the plan.
        fingerprint: of the data set that the shards must belong to.
        taps: taps that a shard must hold to count as done; None takes what it holds.
        sample: sample index -> the prepared sample, whose tokens and mask must be stored; None compares neither.
        checksums: also read every byte of every shard.

    Raises:
        AccessError: the folder may not be read.
        StoreError: the folder cannot be read.
    """
    final, parts = listing.folders(output)
    done: dict[int, ShardRecord] = {}
    bad: dict[int, tuple[Damage, ...]] = {}
    missing: list[int] = []
    for shard in planned:
        if shard.index not in final:
            missing.append(shard.index)
            continue
        folder = names.shard_folder(output, shard.index)
        try:
            record = read_record(folder)
        except StoreError as error:
            bad[shard.index] = (damage_of(folder / names.RECORD, error),)
            continue
        found = shard_damages(
            folder, index=shard.index, fingerprint=fingerprint, checksums=checksums, record=record
        )
        found = found or [
            *_sample_damages(folder, record, shard, sample),
            *_tap_damages(folder, record, taps),
        ]
        if found:
            bad[shard.index] = tuple(found)
        else:
            done[shard.index] = record
    known = {shard.index for shard in planned}
    return ScanResult(
        done=done, bad=bad, missing=tuple(missing), unplanned=tuple(sorted(final - known)), parts=tuple(parts)
    )


def committed(output: Path) -> Iterator[tuple[Path, ShardRecord]]:
    """Folder and record of every shard with a final name, ascending; nothing else is checked. Blocking.

    Raises:
        StoreError: a record is missing or damaged.
        AccessError: the folder may not be read.
    """
    for index in sorted(listing.shard_indices(output)):
        folder = names.shard_folder(output, index)
        yield folder, read_record(folder)


def _sample_damages(
    folder: Path, record: ShardRecord, shard: Shard, sample: Callable[[int], PlannedSample] | None
) -> list[Damage]:
    """Whether stored and quarantined samples together are the planned ones, in the planned order."""
    path = folder / names.TOKENS
    try:
        tokens = read_tokens(folder)
    except StoreError as error:
        return [damage_of(path, error)]
    left_out = {entry.sample_index for entry in record.quarantined}
    expected = [index for index in shard.samples if index not in left_out]
    if not left_out <= set(shard.samples) or not np.array_equal(tokens.sample_index, expected):
        return [
            Damage(
                str(path),
                "wrong_samples",
                f"{path}: holds other samples than planned for shard {shard.index}",
            )
        ]
    fault = None if sample is None else _content_fault(tokens, sample)
    return [Damage(str(path), "wrong_tokens", f"{path}: {fault}")] if fault else []


def _content_fault(tokens: Tokens, sample: Callable[[int], PlannedSample]) -> str | None:
    """The first sample whose tokens or mask are not those of the prepared data set."""
    for number, index in enumerate(tokens.sample_index):
        planned = sample(int(index))
        begin, end = tokens.cu_seqlens[number], tokens.cu_seqlens[number + 1]
        if end - begin != len(planned.input_ids):
            return f"sample {index} has {end - begin} tokens; {len(planned.input_ids)} were prepared"
        if not np.array_equal(tokens.input_ids[begin:end], planned.input_ids):
            return f"sample {index} has other tokens than were prepared"
        if not np.array_equal(tokens.loss_mask[begin:end], planned.loss_mask):
            return f"sample {index} has another loss mask than was prepared"
    return None


def _tap_damages(folder: Path, record: ShardRecord, taps: Sequence[str] | None) -> list[Damage]:
    absent = sorted(set(taps or ()) - {tap.name for tap in record.taps})
    return [
        Damage(str(folder), "tap_missing", f"{folder}: tap {name} is not stored in this shard")
        for name in absent
    ]
