"""The start-up proof: what is captured really is the boundaries asked for, before anything is stored.

Independent of SGLang's capture and of the model's size. On a small batch of real token ids:

1. each B(k), k < n, put through layer k's own input norm, must be what enters layer k's attention; taken as
   SGLang serves it where that is a branch's output, it must be that together with the residual beside it;
2. B(n) put through the final norm must be `normed`, and that must give the logits SGLang computed;
3. what lies in the host buffers must be the captured rows, cast to the dtype of the disk;
4. each sample computed alone must have the rows it has in the packed batch (no rows swapped, no sample
   sees another);
5. where the plan has samples in chunks: one sample computed in chunks must have, in the host buffers, the rows
   that it has as a whole (positions go on, each chunk sees those before it, rows are joined in order).

Where a replica has several ranks, each makes the whole proof, in step with the others, of what it captured itself.
Before anybody judges, the captured states must be the same on all of them, to the last bit: the residual stream
is what every layer's all-reduce gives to all. A state that differs is a part of a sum, and its norms might agree.

Errors are per token, ||a-b|| / ||b|| over the hidden dimension. A proof that fails names what is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from extractor.engine.anatomy import entering_tensor
from extractor.errors import ProofError
from extractor.plan import Geometry, chunk_edges
from extractor.protocol import ProofLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from extractor.engine.model import Engine

# Of a norm recomputed from the captured rows: float32 rounds at 6e-8 per operation; in bfloat16 the input and
# the output of the norm are each rounded to 8 bits (2**-9 = 0.002 per element), and neighbouring boundaries
# differ by 0.02 and more.
NORM_BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
# Of a sample alone against itself in the batch: at its worst token in float32, at its median one in narrow
# dtypes, where kernels round differently at other batch shapes. Rows of another sample are off by 1. That
# each single row is the right one is checked by the norms, in every dtype.
ALONE_BOUND = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 5e-2}
LOGITS_BOUND = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}
# Of the values of a token in the narrower dtype that is stored.
ROUNDING = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}
NUM_PROOF_CHUNKS = 3


class _Watched(NamedTuple):
    """What went into layers during one pass: into their attention, and as residual into their input norm."""

    entering: dict[int, torch.Tensor]
    residual: dict[int, torch.Tensor]


def prove(
    engine: Engine, sequences: Sequence[np.ndarray], in_chunks: np.ndarray | None = None
) -> tuple[ProofLine, ...]:
    """Runs the proof; blocking, a few small forward passes. On all ranks of a replica, in step.

    Args:
        engine: the loaded model with its taps set.
        sequences: two or more token id arrays that differ, int32 [t] each.
        in_chunks: one that fits a batch and is also computed in chunks, three tokens at least; None leaves that
            out.

    Returns:
        The checks with their errors.

    Raises:
        ProofError: a check failed; the message names tap and fault.
    """
    watched, states, prefill = _run_watched(engine, sequences)
    lines = list(_prove_same_on_all_ranks(engine, states))
    lines += _prove_boundaries(engine, watched, states)
    lines += _prove_last(engine, states, prefill)
    _prove_host_rows(engine, states, sequences)
    lines += _prove_alone(engine, states, sequences)
    if in_chunks is not None:
        lines += _prove_chunks(engine, in_chunks)
    return tuple(lines)


def token_errors(a_TH: torch.Tensor, b_TH: torch.Tensor) -> torch.Tensor:
    """Per-token relative error of `a` against `b`, float32 [T]; a row equal to a zero row has error 0."""
    a_TH, b_TH = a_TH.float(), b_TH.float()
    gap = (a_TH - b_TH).norm(dim=-1)
    return torch.where(gap == 0, gap, gap / b_TH.norm(dim=-1))


def _run_watched(
    engine: Engine, sequences: Sequence[np.ndarray]
) -> tuple[_Watched, dict[str, torch.Tensor], Any]:
    """One forward pass, with what goes into every tapped layer and its neighbours."""
    anatomy = engine.runner.anatomy
    n = len(anatomy.layers)
    watched = {k + d for k in engine.spec.taps.boundaries for d in (-1, 0, 1) if 0 <= k + d < n}
    seen = _Watched({}, {})

    def watch(index: int) -> Any:
        module, entry = anatomy.entry(index)

        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_TH = entering_tensor(entry, args, kwargs)
            dtype = hidden_TH.dtype if isinstance(hidden_TH, torch.Tensor) else type(hidden_TH).__name__
            if dtype != getattr(torch, engine.spec.dtype):
                raise ProofError(
                    f"layer {index} is given {dtype} instead of {engine.spec.dtype}: its input norm also "
                    "quantizes, and the proof cannot be made",
                    remedy="use weights without static activation scales",
                )
            seen.entering[index] = hidden_TH.clone()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def watch_residual(index: int) -> Any:
        def hook(_: object, args: tuple[Any, ...]) -> None:
            if len(args) > 1:
                seen.residual[index] = args[1].clone()

        return anatomy.input_norm(index).register_forward_pre_hook(hook)

    handles = [watch(index) for index in sorted(watched)]
    if _is_branch(engine):
        handles += [watch_residual(index) for index in sorted(watched)]
    try:
        states, prefill = engine.forward(sequences)
    finally:
        for handle in handles:
            handle.remove()
    lost = watched - seen.entering.keys()
    if lost:
        raise ProofError(f"the attention of layers {sorted(lost)} never ran; the proof cannot be made")
    return seen, states, prefill


def _is_branch(engine: Engine) -> bool:
    """Whether what is stored between lacks the residual: as served, in a class that serves it so."""
    return engine.spec.taps.as_served and engine.runner.anatomy.family.served == "branch"


def _prove_same_on_all_ranks(engine: Engine, states: dict[str, torch.Tensor]) -> Iterator[ProofLine]:
    if engine.spec.tp == 1:
        return
    final_TH, normed_TH = engine.capture.final_and_normed()
    seen = {**states, "final": states.get("final", final_TH), "normed": states.get("normed", normed_TH)}
    sent = {name: state_TH.float().cpu().numpy().tobytes() for name, state_TH in seen.items()}
    first, *others = engine.lockstep.gather("captured states", sent) or [sent]
    for rank, theirs in enumerate(others, 1):
        for name, data in first.items():
            if theirs[name] != data:
                raise ProofError(
                    _name_difference(engine, name, rank, theirs[name], data), remedy=_RANKS_REMEDY
                )
    # Nobody goes on into the next collective before the verdict.
    engine.lockstep.agree("captured states are the same", lambda: True)
    yield ProofLine(f"all taps: the same on {engine.spec.tp} ranks", 0.0, 0.0)


_RANKS_REMEDY = (
    "try model.sglang.disable_custom_all_reduce = true; otherwise use model.tp = 1 with this SGLang release, and "
    "please report it"
)


def _name_difference(engine: Engine, name: str, rank: int, theirs: bytes, ours: bytes) -> str:
    theirs_TH, ours_TH = (
        torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, engine.spec.hidden_size)
        for data in (theirs, ours)
    )
    error = float(token_errors(theirs_TH, ours_TH).max())
    is_rounding = error <= NORM_BOUND[engine.spec.dtype]
    why = "an all-reduce that gives each rank another sum?" if is_rounding else "an unreduced partial sum?"
    return f"rank {rank}'s {name} is not rank 0's (relative error {error:.2e}): {why}"


def _input_norm(engine: Engine, k: int, state_TH: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        # Cloned: some norm kernels write into their input.
        normed: torch.Tensor = engine.runner.anatomy.input_norm(k)(state_TH.clone())
    return normed


def _prove_boundaries(
    engine: Engine, watched: _Watched, states: dict[str, torch.Tensor]
) -> Iterator[ProofLine]:
    bound = NORM_BOUND[engine.spec.dtype]
    n = engine.spec.taps.num_layers
    for tap in engine.spec.taps.taps:
        k = tap.boundary
        if tap.is_normed or k == n:
            continue
        state_TH, subject = states[tap.name], f"{tap.name}: enters layer {k}"
        if _is_branch(engine) and k > 0:
            state_TH = state_TH + watched.residual[k]
            subject = f"{tap.name}: as served, not B({k}); with the residual it enters layer {k}"
        elif engine.spec.taps.as_served:
            subject = f"{tap.name}: as served, and that is B({k}): enters layer {k}"
        error = float(token_errors(_input_norm(engine, k, state_TH), watched.entering[k]).max())
        if not error <= bound:
            raise ProofError(
                f"{tap.name} is not the residual stream entering layer {k}: relative error {error:.2e}, "
                f"bound {bound:.0e}{_name_neighbour(engine, k, state_TH, watched.entering, bound)}",
                remedy="do not use this selection with this SGLang release; please report it",
            )
        yield ProofLine(subject, error, bound)


def _name_neighbour(
    engine: Engine, k: int, state_TH: torch.Tensor, entering: dict[int, torch.Tensor], bound: float
) -> str:
    for other, words in ((k - 1, "one layer early"), (k + 1, "one layer late")):
        if other in entering:
            error = float(token_errors(_input_norm(engine, other, state_TH), entering[other]).max())
            if error <= bound:
                return f"; it is what enters layer {other}: captured {words}"
    nearest_T = torch.cdist(_input_norm(engine, k, state_TH).float(), entering[k].float()).argmin(dim=1)
    if bool((nearest_T != torch.arange(len(nearest_T), device=nearest_T.device)).any()):
        return "; its rows are those of other tokens: rows swapped"
    return ""


def _prove_last(engine: Engine, states: dict[str, torch.Tensor], prefill: Any) -> Iterator[ProofLine]:
    """What is stored as `final` and `normed`; where one is not stored, what its hook saw."""
    from extractor.engine.sglang_compat import last_logits

    seen_final_TH, seen_normed_TH = engine.capture.final_and_normed()
    final_TH = states.get("final", seen_final_TH)
    normed_TH = states.get("normed", seen_normed_TH)
    norm = engine.runner.anatomy.final_norm
    bound = NORM_BOUND[engine.spec.dtype]
    with torch.no_grad():
        error = float(token_errors(norm(final_TH.clone()), normed_TH).max())
        if not error <= bound:
            has_norm = float(token_errors(final_TH, norm(seen_final_TH.clone())).max()) <= bound
            swapped = has_norm or float(token_errors(norm(normed_TH.clone()), final_TH).max()) <= bound
            raise ProofError(
                f"the final norm of `final` is not `normed`: relative error {error:.2e}, bound {bound:.0e}"
                + ("; the two are swapped: `final` has the norm applied" if swapped else ""),
                remedy="do not use final or normed with this SGLang release; please report it",
            )
    yield ProofLine("final: its norm is normed", error, bound)
    logits_TV = last_logits(engine.runner.anatomy, normed_TH, prefill.forward_batch)
    logits_error = float(token_errors(logits_TV, prefill.last_logits).max())
    if not logits_error <= LOGITS_BOUND[engine.spec.dtype]:
        raise ProofError(
            f"`normed` does not give the model's logits: relative error {logits_error:.2e}",
            remedy="do not use final or normed with this SGLang release; please report it",
        )
    yield ProofLine("normed: gives the logits", logits_error, LOGITS_BOUND[engine.spec.dtype])


def _prove_host_rows(
    engine: Engine, states: dict[str, torch.Tensor], sequences: Sequence[np.ndarray]
) -> None:
    lengths = [len(ids) for ids in sequences]
    block = engine.pool.copy(states, lengths)
    try:
        block.wait()
        for name in block.own_taps:
            state_TH = states[name]
            expected_TH = state_TH.to(block.tensor(name).dtype).cpu()
            same_T = (block.tensor(name) == expected_TH).all(dim=-1)
            if not bool(same_T.all()):
                row = int((~same_T).nonzero()[0])
                raise ProofError(
                    f"{name}: row {row} in the host buffer is not row {row} of the batch: "
                    "rows swapped or not copied"
                )
    finally:
        block.release()


def _prove_alone(
    engine: Engine, states: dict[str, torch.Tensor], sequences: Sequence[np.ndarray]
) -> Iterator[ProofLine]:
    bound = ALONE_BOUND[engine.spec.dtype]
    worst = dict.fromkeys(states, 0.0)
    start = 0
    for index, ids in enumerate(sequences):
        alone, _ = engine.forward([ids])
        for name, state_TH in states.items():
            errors_T = token_errors(state_TH[start : start + len(ids)], alone[name])
            error = float(errors_T.max() if engine.spec.dtype == "float32" else errors_T.median())
            if not error <= bound:
                raise ProofError(
                    f"{name}: sample {index} has other states alone than in a packed batch (relative error "
                    f"{error:.2e}, bound {bound:.0e}): rows of samples are swapped, or samples see each other"
                )
            worst[name] = max(worst[name], error)
        start += len(ids)
    for name, error in worst.items():
        yield ProofLine(f"{name}: a sample alone has the same rows", error, bound)


def _prove_chunks(engine: Engine, ids: np.ndarray) -> Iterator[ProofLine]:
    step = -(-len(ids) // NUM_PROOF_CHUNKS)
    edges = chunk_edges(len(ids), Geometry(step, len(ids), chunk_tokens=step))
    whole, _ = engine.forward([ids])
    block = engine.compute_chunks(ids, edges)
    spec = engine.spec
    bound = ALONE_BOUND[spec.dtype] + (0.0 if spec.store_dtype == spec.dtype else ROUNDING[spec.store_dtype])
    own: dict[str, float] = {}
    try:
        block.wait()
        for name in block.own_taps:
            whole_TH, joined_TH = whole[name].cpu(), block.tensor(name)
            errors_T = token_errors(joined_TH, whole_TH)
            # The first chunk has no other before it: in a median it would hide the others.
            later_T = errors_T[step:] if len(edges) > 1 else errors_T
            error = float(errors_T.max() if spec.dtype == "float32" else later_T.median())
            if not error <= bound:
                raise ProofError(
                    f"{name}: a sample of {len(ids)} tokens has other states in chunks of {step} than as a whole "
                    f"(relative error {error:.2e}, bound {bound:.0e})"
                    f"{_name_order(joined_TH, whole_TH, edges, bound)}",
                    remedy="raise batch.max_tokens or lower data.max_len, so that no sample is longer than a batch; "
                    "please report it",
                )
            own[name] = error
    finally:
        block.release()
    # Each rank has compared the rows that it stores; the leader tells of all.
    found: dict[str, float] = {}
    for errors in engine.lockstep.gather("samples in chunks", own):
        found |= errors
    for name in whole:
        if name in found:
            yield ProofLine(f"{name}: a sample in chunks has the same rows", found[name], bound)


def _name_order(
    joined_TH: torch.Tensor, whole_TH: torch.Tensor, edges: Sequence[tuple[int, int]], bound: float
) -> str:
    """The chunk that stands where another one should, when there is one."""
    for number, (begin, end) in enumerate(edges):
        for other, (first, last) in enumerate(edges):
            if other == number or last - first != end - begin:
                continue
            errors_T = token_errors(joined_TH[begin:end], whole_TH[first:last])
            if float(errors_T.median()) <= bound:
                return (
                    f": chunk {other} stands in the place of chunk {number}, they are joined in another order"
                )
    return ""
