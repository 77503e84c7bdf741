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
from typing import TYPE_CHECKING, Any, Literal

import humanize
import msgspec

from extractor import checkpoint
from extractor.errors import ConfigError, PreflightError
from extractor.store import manifest as manifests
from extractor.store import names
from extractor.store.record import read_record
from extractor.store.scan import shard_indices
from extractor.store.verify import VerifyReport, check
from extractor.taps import TapSelection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
        f"({report.supervised_tokens:,} supervised), {humanize.naturalsize(report.bytes)}"
    )
    if report.quarantined or report.rejected:
        out.line(
            f"left out: {report.quarantined:,} samples quarantined, {report.rejected or 0:,} records rejected"
        )
    for damage in report.damages[:SHOWN_DAMAGES]:
        out.line(f"damaged: {damage.reason} [{damage.kind}]")
    if len(report.damages) > SHOWN_DAMAGES:
        out.line(f"damaged: {SHOWN_DAMAGES} of {len(report.damages):,} findings shown; --json has all")
    if report.missing_shards:
        count = f"{len(report.missing_shards):,} planned shards are not there"
        out.line(f"incomplete: {count}: {_few(report.missing_shards)}")


def _tell_comparison(compared: CompareReport, out: Output) -> None:
    out.line(
        f"compared with transformers: {compared.num_samples:,} samples, {compared.num_tokens:,} tokens; "
        "relative error per token"
    )
    width = max(len(tap.name) for tap in compared.taps)
    for tap in compared.taps:
        out.line(f"  {tap.name:<{width}}  {_tap_line(tap)}")


def _tap_line(tap: TapReport) -> str:
    errors = (
        f"max {tap.max_rel_err:.1e} (bound {tap.bound:.1e})  p99 {tap.p99:.1e} (bound {tap.p99_bound:.1e})"
    )
    if tap.ok:
        return f"{errors}  ok"
    return f"{errors}  WRONG: {tap.looks_like or 'no neighbouring layer or norm variant fits better'}"


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
