"""`speculators-v1`: `data_{i}.pt`, what speculators 0.3.0 to 0.7.0.2 train on.

Owns the folder it writes to: `data_{i}.pt` (i = rank of the sample among the stored ones, by its index in
the data set), `sample_lengths.json` and `data_config.json`. The trainer takes every file whose name ends
in `pt`, so no other such name may ever be there; it takes the last element of `hidden_states` for the
verifier's last state, so that one must be `final`.

Invariants: `data_config.json` and a complete `sample_lengths.json` are there before the first sample, so
at every stop; a file has its final name only when it is complete and on the disk; a file that is there is
kept only after its contents were compared; of a shard whose bytes do not have their checksums nothing is
written, not even its lengths; nothing is shifted; one sample is in memory at a time.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from extractor.errors import AccessError, PreflightError, StoreError
from extractor.store import atomic, manifest, names
from extractor.store.damage import file_damages, read_tokens
from extractor.store.filesystem import RealFileSystem
from extractor.store.reader import DTYPES, ShardReader
from extractor.store.scan import committed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from extractor.store.damage import Tokens
    from extractor.store.reader import StoredSample
    from extractor.store.record import ShardRecord

FORMAT = "speculators-v1"
LENGTHS = "sample_lengths.json"
CONFIG = "data_config.json"
NUM_AUXILIARY = 3
"""Auxiliary layers that the trainers of 0.3 and 0.4 are fixed to."""
_SAMPLE = re.compile(r"^data_(0|[1-9]\d*)\.pt$")


class ExportResult(msgspec.Struct, frozen=True):
    """What an export did.

    Attributes:
        samples: files that are there now.
        written: of those, how many this call wrote.
        tokens: of all samples.
        taps: element i of `hidden_states` is this tap.
        warnings: what the user should know.
    """

    samples: int
    written: int
    tokens: int
    taps: tuple[str, ...]
    warnings: tuple[str, ...]


class _Plan(msgspec.Struct, frozen=True):
    """What is exported: taps, and sample index -> (rank, tokens), in ascending order of the index."""

    folders: tuple[Any, ...]  # Path: msgspec has no need to know
    dataset: manifest.Manifest
    taps: tuple[str, ...]
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    samples: dict[int, tuple[int, int]]
    warnings: tuple[str, ...]


def file_name(rank: int) -> str:
    """Name of one sample's file: `data_5.pt`."""
    return f"data_{rank}.pt"


def export(
    output: Path,
    target: Path,
    *,
    taps: Sequence[str] | None = None,
    force: bool = False,
    allow_incomplete: bool = False,
    note: Callable[[str], None],
) -> ExportResult:
    """Writes the stored samples in this layout, or what is missing of them. Blocking; may be repeated.

    Args:
        output: the data set.
        target: folder for the export, outside the data set; new, empty, or of the same export before.
        taps: taps to export; None takes all boundaries that are stored, but `embed`.
        force: also export a list that does not end in `final`.
        allow_incomplete: also export a data set that is not finished.
        note: told what the user should know as it happens.

    Raises:
        PreflightError: taps that this layout cannot hold, a target that is something else, or a data set
            that is not finished.
        StoreError: a shard is damaged, shards hold different taps, or a file cannot be written.
        AccessError: a folder may not be read or written, or the target is no folder.
        DiskSpaceError: the export does not fit.
    """
    _check_place(output, target)
    plan = _plan(output, taps, force=force, allow_incomplete=allow_incomplete)
    for warning in plan.warnings:
        note(warning)
    _claim(target, plan, note)
    written = 0
    for folder in plan.folders:
        with ShardReader(folder, plan.taps) as shard:
            shard.check_contents()
            for sample in shard:
                written += _write_if_needed(target, plan, sample)
    return ExportResult(
        samples=len(plan.samples),
        written=written,
        tokens=sum(tokens for _, tokens in plan.samples.values()),
        taps=plan.taps,
        warnings=plan.warnings,
    )


def _check_place(output: Path, target: Path) -> None:
    """Refuses a target that is no folder, or a place in the data set."""
    try:
        place = next(path for path in (target, *target.absolute().parents) if os.path.lexists(path))
        if not place.is_dir():
            raise AccessError(f"{place} is no folder", remedy="choose a new or empty folder for the export")
        # By identity, not by name: a folder may be reached through links and mounts.
        resolved = target.resolve()
        if output.exists() and any(
            path.exists() and path.samefile(output) for path in (resolved, *resolved.parents)
        ):
            what = "is the data set itself" if resolved == output.resolve() else "is inside the data set"
            raise PreflightError(
                f"{target} {what}", remedy="choose a folder outside of it for the export", code="bad_target"
            )
    except OSError as error:
        raise atomic.explain(error, target, "read") from error


