"""Everything that can be refused before weights are read, and the facts that a run is built from.

Reads the configuration, the model's config.json and the file system; changes nothing and imports neither
torch nor sglang. Each refusal names cause and remedy.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import msgspec

from extractor import checkpoint, families, sglang_args, taps
from extractor.checkpoint import Checkpoint
from extractor.errors import AccessError, ConfigError, DiskSpaceError, PreflightError
from extractor.estimate import DiskVerdict
from extractor.folders import existing_parent
from extractor.protocol import Dtype
from extractor.taps import TapSelection

if TYPE_CHECKING:
    from extractor.config import RunConfig

Device = Literal["cuda", "cpu"]


class Facts(msgspec.Struct, frozen=True):
    """What a configuration means on this machine.

    Attributes:
        model: the model folder's facts.
        taps: the resolved selection.
        device: where the model runs.
        dtype: precision of the computation.
        store_dtype: precision on disk.
    """

    model: Checkpoint
    taps: TapSelection
    device: Device
    dtype: Dtype
    store_dtype: Dtype


def check(config: RunConfig) -> Facts:
    """All checks that need no data set.

    Raises:
        ConfigError: a layer that does not exist, a length the model cannot have.
        PreflightError: no model, an unsupported class, parallelism that is not there, no device.
        AccessError: the output folder cannot be written, an input cannot be read.
    """
    model = checkpoint.read(checkpoint.resolve(config.model.path, config.model.revision))
    families.family_of(model.architecture)
    if config.taps.as_served:
        families.check_served(model.architecture, device_of(config))
    selection = taps.select(
        num_layers=model.num_layers,
        layers=config.taps.layers,
        embed=config.taps.embed,
        final=config.taps.final,
        normed=config.taps.normed,
        convention=config.taps.convention,
        as_served=config.taps.as_served,
    )
    _check_parallel(config, model)
    _check_gpus(config)
    sglang_args.check(config.model.sglang)
    _check_lengths(config, model)
    _check_inputs(config)
    check_writable(Path(config.output.dir))
    dtype = _dtype(config.model.dtype, model)
    return Facts(
        model=model,
        taps=selection,
        device=device_of(config),
        dtype=dtype,
        store_dtype=dtype if config.output.dtype == "auto" else config.output.dtype,
    )


def check_disk(output: Path, needed_bytes: int, reserve_bytes: int) -> DiskVerdict:
    """Refuses a run whose output would not fit.

    Raises:
        DiskSpaceError: with the figures.
    """
    verdict = disk_verdict(output, needed_bytes, reserve_bytes)
    if verdict.missing_bytes:
        raise DiskSpaceError(
            f"{output}: the run needs {_gb(verdict.needed_bytes)} more and must leave {_gb(reserve_bytes)} free "
            f"(output.reserve_bytes), but {existing_parent(output)} has {_gb(verdict.free_bytes)} free: "
            f"{_gb(verdict.missing_bytes)} too little",
            remedy="free space, choose another output.dir, fewer taps, fewer samples (data.limit), "
            "or a smaller output.reserve_bytes",
        )
    return verdict


def disk_verdict(output: Path, needed_bytes: int, reserve_bytes: int) -> DiskVerdict:
    """What is needed, free and reserved on the file system that the output is or will be on."""
    return DiskVerdict(needed_bytes, shutil.disk_usage(existing_parent(output)).free, reserve_bytes)


def check_writable(output: Path) -> None:
    """Refuses an output folder that could not be made or written; makes nothing.

    Raises:
        AccessError: with the folder that is in the way.
    """
    folder = existing_parent(output)
    if not folder.is_dir():
        raise AccessError(f"{output}: {folder} is a file, not a folder", remedy="choose another output.dir")
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    if read_only or not os.access(folder, os.W_OK | os.X_OK):
        why = "is on a read-only file system" if read_only else f"may not be written by user {os.getuid()}"
        raise AccessError(
            f"{output}: {folder} {why}", remedy="choose another output.dir, or change its permissions"
        )


def _check_parallel(config: RunConfig, model: Checkpoint) -> None:
    tp = config.model.tp
    if config.model.dp != 1:
        raise PreflightError(
            f"model.dp = {config.model.dp}: this version runs one copy of the model",
            remedy="set model.dp = 1",
            code="unsupported_parallel",
        )
    kv_heads = model.num_key_value_heads
    expert_ranks = max(1, tp // _ep_size(config))
    parts = (
        ("query heads (num_attention_heads)", model.num_attention_heads, tp),
        # Fewer heads than ranks are repeated, evenly.
        ("heads of the KV cache (num_key_value_heads)", kv_heads, tp if not kv_heads or kv_heads > tp else 1),
        ("ranks over the heads of the KV cache (num_key_value_heads)", tp, min(kv_heads or 1, tp)),
        ("units of the MLP (intermediate_size)", model.intermediate_size, tp),
        ("units of an expert (moe_intermediate_size)", model.moe_intermediate_size, expert_ranks),
        ("experts, by model.sglang.ep_size,", model.num_experts, _ep_size(config)),
        ("ranks by model.sglang.ep_size", tp, _ep_size(config)),
    )
    for what, number, divisor in parts:
        if number is not None and number % divisor:
            raise PreflightError(
                f"model.tp = {tp}: {number} {what} cannot be split into {divisor} equal parts",
                remedy=f"set model.tp to one of {', '.join(map(str, _possible_tp(model)))}",
                code="unsupported_parallel",
            )


def _check_gpus(config: RunConfig) -> None:
    tp, gpus = config.model.tp, config.model.gpus
    if device_of(config) != "cuda":
        return
    if gpus is not None and (len(gpus) != tp or len(set(gpus)) != tp):
        raise PreflightError(
            f"model.gpus = {list(gpus)}: {tp} different GPUs are needed, one for each of the model.tp = {tp} ranks",
            remedy="name as many GPUs as ranks, or change model.tp",
            code="unsupported_parallel",
        )
    visible = _num_visible_gpus()
    if gpus is None and visible is not None and visible < tp:
        raise PreflightError(
            f"model.tp = {tp}: {visible} GPUs are visible here, one for each rank is needed",
            remedy=f"set model.tp = {max(visible, 1)}, or let the process see more (CUDA_VISIBLE_DEVICES)",
            code="unsupported_parallel",
        )


def _num_visible_gpus() -> int | None:
    """GPUs that a rank would see; None when that cannot be said without the driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or None


