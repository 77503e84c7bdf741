"""Facts about a model folder, read before anything is loaded.

Owns the answer to "which folder is it" (a folder, or a hub id in the local cache) and "what does it
declare". It reads `config.json`, the headers of the weight files, and of the weights no more than tells two
models apart; it imports no torch, no transformers and no SGLang, so that a wrong model is refused soon.

Invariants: no network call, ever; every refusal names the file, the key and the remedy; a value that the
folder does not state is None, never a guess.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import xxhash

from extractor.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
HEADER_LIMIT = 100_000_000
"""Largest safetensors header that the format allows, in bytes."""
WHOLE_BYTES = 64 << 20
"""A weight file up to this size is hashed as a whole."""
BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
"""Blocks of a larger weight file that are hashed."""

NOT_PLAIN_KEYS = (
    "attention_chunk_size",
    "attn_layer_",
    "attn_type_list",
    "block_types",
    "conv_L_cache",
    "dual_chunk_attention",
    "full_attention_interval",
    "hybrid_",
    "index_topk",
    "interleaved_sliding_window",
    "layers_block_type",
    "linear_",
    "mamba_",
    "sparse_attention",
    "ssm_",
)
"""Beginnings of the keys of models with recurrent, linear, sparse or local attention."""
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope", "su"}
"""Rotary embeddings whose angles depend on how long the sequence is."""

TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal models keep the configuration of their language model (omni models: one level deeper)."""

QUANT_KEYS = ("quantization_config", "compression_config")
"""How checkpoints call the description of their quantized weights."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What a model folder says about itself.

    Attributes:
        folder: the folder, absolute.
        architecture: the model class, `architectures[0]` of config.json.
        model_type: `model_type` of config.json, of the whole model where it has parts.
        num_layers: n, the number of decoder layers (of the language model, when there are several).
        hidden_size: H, the width of the residual stream.
        vocab_size: rows of the embedding; None when config.json leaves it to the class.
        max_position_embeddings: longest sequence in tokens; None when not stated.
        dtype: precision that config.json declares ("bfloat16", ...); None when not stated.
        config_hash: xxh3-128 of the bytes of config.json, 32 hex digits.
        weights_hash: which weights these are, see `hash_weights`.
        weight_bytes: size of the weight files.
        revision: commit, when the folder is a snapshot of the hub's cache.
        has_tied_embeddings: the output head is the embedding.
        num_attention_heads: query heads, when stated.
        num_key_value_heads: heads of the KV cache, when stated or implied by `num_attention_heads`.
        head_dim: size of a head, when stated or implied; never implied where keys and values are compressed.
        not_plain: what keeps its layers from being full attention over all earlier tokens, at positions that do
            not depend on the length of the sequence, as the key says it; None when nothing does.
        intermediate_size: units of a dense MLP, when stated.
        moe_intermediate_size: units of one expert, when stated.
        num_experts: routed experts of a layer, when stated.
        quantization: the method of quantized weights ("compressed-tensors", "fp8", ...); None for plain ones.
        remote_code: files of Python code that config.json and tokenizer_config.json want to be run.
    """

    folder: Path
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    max_position_embeddings: int | None
    dtype: str | None
    config_hash: str
    weights_hash: str
    weight_bytes: int
    revision: str | None
    has_tied_embeddings: bool
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    not_plain: str | None = None
    quantization: str | None = None
    remote_code: tuple[str, ...] = ()
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    num_experts: int | None = None


