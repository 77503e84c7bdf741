"""Output folders as the end-to-end tests look at them: names, bytes and inodes, not through the product."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

FINAL = re.compile(r"\d{6}")
PART = re.compile(r"\d{6}\.part-.+")


class Stamp(NamedTuple):
    """What changes when a file is written again, whatever its bytes."""

    inode: int
    mtime_ns: int
    size: int


def final_shards(output: Path) -> dict[str, Path]:
    """Name to folder of every shard with a final name."""
    return {name: path for name, path in _entries(output).items() if FINAL.fullmatch(name)}


def part_folders(output: Path) -> list[str]:
    """Names of the shards in the making."""
    return [name for name in _entries(output) if PART.fullmatch(name)]


def stray_names(output: Path) -> list[str]:
    """What is neither."""
    return [name for name in _entries(output) if not FINAL.fullmatch(name) and not PART.fullmatch(name)]


def contents(folder: Path) -> dict[str, bytes]:
    """Relative name to bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamps(folder: Path) -> dict[str, Stamp]:
    """Relative name to stamp of every file below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[str(path.relative_to(folder))] = Stamp(stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def require_sound(output: Path, reference: Path) -> set[str]:
    """Every shard with a final name is byte for byte the reference's; everything else has a temporary name.

    Returns:
        The names of the final shards.
    """
    assert stray_names(output) == []
    shards = final_shards(output)
    for name, folder in shards.items():
        require_same_bytes(folder, reference / "shards" / name)
    return set(shards)


def require_same_bytes(folder: Path, other: Path) -> None:
    """Both hold the same files with the same bytes."""
    ours, theirs = contents(folder), contents(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def lease(output: Path) -> dict[str, object] | None:
    """`lease.json`; None when there is none."""
    try:
        return dict(json.loads((output / "lease.json").read_bytes()))
    except FileNotFoundError:
        return None


def _entries(output: Path) -> dict[str, Path]:
    root = output / "shards"
    return {path.name: path for path in sorted(root.iterdir())} if root.is_dir() else {}
