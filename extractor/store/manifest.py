"""`dataset.json`: what a data set is, and which runs may add shards to it.

Owns that file. It decides what makes the shards of two runs interchangeable (`fingerprint`) and says in
words where two runs differ (`differences`). It looks at no shard.

Invariants: the file is replaced as a whole; one that cannot be read is an error for a person to look at
and is never written over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from extractor.errors import LeaseError, StoreError
from extractor.plan import Geometry
from extractor.store import atomic, names
from extractor.store.record import StatesDtype
from extractor.taps import Tap, TapSelection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from extractor.store.filesystem import FileSystem

FORMAT_VERSION = 1


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model whose states are stored.

    Attributes:
        path: folder or hub id, as configured.
        revision: commit of the hub, if it has one.
        config_hash: of its `config.json`.
        weights_hash: of its weight files (`extractor.checkpoint.hash_weights`).
        architecture: class name in `config.json`.
        num_layers: n.
        hidden_size: H.
    """

    path: str
    revision: str | None
    config_hash: str
    weights_hash: str
    architecture: str
    num_layers: int
    hidden_size: int


class TapsRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored tensors, and their ids in every convention that somebody may ask for.

    Attributes:
        taps: in stored order.
        is_default: nobody chose the layers.
        ids_after: ids of the boundaries where id v means "after layer v" (`embed` is -1).
        ids_before: the same where id k means B(k).
        draft_config: server -> the auxiliary layer ids its draft model's configuration lists.
        as_served: the layers between hold what SGLang's own capture gives (`taps.as_served`).
        holds: what that is: `boundary`, the residual stream B(k); or `branch`, the output of the last branch
            before it without the residual.
    """

    taps: tuple[Tap, ...]
    is_default: bool
    ids_after: tuple[int, ...]
    ids_before: tuple[int, ...]
    draft_config: dict[str, tuple[int, ...]]
    as_served: bool = False
    holds: Literal["boundary", "branch"] = "boundary"

    @classmethod
    def of(cls, selection: TapSelection, *, served: Literal["boundary", "branch"] = "boundary") -> TapsRecord:
        """The record of a selection.

        Args:
            selection: the taps.
            served: what SGLang's own capture gives in this class.
        """
        return cls(
            taps=selection.taps,
            is_default=selection.is_default,
            ids_after=selection.ids("after"),
            ids_before=selection.ids("before"),
            # SGLang's list counts "after" ids; vLLM and speculators >= 0.5 count boundaries.
            draft_config={
                "sglang": selection.auxiliary_ids("after"),
                "vllm": selection.auxiliary_ids("before"),
            },
            as_served=selection.as_served,
            holds=served if selection.as_served else "boundary",
        )


class EnvVariable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment variable in force.

    Attributes:
        value: its value.
        origin: who set it: `preset`, `run.toml`, `shell`.
    """

    value: str
    origin: str


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computed some of the shards; information only.

    Attributes:
        versions: package -> version.
        sglang: settings of SGLang in force.
        env: NCCL and CUDA variables in force.
    """

    versions: dict[str, str] = {}
    sglang: dict[str, Any] = {}
    env: dict[str, EnvVariable] = {}


class Totals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a finished data set must add up to.

    Attributes:
        samples: planned samples; each ends as stored or quarantined.
        tokens: of the planned samples.
        supervised_tokens: of the planned samples.
        shards: planned shards.
        rejected: input records that did not become samples.
    """

    samples: int
    tokens: int
    supervised_tokens: int
    shards: int
    rejected: int


class ShardRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shards `first`..`last` (inclusive) and the taps they hold."""

    first: int
    last: int
    taps: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`dataset.json`.

    Attributes:
        format_version: of this file.
        fingerprint: `fingerprint` of the rest, for people and programs that only compare.
        model: the model.
        tokenizer_hash: of the tokenizer's files.
        template_hash: of the chat template and its arguments.
        data_hash: of the input data.
        samples_hash: of ids, tokens and masks of the prepared samples.
        prepared_key: cache key of the prepared data set at the first start; information only.
        data: options of `[data]` that shape the samples, so that a refused resume can name them.
        mask: the mask settings.
        geometry: what the plan depends on.
        taps: the stored tensors.
        last_state: `final` holds B(n), which has not seen the final norm.
        dtype: type of the states on disk.
        compute_dtype: type the model ran in.
        device: where it ran: `cuda` or `cpu`.
        attention_backend: as configured; None took SGLang's choice.
        sglang_args: `[model.sglang]` as configured.
        tp: ranks over which each layer was split: sums over another number of parts round differently.
        versions, sglang, env: the environment of the first start that had a model; information only.
        later: other environments of later starts, in that order; information only.
        totals: what must be there in the end.
        shards: what is there, as ranges.
    """

    format_version: int = FORMAT_VERSION
    fingerprint: str = ""
    model: ModelRecord
    tokenizer_hash: str
    template_hash: str
    data_hash: str
    samples_hash: str
    prepared_key: str
    data: dict[str, Any]
    mask: dict[str, Any]
    geometry: Geometry
    taps: TapsRecord
    last_state: Literal["pre_norm"] = "pre_norm"
    dtype: StatesDtype
    compute_dtype: str
    device: str
    attention_backend: str | None
    sglang_args: dict[str, Any]
    tp: int = 1
    versions: dict[str, str] = {}
    sglang: dict[str, Any] = {}
    env: dict[str, EnvVariable] = {}
    later: tuple[Environment, ...] = ()
    totals: Totals
    shards: tuple[ShardRange, ...] = ()


def identity(manifest: Manifest) -> dict[str, Any]:
    """What makes the shards of two runs interchangeable, as dotted keys.

    The model's path counts, and so do its weights: they may be replaced in place. Taps do not: a shard says
    itself which ones it holds. Versions of libraries do not: that they changed is recorded (`with_environment`),
    and what tokenizes differently gives other samples.
    """
    parts = {
        "model": manifest.model,
        "tokenizer_hash": manifest.tokenizer_hash,
        "template_hash": manifest.template_hash,
        "data_hash": manifest.data_hash,
        "samples_hash": manifest.samples_hash,
        "data": manifest.data,
        "data.mask": manifest.mask,
        "plan": manifest.geometry,
        "dtype": manifest.dtype,
        "compute_dtype": manifest.compute_dtype,
        "device": manifest.device,
        "attention_backend": manifest.attention_backend,
        "model.sglang": manifest.sglang_args,
    }
    if manifest.taps.as_served:
        # Under the same names other tensors: such shards never mix with those of a usual run.
        parts["taps.holds"] = manifest.taps.holds
    if manifest.tp != 1:
        # Left out where it is 1, so that data sets from before there was a choice keep their fingerprint.
        parts["model.tp"] = manifest.tp
    return dict(_flatten(msgspec.to_builtins(parts), ""))


