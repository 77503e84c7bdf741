"""Small random models in Hugging Face form, with a byte-level tokenizer and a plain ChatML template.

A norm's weights are drawn around 1 and all others at a size that keeps every layer's contribution visible,
so that neighbouring boundaries differ by far more than rounding.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

TOKENIZER = Path(__file__).parents[1] / "data/cases/_common/tok"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS = 6
BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
# Shared experts, and experts chosen by groups after a first dense layer.
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0],
}
# Shorter than the sequences that the tests send, so that it matters.
WINDOW: dict[str, Any] = {"sliding_window": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Kind(NamedTuple):
    """A kind of small model.

    Attributes:
        architecture: the model class, of transformers and of SGLang.
        config: its configuration class in transformers.
        settings: what differs from `BASE`; the settings of the text model where `is_nested`.
        is_nested: a model that also sees images; `vision` is its other part.
        added: keys of config.json that SGLang needs and transformers does not know.
        runs_on: where SGLang can run it; what runs on the CPU also runs on CUDA.
    """

    architecture: str
    config: str
    settings: Mapping[str, Any] = NOTHING
    is_nested: bool = False
    vision: Mapping[str, Any] = NOTHING
    added: Mapping[str, Any] = NOTHING
    runs_on: Literal["cpu", "cuda"] = "cpu"


DEEPSEEK = ROUTED | LATENT | {"rope_parameters": YARN, "routed_scaling_factor": 1.5}
DEEPSEEK_ADDED: dict[str, Any] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10000.0,
    "rope_scaling": {**YARN, "type": "yarn"},
}
KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", "LlamaConfig"),
    "mistral": Kind("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "phi3": Kind("Phi3ForCausalLM", "Phi3Config", {"pad_token_id": 0}),
    "qwen2": Kind("Qwen2ForCausalLM", "Qwen2Config", {"head_dim": None}),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen2-moe": Kind(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        MOE | {"shared_expert_intermediate_size": 0, "head_dim": None},
    ),
    "qwen3-moe": Kind("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "deepseek-v3": Kind("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, added=DEEPSEEK_ADDED),
    "glm4": Kind("Glm4ForCausalLM", "Glm4Config", {"pad_token_id": 0, "eos_token_id": 1}),
    "glm4-moe": Kind("Glm4MoeForCausalLM", "Glm4MoeConfig", ROUTED | {"use_qk_norm": True}),
    "glm4-moe-lite": Kind(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {key: value for key, value in (ROUTED | LATENT).items() if key != "first_k_dense_replace"}
        # Transformers gives the norms of latent attention this epsilon, whatever the others have.
        | {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1), "rms_norm_eps": 1e-6},
        added={"moe_layer_freq": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1},
    ),
    "gemma3": Kind(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        WINDOW | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma4": Kind(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        WINDOW
        | {
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 32,
        },
        runs_on="cuda",
    ),
    "llama4": Kind(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 256,
            "pad_token_id": 0,
            "attention_chunk_size": 2048,
        },
        runs_on="cuda",
    ),
    "apertus": Kind(
        "ApertusForCausalLM",
        "ApertusConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        runs_on="cuda",
    ),
    "arcee": Kind("ArceeForCausalLM", "ArceeConfig", {"bos_token_id": 1, "eos_token_id": 2}),
    "exaone-moe": Kind(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {key: value for key, value in MOE.items() if key != "decoder_sparse_step"}
        | {"layer_types": ["full_attention"] * LAYERS, "sliding_window": None},
        runs_on="cuda",
    ),
    "granite-hybrid": Kind(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["attention"] * LAYERS,
            "shared_intermediate_size": 128,
            "num_local_experts": 4,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "minimax-m2": Kind(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
        added={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 32},
        runs_on="cuda",
    ),
    "ministral3": Kind(
        "Ministral3ForCausalLM", "Ministral3Config", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
    ),
    "gpt-oss": Kind(
        "GptOssForCausalLM",
        "GptOssConfig",
        WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
        runs_on="cuda",
    ),
    "laguna": Kind(
        "LagunaForCausalLM",
        "LagunaConfig",
        WINDOW
        | {
            "layer_types": ALTERNATING,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "mellum": Kind(
        "MellumForCausalLM",
        "MellumConfig",
        WINDOW
        | {
            "layer_types": ALTERNATING,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "qwen3-vl": Kind(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"rope_parameters": MROPE},
        is_nested=True,
        vision=VISION,
    ),
    "lfm2": Kind(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"block_auto_adjust_ff_dim": False},
        runs_on="cuda",
    ),
    "qwen3-next": Kind(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        MOE
        | {
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
        runs_on="cuda",
    ),
}


def make(folder: Path, kind: str, dtype: str = "float32", **shape: Any) -> Path:
    """Writes a model of one of the `KINDS` with seeded random weights."""
    import torch
    import transformers

    what = KINDS[kind]
    values = {key: value for key, value in ({**BASE, **what.settings, **shape}).items() if value is not None}
    if what.is_nested:
        values = {"text_config": values, "vision_config": dict(what.vision), "tie_word_embeddings": False}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # A part of size zero stands for one that is left out.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = getattr(transformers, what.architecture)(getattr(transformers, what.config)(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0, 0.06)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if what.is_nested else config).update(what.added)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """The byte-level tokenizer with the template, into a model folder."""
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def conversations(path: Path, lengths: list[int], seed: int = 0) -> Path:
    """Writes one conversation per length; a conversation has about that many tokens (bytes), at least 60."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz ,.?"
    with path.open("w") as file:
        for number, length in enumerate(lengths):
            # The template itself takes about 40 tokens.
            texts = ["".join(rng.choice(letters) for _ in range(max(10, (length - 40) // 2))) for _ in "qa"]
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    return path