def _plan(output: Path, taps: Sequence[str] | None, *, force: bool, allow_incomplete: bool) -> _Plan:
    dataset = manifest.read(output)
    shards = list(committed(output))
    records = [record for _, record in shards]
    chosen = _choose(output, records, taps)
    warnings = _check_last(chosen, force=force)
    if len(chosen) - 1 != NUM_AUXILIARY:
        warnings.append(
            f"{len(chosen) - 1} auxiliary layers: the trainers of 0.3 and 0.4 need {NUM_AUXILIARY}"
        )
    missing = _missing(dataset.totals, records)
    if missing and not allow_incomplete:
        raise PreflightError(
            f"{output} is not complete: {missing}",
            remedy="finish the run first, or export what is there with --allow-incomplete",
            code="incomplete",
        )
    if missing:
        warnings.append(f"{missing}; only those are exported")
    lengths: dict[int, int] = {}
    for folder, record in shards:
        if record.fingerprint != dataset.fingerprint:
            raise StoreError(f"{folder}: belongs to another data set", remedy="run `tapdeck verify`")
        tokens = _sound_tokens(folder, record)
        lengths.update(zip(tokens.sample_index.tolist(), tokens.lengths.tolist(), strict=True))
    if len(lengths) != sum(record.num_samples for record in records):
        raise StoreError(f"{output}: a sample is in two shards", remedy="run `tapdeck verify`")
    return _Plan(
        folders=tuple(folder for folder, _ in shards),
        dataset=dataset,
        taps=chosen,
        layer_ids=tuple(tap.boundary - 1 for tap in records[0].taps if tap.name in chosen),
        dtype=records[0].dtype,
        hidden_size=records[0].hidden_size,
        samples={index: (rank, lengths[index]) for rank, index in enumerate(sorted(lengths))},
        warnings=tuple(warnings),
    )


def _missing(totals: manifest.Totals, records: Sequence[ShardRecord]) -> str | None:
    """What says that a data set is not finished; None if it is."""
    if len(records) < totals.shards:
        return f"{len(records)} of {totals.shards} shards are there"
    dealt_with = sum(record.num_samples + len(record.quarantined) for record in records)
    if dealt_with < totals.samples:
        return f"{dealt_with} of {totals.samples} samples are there"
    return None


def _sound_tokens(folder: Path, record: ShardRecord) -> Tokens:
    """The tokens of a shard, once their checksum is right: the lengths are published before the samples."""
    path = folder / names.TOKENS
    if names.TOKENS not in record.files:
        raise StoreError(f"{folder / names.RECORD}: does not list {path.name}", remedy="run `tapdeck verify`")
    found = file_damages(path, record.files[names.TOKENS], checksums=True)
    if found:
        raise StoreError(
            f"damaged shard: {found[0].reason}",
            remedy="run `tapdeck verify`, which says how to repair it",
            code=found[0].kind,
        )
    return read_tokens(folder)


def _choose(output: Path, records: Sequence[ShardRecord], taps: Sequence[str] | None) -> tuple[str, ...]:
    """The taps to export, in stored order."""
    if not records:
        raise StoreError(f"{output}: no shard is stored yet", remedy="start the run first")
    unfit = sorted({"embed", "normed"} & set(taps or ()))
    if unfit:
        raise PreflightError(
            f"speculators-v1 holds layers and the last state before the norm, not {' or '.join(unfit)}",
            remedy="leave it out of the taps",
        )
    stored = {tuple(tap.name for tap in record.taps) for record in records}
    if taps is None:
        if len(stored) > 1:
            raise StoreError(
                f"{output}: shards hold different taps: "
                + "; ".join(", ".join(names_) for names_ in sorted(stored)),
                remedy="name taps that all shards hold, or backfill the missing ones",
                code="taps_differ",
            )
        chosen = tuple(name for name in stored.pop() if name not in {"embed", "normed"})
    else:
        absent = sorted(name for name in set(taps) if any(name not in held for held in stored))
        if absent:
            raise StoreError(
                f"{output}: not stored in all shards: {', '.join(absent)}",
                remedy="name taps that all shards hold, or backfill the missing ones",
                code="taps_differ",
            )
        chosen = tuple(tap.name for tap in records[0].taps if tap.name in taps)
    if not chosen:
        raise PreflightError(f"{output}: no tap to export", remedy="name at least one layer and `final`")
    return chosen


def _check_last(chosen: Sequence[str], *, force: bool) -> list[str]:
    """Warnings about the last element of the list."""
    if chosen[-1] == "final":
        return []
    message = f"the last tap is {chosen[-1]}, not final: the trainer takes it for the verifier's last state"
    if not force:
        raise PreflightError(message, remedy="store `final` too (taps.final = true), or force the export")
    return [message]


