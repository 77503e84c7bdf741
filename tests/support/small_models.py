"""Small random models in Hugging Face form, with a byte-level tokenizer and a plain ChatML template.

A norm's weights are drawn around 1 and all others at a size that keeps every layer's contribution visible,
so that neighbouring boundaries differ by far more than rounding.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

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


def make(folder: Path, kind: str, dtype: str = "float32", **shape: Any) -> Path:
    """Writes a model of one kind ("llama", "qwen2", "qwen3", "qwen3-moe") with seeded random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    configs = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3-moe": Qwen3MoeConfig,
    }
    extra = MOE if kind == "qwen3-moe" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind](**(BASE | extra | shape)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0, 0.06)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
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
