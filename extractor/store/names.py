"""The names of all files of a data set. No other module forms one.

Pure: it touches no disk. Invariants: a folder of a shard in the making never matches the pattern of a
final one; the name of a temporary file stands beside its target, on the same file system, and never ends
like a file that a reader looks for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SHARDS = "shards"
"""Folder of the shards, below the output folder."""
TOKENS = "tokens.safetensors"
RECORD = "shard.json"
"""What a shard says about itself; written last."""
DATASET = "dataset.json"
SAMPLES = "samples.parquet"
REJECTED = "rejected.jsonl"
QUARANTINE = "quarantine.jsonl"
LEASE = "lease.json"
LEASE_LOCK = "lease.lock"
STATES_KEY = "states"
"""Name of the tensor in a tap file."""

_SHARD = re.compile(r"^(\d{6,})$")
_PART = re.compile(r"^\d{6,}\.part-([A-Za-z0-9_-]+)[A-Za-z0-9_.-]*$")


def shard_folder(output: Path, index: int) -> Path:
    """Final folder of a shard: `shards/000012`."""
    return output / SHARDS / f"{index:06d}"


def part_folder(output: Path, index: int, replica: int | str, attempt: int = 0, rank: int = 0) -> Path:
    """Folder of a shard in the making: `shards/000012.part-0-1f2e3d4c`.

    Args:
        output: the output folder.
        index: number of the shard.
        replica: who writes it; no other start of a worker has that name.
        attempt: counts the tries of one process, so that two of them never share a folder.
        rank: of the process within the replica.
    """
    suffix = (f".{attempt}" if attempt else "") + (f".r{rank}" if rank else "")
    return output / SHARDS / f"{index:06d}.part-{replica}{suffix}"


def replaced_folder(part: Path) -> Path:
    """Where a final folder goes while `part` takes its place; it counts as a part folder."""
    return part.with_name(part.name + ".replaced")


def shard_index(name: str) -> int | None:
    """Number of the shard whose final folder is called `name`; None for any other name."""
    match = _SHARD.match(name)
    if match is None or f"{int(match[1]):06d}" != name:
        return None
    return int(match[1])


def is_part(name: str) -> bool:
    """Whether `name` is a folder that a shard in the making left behind."""
    return _PART.match(name) is not None


def part_replica(name: str) -> str | None:
    """The replica that left the folder `name` behind; None for any other name."""
    match = _PART.match(name)
    return None if match is None else match[1]


def tap_file(tap: str) -> str:
    """File of one tap inside its shard: `layer_002.safetensors`."""
    return f"{tap}.safetensors"


def temporary(target: Path) -> Path:
    """Name under which `target` is written before it is renamed; beside it, ends in `.part`."""
    return target.with_name(target.name + ".part")