def _ep_size(config: RunConfig) -> int:
    size = config.model.sglang.get("ep_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def _possible_tp(model: Checkpoint) -> list[int]:
    """Sizes by which heads and units can be divided, experts apart."""
    kv_heads = model.num_key_value_heads
    return [
        tp
        for tp in (1, 2, 4, 8, 16)
        if all(
            not number or number % tp == 0 for number in (model.num_attention_heads, model.intermediate_size)
        )
        and (not kv_heads or kv_heads % tp == 0 or tp % kv_heads == 0)
    ]


def _check_lengths(config: RunConfig, model: Checkpoint) -> None:
    longest = model.max_position_embeddings
    if longest is not None and config.data.max_len > longest:
        raise ConfigError(
            f"data.max_len = {config.data.max_len}: the model has positions for {longest} tokens",
            remedy=f"set data.max_len to at most {longest}",
        )
    if config.chunk_tokens is not None:
        _check_chunks(config, model)


def _check_chunks(config: RunConfig, model: Checkpoint) -> None:
    """Refuses samples longer than a batch where nobody has shown that chunks give the states of the whole."""
    cache_dtype = config.model.sglang.get("kv_cache_dtype", "auto")
    family = families.family_of(model.architecture)
    if model.not_plain is not None:
        why = (
            f"{model.folder / 'config.json'}: {model.not_plain}; chunks were tested with full attention only"
        )
    elif family.has_state:
        why = f"some layers of {model.architecture} carry a state from token to token; chunks were tested with full "
        why += "attention only"
    elif not family.chunks_verified:
        tested = ", ".join(sorted(name for name, other in families.FAMILIES.items() if other.chunks_verified))
        why = f"chunks were not tested with the model class {model.architecture} (but with {tested})"
    elif cache_dtype != "auto":
        why = f"model.sglang.kv_cache_dtype = {cache_dtype!r}: a chunk would read what came before it rounded"
    else:
        return
    raise PreflightError(
        f"data.max_len = {config.data.max_len}: samples longer than batch.max_tokens = {config.max_tokens} would be "
        f"computed in chunks, which is refused for this model: {why}",
        remedy=f"raise batch.max_tokens to {config.data.max_len}, or lower data.max_len to {config.max_tokens}",
        code="chunks_untested",
    )


def _check_inputs(config: RunConfig) -> None:
    named = [("data.files", file) for file in config.data.files]
    if config.data.template is not None:
        named.append(("data.template", config.data.template))
    for key, file in named:
        if not Path(file).is_file():
            raise PreflightError(
                f"{key}: {file}: no such file", remedy=f"name an existing file in {key}", code="no_file"
            )
        if not os.access(file, os.R_OK):
            raise AccessError(f"{key}: {file} may not be read by user {os.getuid()}")


def _dtype(wanted: str, model: Checkpoint) -> Dtype:
    dtype = (model.dtype or "bfloat16") if wanted == "auto" else wanted
    if dtype not in get_args(Dtype):
        raise PreflightError(
            f"{model.folder}: config.json declares dtype {dtype}, which is not supported",
            remedy=f"set model.dtype to one of {', '.join(get_args(Dtype))}",
        )
    return cast("Dtype", dtype)  # narrowed by the line above, which mypy cannot see


def device_of(config: RunConfig) -> Device:
    """Where the model of a run will run on this machine."""
    return local_device() if config.model.device == "auto" else config.model.device


def local_device() -> Device:
    """What this machine has."""
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
