"""Stored states judged by plain transformers: how far off is each tap, how far may it be, and why.

Owns the bounds (what counts as equal in which precision) and the diagnosis (which other tensor a wrong
tap looks like). Where samples are stored and how a report is printed is not its business.

Invariants: error is per token (`extractor.reference.token_errors`), so a few tokens with massive
activations hide nothing; every tap that is stored is judged; a state that is not finite fails its tap.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch

from extractor.errors import DatasetError
from extractor.reference import ComputeDtype, ErrorSummary, Reference, summarize, token_errors
from extractor.taps import Tap, TapSelection, make_tap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from extractor.store.reader import StoredSample

FLOAT32_BOUND = 1e-5
"""Largest error of a token between two exact float32 implementations. Measured 0 to 5e-7 (SGLang on CPU)."""

SIGNIFICANT_BITS: Mapping[str, int] = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Precision of a dtype: rounding to it changes a value by at most 2**-bits of it."""

YARDSTICK = 1.5
"""How much larger than transformers' own error in the same narrow precision ours may be."""

EXCLUDED_SHARE = 0.05
"""Largest share of tokens that are not judged because a router may have sent them elsewhere."""

APPEALS = 8
"""Runs of transformers with other rounding before a worst token is called wrong."""

DIAGNOSED_SAMPLES = 3
"""Samples from which a wrong tap is explained; all of them show the same cause."""


class TapReport(msgspec.Struct, frozen=True):
    """The judgement on one tap; errors are relative, per token, inf where a state is not finite.

    Attributes:
        name: of the tap.
        max_rel_err: error of the worst token.
        bound: what `max_rel_err` may be at most.
        p99: 99th percentile of the errors.
        p99_bound: what `p99` may be at most.
        looks_like: what the tap holds instead of what it should, when that is known.
        yardstick_runs: runs of transformers whose worst token gave `bound`; see `_hear_appeals`.
    """

    name: str
    max_rel_err: float
    bound: float
    p99: float
    p99_bound: float
    looks_like: str | None = None
    yardstick_runs: int = 1

    @property
    def ok(self) -> bool:
        """Both errors are within their bounds."""
        return self.max_rel_err <= self.bound and self.p99 <= self.p99_bound


