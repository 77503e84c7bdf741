"""What of SGLang is supported: releases, model classes, and how each class is captured.

Known without importing SGLang, so that an unsupported model is refused before its weights are read. A class is
in `FAMILIES` (how its states are taken, and where its parts are) or in `REFUSED` (why not); one that is in
neither is refused as well. `extractor.engine.adapters` has one adapter per mechanism. Nothing here is believed:
the start-up proof of every run decides, and `CHECKED` says which classes were compared with transformers.

Words: the wrapper is the object whose `forward` unpacks what the inner model returns and makes the logits; the
inner model owns the decoder layers and the final norm. n is the number of layers.

Source: `sglang/srt/models/*.py` of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from extractor.errors import PreflightError

Mechanism = Literal["list", "flag", "after", "hook"]
Stock = Literal["list", "flag", "after"]

VERIFIED_RELEASES = {"0.5.17": "cuda", "0.5.23": "cpu"}
"""Release: the device on which it was verified. Others are refused unless a run says otherwise."""


class Entry(msgspec.Struct, frozen=True):
    """The module of a layer that is given what its input norm made: its attention, or what stands in its place.

    Attributes:
        module: path below the layer.
        position: of the tensor among the positional arguments, where it is not the keyword `hidden_states`.
    """

    module: str
    position: int = 1


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of model classes is captured. Paths are dotted; a number is an index.

    Attributes:
        mechanism: how B(k), 0 < k < n, is taken. `list`: a container of boundaries on the inner model; `flag`: a
            flag on every layer (and the container beside it); `after`: a container of layers after which it is
            taken, k-1; `hook`: a hook on layer k's input norm.
        stock: the mechanism that SGLang's own capture has, where `mechanism` is not that one; None: the same.
        has_setter: SGLang can be told to capture (it serves hidden states of this class).
        served: what SGLang's own capture gives: B(k), or the last branch's output without the residual.
        overwritten_on: devices where SGLang's own capture hands over a tensor that the layer then writes into.
        wrapper: path from the loaded model.
        inner: path from the wrapper.
        head: path from the wrapper to what the logits processor is given as head.
        container: attribute of the inner model that lists what is captured.
        is_off_when_none: the container must be None, not empty, while nothing is captured.
        has_inner_switch: the inner model has a switch of its own beside the wrapper's.
        needs_capture_mode: the inner model captures only in batches that ask for hidden states.
        final_norm: path from the inner model.
        norm_outputs: 2 when the final norm is given the residual and returns (normed, B(n)); 1 when it is
            given B(n) and returns normed.
        input_norm: path from a layer.
        entries: the first that a layer has is the one that is watched.
        captured_at: which element of what the inner model returns holds the captures.
        calls_forward: the class calls `forward` of model and layers, so that hooks on them never run.
        has_state: some layers carry a state instead of a KV cache (mamba, linear attention, convolution).
        chunks_verified: a sample in chunks was compared with the same sample in one piece.
    """

    mechanism: Mechanism = "list"
    stock: Stock | None = None
    has_setter: bool = True
    served: Literal["boundary", "branch"] = "boundary"
    overwritten_on: tuple[str, ...] = ()
    wrapper: str = ""
    inner: str = "model"
    head: str = "lm_head"
    container: str = "layers_to_capture"
    is_off_when_none: bool = False
    has_inner_switch: bool = False
    needs_capture_mode: bool = False
    final_norm: str = "norm"
    norm_outputs: Literal[1, 2] = 2
    input_norm: str = "input_layernorm"
    entries: tuple[Entry, ...] = (Entry("self_attn"),)
    captured_at: int = 1
    calls_forward: bool = False
    has_state: bool = False
    chunks_verified: bool = False


_LIST = Family()
_LIST_CHUNKS = Family(chunks_verified=True)
_FLAG = Family(mechanism="flag")
_NO_SETTER = Family(has_setter=False)
_WITHIN = "language_model"

# The residual travels beside the hidden states; on CUDA the tensor that SGLang hands over is written into.
_GEMMA3 = Family(
    mechanism="hook", stock="list", served="branch", overwritten_on=("cuda",), head="model.embed_tokens"
)
# 0.5.17 hands over the tensor that a fused norm of the same layer then writes into.
_GEMMA4 = Family(mechanism="hook", stock="list", overwritten_on=("cuda",), norm_outputs=1)
_LINEAR_OR_QKV = (Entry("linear_attn", 0), Entry("qkv_proj", 0))
_QWEN3_NEXT = Family(mechanism="flag", entries=_LINEAR_OR_QKV, has_state=True)
_LFM2 = Family(
    mechanism="flag",
    final_norm="embedding_norm",
    norm_outputs=1,
    input_norm="operator_norm",
    entries=(Entry("self_attn", 1), Entry("conv", 0)),
    has_state=True,
)
_NEMOTRON_H = Family(
    final_norm="norm_f",
    input_norm="norm",
    # One layer is one of: mamba, attention, MLP, mixture of experts.
    entries=tuple(Entry(f"mixer.{name}", 0) for name in ("in_proj", "qkv_proj", "up_proj", "gate")),
    calls_forward=True,
    has_state=True,
)
_BAILING = Family(entries=(Entry("attention"),))
_MIMO_V2 = Family(captured_at=2)
_MUSE_GLIMMER = Family(norm_outputs=1)


