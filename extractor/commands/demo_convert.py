"""Turns the demo's GGUF file into a model folder. Run as a process of its own, so that torch stays in it.

    python -m extractor.commands.demo_convert GGUF_FILE TARGET_FOLDER

Owns what is in the folder: `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer
with its chat template. It never touches the network, and it writes only into the folder that it is given;
`extractor.commands.demo_data` publishes the folder.

The weights are kept in float32. The file is Q4_1: a weight is `scale * q + minimum`, with 16-bit scale and
minimum and a 4-bit q. Rounding that to bfloat16 would change nearly every weight (by up to 2**-8 of it),
and float16 does not hold it either, while float32 is what transformers dequantises to. It is also what
lets `verify` ask for 1e-5 instead of a bfloat16 bound.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf_file: Path, target: Path) -> None:
    """Writes the Hugging Face form of a GGUF model.

    Args:
        gguf_file: a GGUF file of an architecture that transformers can dequantise.
        target: an existing, empty folder.

    Raises:
        OSError: the file cannot be read, or the folder not written.
        ValueError: transformers does not know the file's architecture.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf_file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file.name, dtype=torch.float32)
    # `save_pretrained` of the model refuses what was quantised once, so its parts are written here.
    tensors = {name: tensor.contiguous() for name, tensor in _stored_tensors(model).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_plain_config(model), indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _stored_tensors(model: Any) -> dict[str, Any]:
    """Parameters by name, without an output head that is the embedding again."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()  # noqa: SLF001
    return {name: tensor.detach() for name, tensor in model.named_parameters() if name not in tied}


def _plain_config(model: Any) -> dict[str, Any]:
    """The configuration of the dequantised model: SGLang needs the class, and no quantisation."""
    config: dict[str, Any] = model.config.to_diff_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    return config | {"architectures": [type(model).__name__], "dtype": "float32"}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
