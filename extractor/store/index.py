"""The lists beside the shards: `samples.parquet`, `quarantine.jsonl`, `rejected.jsonl`.

Owns these three files. They say nothing that shards and prepared data set do not say, and are rebuilt
from them as a whole. Invariants: each is replaced atomically; equal shards give equal bytes (with one
version of pyarrow, whose name is in the file); memory is bounded by one shard's samples.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extractor.store import atomic, names
from extractor.store.damage import read_tokens
from extractor.store.filesystem import RealFileSystem
from extractor.store.tensors import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from extractor.store.record import ShardRecord


class Origin(Protocol):
    """Where a sample came from."""

    @property
    def sample_id(self) -> str:
        """Its stable id."""

    @property
    def source_file(self) -> str:
        """Name of the input file."""

    @property
    def source_line(self) -> int:
        """1-based line in it."""


class IndexTotals(msgspec.Struct, frozen=True):
    """What the lists hold.

    Attributes:
        samples: lines of `samples.parquet`.
        quarantined: lines of `quarantine.jsonl`.
    """

    samples: int
    quarantined: int


class QuarantineLine(msgspec.Struct, frozen=True):
    """A line of `quarantine.jsonl`: a sample that was computed and not stored."""

    sample_index: int
    sample_id: str
    reason: str
    shard: int
    source_file: str
    source_line: int


SCHEMA = pa.schema(
    [
        pa.field("sample_index", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("source_line", pa.int64(), nullable=False),
        pa.field("shard", pa.int64(), nullable=False),
        # First row of the sample in every tap file of the shard.
        pa.field("row", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("supervised_tokens", pa.int64(), nullable=False),
    ]
)
"""Columns of `samples.parquet`; lines stand in the order of shard and row."""


def rebuild(
    output: Path,
    records: Sequence[ShardRecord],
    origin: Callable[[int], Origin],
    rejected: Path | None = None,
) -> IndexTotals:
    """Writes all three lists. Blocking.

    Args:
        output: the output folder; only its owner may call this.
        records: of the shards to list, ascending: those that are done. A damaged one that waits to be computed
            again is not read.
        origin: sample index -> where the sample came from.
        rejected: list of rejects of the prepared data set; None leaves `rejected.jsonl` as it is.

    Raises:
        StoreError: a shard is damaged, or a list cannot be written.
        AccessError: the folder may not be written.
    """
    samples = _write_samples(output, records, origin)
    quarantined = _write_quarantine(output, records, origin)
    if rejected is not None:
        with _replacing(output / names.REJECTED) as sink, rejected.open("rb") as source:
            while piece := source.read(CHUNK_BYTES):
                sink.write(piece)
    return IndexTotals(samples, quarantined)


def _write_samples(output: Path, records: Sequence[ShardRecord], origin: Callable[[int], Origin]) -> int:
    count = 0
    with (
        _replacing(output / names.SAMPLES) as sink,
        pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer,
    ):
        for record in records:
            table = _sample_rows(names.shard_folder(output, record.index), record, origin)
            if table.num_rows:
                writer.write_table(table)
            count += table.num_rows
    return count


def _sample_rows(folder: Path, record: ShardRecord, origin: Callable[[int], Origin]) -> Any:  # Any: pyarrow
    tokens = read_tokens(folder)
    origins = [origin(int(index)) for index in tokens.sample_index]
    ends = np.concatenate([[0], np.cumsum(tokens.loss_mask, dtype=np.int64)])
    return pa.table(
        {
            "sample_index": tokens.sample_index,
            "sample_id": [entry.sample_id for entry in origins],
            "source_file": [entry.source_file for entry in origins],
            "source_line": [entry.source_line for entry in origins],
            "shard": np.full(len(origins), record.index, dtype=np.int64),
            "row": tokens.cu_seqlens[:-1],
            "tokens": tokens.lengths,
            "supervised_tokens": np.diff(ends[tokens.cu_seqlens]),
        },
        schema=SCHEMA,
    )


def _write_quarantine(output: Path, records: Sequence[ShardRecord], origin: Callable[[int], Origin]) -> int:
    count = 0
    encoder = msgspec.json.Encoder()
    with _replacing(output / names.QUARANTINE) as sink:
        for record in records:
            for entry in record.quarantined:
                source = origin(entry.sample_index)
                line = QuarantineLine(
                    entry.sample_index,
                    entry.sample_id,
                    entry.reason,
                    record.index,
                    source.source_file,
                    source.source_line,
                )
                sink.write(encoder.encode(line) + b"\n")
                count += 1
    return count


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path`, durably, if the block ends well."""
    part = names.temporary(path)
    files = RealFileSystem()
    try:
        with part.open("wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        files.rename(part, path)
        files.sync_folder(path.parent)
    except OSError as error:
        raise atomic.explain(error, path, "written") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