def fingerprint(manifest: Manifest) -> str:
    """xxh3-128 of `identity`, in hex. Pure."""
    return str(xxhash.xxh3_128_hexdigest(msgspec.json.encode(identity(manifest), order="sorted")))


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Where two runs differ so that their shards must not be mixed: `key: old -> new`, sorted. Pure."""
    return _changes(*({"model.tp": manifest.tp} | identity(manifest) for manifest in (old, new)))


def with_environment(old: Manifest | None, new: Manifest) -> tuple[Manifest, list[str]]:
    """The manifest of a run that goes on, and where its environment differs from the last one. Pure.

    The first environment stays where it is; one that was never there is appended to `later`. A run that goes
    on in the same environment therefore has the manifest of one that was never interrupted.

    Args:
        old: what is there; None at the first start, and without versions when no model was ever loaded.
        new: of this start, with its environment.
    """
    if old is None or not old.versions:
        return new, []
    known = [_environment(old), *old.later]
    now = _environment(new)
    kept = msgspec.structs.replace(
        new,
        prepared_key=old.prepared_key,
        versions=old.versions,
        sglang=old.sglang,
        env=old.env,
        later=old.later,
    )
    if now not in known:
        kept = msgspec.structs.replace(kept, later=(*old.later, now))
    return kept, _changes(*(dict(_flatten(msgspec.to_builtins(part), "")) for part in (known[-1], now)))


def require_same(old: Manifest, new: Manifest, output: Path) -> None:
    """Refuses to go on with an output folder that belongs to another configuration.

    Raises:
        LeaseError: with every difference.
    """
    found = differences(old, new)
    if found:
        raise LeaseError(
            f"{output} holds a data set of another configuration:\n  " + "\n  ".join(found),
            remedy="choose another output.dir, or restore the old settings",
            code="output_differs",
        )


def encode(manifest: Manifest) -> bytes:
    """The bytes of `dataset.json`, with `fingerprint` filled in."""
    stamped = msgspec.structs.replace(manifest, fingerprint=fingerprint(manifest))
    return msgspec.json.format(msgspec.json.encode(stamped, order="deterministic"), indent=2) + b"\n"


def write(output: Path, manifest: Manifest, *, files: FileSystem | None = None) -> None:
    """Writes `dataset.json`, atomically. Blocking.

    Refuses to replace one that it cannot read or that has another fingerprint.

    Raises:
        StoreError: the file that is there cannot be read, or the new one not be written.
        LeaseError: the file that is there is of another configuration.
        AccessError: the folder may not be written.
    """
    old = read_if_any(output)
    if old is not None:
        require_same(old, manifest, output)
    path = output / names.DATASET
    try:
        atomic.replace_file(path, encode(manifest), files=files)
    except OSError as error:
        raise atomic.explain(error, path, "written") from error


def read(output: Path) -> Manifest:
    """Reads `dataset.json`. Blocking.

    Raises:
        StoreError: it is missing (`file_missing`), damaged (`manifest_invalid`), or of another version
            (`manifest_version`).
    """
    manifest = read_if_any(output)
    if manifest is None:
        raise StoreError(
            f"{output / names.DATASET}: the file is missing; this is no data set of tapdeck",
            remedy="name the output folder of a run (output.dir in its run.toml)",
            code="file_missing",
        )
    return manifest


def read_if_any(output: Path) -> Manifest | None:
    """Reads `dataset.json`; None if there is none. Blocking.

    Raises:
        StoreError: as `read`.
    """
    path = output / names.DATASET
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise atomic.explain(error, path, "read") from error
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{path}: format version {version}; this tapdeck reads version {FORMAT_VERSION}",
                remedy="use the release of tapdeck that wrote it",
                code="manifest_version",
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{path}: damaged: {error}",
            remedy="restore it from a copy; it is not replaced, since it says what the shards are",
            code="manifest_invalid",
        ) from error


def shard_ranges(stored: Iterable[tuple[int, Sequence[str]]]) -> tuple[ShardRange, ...]:
    """Runs of consecutive shards that hold the same taps. Pure.

    Args:
        stored: (shard index, names of its taps), in any order.
    """
    ranges: list[ShardRange] = []
    for index, taps in sorted((index, tuple(taps)) for index, taps in stored):
        if ranges and ranges[-1].last == index - 1 and ranges[-1].taps == taps:
            ranges[-1] = ShardRange(first=ranges[-1].first, last=index, taps=taps)
        else:
            ranges.append(ShardRange(first=index, last=index, taps=taps))
    return tuple(ranges)


def _environment(manifest: Manifest) -> Environment:
    return Environment(versions=manifest.versions, sglang=manifest.sglang, env=manifest.env)


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


class _Version(msgspec.Struct):
    format_version: int


def _flatten(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    """(dotted key, leaf) of nested dicts of JSON values."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, item in value.items():
        yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))


def _show(value: Any) -> str:
    return "(none)" if value is None else msgspec.json.encode(value).decode()
