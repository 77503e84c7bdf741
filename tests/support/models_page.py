"""docs/models.md, made from `extractor.families`.

python -m tests.support.models_page > docs/models.md
"""

from __future__ import annotations

import json
from pathlib import Path

from extractor.families import CHECKED, FAMILIES, NOT_ON_CPU, REFUSED, VERIFIED_RELEASES, Family
from tests.support.stand_in_models import STAND_INS

ON_GPU = Path(__file__).parents[1] / "data/capture_on_gpu.jsonl"
UNVERIFIED = "unverified: the start-up proof decides"
HEAD = """\
# Model classes

Made from `extractor/families.py` (`python -m tests.support.models_page > docs/models.md`); a test compares the two.

A model class is taken, or refused by name before its weights are read; one that is in neither table is refused.
What is stored for a layer is the residual stream B(k) that enters layer k (see [glossary.md](glossary.md)), in
every class, unless `taps.as_served = true` asks for what SGLang's own capture gives.

The proof at the start of every run shows it on the loaded model, whatever this page says: each captured B(k), put
through the layer's own input norm, must be what enters its attention; B(n), put through the final norm and the head,
must give the logits. "Unverified" means that nobody has compared the class with transformers yet; such a run is
accepted, and the proof decides. Compare it once with `tapdeck verify OUTPUT --against transformers`.

Verified releases of SGLang: {releases}.

## Classes that are taken

* taken by: how B(k), 0 < k < n, is captured. list, set, flag: SGLang's own EAGLE-3 or DFLASH capture, set, cleared
  and read back by tapdeck; after: SGLang's DSPARK capture, whose ids mean "after layer"; hook: a hook on each input
  norm, where SGLang's own capture gives something else.
* last boundary: B(n) is the second output of the final norm (residual), or its input.
* watched: the module whose input the proof compares; the first that a layer has.
* as served: what `taps.as_served` stores. B(k): the same. branch: the last branch's output without the residual.
  none: SGLang does not serve hidden states of this class.
* chunks: samples longer than `batch.max_tokens` are taken, since a sample in chunks was compared with the whole.
* run: what was compared with transformers, every boundary and `normed`, token by token. Stand-in: set, clear, read
  back and result were run on a torch module of the class's form, since SGLang's class needs CUDA kernels. Not on the
  CPU: it was tried there and needs a GPU, for the reason given.
"""
GPU_HEAD = """
## Errors in bfloat16 on a GPU

One H200, SGLang 0.5.17, 2026-12-01: `tests/benchmarks/gpu.sh CAPTURE WORK` (and `qwen3-fa3`). Random models of hidden
size 2048 and 6 layers (DeepSeek: 4), 48 conversations, compared with transformers in float32 on the same samples: error
of a token, at
its maximum and at the 99th percentile of all tokens; in brackets the bound, 1.5 times the error of transformers'
own bfloat16. kimi: 3 layers of Kimi-K2.5's widths (hidden 7168, latent attention, 16 experts in INT4, group 32),
compared with the dequantized weights. Not judged: tokens of mixtures of experts whose router is nearest to a tie, at
most 5 %. Proof: the largest error of the start-up proof.

| model, attention | proof | not judged | tap | maximum (bound) | 99th percentile (bound) |
|---|---|---|---|---|---|
"""
REFUSED_HEAD = """
## Classes that are refused

| class | why |
|---|---|
"""
TAIL = """
## What is known of single classes

* Gemma 3: SGLang hands over the last branch's output without its residual, and on CUDA a tensor that the layer then
  overwrites. B(k) is taken from the input norm; `taps.as_served` is refused on CUDA.
* Gemma 4: SGLang 0.5.17 hands over a tensor that a fused norm of the same layer writes into. B(k) is taken from the
  input norm.
* Bailing (Ling) v2: the class reads a list and flags and captures twice where both are set; the list alone is set.
* DeepSeek's classes and GLM-4 Lite on the CPU: SGLang has no backend registered for their latent attention there; the
  tests register its own one. A run of such a model on the CPU is refused by SGLang.
* Classes with mamba, linear attention or convolution layers keep a state, so that a chunk needs more of those before
  it than keys and values.
* `enforce_disable_flashinfer_allreduce_fusion` is fixed to true: with fused all-reduces SGLang 0.5.17 captures partial
  sums under tensor parallelism in some mixture-of-experts classes, and only in batches of up to 2,048 tokens.
* Weights with static activation scales (FP8 per tensor): the input norm also quantizes, so that the proof cannot be
  made; such a run does not start.
"""


def page() -> str:
    """The whole page."""
    releases = ", ".join(f"{release} on {device}" for release, device in VERIFIED_RELEASES.items())
    rows = [
        "| class | taken by | last boundary | watched | as served | chunks | run |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, family) for name, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower())),
    ]
    refused = "\n".join(
        f"| {name} | {why} |" for name, why in sorted(REFUSED.items(), key=lambda item: item[0].lower())
    )
    taken = HEAD.format(releases=releases) + "\n" + "\n".join(rows) + "\n"
    return taken + REFUSED_HEAD + refused + "\n" + GPU_HEAD + "\n".join(_gpu_rows()) + "\n" + TAIL


def _gpu_rows() -> list[str]:
    """What `tests/benchmarks/gpu_capture.py` measured, a row for each tap."""
    rows = []
    for line in ON_GPU.read_text().splitlines():
        model = json.loads(line)
        first = f"{model['name'].removesuffix('-fa3')}, {model['backend']} | {model['proof']:.1e}"
        first += f" | {model['excluded']:,} of {model['tokens']:,}"
        for tap, (maximum, bound, p99, p99_bound) in model["taps"].items():
            errors = f"{maximum:.1e} ({bound:.1e}) | {p99:.1e} ({p99_bound:.1e})"
            rows.append(f"| {first} | {tap} | {errors} |")
            first = " | | "
    return rows


def _row(name: str, family: Family) -> str:
    inside = ".".join(part for part in (family.wrapper, family.inner) if part)
    taken = family.mechanism + (f" in {inside}" if inside != "model" else "")
    last = "residual" if family.norm_outputs == 2 else "input"
    watched = ", ".join(f"`{entry.module}`" for entry in family.entries)
    served = ("B(k)" if family.served == "boundary" else family.served) if family.has_setter else "none"
    if family.overwritten_on:
        served += f", not on {', '.join(family.overwritten_on)}"
    run = [f"{check.release} {check.device}: {check.what}" for check in CHECKED.get(name, ())] or [UNVERIFIED]
    if name in STAND_INS and name not in CHECKED:
        run.append("stand-in")
    if name in NOT_ON_CPU:
        run.append(f"not on the CPU: {NOT_ON_CPU[name]}")
    chunks = "yes" if family.chunks_verified else "no"
    cells = [name, taken, f"{last} of `{family.final_norm}`", watched, served, chunks, "; ".join(run)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