class CompareReport(msgspec.Struct, frozen=True):
    """The judgement on a number of samples.

    Attributes:
        taps: one report per stored tap, in stored order.
        num_samples: samples compared.
        num_tokens: their tokens.
        num_excluded_tokens: of those, not judged: a router of the model decides them on a near tie, which
            rounding to the dtype of the computation may turn.
    """

    taps: tuple[TapReport, ...]
    num_samples: int
    num_tokens: int
    num_excluded_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Every tap is within its bounds."""
        return all(tap.ok for tap in self.taps)


def compare_with_transformers(
    samples: Sequence[StoredSample],
    *,
    model_folder: Path,
    taps: TapSelection,
    stored_dtype: ComputeDtype,
    compute_dtype: ComputeDtype,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> CompareReport:
    """Recomputes samples with transformers and judges what is stored. Blocking; loads the model.

    Computed in float32: the error of every token is at most 1e-5, plus the rounding of a narrower store.
    Computed in a narrower dtype: at most 1.5 times what transformers computes itself in that dtype, against
    the same float32 reference on the same samples, at the maximum and at the 99th percentile; see
    `_hear_appeals` for what "transformers itself" means at the maximum.

    Args:
        samples: what is stored; at least one.
        model_folder: the model, in Hugging Face form.
        taps: what each sample's `states` hold.
        stored_dtype: precision on disk.
        compute_dtype: precision that the run computed in.
        device: where transformers computes.
        trust_remote_code: may code from the model folder be run.

    Raises:
        DatasetError: there is no sample, or one lacks a tap.
        PreflightError: transformers cannot load the model or does not give its boundaries.
    """
    if not samples:
        raise DatasetError("there is no stored sample to compare", remedy="verify an output that has samples")
    absent = [name for name in taps.names if any(name not in sample.states for sample in samples)]
    if absent:
        raise DatasetError(
            f"not stored in all samples that are to be compared: {', '.join(absent)}",
            remedy="run `tapdeck verify` without --against: it names the shards that lack them",
        )
    reference = Reference(model_folder, "float32", device, trust_remote_code)
    peer = (
        None
        if compute_dtype == "float32"
        else Reference(model_folder, compute_dtype, device, trust_remote_code)
    )
    ours: dict[str, list[torch.Tensor]] = {name: [] for name in taps.names}
    theirs: dict[str, list[torch.Tensor]] = {name: [] for name in taps.names}
    for sample in samples:
        exact = reference.states(sample.input_ids.numpy(), taps.taps)
        rounded = peer.states(sample.input_ids.numpy(), taps.taps) if peer else {}
        for name in taps.names:
            ours[name].append(token_errors(sample.states[name].cpu(), exact[name]))
            if peer:
                theirs[name].append(token_errors(rounded[name], exact[name]))
    judged = _judged_tokens(samples, reference, compute_dtype)
    reports = []
    for tap in taps.taps:
        yardstick = summarize(torch.cat(theirs[tap.name])[judged]) if peer else None
        errors = summarize(torch.cat(ours[tap.name])[judged])
        reports.append(_judge(tap.name, errors, yardstick, stored_dtype, compute_dtype))
    if peer is not None:
        reports = _hear_appeals(reports, samples, ours, judged, taps, reference=reference, peer=peer)
    for index, report in enumerate(reports):
        if not report.ok:
            likeness = _likeness(taps.taps[index], taps.taps, samples[:DIAGNOSED_SAMPLES], reference)
            reports[index] = msgspec.structs.replace(report, looks_like=likeness)
    return CompareReport(tuple(reports), len(samples), len(judged), int((~judged).sum()))


def _hear_appeals(
    reports: list[TapReport],
    samples: Sequence[StoredSample],
    ours: Mapping[str, Sequence[torch.Tensor]],
    judged: torch.Tensor,
    taps: TapSelection,
    *,
    reference: Reference,
    peer: Reference,
) -> list[TapReport]:
    """Looks again at taps that fail at their worst token alone.

    How far rounding carries a sensitive token is chance: with embeddings moved by one unit in the last
    place, transformers' own error at one token of SmolLM2 in bfloat16 varied between 0.03 and 0.11. So the
    yardstick for the maximum is the worst of several such runs on the samples in question. The 99th
    percentile varies little and gets no second look, which is what finds a tap that is really wrong.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    for seed in range(APPEALS):
        failing = [report for report in reports if not report.ok and report.p99 <= report.p99_bound]
        if not failing:
            break
        for number, (sample, mask) in enumerate(zip(samples, torch.split(judged, lengths), strict=True)):
            names = [r.name for r in failing if bool((ours[r.name][number][mask] > r.bound).any())]
            asked = [tap for tap in taps.taps if tap.name in names]
            if not asked:
                continue
            exact = reference.states(sample.input_ids.numpy(), asked)
            moved = peer.states(sample.input_ids.numpy(), asked, jitter_seed=seed)
            for index, report in enumerate(reports):
                if report.name in names:
                    worst = summarize(token_errors(moved[report.name], exact[report.name])[mask]).maximum
                    bound = max(report.bound, YARDSTICK * worst)
                    reports[index] = msgspec.structs.replace(report, bound=bound, yardstick_runs=seed + 2)
    return reports


def _judged_tokens(
    samples: Sequence[StoredSample], reference: Reference, compute_dtype: ComputeDtype
) -> torch.Tensor:
    """Which tokens are judged, bool [tokens of all samples].

    All, but for those of a mixture-of-experts model whose experts are chosen on a near tie: in a narrow
    dtype they may go elsewhere without anything being wrong. The nearest ties first, and not many.
    """
    judged = torch.ones(sum(len(sample.input_ids) for sample in samples), dtype=torch.bool)
    if compute_dtype == "float32":
        return judged
    margins = [reference.routing_margins(sample.input_ids.numpy()) for sample in samples]
    known = [margin for margin in margins if margin is not None]
    if known:
        joined = torch.cat(known)
        nearest = joined.argsort()[: int(EXCLUDED_SHARE * len(joined))]
        judged[nearest] = joined[nearest] >= 2.0 ** -SIGNIFICANT_BITS[compute_dtype]
    return judged