def _claim(target: Path, plan: _Plan, note: Callable[[str], None]) -> None:
    """Makes the target ours: no foreign file, then `data_config.json`, then `sample_lengths.json`."""
    config = _config(plan)
    lengths = {str(rank): tokens for rank, tokens in plan.samples.values()}
    try:
        if target.exists():
            _check_target(target, config, len(plan.samples))
        target.mkdir(parents=True, exist_ok=True)
        there = _read_json(target / CONFIG)
        if there != config:
            atomic.replace_file(target / CONFIG, _json_bytes(config))
        if _read_json(target / LENGTHS) != lengths:
            if (target / LENGTHS).exists():
                note(f"{target / LENGTHS}: was damaged or incomplete and is rebuilt from the shards")
            atomic.replace_file(target / LENGTHS, _json_bytes(lengths))
    except OSError as error:
        raise atomic.explain(error, target, "written") from error


def _check_target(target: Path, config: dict[str, Any], num_samples: int) -> None:
    """Refuses a folder that holds anything but this export, begun or finished.

    Raises:
        PreflightError: what is there is foreign, or of another export.
    """
    _check_sample_files(target, num_samples)
    there = _read_json(target / CONFIG)
    if isinstance(there, dict) and there.get("format") == FORMAT:
        if _identity(there) != _identity(config):
            raise PreflightError(
                f"{target} holds another export",
                remedy="choose a new folder, or remove that export first",
                code="bad_target",
            )
        return
    # `data_config.json` is the first file of an export: of one that was stopped before, only this is left.
    begun = names.temporary(target / CONFIG).name
    foreign = sorted(path.name for path in target.iterdir() if path.name != begun)
    if foreign:
        raise PreflightError(
            f"{target} is not empty and holds no export of tapdeck: {', '.join(foreign[:3])}"
            + (" ..." if len(foreign) > 3 else ""),
            remedy="choose a new or empty folder for the export",
            code="bad_target",
        )


def _check_sample_files(target: Path, num_samples: int) -> None:
    """Refuses a folder with a file that the trainer would take for a sample and that is none of ours."""
    for folder, _, files in os.walk(target):
        for name in files:
            match = _SAMPLE.match(name)
            is_ours = match and folder == str(target) and int(match[1]) < num_samples
            if name.endswith("pt") and not is_ours:
                raise PreflightError(
                    f"{folder}/{name}: the trainer takes every file that ends in pt for a sample",
                    remedy="choose an empty folder for the export, or remove that file",
                )


def _write_if_needed(target: Path, plan: _Plan, sample: StoredSample) -> bool:
    rank = plan.samples[sample.sample_index][0]
    path = target / file_name(rank)
    item = {
        "input_ids": sample.input_ids.to(torch.int64),
        "loss_mask": sample.loss_mask.to(torch.int64),
        # A list in ascending order; each state has a storage of its own, or the file would hold them all
        # for each.
        "hidden_states": [sample.states[tap] for tap in plan.taps],
    }
    if _holds(path, item):
        return False
    part = names.temporary(path)
    files = RealFileSystem()
    try:
        # From a file object, so that the name of the file does not get into the archive.
        with part.open("wb") as sink:
            torch.save(item, sink)
            sink.flush()
            os.fsync(sink.fileno())
        files.rename(part, path)
        files.sync_folder(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise atomic.explain(error, path, "written") from error
    return True


def _holds(path: Path, item: dict[str, Any]) -> bool:
    """Whether a file is there and holds exactly this sample."""
    if not path.exists():
        return False
    try:
        there = torch.load(path, weights_only=True)
        states, wanted = there["hidden_states"], item["hidden_states"]
        return (
            len(states) == len(wanted)
            and all(_same(a, b) for a, b in zip(states, wanted, strict=True))
            and _same(there["input_ids"], item["input_ids"])
            and _same(there["loss_mask"], item["loss_mask"])
        )
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError):
        # Damaged in whatever way: it is written again.
        return False


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _config(plan: _Plan) -> dict[str, Any]:
    """What is known about the data; no times, so that an export can be compared with another."""
    dataset = plan.dataset
    return {
        "format": FORMAT,
        "fingerprint": dataset.fingerprint,
        "model": {
            "target_model_path": dataset.model.path,
            "revision": dataset.model.revision,
            "num_layers": dataset.model.num_layers,
            "hidden_size": plan.hidden_size,
        },
        "data": {
            "data_hash": dataset.data_hash,
            "template_hash": dataset.template_hash,
        },
        "hidden_states": {
            "taps": list(plan.taps),
            "layer_ids": list(plan.layer_ids),
            "convention": "after",
            "last_state": dataset.last_state,
            "dtype": str(DTYPES[plan.dtype]),
        },
        "file_pattern": "data_{i}.pt",
        "totals": {
            "samples": len(plan.samples),
            "tokens": sum(tokens for _, tokens in plan.samples.values()),
        },
    }


def _identity(config: Any) -> Any:  # Any: whatever JSON the file holds
    """What two exports must share to be the same one; the number of samples may have grown."""
    return (
        {key: value for key, value in config.items() if key != "totals"} if isinstance(config, dict) else None
    )


def _json_bytes(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _read_json(path: Path) -> Any:  # Any: whatever JSON the file holds
    """The file's value; None if there is no file or no JSON in it."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