def _within(path: str, family: Family) -> Family:
    """The same family inside a model that also sees images."""
    return msgspec.structs.replace(family, wrapper=path)


FAMILIES: dict[str, Family] = {
    # A list of boundaries on the inner model.
    "LlamaForCausalLM": _LIST_CHUNKS,
    "Phi3ForCausalLM": _LIST,
    "InternLM3ForCausalLM": _LIST,
    "IQuestCoderForCausalLM": _LIST,
    "MistralForCausalLM": _LIST,
    "Ministral3ForCausalLM": _LIST,
    "TeleFLMForCausalLM": _LIST,
    "Qwen2ForCausalLM": _LIST_CHUNKS,
    "Qwen3ForCausalLM": _LIST_CHUNKS,
    "Llama4ForCausalLM": _LIST,
    "ApertusForCausalLM": Family(input_norm="attention_layernorm"),
    "ArceeForCausalLM": _NO_SETTER,
    "Cosmos3EdgeForConditionalGeneration": _NO_SETTER,
    "Glm4ForCausalLM": _NO_SETTER,
    "ExaoneMoEForCausalLM": _LIST,
    "ExaoneMoeForCausalLM": _LIST,
    "Glm4MoeForCausalLM": _LIST,
    "Glm4MoeLiteForCausalLM": _LIST,
    "GptOssForCausalLM": _LIST,
    # These read a list and flags, and capture twice where both are set: the list alone is used.
    "BailingMoEForCausalLM": _BAILING,
    "BailingMoeForCausalLM": _BAILING,
    "BailingMoeV2ForCausalLM": _BAILING,
    "SarvamMoEForCausalLM": _BAILING,
    "DeepseekV2ForCausalLM": _LIST,
    "DeepseekV3ForCausalLM": _LIST,
    "DeepseekV32ForCausalLM": _LIST,
    "GlmMoeDsaForCausalLM": _LIST,
    "MistralLarge3ForCausalLM": _LIST,
    "MiniMaxM2ForCausalLM": _LIST,
    "LagunaForCausalLM": _LIST,
    # Two attentions in a layer: B(k) enters the first.
    "LongcatFlashForCausalLM": Family(input_norm="input_layernorm.0", entries=(Entry("self_attn.0"),)),
    "GraniteMoeHybridForCausalLM": Family(
        has_setter=False,
        norm_outputs=1,
        entries=(Entry("self_attn"), Entry("mamba.in_proj", 0)),
        has_state=True,
    ),
    "MuseGlimmerForCausalLM": _MUSE_GLIMMER,
    "MuseGlimmerForConditionalGeneration": _MUSE_GLIMMER,
    "MiMoV2ForCausalLM": _MIMO_V2,
    "MiMoV2FlashForCausalLM": _MIMO_V2,
    # A set of boundaries.
    "NemotronHForCausalLM": _NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": _NEMOTRON_H,
    # Text models inside models that also see images.
    "KimiK25ForConditionalGeneration": _within(_WITHIN, _LIST),
    "Llama4ForConditionalGeneration": _within(_WITHIN, _LIST),
    "Lfm2VlForConditionalGeneration": _within(_WITHIN, _LFM2),
    "NemotronH_Nano_VL_V2": _within(_WITHIN, _NEMOTRON_H),
    "NemotronH_Nano_Omni_Reasoning_V3": _within(_WITHIN, _NEMOTRON_H),
    "NemotronH_Omni_Reasoning_V3": _within(_WITHIN, _NEMOTRON_H),
    "Qwen3VLForConditionalGeneration": _LIST,
    "Cosmos3ForConditionalGeneration": _LIST,
    "Qwen3VLMoeForConditionalGeneration": _LIST,
    "InternS1ProForConditionalGeneration": _LIST,
    "Qwen2_5_VLForConditionalGeneration": _LIST,
    "Glm4vForConditionalGeneration": _NO_SETTER,
    "GlmOcrForConditionalGeneration": _NO_SETTER,
    "Glm4vMoeForConditionalGeneration": _NO_SETTER,
    # A flag on every layer, which SGLang's own setter never clears.
    "Qwen2MoeForCausalLM": _FLAG,
    "Qwen3MoeForCausalLM": Family(mechanism="flag", chunks_verified=True),
    "MellumForCausalLM": _FLAG,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_NEXT,
    "InternS2PreviewForConditionalGeneration": _QWEN3_NEXT,
    "InternS2MobiusForConditionalGeneration": _QWEN3_NEXT,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "MiniMaxM3SparseForCausalLM": _FLAG,
    "MiniMaxM3SparseForConditionalGeneration": _FLAG,
    # A list of layers after which a state is taken.
    "KimiLinearForCausalLM": Family(
        mechanism="after", container="dspark_layers_to_capture", is_off_when_none=True, has_state=True
    ),
    "BailingMoeV3ForCausalLM": Family(
        mechanism="after",
        is_off_when_none=True,
        has_inner_switch=True,
        needs_capture_mode=True,
        entries=(Entry("attention"),),
        has_state=True,
    ),
    # A hook on each input norm, since SGLang's own capture gives something else.
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _within(_WITHIN, _GEMMA3),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": msgspec.structs.replace(_GEMMA4, inner="language_model"),
    "Gemma4UnifiedForConditionalGeneration": msgspec.structs.replace(_GEMMA4, inner="language_model"),
}

