"""INT4 weights as `compressed-tensors` packs them: `pack-quantized`, symmetric, one scale per group of inputs.

What a weight means is `dequantize(quantize(weight))`; a reference model is made of that, so that quantizing
costs no accuracy in a comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GROUP = 32
PER_WORD = 8
"""Values of 4 bits in an int32, the first in the lowest bits."""
OFFSET = 8
"""A value is stored plus this, so that it has no sign."""


def quantization_config(ignore: list[str]) -> dict[str, Any]:
    """The entry of config.json, for all linear layers but those ignored."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Packs a weight [out, in], in a multiple of `GROUP`, of bfloat16.

    Returns:
        `weight_packed` int32 [out, in / 8], `weight_scale` bfloat16 [out, in / 32], `weight_shape` int64 [2].
    """
    import torch

    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    # The range -8 .. 7 holds the largest value of a group on either side.
    scale = (groups.abs().amax(dim=-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32)
    nibbles = (values + OFFSET).view(rows, columns // PER_WORD, PER_WORD)
    shifts = torch.arange(PER_WORD, device=weight.device, dtype=torch.int64) * 4
    # Through int64: the highest nibble reaches the sign.
    words = (nibbles.to(torch.int64) << shifts).sum(dim=-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=torch.int64)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def dequantize(packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight [out, in] that packed tensors mean, in bfloat16, in which kernels multiply with the scale."""
    import torch

    words, scale = packed["weight_packed"], packed["weight_scale"]
    shifts = torch.arange(PER_WORD, device=words.device, dtype=torch.int32) * 4
    values = ((words[..., None] >> shifts) & 0xF) - OFFSET
    rows, columns = words.shape[0], words.shape[1] * PER_WORD
    grouped = values.view(rows, columns // GROUP, GROUP).to(scale.dtype) * scale[..., None]
    return grouped.view(rows, columns)
