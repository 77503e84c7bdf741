"""The disk side of one shard in the making: its part folder, its tap files, and the step that publishes it.

Owns `shards/NNNNNN.part-*` from the first byte to the rename. It knows no threads: callers see to it that
a tap is written by one thread at a time and that `publish` and `discard` run alone.

Order of `publish`, which is what makes a kill at any moment harmless: tap files are complete and synced (those
that other ranks wrote are renamed into the part folder by then);
tokens, then `shard.json` are written and synced; the part folder is synced; a shard that is in the way is
renamed aside; the part folder is renamed; the parent folder is synced.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from extractor.errors import BugError
from extractor.store import names
from extractor.store.filesystem import write_whole
from extractor.store.record import FORMAT_VERSION, FileRecord, Quarantined, ShardRecord, encode_record
from extractor.store.tensors import StatesWriter, arrays_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from extractor.store.filesystem import FileSystem
    from extractor.store.record import ShardSpec


class PartFolder:
    """A shard on its way to its final name."""

    def __init__(self, spec: ShardSpec, files: FileSystem, attempt: int = 0) -> None:
        """Touches no disk."""
        self._spec = spec
        self._files = files
        self._final = names.shard_folder(spec.output, spec.index)
        self._part = names.part_folder(spec.output, spec.index, spec.replica, attempt, spec.rank)
        self._done: dict[str, FileRecord] = {}
        self._published = False

    @property
    def path(self) -> Path:
        """Where it is written."""
        return self._part

    def tap_path(self, tap: str) -> Path:
        """Where the file of one tap is written."""
        return self._part / names.tap_file(tap)

    def prepare(self) -> None:
        """Makes the folder, in place of what an earlier process may have left. Blocking.

        Raises:
            OSError: any of it failed.
        """
        self._files.remove_tree(self._part)
        is_first = not self._files.exists(self._part.parent)
        self._files.make_folder(self._part)
        if is_first:
            self._files.sync_folder(self._part.parent.parent)

    def create_tap(self, tap: str) -> StatesWriter:
        """Creates the file of one tap. Blocking.

        Raises:
            OSError: any of it failed.
        """
        return StatesWriter(
            self._files,
            self.tap_path(tap),
            num_tokens=self._spec.num_tokens,
            hidden_size=self._spec.hidden_size,
            dtype=self._spec.dtype,
        )

    def finish_tap(self, tap: str, writer: StatesWriter) -> None:
        """Completes and syncs the file of one tap. Blocking.

        Raises:
            OSError: any of it failed.
        """
        size, digest = writer.finish()
        self._done[names.tap_file(tap)] = FileRecord(size, digest)

    @property
    def files(self) -> dict[str, FileRecord]:
        """The files that are complete."""
        return dict(self._done)

    def adopt(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        """Takes the complete files of another rank's part folder into this one, and removes that. Blocking.

        Raises:
            OSError: any of it failed; what is left of `folder` is the caller's to remove.
        """
        for name, record in files.items():
            self._files.rename(folder / name, self._part / name)
            self._done[name] = record
        self._files.remove_tree(folder)

    def publish(
        self,
        samples: Sequence[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint8]]],
        quarantined: Sequence[Quarantined],
    ) -> ShardRecord:
        """Writes tokens and record and gives the folder its final name. Blocking.

        Args:
            samples: (sample index, input_ids [t], loss_mask [t]) of the stored samples, in row order.
            quarantined: those left out, in row order.

        Returns:
            The record of the shard, which is now on the disk under its final name.

        Raises:
            OSError: any of it failed; then `discard` is due.
            BugError: the files do not hold what was planned.
        """
        spec = self._spec
        tokens = _tokens_bytes(samples)
        write_whole(self._files, self._part / names.TOKENS, tokens)
        self._done[names.TOKENS] = FileRecord(len(tokens), xxhash.xxh3_128_hexdigest(tokens))
        num_tokens = sum(ids.size for _, ids, _ in samples)
        record = ShardRecord(
            format_version=FORMAT_VERSION,
            index=spec.index,
            fingerprint=spec.fingerprint,
            geometry=spec.geometry,
            taps=spec.taps,
            dtype=spec.dtype,
            hidden_size=spec.hidden_size,
            num_samples=len(samples),
            num_tokens=num_tokens,
            num_supervised_tokens=sum(int(mask.sum()) for _, _, mask in samples),
            num_finite_tokens=num_tokens,
            quarantined=tuple(quarantined),
            files=dict(self._done),
        )
        missing = {names.tap_file(tap.name) for tap in spec.taps} - set(record.files)
        if missing:
            raise BugError(f"shard {spec.index}: never written: {', '.join(sorted(missing))}")
        write_whole(self._files, self._part / names.RECORD, encode_record(record))
        self._files.sync_folder(self._part)
        self._swap_in()
        return record

    def discard(self) -> None:
        """Removes what there is of the shard, as far as the file system lets it. Blocking.

        A shard whose rename may not have reached the disk is taken back too: it was not reported as done,
        and its name could still vanish.

        Raises:
            OSError: something is left; under a name that `scan` knows as a leftover, unless the rename back
                failed, and then it is a complete shard.
        """
        if self._published:
            self._files.rename(self._final, self._part)
            self._published = False
        self._files.remove_tree(self._part)

    def _swap_in(self) -> None:
        aside = names.replaced_folder(self._part)
        in_the_way = self._files.exists(self._final)
        if in_the_way:
            self._files.remove_tree(aside)
            self._files.rename(self._final, aside)
        self._files.rename(self._part, self._final)
        self._published = True
        self._files.sync_folder(self._final.parent)
        if in_the_way:
            # The shard is on the disk; what it replaced is a leftover like any other if it cannot be removed.
            with contextlib.suppress(OSError):
                self._files.remove_tree(aside)


def _tokens_bytes(samples: Sequence[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint8]]]) -> bytes:
    """`tokens.safetensors`: wide types first, so that every tensor is aligned."""
    lengths = [ids.size for _, ids, _ in samples]
    cu_seqlens = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return arrays_bytes(
        {
            "cu_seqlens": cu_seqlens,
            "sample_index": np.array([index for index, _, _ in samples], dtype=np.int64),
            "input_ids": np.concatenate([np.empty(0, np.int32), *(ids for _, ids, _ in samples)]),
            "loss_mask": np.concatenate([np.empty(0, np.uint8), *(mask for _, _, mask in samples)]),
        }
    )