def resolve(path: str, revision: str | None = None) -> Path:
    """The folder of a model, found without a network.

    Args:
        path: an existing folder, or the id of a model (`owner/name`) in the local cache of the hub.
        revision: branch, tag or commit of a hub id; None means `main`. A folder has none.

    Raises:
        PreflightError: there is no such folder, or the model or revision is not in the local cache.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        if revision is not None and revision != _commit_of(folder):
            raise PreflightError(
                f"model.revision = {revision!r}: {folder} is a folder, and a folder has no revisions",
                remedy="leave out the revision, or give a hub id that is in the local cache",
                code="model_revision",
            )
        return folder
    if folder.exists() or path.startswith(("/", "./", "../", "~")) or not HUB_ID.fullmatch(path):
        raise PreflightError(
            f"model {path}: no such folder",
            remedy="give the folder that holds config.json and the weights, or a hub id in the local cache",
            code="model_not_found",
        )
    return _cached_snapshot(path, revision)


def read(folder: Path) -> Checkpoint:
    """Reads what a model folder declares. Blocking: reads up to 64 MiB of each weight file (`hash_weights`).

    Raises:
        PreflightError: config.json is missing, broken or lacks a key; weights are missing or cut off.
    """
    content, config = _read_config(folder)
    where, text = _text_config(folder, config)
    weights, tensor_names = _read_weights(folder)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if not isinstance(tied, bool):
        # Configurations leave the key out when it equals a default that differs by class.
        tied = not any(name.endswith("lm_head.weight") for name in tensor_names)
    hidden_size = _required_int(folder, where, text, "hidden_size", "n_embd")
    heads = _optional_int(text, "num_attention_heads", "n_head")
    head_dim = _optional_int(text, "head_dim")
    if head_dim is None and heads and "kv_lora_rank" not in text:
        head_dim = hidden_size // heads
    return Checkpoint(
        folder=folder.resolve(),
        architecture=_architecture(folder, config),
        model_type=str(config.get("model_type", "")),
        num_layers=_required_int(folder, where, text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=hidden_size,
        vocab_size=_optional_int(text, "vocab_size") or _optional_int(config, "vocab_size"),
        max_position_embeddings=_optional_int(text, "max_position_embeddings", "n_positions"),
        dtype=_dtype(config, text),
        config_hash=xxhash.xxh3_128_hexdigest(content),
        weights_hash=hash_weights(weights),
        weight_bytes=sum(path.stat().st_size for path in weights),
        revision=_commit_of(folder.absolute()),
        has_tied_embeddings=tied,
        num_attention_heads=heads,
        num_key_value_heads=_optional_int(text, "num_key_value_heads") or heads,
        head_dim=head_dim,
        not_plain=_not_plain(text),
        quantization=_quantization(folder, config, where, text),
        remote_code=remote_code(folder),
        intermediate_size=_optional_int(text, "intermediate_size"),
        moe_intermediate_size=_optional_int(text, "moe_intermediate_size"),
        num_experts=_optional_int(text, "num_experts", "n_routed_experts", "num_local_experts"),
    )


def remote_code(folder: Path) -> tuple[str, ...]:
    """The files of Python code that a model folder wants to be run, from its `auto_map` entries; none is run.

    Returns:
        Sorted names such as "tokenization_x.py", or "owner/name: file.py" for code in another repository.

    Raises:
        PreflightError: a configuration that is there is not JSON.
    """
    maps = [_read_json(folder / name).get("auto_map") for name in ("config.json", "tokenizer_config.json")]
    entries = [entry for found in maps if isinstance(found, dict) for entry in found.values()]
    # A tokenizer is [slow class, fast class], either of which may be null.
    names = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry])]
    return tuple(sorted({_code_file(name) for name in names if isinstance(name, str)}))


def _code_file(reference: str) -> str:
    """`REPOSITORY--module.Class` as the file that it names."""
    repository, _, name = reference.rpartition("--")
    file = name.split(".")[0] + ".py"
    return f"{repository}: {file}" if repository else file


def hash_weights(paths: Sequence[Path]) -> str:
    """What tells the weights of two models apart: xxh3-128, 32 hex digits. Blocking.

    Covers name, size and content of each file, in the order of their names. A file of up to 64 MiB counts as a
    whole; of a larger one the header, 64 blocks of 64 KiB at even distances, and its last 64 KiB: some 4 MiB a
    file, so that terabytes take seconds. Training or quantizing changes nearly every block; a change by hand
    of a few values in a large file can go unseen.

    Raises:
        PreflightError: a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(paths, key=lambda path: path.name):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                for begin, length in _hashed_spans(file, size):
                    file.seek(begin)
                    digest.update(file.read(length))
        except OSError as error:
            raise PreflightError(
                f"{path}: {error.strerror}", remedy="copy the file again", code="model_weights"
            ) from error
    return str(digest.hexdigest())


