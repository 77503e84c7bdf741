"""Writes a prepared data set, sample by sample; the reader is `extractor.dataset.prepared`.

Invariants: memory is bounded by one record batch, however long the input; `meta.json` is written last,
after everything else is on disk; equal samples in equal order give equal bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from extractor.dataset.prepared import META_NAME, SAMPLES_NAME, SCHEMA, SampleHash
from extractor.errors import BugError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from extractor.dataset.prepared import PreparedMeta
    from extractor.dataset.records import Conversation

BATCH_TOKENS = 262_144
BATCH_ROWS = 4096


class SampleWriter:
    """Appends samples to `samples.arrow` of a folder.

    Attributes:
        hash: of the samples so far.
        num_samples, num_tokens, num_supervised: so far.
        longest: tokens of the longest sample so far.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / SAMPLES_NAME).open("wb")
        self._writer = pa.ipc.new_file(self._file, SCHEMA)
        self._rows: list[tuple[Conversation, NDArray[np.int32], NDArray[np.uint8]]] = []
        self._pending_tokens = 0
        self.hash = SampleHash()
        self.num_samples = 0
        self.num_tokens = 0
        self.num_supervised = 0
        self.longest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._writer.close()
                self._file.flush()
                sync_file(self._file.fileno())
        finally:
            self._file.close()

    def add(
        self, conversation: Conversation, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]
    ) -> None:
        """Appends one sample.

        Args:
            conversation: where it came from.
            input_ids: int32 [t].
            loss_mask: uint8 [t], of 0 and 1.

        Raises:
            BugError: the two differ in length, or no or no token is supervised.
        """
        supervised = int(loss_mask.sum())
        if len(input_ids) != len(loss_mask) or supervised == 0:
            raise BugError(f"{conversation.sample_id}: a mask that must not be stored reached the writer")
        self._rows.append((conversation, input_ids, loss_mask))
        self.hash.add(conversation.sample_id, input_ids, loss_mask)
        self._pending_tokens += len(input_ids)
        self.num_samples += 1
        self.num_tokens += len(input_ids)
        self.num_supervised += supervised
        self.longest = max(self.longest, len(input_ids))
        if self._pending_tokens >= BATCH_TOKENS or len(self._rows) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        conversations = [row[0] for row in self._rows]
        lengths = np.array([len(row[1]) for row in self._rows], np.int32)  # [rows]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [
            pa.array([conversation.sample_id for conversation in conversations], pa.string()),
            pa.array([conversation.source_file for conversation in conversations], pa.string()),
            pa.array([conversation.source_line for conversation in conversations], pa.int64()),
            pa.array(lengths),
            pa.array(np.array([row[2].sum() for row in self._rows], np.int32)),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row[1] for row in self._rows]))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row[2] for row in self._rows]))),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        self._rows = []
        self._pending_tokens = 0


def write_meta(folder: Path, meta: PreparedMeta) -> None:
    """Writes `meta.json`, which makes the folder whole, and syncs the folder."""
    with (folder / META_NAME).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n")
        file.flush()
        sync_file(file.fileno())
    sync_folder(folder)


def sync_file(descriptor: int) -> None:
    """Waits until a file is on disk."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
