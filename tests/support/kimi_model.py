"""A small model of Kimi-K2.5's form: a DeepSeek-V3 text model inside a model that also sees images.

Written as two folders: the model as it is served (INT4 experts in `compressed-tensors` form, or plain), and a
text model in transformers' form with the weights that the first one means.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import int4_weights, small_models

if TYPE_CHECKING:
    import torch

REAL: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""The widths of Kimi-K2.5; its 384 experts and 61 layers are left to the caller."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}
"""The vision tower cannot be left out; it is as small as it gets."""
TOWER = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
YARN: dict[str, Any] = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
IGNORED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
]
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
SHARD_BYTES = 2 << 30


def text_config(shape: dict[str, Any], *, num_layers: int, num_experts: int, top_k: int) -> dict[str, Any]:
    """The configuration of the text model, in the spelling of the published one."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": small_models.BASE["vocab_size"],
        "num_hidden_layers": num_layers,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.827,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }


def make(
    folder: Path,
    reference: Path,
    *,
    shape: dict[str, Any] = TINY,
    num_layers: int = 3,
    num_experts: int = 16,
    top_k: int = 4,
    quantized: bool = True,
    dtype: str = "bfloat16",
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Writes both folders, with seeded random weights.

    Args:
        folder: of the model as it is served.
        reference: of the text model, for transformers.
        shape: `REAL`, `TINY`, or another set of widths.
        num_layers: the first is dense, the others have experts.
        num_experts: routed ones of a layer.
        top_k: experts of a token.
        quantized: pack the routed experts' weights as INT4; needs bfloat16.
        dtype: of the other weights, and of all in `reference`.
        device: where weights are drawn.
        seed: of the weights.
    """
    import torch

    text = text_config(shape, num_layers=num_layers, num_experts=num_experts, top_k=top_k) | {"dtype": dtype}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": dtype,
        "media_placeholder_token_id": small_models.BASE["vocab_size"] - 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": VISION
        | TOWER
        | {f"vt_{key}": value for key, value in TOWER.items()}
        | {"mm_hidden_size": TOWER["hidden_size"], "text_hidden_size": shape["hidden_size"]},
        "text_config": text
        | ({"quantization_config": int4_weights.quantization_config(IGNORED)} if quantized else {}),
    }
    for place, config in ((folder, outer), (reference, text)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config, indent=2))
        small_models.add_tokenizer(place)
    generator = torch.Generator(device).manual_seed(seed)
    served, plain = _Weights(folder), _Weights(reference)
    for name, size in _shapes(text):
        weight = _draw(name, size, generator, getattr(torch, dtype))
        if quantized and _is_routed(name):
            packed = int4_weights.quantize(weight)
            for part, tensor in packed.items():
                served.add(f"language_model.{name.removesuffix('weight')}{part}", tensor)
            weight = int4_weights.dequantize(packed)
        else:
            served.add(f"language_model.{name}", weight)
        plain.add(name, weight)
    served.finish()
    plain.finish()


def _shapes(text: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of the text model, in the order of the layers."""
    hidden, heads, lora = text["hidden_size"], text["num_attention_heads"], text["q_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    latent, moe = text["kv_lora_rank"], text["moe_intermediate_size"]
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (text["vocab_size"], hidden))]

    def mlp(prefix: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        return [(f"{prefix}.{part}.weight", size) for part, size in zip(EXPERT_PARTS, sizes, strict=True)]

    for number in range(text["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes += [
            (f"{layer}.input_layernorm.weight", (hidden,)),
            (f"{layer}.post_attention_layernorm.weight", (hidden,)),
            (f"{layer}.self_attn.q_a_proj.weight", (lora, hidden)),
            (f"{layer}.self_attn.q_a_layernorm.weight", (lora,)),
            (f"{layer}.self_attn.q_b_proj.weight", (heads * (nope + rope), lora)),
            (f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)),
            (f"{layer}.self_attn.kv_a_layernorm.weight", (latent,)),
            (f"{layer}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)),
            (f"{layer}.self_attn.o_proj.weight", (hidden, heads * value)),
        ]
        if number < text["first_k_dense_replace"]:
            shapes += mlp(f"{layer}.mlp", text["intermediate_size"])
            continue
        shapes += [
            (f"{layer}.mlp.gate.weight", (text["n_routed_experts"], hidden)),
            (f"{layer}.mlp.gate.e_score_correction_bias", (text["n_routed_experts"],)),
            *mlp(f"{layer}.mlp.shared_experts", moe),
        ]
        for expert in range(text["n_routed_experts"]):
            shapes += mlp(f"{layer}.mlp.experts.{expert}", moe)
    return [*shapes, ("model.norm.weight", (hidden,)), ("lm_head.weight", (text["vocab_size"], hidden))]


def _is_routed(name: str) -> bool:
    return ".mlp.experts." in name


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """A weight whose output is about as large as its input, so that every layer matters and none explodes."""
    import torch

    drawn = torch.randn(size, generator=generator, device=generator.device)
    if "norm" in name:
        return (1 + 0.1 * drawn).to(dtype)
    if name.endswith("e_score_correction_bias"):
        # Kept in float32 by every loader. It spreads the experts' scores as training does.
        return 0.2 * drawn
    if "embed_tokens" in name:
        return (0.5 * drawn).to(dtype)
    return (0.7 / math.sqrt(size[-1]) * drawn).to(dtype)


class _Weights:
    """Weight files with an index, written in parts so that a large model needs no memory of its size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        # To the host at once: weights of both folders would fill a device that others share.
        self._held[name] = tensor.cpu().contiguous()
        self._bytes += tensor.nbytes
        if self._bytes >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        self._write()
        index = {"metadata": {}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _write(self) -> None:
        from safetensors.torch import save_file

        if not self._held:
            return
        file = f"model-{len(set(self._files.values())):05}.safetensors"
        save_file(self._held, self._folder / file, metadata={"format": "pt"})
        self._files |= dict.fromkeys(self._held, file)
        self._held, self._bytes = {}, 0