def _hashed_spans(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """(first byte, length) of what is hashed of a weight file."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    header = 8 + min(int.from_bytes(file.read(8), "little"), HEADER_LIMIT)
    step = (size - header) // NUM_BLOCKS
    blocks = [(header + number * step, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
    return [(0, header), *blocks, (size - BLOCK_BYTES, BLOCK_BYTES)]


def _cached_snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Only config.json must be there for this call; which weights are needed is checked by `read`.
        found = snapshot_download(
            hub_id, revision=revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except LocalEntryNotFoundError as error:
        cache = Path(constants.HF_HUB_CACHE)
        wanted = f"{hub_id} (revision {revision or constants.DEFAULT_REVISION})"
        option = f" --revision {revision}" if revision else ""
        raise PreflightError(
            f"model {wanted}: not in local cache {cache}; tapdeck never downloads a model by itself",
            remedy=f"fetch it once with `hf download {hub_id}{option}`, give the folder of a copy, or set "
            "HF_HOME to the cache that has it",
            code="model_not_cached",
        ) from error
    return Path(found)


def _commit_of(folder: Path) -> str | None:
    """The commit of a folder `models--OWNER--NAME/snapshots/COMMIT` of the hub's cache."""
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if is_snapshot and COMMIT.fullmatch(folder.name) else None


def _read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    path = folder / "config.json"
    content = _read_bytes(path, "give the folder that holds config.json; a GGUF file must be converted first")
    return content, _parse_json(path, content)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file that need not be there."""
    return _parse_json(path, _read_bytes(path, "copy the file again")) if path.exists() else {}


def _read_bytes(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PreflightError(f"{path}: {error.strerror}", remedy=remedy, code="model_config") from error


def _parse_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise PreflightError(
            f"{path}: not valid JSON: {error}", remedy="copy the file again", code="model_config"
        ) from error
    if not isinstance(parsed, dict):
        raise PreflightError(
            f"{path}: expected a JSON object", remedy="copy the file again", code="model_config"
        )
    return parsed


def _text_config(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The language model's part of a configuration, and its key with a dot (or nothing)."""
    for key in TEXT_CONFIGS:
        part = config.get(key)
        if isinstance(part, dict):
            where, text = _text_config(folder, part)
            return f"{key}.{where}", text
        if part is not None:
            raise PreflightError(
                f"{folder / 'config.json'}: {key} is {part!r}; expected an object with the language model's shape",
                remedy="copy the file again from the model's source",
                code="model_config",
            )
    return "", config


def _quantization(folder: Path, config: Mapping[str, Any], where: str, text: Mapping[str, Any]) -> str | None:
    """The method of quantized weights, wherever a checkpoint says it."""
    for prefix, part in (("", config), (where, text)):
        for key in QUANT_KEYS:
            stated = part.get(key)
            if stated is None:
                continue
            method = None
            if isinstance(stated, dict):
                # ModelOpt names only its algorithm.
                method = stated.get("quant_method", "modelopt" if "quant_algo" in stated else None)
            if not isinstance(method, str):
                raise PreflightError(
                    f"{folder / 'config.json'}: {prefix}{key}.quant_method is missing; without it nobody knows "
                    "how the weights are packed",
                    remedy="copy the file again from the model's source",
                    code="model_config",
                )
            return method
    # Where NVIDIA's ModelOpt writes it unless it is asked for one file.
    return "modelopt" if _read_json(folder / "hf_quant_config.json").get("quantization") else None


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise PreflightError(
        f"{folder / 'config.json'}: architectures is {'missing' if names is None else repr(names)}; "
        "without it nobody knows which model class the weights are for",
        remedy='add it, for example "architectures": ["LlamaForCausalLM"]',
        code="model_config",
    )


def _required_int(folder: Path, where: str, text: Mapping[str, Any], *keys: str) -> int:
    value = _optional_int(text, *keys)
    if value is None:
        stated = repr(text[keys[0]]) if keys[0] in text else "missing"
        raise PreflightError(
            f"{folder / 'config.json'}: {where}{keys[0]} is {stated}; expected a positive number",
            remedy="copy the file again from the model's source",
            code="model_config",
        )
    return value


def _optional_int(text: Mapping[str, Any], *keys: str) -> int | None:
    """The first of several spellings of a key whose value is a positive integer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _not_plain(text: Mapping[str, Any]) -> str | None:
    """The first key by which a layer sees, or keeps, something else than all earlier tokens."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and (others := sorted({str(kind) for kind in kinds} - {"full_attention"})):
        return f"layer_types has {', '.join(others)}"
    # Qwen's configurations state a window and, beside it, that it is not used.
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"sliding_window = {text['sliding_window']}"
    for key in sorted(text):
        if text[key] not in (None, False, 0, [], {}) and key.startswith(NOT_PLAIN_KEYS):
            return f"{key} is set"
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind in LENGTH_DEPENDENT_ROPES:
            return f"{key} is {kind}"
    return None


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """`dtype`, which transformers before version 5 called `torch_dtype`."""
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key]).removeprefix("torch.")
    return None


def _read_weights(folder: Path) -> tuple[Sequence[Path], set[str]]:
    """The weight files, all there and of full length, and the names of their tensors."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        paths = [folder / name for name in _indexed_files(index)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise PreflightError(
                f"{folder}: {len(missing)} of {len(paths)} weight files are missing: {', '.join(missing[:5])}"
                + (" ..." if len(missing) > 5 else ""),
                remedy="complete the download",
                code="model_weights",
            )
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pt") for path in folder.glob(pattern))
        raise PreflightError(
            f"{folder}: no weight files (*.safetensors)"
            + (f"; found {', '.join(others[:3])}" if others else ""),
            remedy="convert the weights to safetensors" if others else "complete the download",
            code="model_weights",
        )
    return paths, {name for path in paths for name in _tensor_names(path)}


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(
            f"{index}: no readable weight_map", remedy="copy the file again", code="model_weights"
        ) from error


def _tensor_names(path: Path) -> set[str]:
    """Names in the header of a safetensors file, whose length must be what the header says."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_bytes, HEADER_LIMIT)))
        header.pop("__metadata__", None)
        expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise PreflightError(
            f"{path}: not a safetensors file",
            remedy="download it again (a text file of three lines here is a Git LFS pointer: `git lfs pull`)",
            code="model_weights",
        ) from error
    actual = path.stat().st_size
    if actual != expected:
        raise PreflightError(
            f"{path}: {actual} bytes, but its header describes {expected}: the file is cut off or damaged",
            remedy="download it again",
            code="model_weights",
        )
    return set(header)