_DRAFT = "it is a draft model (MTP, NextN or EAGLE), and drafts are what these states train"
_EMBEDDING = "it is an embedding model and has no next-token states"
_STREAMS = "its layers exchange several residual streams (hyper-connections): no single tensor is B(k)"
_BANKED = "its residual is a mixture over banked rows: no single tensor is B(k)"
_WRAPS = "SGLang has no capture for it, and which text model is inside is chosen while it loads"
_LOOP = "its layers run several times in a pass, so a layer has no one boundary"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "DeepseekV3ForCausalLMNextN",
            "DeepseekV4ForCausalLMNextN",
            "ExaoneMoEForCausalLMMTP",
            "Gemma4AssistantForCausalLM",
            "Gemma4UnifiedAssistantForCausalLM",
            "Glm4MoeForCausalLMNextN",
            "Glm4MoeLiteForCausalLMNextN",
            "Glm5NextForConditionalGenerationNextN",
            "GlmMoeDsaForCausalLMNextN",
            "LlamaForCausalLMEagle",
            "LlamaForCausalLMEagle3",
            "LongcatFlashForCausalLMNextN",
            "MiMoV2MTP",
            "MistralForCausalLMEagle",
            "MistralLarge3ForCausalLMEagle",
            "NemotronHForCausalLMMTP",
            "Qwen2ForCausalLMEagle",
            "Qwen3MoeForCausalLMMTP",
            "Qwen3NextForCausalLMMTP",
        ),
        _DRAFT,
    ),
    "EmbeddingGemmaModel": _EMBEDDING,
    "Lfm2BidirectionalModel": _EMBEDDING,
    "BertModel": _EMBEDDING,
    "WhisperForConditionalGeneration": "it has an encoder and a decoder; only decoders are captured",
    "DeepseekV4ForCausalLM": _STREAMS,
    "Qwen4ExpForConditionalGeneration": _STREAMS,
    "Glm5NextForConditionalGeneration": _STREAMS,
    "KimiK3LinearForCausalLM": _BANKED,
    "KimiK3ForConditionalGeneration": _BANKED,
    "NanbeigeForCausalLM": _LOOP,
    "InklingForConditionalGeneration": "what SGLang captures precedes a convolution that belongs to the layer before",
    "BeamForCausalLM": "its fused layers pass by the norms, so that neither capture nor last boundary can be proven",
    "MuseSparkForConditionalGeneration": "a layer ends with the next one's input norm, and its stream has another "
    "dtype than the model",
    "MindSporeForCausalLM": "it runs on another framework than torch",
    "MiniCPMV": "its class is a proxy for one that is chosen while it loads",
    "Qwen2VLForConditionalGeneration": "SGLang has no capture for it",
    "OPTForCausalLM": "SGLang's class never captures",
    **dict.fromkeys(
        (
            "BailingMoeV3VLForConditionalGeneration",
            "DeepseekOCRForCausalLM",
            "DeepseekVL2ForCausalLM",
            "InternS1ForConditionalGeneration",
            "InternVLChatModel",
            "KimiVLForConditionalGeneration",
            "LlavaLlamaForCausalLM",
            "LlavaQwenForCausalLM",
            "Mistral3ForConditionalGeneration",
        ),
        _WRAPS,
    ),
}
"""Class: why its states are not taken."""


class Check(msgspec.Struct, frozen=True):
    """Where a class was compared with transformers: every boundary and `normed`, token by token.

    Attributes:
        release: of SGLang.
        device: where it ran.
        what: model and precision.
    """

    release: str
    device: str
    what: str


