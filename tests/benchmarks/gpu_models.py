"""Random models and their inputs for `gpu.sh`; see there.

python tests/benchmarks/gpu_models.py WORK     the models of PARITY
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from extractor.commands.demo_text import build_conversations
from tests.support import kimi_model, small_models

if TYPE_CHECKING:
    import torch

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GQA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 16,
    "head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_parameters": YARN,
    "max_position_embeddings": 163840,
}
DEEPSEEK_ADDED: dict[str, Any] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10000.0,
    "rope_scaling": {**YARN, "type": "yarn"},
}
# Shorter than most samples, so that it matters.
WINDOW: dict[str, Any] = {"sliding_window": 128}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [0],
}


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Kind(NamedTuple):
    """A model of some class of transformers.

    Attributes:
        architecture: the class, of transformers and of SGLang.
        config: its configuration class in transformers.
        settings: of the (text) model, over `GQA`; None takes a key away.
        vision: the other part of a model that also sees images.
        added: keys of config.json that SGLang needs and transformers does not write.
    """

    architecture: str
    config: str
    settings: Mapping[str, Any] = NOTHING
    vision: Mapping[str, Any] | None = None
    added: Mapping[str, Any] = NOTHING


KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3-moe": Kind(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
    "deepseek-v3": Kind("DeepseekV3ForCausalLM", "DeepseekV3Config", ROUTED | LATENT, added=DEEPSEEK_ADDED),
    "deepseek-v3-groups": Kind(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        ROUTED | LATENT | {"n_routed_experts": 32, "n_group": 8, "topk_group": 4},
        added=DEEPSEEK_ADDED,
    ),
    "gpt-oss": Kind(
        "GptOssForCausalLM",
        "GptOssConfig",
        WINDOW
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 2048,
            "head_dim": 64,
            "max_position_embeddings": 131072,
        },
        added={"swiglu_limit": 7.0},
    ),
    "gemma3": Kind(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        WINDOW | {"query_pre_attn_scalar": 128, "tie_word_embeddings": True},
    ),
    "glm4-moe": Kind("Glm4MoeForCausalLM", "Glm4MoeConfig", ROUTED | {"use_qk_norm": True}),
    "qwen3-vl": Kind(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}},
        vision=VISION,
    ),
    # Wide and shallow: for what states of a wide model take in memory.
    "wide": Kind(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 7168,
            "intermediate_size": 4096,
            "num_hidden_layers": 4,
            "num_attention_heads": 56,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
        },
    ),
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
}
"""Widths for a try on a CPU; only for classes whose widths these are."""


def make(folder: Path, name: str, *, device: str = "cuda", tiny: bool = False) -> None:
    """Writes a model of `KINDS` in bfloat16 with seeded random weights."""
    import torch
    import transformers

    what = KINDS[name]
    widths = {key: TINY[key] for key in TINY if key in {**GQA, **what.settings}} if tiny else {}
    values = {**small_models.BASE, "max_position_embeddings": 32768, **GQA, **what.settings, **widths}
    values = {key: value for key, value in values.items() if value is not None}
    if what.vision is not None:
        values = {"text_config": values, "vision_config": what.vision, "tie_word_embeddings": False}
    config = getattr(transformers, what.config)(**values)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, what.architecture)(config).to(torch.bfloat16)
    with torch.no_grad():
        for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(path, tensor)
    model.save_pretrained(folder)
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text())
    (written if what.vision is None else written["text_config"]).update(what.added)
    config_file.write_text(json.dumps(written, indent=2))
    small_models.add_tokenizer(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def _fill(path: str, tensor: torch.Tensor) -> None:
    """Draws weights whose output is about as large as their input, so that every layer matters."""
    if path.endswith("e_score_correction_bias"):
        tensor.normal_(0, 0.2)
    elif "inv_freq" in path or "rotary" in path or not tensor.is_floating_point() or "scale" in path:
        return
    elif "norm" in path and path.endswith("weight"):
        tensor.normal_(1.0, 0.1)
    elif tensor.dim() < 2:
        tensor.normal_(0, 0.05)
    elif "embed_tokens" in path:
        tensor.normal_(0, 0.5)
    else:
        # Experts of some classes are stored [inputs, outputs]; the smaller side is near enough for those.
        fan_in = tensor.shape[-1] if tensor.dim() == 2 else min(tensor.shape[-2:])
        tensor.normal_(0, 0.7 / math.sqrt(fan_in))


def make_kimi(folder: Path, reference: Path, *, device: str = "cuda", tiny: bool = False) -> None:
    """Writes Kimi-K2.5's form with its real widths, a dense layer and two with experts, and its plain twin."""
    kimi_model.make(
        folder,
        reference,
        shape=kimi_model.TINY if tiny else kimi_model.REAL,
        num_layers=3,
        num_experts=16,
        top_k=4,
        device=device,
    )


def main() -> None:
    work = Path(sys.argv[1])
    build_conversations(work / "conversations.jsonl", num_samples=64, seed=1)
    rng = random.Random(0)
    lengths = [rng.randrange(60, 700) for _ in range(48)]
    small_models.conversations(work / "letters.jsonl", lengths)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    for kind in ("qwen3", "qwen3-moe"):
        small_models.make(work / kind, kind, "bfloat16", **shape)


if __name__ == "__main__":
    main()