def _judge(
    name: str,
    ours: ErrorSummary,
    yardstick: ErrorSummary | None,
    stored_dtype: ComputeDtype,
    compute_dtype: ComputeDtype,
) -> TapReport:
    slack = FLOAT32_BOUND
    if SIGNIFICANT_BITS[stored_dtype] < SIGNIFICANT_BITS[compute_dtype]:
        slack += 2.0 ** -SIGNIFICANT_BITS[stored_dtype]
    if yardstick is None:
        bound = p99_bound = slack
    else:
        # Slack also where theirs is exact: an embedding that the checkpoint holds in this dtype has error 0.
        bound = YARDSTICK * yardstick.maximum + slack
        p99_bound = YARDSTICK * yardstick.p99 + slack
    return TapReport(name, ours.maximum, bound, ours.p99, p99_bound)


def _likeness(
    tap: Tap, selected: Sequence[Tap], samples: Sequence[StoredSample], reference: Reference
) -> str | None:
    """What a wrong tap fits clearly better than what it should be, or None."""
    fits: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        stored = sample.states[tap.name].cpu()
        for description, expected, late_rows in _suspects(tap, selected, sample, reference):
            num_rows = len(expected) - abs(late_rows)
            first = max(0, late_rows)
            errors = token_errors(
                stored[first : first + num_rows], expected[first - late_rows : first - late_rows + num_rows]
            )
            fits.setdefault(description, []).append(errors)
    # The median: the first token's massive activations differ little between layers, most tokens much.
    medians = {description: torch.cat(errors).median().item() for description, errors in fits.items()}
    own = medians.pop("")
    best = min(medians, key=medians.__getitem__)
    return best if medians[best] < own / 2 and math.isfinite(medians[best]) else None


def _suspects(
    tap: Tap, selected: Sequence[Tap], sample: StoredSample, reference: Reference
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """What a tap may hold: first itself (described by ""), then what it is mistaken for.

    Layers beside it, which an engine mistakes for it, then the other stored taps: their files may be swapped.

    Yields:
        Description, states [T, H], and by how many rows they are late (negative: early).
    """
    n = reference.num_layers
    normed = Tap(n, True, "normed")
    neighbours = [make_tap(k, n) for k in (tap.boundary - 1, tap.boundary + 1) if 0 <= k <= n]
    # `final` and `normed` for each other are left to the norm below; `normed` has a neighbour only normed.
    known = {tap.name} | ({"final"} if tap.is_normed else {neighbour.name for neighbour in neighbours})
    if tap.boundary == n:
        known.add("normed")
    others = [other for other in selected if other.name not in known]
    wanted = {wanted.name: wanted for wanted in (tap, *neighbours, *others, make_tap(n, n), normed)}
    states = reference.states(sample.input_ids.numpy(), list(wanted.values()))
    own = states[tap.name]
    yield "", own, 0
    for neighbour in neighbours:
        if tap.is_normed and neighbour.boundary == n:
            continue
        side = "one layer early" if neighbour.boundary < tap.boundary else "one layer late"
        found = states[neighbour.name]
        if tap.is_normed:
            found = reference.normalized(found)
        yield f"{tap.name} looks like {neighbour.name}: {side}", found, 0
    for other in others:
        yield f"{tap.name} looks like {other.name}", states[other.name], 0
    once = reference.normalized(own)
    if tap.is_normed:
        yield "normed is final: the norm is not applied", states["final"], 0
        yield "normed has the norm applied twice", once, 0
    else:
        yield f"{tap.name} has the norm applied", once, 0
        yield f"{tap.name} has the norm applied twice", reference.normalized(once), 0
    yield f"{tap.name} has its rows one token late", own, 1
    yield f"{tap.name} has its rows one token early", own, -1