_CPU = Check("0.5.23", "cpu", "small random model, float32")
_CUDA = Check("0.5.17", "cuda", "small random model, bfloat16")

CHECKED: dict[str, tuple[Check, ...]] = {
    "ArceeForCausalLM": (_CPU,),
    "DeepseekV3ForCausalLM": (_CPU, _CUDA),
    "Gemma3ForCausalLM": (_CPU, _CUDA),
    "Glm4ForCausalLM": (_CPU,),
    "Glm4MoeForCausalLM": (_CPU, _CUDA),
    "Glm4MoeLiteForCausalLM": (_CPU,),
    "GraniteMoeHybridForCausalLM": (
        Check("0.5.23", "cpu", "small random model without mamba layers, float32"),
    ),
    "KimiK25ForConditionalGeneration": (
        Check("0.5.23", "cpu", "text of a small random model, float32"),
        Check("0.5.17", "cuda", "3 layers of its widths with INT4 experts, bfloat16"),
    ),
    "LagunaForCausalLM": (_CPU,),
    "LlamaForCausalLM": (
        Check("0.5.23", "cpu", "SmolLM2-135M and a small random model, float32 and bfloat16"),
        Check("0.5.17", "cuda", "SmolLM2-135M and a small random model, bfloat16"),
    ),
    "MellumForCausalLM": (_CPU,),
    "Ministral3ForCausalLM": (_CPU,),
    "MistralForCausalLM": (_CPU,),
    "Phi3ForCausalLM": (_CPU,),
    "Qwen2ForCausalLM": (_CPU,),
    "Qwen2MoeForCausalLM": (Check("0.5.23", "cpu", "small random model without shared expert, float32"),),
    "Qwen3ForCausalLM": (_CPU, _CUDA),
    "Qwen3MoeForCausalLM": (_CPU, _CUDA),
    "Qwen3VLForConditionalGeneration": (
        Check("0.5.23", "cpu", "text of a small random model, float32"),
        Check("0.5.17", "cuda", "text of a small random model, bfloat16"),
    ),
}
"""Classes that were compared; the others are unverified, and the start-up proof of each run decides."""

_BACKEND = "SGLang wants one of its CUDA attention backends"
NOT_ON_CPU: dict[str, str] = {
    "ApertusForCausalLM": "the constants of its activation are bfloat16 (3e-3 from transformers in float32)",
    "ExaoneMoEForCausalLM": _BACKEND,
    "ExaoneMoeForCausalLM": _BACKEND,
    "Gemma4ForCausalLM": _BACKEND,
    "Gemma4ForConditionalGeneration": _BACKEND,
    "Gemma4UnifiedForConditionalGeneration": _BACKEND,
    "GptOssForCausalLM": _BACKEND,
    "Lfm2ForCausalLM": "its convolutions have a cache on CUDA only",
    "Llama4ForCausalLM": "queries and keys are normed in bfloat16, and rotated in place on CUDA only",
    "MiniMaxM2ForCausalLM": "its norms of queries and keys are a Triton kernel",
    "Qwen2MoeForCausalLM": "the gate of its shared expert is a Triton kernel",
    "Qwen3NextForCausalLM": "its linear attention is a CUDA kernel",
}
"""Classes that were tried on the CPU path of 0.5.23, and what of it cannot be run or compared there."""


def unverified_note(release: str, device: str) -> str | None:
    """What to tell a person whose release was verified on the other device only, or never."""
    verified = VERIFIED_RELEASES.get(release)
    if verified == device:
        return None
    where = "never verified" if verified is None else f"verified on {verified} only"
    return f"SGLang {release} was {where}; this run uses {device}: look at `tapdeck verify --against transformers`"


def family_of(architecture: str) -> Family:
    """How SGLang's class is captured.

    Raises:
        PreflightError: the class is not supported, with the reason.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    reason = REFUSED.get(architecture, "nobody has shown which states SGLang returns for it")
    raise PreflightError(
        f"model class {architecture} is not supported: {reason}",
        remedy="docs/models.md lists the classes that are; among them " + ", ".join(sorted(CHECKED)),
        code="unsupported_model",
    )


def check_served(architecture: str, device: str) -> None:
    """Refuses `taps.as_served` where SGLang's own capture cannot be had, or hands over something else later.

    Raises:
        PreflightError: with the reason.
    """
    family = family_of(architecture)
    if not family.has_setter:
        why = f"SGLang does not serve hidden states of {architecture}"
    elif device in family.overwritten_on:
        why = (
            f"on {device} SGLang's {architecture} hands over a tensor that the layer then writes into, so what is "
            "served depends on when it is read"
        )
    else:
        return
    raise PreflightError(
        f"taps.as_served: {why}",
        remedy="leave out taps.as_served: the residual stream B(k) is stored then",
        code="as_served",
    )
