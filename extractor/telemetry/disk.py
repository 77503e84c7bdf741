"""Space on the file system that a path is, or will be, on.

Reads only. A network mount may block: call `sample` from a thread that has nothing else to do.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec

from extractor.folders import existing_parent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class DiskUsage(msgspec.Struct, frozen=True):
    """A file system at one moment.

    Attributes:
        used_bytes: by anybody.
        free_bytes: that this user may write; less than total - used where some is kept for root.
        sampled_utc: when.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    sampled_utc: float


class DiskProbe:
    """Space where a path is or will be."""

    def __init__(self, path: Path, now_utc: Callable[[], float]) -> None:
        self._path = path.absolute()
        self._now_utc = now_utc

    def sample(self) -> DiskUsage:
        """Space now. May block.

        Raises:
            OSError: the file system does not say.
        """
        now_utc = self._now_utc()
        usage = shutil.disk_usage(existing_parent(self._path))
        return DiskUsage(usage.total, usage.used, usage.free, now_utc)
