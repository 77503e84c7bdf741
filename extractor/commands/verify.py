"""`tapdeck verify`: is a data set whole, and are its states what the model computes?

Owns the verdict and how it is told. What is wrong with a file is found by `extractor.store.verify`; how far
a state may be off is decided by `extractor.commands.recompute`.

Invariants: nothing is changed; a data set with a damaged, missing or uncounted sample is not "ok", and
neither is one whose recomputed samples are out of bounds; a damaged data set is not recomputed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from extractor import checkpoint
from extractor.errors import ConfigError, PreflightError, StoreError
from extractor.quantities import bytes_words
from extractor.store import manifest as manifests
from extractor.store import names
from extractor.store.listing import shard_indices
from extractor.store.record import read_record
from extractor.store.verify import VerifyReport, check
from extractor.taps import TapSelection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extractor.commands.output import Output
    from extractor.commands.recompute import CompareReport, TapReport
    from extractor.reference import ComputeDtype
    from extractor.store.manifest import Manifest
    from extractor.store.reader import StoredSample

Oracle = Literal["transformers"]

DEFAULT_SAMPLES = 8
SHOWN_DAMAGES = 20


@dataclass(frozen=True)
class Outcome:
    """What `verify` found.

    Attributes:
        store: about the files.
        compared: about recomputed samples; None when none were recomputed.
    """

    store: VerifyReport
    compared: CompareReport | None

    @property
    def ok(self) -> bool:
        """Every planned sample is there and whole, and what was recomputed is within bounds."""
        return self.store.is_complete and (self.compared is None or self.compared.ok)

    def as_json(self) -> dict[str, Any]:
        """The result for programs; an error that is infinite is null, since JSON has no infinity."""
        result: dict[str, Any] = {"ok": self.ok, "complete": self.store.is_complete}
        result |= msgspec.to_builtins(self.store)
        result["damaged"] = result.pop("damages")
        if self.compared is not None:
            taps = self.compared.taps
            result |= {
                "compared_samples": self.compared.num_samples,
                "compared_tokens": self.compared.num_tokens,
                "excluded_tokens": self.compared.num_excluded_tokens,
                "max_rel_err": {tap.name: _finite(tap.max_rel_err) for tap in taps},
                "bound": {tap.name: tap.bound for tap in taps},
                "p99_rel_err": {tap.name: _finite(tap.p99) for tap in taps},
                "p99_bound": {tap.name: tap.p99_bound for tap in taps},
                "failed_taps": {tap.name: tap.looks_like for tap in taps if not tap.ok},
            }
        return result


def run(
    output: Path,
    *,
    sample: int | None,
    against: Oracle | None,
    seed: int,
    quick: bool,
    model_folder: Path | None,
    out: Output,
) -> int:
    """The verb: `verify`, told to people or as JSON.

    Returns:
        0 when everything is whole and within bounds, else 1.

    Raises:
        TapdeckError: see `verify`.
    """
    outcome = verify(
        output, sample=sample, against=against, seed=seed, quick=quick, model_folder=model_folder, out=out
    )
    out.result(outcome.as_json())
    return 0 if outcome.ok else 1


def verify(
    output: Path,
    *,
    sample: int | None = None,
    against: Oracle | None = None,
    seed: int = 0,
    quick: bool = False,
    model_folder: Path | None = None,
    out: Output,
) -> Outcome:
    """Checks an output folder and tells people about it. Blocking.

    Args:
        output: the output folder.
        sample: how many stored samples to recompute (8 when `against` is given without it).
        against: what to recompute them with; None checks files only.
        seed: chooses the samples.
        quick: read headers, sizes and tokens, but no checksums and values.
        model_folder: where the model is now, when it is not where dataset.json says.
        out: takes the lines for people.

    Raises:
        ConfigError: `sample` without `against`, or less than one.
        StoreError: there is no such folder, or it cannot be read.
        DatasetError: there is no sample to recompute.
        PreflightError: the model is not there, is another one, or transformers cannot run it.
    """
    if sample is not None and (against is None or sample < 1):
        raise ConfigError(
            f"--sample {sample}: a comparison needs --against, and at least one sample",
            remedy="for example --sample 8 --against transformers",
        )
    if not output.is_dir():
        raise StoreError(
            f"{output}: no such folder",
            remedy="name the output folder of a run (output.dir in its run.toml)",
            code="output_missing",
        )
    report = check(output, quick=quick)
    _tell_store(output, report, out)
    compared: CompareReport | None = None
    if against is not None and report.is_ok:
        compared = recompute(
            output, num_samples=sample or DEFAULT_SAMPLES, seed=seed, model_folder=model_folder, out=out
        )
        _tell_comparison(compared, out)
    elif against is not None:
        out.line("not recomputed: repair the data set first")
    outcome = Outcome(report, compared)
    out.line("ok" if outcome.ok else "NOT OK")
    return outcome


def recompute(
    output: Path, *, num_samples: int, seed: int, model_folder: Path | None, out: Output
) -> CompareReport:
    """Recomputes random samples of a sound data set with transformers. Blocking; loads the model.

    Raises:
        StoreError: the data set cannot be read.
        DatasetError: it holds no sample.
        PreflightError: the model is not there, is another one, or transformers cannot run it.
    """
    import torch

    from extractor.commands.recompute import compare_with_transformers

    manifest = manifests.read(output)
    if manifest.taps.holds != "boundary":
        raise PreflightError(
            f"{output} holds what SGLang serves (taps.as_served), which in {manifest.model.architecture} is not the "
            "residual stream: transformers has nothing to compare it with",
            remedy="verify without --against transformers",
            code="as_served",
        )
    folder = _model_folder(manifest, model_folder)
    samples = draw(output, num_samples, seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out.note(f"recomputing {len(samples)} samples with transformers in float32 on {device}")
    return compare_with_transformers(
        samples,
        model_folder=folder,
        taps=TapSelection(manifest.taps.taps, manifest.model.num_layers),
        stored_dtype=manifest.dtype,
        compute_dtype=_compute_dtype(manifest),
        device=device,
    )


def draw(output: Path, num_samples: int, seed: int) -> list[StoredSample]:
    """Random stored samples, without repetition, in the order of the store. Blocking.

    Every sample is equally likely, whatever shard it is in.

    Raises:
        StoreError: a shard is damaged.
    """
    from extractor.store.reader import ShardReader

    places = [
        (index, position)
        for index in sorted(shard_indices(output))
        for position in range(read_record(names.shard_folder(output, index)).num_samples)
    ]
    chosen = random.Random(seed).sample(places, min(num_samples, len(places)))  # noqa: S311 -- reproducible
    samples: list[StoredSample] = []
    for index in sorted({index for index, _ in chosen}):
        with ShardReader(names.shard_folder(output, index)) as shard:
            samples.extend(shard.sample(position) for owner, position in sorted(chosen) if owner == index)
    return samples


def _model_folder(manifest: Manifest, given: Path | None) -> Path:
    """The model that the data set was made with, known by its config.json."""
    folder = given or checkpoint.resolve(manifest.model.path, manifest.model.revision)
    facts = checkpoint.read(folder)
    if facts.config_hash != manifest.model.config_hash:
        raise PreflightError(
            f"{folder}: its config.json (xxh3-128 {facts.config_hash}) is not the one that the data set was "
            f"made with ({manifest.model.config_hash}); recomputing with another model proves nothing",
            remedy=f"name the folder of {manifest.model.path} as it was, with --model-path",
            code="model_differs",
        )
    return folder


def _compute_dtype(manifest: Manifest) -> ComputeDtype:
    match manifest.compute_dtype:
        case "float32" | "bfloat16" | "float16" as dtype:
            return dtype
        case other:
            raise PreflightError(
                f"dataset.json: compute_dtype {other}: transformers does not compute in it",
                remedy="verify without --against transformers",
            )


def _tell_store(output: Path, report: VerifyReport, out: Output) -> None:
    out.line(
        f"{output}: {report.shards:,} shards, {report.samples:,} samples, {report.tokens:,} tokens "
        f"({report.supervised_tokens:,} supervised), {bytes_words(report.bytes)}"
    )
    if report.quarantined or report.rejected:
        out.line(
            f"left out: {report.quarantined:,} samples quarantined, {report.rejected or 0:,} records rejected"
        )
    for damage in report.damages[:SHOWN_DAMAGES]:
        out.line(f"damaged: {damage.reason} [{damage.kind}]")
    if len(report.damages) > SHOWN_DAMAGES:
        out.line(f"damaged: {SHOWN_DAMAGES} of {len(report.damages):,} findings shown; --json has all")
    if damaged := _damaged_shards(output, report):
        # A resume reads sizes and headers only: it would take a shard with a wrong byte for done.
        out.line(
            f"to repair: remove {_few(damaged)} from {output / names.SHARDS}, then start the run again: "
            "it computes them anew"
        )
    if report.missing_shards:
        count = f"{len(report.missing_shards):,} planned shards are not there"
        out.line(f"incomplete: {count}: {_few(report.missing_shards)}")


def _tell_comparison(compared: CompareReport, out: Output) -> None:
    out.line(
        f"compared with transformers: {compared.num_samples:,} samples, {compared.num_tokens:,} tokens; "
        "relative error per token"
    )
    if compared.num_excluded_tokens:
        out.line(f"  not judged: {compared.num_excluded_tokens:,} tokens, whose experts are a near tie")
    width = max(len(tap.name) for tap in compared.taps)
    for tap in compared.taps:
        out.line(f"  {tap.name:<{width}}  {_tap_line(tap)}")


def _tap_line(tap: TapReport) -> str:
    errors = (
        f"max {tap.max_rel_err:.1e} (bound {tap.bound:.1e})  p99 {tap.p99:.1e} (bound {tap.p99_bound:.1e})"
    )
    if tap.ok:
        return f"{errors}  ok"
    cause = tap.looks_like or "no neighbouring layer, other stored tap or norm variant fits better"
    return f"{errors}  WRONG: {cause}"


def _damaged_shards(output: Path, report: VerifyReport) -> list[str]:
    """Folders of the shards that something is wrong with, ascending."""
    root = output / names.SHARDS
    paths = [Path(damage.path) for damage in report.damages]
    return sorted({path.relative_to(root).parts[0] for path in paths if root in path.parents})


def _few(numbers: Sequence[int | str]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
