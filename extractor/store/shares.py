"""Shards that several ranks write together: who writes which tap, and what one rank hands to another.

Rank r of a shard's writers writes the taps r, r + writers, ... into a part folder of its own. When its files are
complete and synced it hands over a `Share`; from then on its folder belongs to rank 0, which alone publishes, and
alone removes what comes of nothing. A rank whose share fails removes its own folder first and says why. So
nobody ever removes a folder that another process writes to. Pure.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from extractor.errors import RanksDisagreeError, StoreError
from extractor.store.record import FileRecord, Quarantined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class WriteError(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to another process.

    Attributes:
        text: what happened.
        errno: number of the operating system's error, if it was one.
        path: the file it is about, if it was one.
    """

    text: str
    errno: int | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> WriteError:
        """What can be said of an error elsewhere."""
        if isinstance(error, OSError) and error.errno is not None:
            path = None if error.filename is None else os.fsdecode(error.filename)
            return cls(text=str(error), errno=error.errno, path=path)
        return cls(text=f"{type(error).__name__}: {error}")

    def as_exception(self, rank: int) -> Exception:
        """The error as the rank that publishes raises it; one of the system's keeps its number."""
        if self.errno is not None:
            return OSError(self.errno, f"{os.strerror(self.errno)} (rank {rank})", self.path)
        return StoreError(f"rank {rank}: {self.text}", code="share_failed")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written of a shard.

    Attributes:
        index: number of the shard.
        attempt: which of the tries of this start (`names.part_folder`).
        rank: who wrote it.
        folder: its part folder.
        files: name -> size and checksum of its files, complete and synced; none when it failed.
        quarantined: samples it left out, in row order.
        magnitudes: tap -> digest over the largest magnitude of every row computed, of all taps of the shard.
        error: why it failed; its folder is gone then.
    """

    index: int
    attempt: int
    rank: int
    folder: str
    files: dict[str, FileRecord] = {}
    quarantined: tuple[Quarantined, ...] = ()
    magnitudes: dict[str, str] = {}
    error: WriteError | None = None


def require_agreement(
    share: Share, quarantined: Sequence[Quarantined], magnitudes: Mapping[str, str]
) -> None:
    """Refuses a share whose rank has seen other values than this one.

    Args:
        share: of the other rank.
        quarantined: samples left out here.
        magnitudes: digests of all taps here, in stored order.

    Raises:
        RanksDisagreeError: with shard, rank and taps.
    """
    differing = [tap for tap, digest in magnitudes.items() if share.magnitudes.get(tap) != digest]
    if differing:
        raise RanksDisagreeError(
            f"shard {share.index}: ranks disagree: the states of {', '.join(differing)} on rank {share.rank} are not "
            "those on rank 0",
            remedy="nothing of this shard was kept; a collective of this machine is at fault: try "
            "model.sglang.disable_custom_all_reduce = true, and verify what was stored before",
        )
    if share.quarantined != tuple(quarantined):
        here = [sample.sample_index for sample in quarantined]
        there = [sample.sample_index for sample in share.quarantined]
        raise RanksDisagreeError(
            f"shard {share.index}: ranks disagree: rank {share.rank} leaves out the samples {there}, rank 0 {here}",
            remedy="nothing of this shard was kept; please report this",
        )
