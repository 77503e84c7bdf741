"""Which folders of shards are there, by their names alone, and the removal of those that were never finished.

Says nothing of what is in them (`scan` does) and loads nothing but the standard library, so that a supervisor
can use it. Invariant: only part folders are ever removed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from extractor.store import atomic, names


def shard_indices(output: Path) -> set[int]:
    """Numbers of the folders that have the final name of a shard. Blocking.

    Raises:
        AccessError: the folder may not be read.
        StoreError: the folder cannot be read.
    """
    return folders(output)[0]


def clean_parts(output: Path, *, replica: str | None = None) -> list[Path]:
    """Removes the folders of shards that were never finished; needs the output's lease. Blocking.

    Args:
        output: the output folder.
        replica: only those of this one, whose process is gone; None: of all, when nobody writes.

    Returns:
        What was removed.

    Raises:
        AccessError: a folder may not be removed.
        StoreError: a folder cannot be removed.
    """
    parts = [
        part for part in folders(output)[1] if replica is None or names.part_replica(part.name) == replica
    ]
    for part in parts:
        try:
            shutil.rmtree(part)
        except OSError as error:
            raise atomic.explain(error, part, "removed") from error
    return parts


def folders(output: Path) -> tuple[set[int], list[Path]]:
    """Numbers of the shards that have their final name, and the part folders. Blocking.

    Raises:
        AccessError: the folder may not be read.
        StoreError: the folder cannot be read.
    """
    root = output / names.SHARDS
    final: set[int] = set()
    parts: list[Path] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                index = names.shard_index(entry.name)
                # A shard may have been moved to another disk and linked; a leftover is never followed.
                if index is not None and entry.is_dir():
                    final.add(index)
                elif names.is_part(entry.name) and entry.is_dir(follow_symlinks=False):
                    parts.append(Path(entry.path))
    except FileNotFoundError:
        return set(), []
    except OSError as error:
        raise atomic.explain(error, root, "read") from error
    return final, sorted(parts)
