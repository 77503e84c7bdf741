"""What of SGLang is supported: releases, model classes, and the mechanism by which a class captures.

Known without importing SGLang, so that an unsupported model is refused before its weights are read.
`extractor.engine.capture` has one adapter per mechanism. A class that is not listed is refused.

Source: `sglang/srt/models/*.py` of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from typing import Literal

from extractor.errors import PreflightError

Mechanism = Literal["list", "flag"]

VERIFIED_RELEASES = {"0.5.17": "cuda", "0.5.23": "cpu"}
"""Release: the device on which it was verified. Others are refused unless a run says otherwise."""

MECHANISMS: dict[str, Mechanism] = {
    # `inner.layers_to_capture`, a list of boundaries
    "LlamaForCausalLM": "list",
    "MistralForCausalLM": "list",
    "Qwen2ForCausalLM": "list",
    "Qwen3ForCausalLM": "list",
    # `_is_layer_to_capture` on each layer, never cleared by SGLang's own setter
    "Qwen2MoeForCausalLM": "flag",
    "Qwen3MoeForCausalLM": "flag",
}


CHUNKS_VERIFIED = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Classes of which tests have shown that a sample computed in chunks has the states that it has as a whole."""


def unverified_note(release: str, device: str) -> str | None:
    """What to tell a person whose release was verified on the other device only, or never."""
    verified = VERIFIED_RELEASES.get(release)
    if verified == device:
        return None
    where = "never verified" if verified is None else f"verified on {verified} only"
    return f"SGLang {release} was {where}; this run uses {device}: look at `tapdeck verify --against transformers`"


def mechanism_of(architecture: str) -> Mechanism:
    """How SGLang captures in this class.

    Raises:
        PreflightError: the class is not supported.
    """
    try:
        return MECHANISMS[architecture]
    except KeyError:
        raise PreflightError(
            f"model class {architecture} is not supported: nobody has shown which states SGLang returns for it",
            remedy=f"use one of: {', '.join(sorted(MECHANISMS))}",
            code="unsupported_model",
        ) from None
