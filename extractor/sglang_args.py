"""What `[model.sglang]` may not set, and why; known without importing SGLang.

SGLang's settings are the user's but for three kinds: what capture depends on is fixed, what tapdeck has a key
for (or works out) is owned, and what leaves a rank without some rows or layers is refused. Whether the
installed release knows a setting at all is checked by the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What makes hidden states complete and hooks run: no prefix cache, no scheduler tricks, no CUDA graphs. Fused
# all-reduces leave a partial sum in the hidden states of one rank (0.5.17 captures it in some classes, and only in
# batches of up to 2048 tokens, so that a proof may not see it), and pass by the input norms that hooks sit on.
FIXED: Mapping[str, Any] = {
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "chunked_prefill_size": -1,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sampling_backend": "pytorch",
    "skip_server_warmup": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
    # Else layers with a window get a smaller cache than the others, and a full batch of a single pass does not fit.
    "swa_full_tokens_ratio": 1.0,
}

OWNED: Mapping[str, str] = {
    "model_path": "set model.path",
    "revision": "set model.revision",
    "dtype": "set model.dtype",
    "device": "set model.device",
    "attention_backend": "set model.attention_backend",
    "trust_remote_code": "set model.trust_remote_code",
    "mem_fraction_static": "set model.mem_fraction",
    "tp_size": "set model.tp",
    "dp_size": "set model.dp",
    "max_total_tokens": "it follows from batch.max_tokens",
    "max_running_requests": "it follows from the plan",
    "cuda_graph_config": "all CUDA graphs stay off: hooks do not run when a graph is replayed",
    "aux_hidden_state_capture": "choose layers in [taps]",
    "return_aux_hidden_state_layer_ids": "choose layers in [taps]",
    "enable_return_aux_hidden_states": "choose layers in [taps]",
    "enable_return_hidden_states": "choose layers in [taps]",
}

_PART_OF_ROWS = "a rank would hold only part of the rows"
_PART_OF_LAYERS = "a rank would hold only part of the layers"
_PARTIAL_SUM = "what is captured between two layers would be a partial sum"
_DRAFT = "a draft model changes what is captured"
REFUSED: Mapping[str, str] = {
    "pp_size": _PART_OF_LAYERS,
    "nnodes": "a run is on one machine",
    "enable_dp_attention": _PART_OF_ROWS,
    "attn_dp_size": _PART_OF_ROWS,
    "attn_cp_size": _PART_OF_ROWS,
    "dcp_size": _PART_OF_ROWS,
    "moe_dp_size": _PART_OF_ROWS,
    "enable_prefill_cp": _PART_OF_ROWS,
    "enable_layernorm_sp": _PART_OF_ROWS,
    "enable_attn_tp_input_scattered": _PART_OF_ROWS,
    "enable_aiter_allreduce_fusion": _PARTIAL_SUM,
    "flashinfer_allreduce_fusion_backend": _PARTIAL_SUM,
    "enable_two_batch_overlap": "half of the rows would run at a time",
    "enable_single_batch_overlap": "the layers of a batch would overlap",
    "enable_torch_compile": "hooks do not run in compiled graphs",
    "is_embedding": "an embedding model has no next-token states",
    "encoder_only": "an encoder has no next-token states",
    "enable_lora": "adapters change the model that is captured",
    "lora_paths": "adapters change the model that is captured",
    "json_model_override_args": "the model would not be the one that its config.json describes; edit that file",
}
"""Refused unless switched off (false, none, an empty list, a size of one)."""


def check(args: Mapping[str, Any]) -> None:
    """Refuses settings that capture cannot live with.

    Args:
        args: `[model.sglang]`.

    Raises:
        ConfigError: the setting and the reason.
    """
    for key, value in args.items():
        if key in FIXED and value != FIXED[key]:
            raise _refusal(key, value, f"it is fixed to {FIXED[key]!r}, capture depends on it")
        if key in OWNED:
            raise _refusal(key, value, OWNED[key])
        if key in REFUSED and not _is_off(value):
            raise _refusal(key, value, REFUSED[key])
        if key.startswith("speculative_") and not _is_off(value):
            raise _refusal(key, value, _DRAFT)
        if key == "model_impl" and value not in (None, "auto", "sglang"):
            raise _refusal(key, value, "only SGLang's own model classes are captured")


def _refusal(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(
        f"model.sglang.{key} = {value!r} is refused: {why}",
        remedy=f"remove model.sglang.{key}",
        code="sglang_setting",
    )


def _is_off(value: object) -> bool:
    # True == 1, so the type decides first.
    if isinstance(value, bool) or value is None:
        return not value
    return value <= 1 if isinstance(value, int) else value in ("", "{}", [], ())
