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
    _check_parallel(config)
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


def _check_parallel(config: RunConfig) -> None:
    for key, value in (("tp", config.model.tp), ("dp", config.model.dp)):
        if value != 1:
            raise PreflightError(
                f"model.{key} = {value}: this version runs one process per model",
                remedy=f"set model.{key} = 1",
                code="unsupported_parallel",
            )


def _check_lengths(config: RunConfig, model: Checkpoint) -> None:
    longest = model.max_position_embeddings
    if longest is not None and config.data.max_len > longest:
        raise ConfigError(
            f"data.max_len = {config.data.max_len}: the model has positions for {longest} tokens",
            remedy=f"set data.max_len to at most {longest}",
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
