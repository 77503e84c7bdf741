"""A prepared data set on disk: token ids, loss masks, and where each sample came from.

One folder: `samples.arrow` (Arrow IPC file, record batches), `rejected.jsonl`, `meta.json` (written last).
This module reads it; `extractor.dataset.writer` writes it. It imports neither transformers nor torch, since
every engine worker opens a prepared data set.

Invariants: the Arrow file is memory-mapped and never read as a whole; a folder is whole if and only if
`meta.json` can be read and agrees with the other two files; ids and mask of a sample have equal length;
nothing is shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from extractor.dataset.masks import MaskOptions
from extractor.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SAMPLES_NAME = "samples.arrow"
REJECTED_NAME = "rejected.jsonl"
META_NAME = "meta.json"
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("source_line", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("num_supervised", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
    ]
)


class SourceFile(msgspec.Struct, frozen=True):
    """A data file as it was read: name without folder, size, xxh3-128 of its bytes."""

    name: str
    num_bytes: int
    checksum: str


class Counts(msgspec.Struct, frozen=True):
    """What became of the records: `records == accepted + sum(rejected.values())`.

    Attributes:
        records: records read; blank lines are none.
        accepted: samples stored.
        rejected: by reason code.
        warnings: records by warning code; those are accepted.
        tokens: of all samples.
        supervised_tokens: of all samples.
        longest: tokens of the longest sample.
    """

    records: int
    accepted: int
    rejected: dict[str, int]
    warnings: dict[str, int]
    tokens: int
    supervised_tokens: int
    longest: int


class SampleHash:
    """xxh3-128 over ids, tokens and masks of samples in their order, whatever file they are kept in."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, sample_id: str, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> None:
        """Takes the next sample."""
        name = sample_id.encode("utf-8", "surrogatepass")
        self._digest.update(f"{len(name)} {len(input_ids)}\0".encode() + name)
        self._digest.update(np.ascontiguousarray(input_ids, dtype="<i4").data)
        self._digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).data)

    def hexdigest(self) -> str:
        """The hash of all samples so far, 32 hex digits."""
        return str(self._digest.hexdigest())


class PreparedMeta(msgspec.Struct, frozen=True):
    """`meta.json`.

    Attributes:
        version: of the preparation; other versions are prepared anew.
        key: name of the cache entry, a hash of all that the result depends on.
        data_hash: over all data files.
        tokenizer_hash: over the tokenizer's files.
        template_hash: over the template's text.
        template_source: "tokenizer" or the name of a file.
        template_args: variables given to the template.
        mask: the mask options.
        border_rule: what happens to a token shared between header and answer.
        end_markers: tokens that end an answer in this template; empty if none could be confirmed.
        max_len: samples are cut to this many tokens.
        min_supervised: samples with fewer supervised tokens were rejected.
        limit: only so many samples were taken; None means all.
        format: record style asked for.
        files: what was read.
        counts: what became of it.
        samples_hash: `SampleHash` of all samples.
        samples_bytes: size of the Arrow file.
        samples_checksum: xxh3-128 of the Arrow file.
        rejected_checksum: xxh3-128 of the reject list.
        libraries: versions of what rendered and tokenized.
    """

    version: int
    key: str
    data_hash: str
    tokenizer_hash: str
    template_hash: str
    template_source: str
    template_args: dict[str, Any]  # Any: TOML values
    mask: MaskOptions
    border_rule: str
    end_markers: tuple[str, ...]
    max_len: int
    min_supervised: int
    limit: int | None
    format: str
    files: tuple[SourceFile, ...]
    counts: Counts
    samples_hash: str
    samples_bytes: int
    samples_checksum: str
    rejected_checksum: str
    libraries: dict[str, str]


@dataclass(frozen=True)
class PreparedSample:
    """One sample.

    Attributes:
        index: its position in the data set.
        sample_id: its id.
        source_file: name of the file that it came from.
        source_line: 1-based line there.
        input_ids: int32 [t], read-only.
        loss_mask: uint8 [t], read-only; 1 where token t itself is supervised (not shifted).
    """

    index: int
    sample_id: str
    source_file: str
    source_line: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class PreparedDataset:
    """Read access to a prepared data set, in any order.

    Attributes:
        path: its folder.
        meta: how it was made and what is in it.
        lengths: tokens of each sample, int64 [n].
        supervised: supervised tokens of each sample, int64 [n].
    """

    def __init__(self, path: Path, meta: PreparedMeta, batches: list[pa.RecordBatch]) -> None:
        self.path = path
        self.meta = meta
        self._batches = batches
        rows = [batch.num_rows for batch in batches]
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])  # [batches + 1]
        self.lengths = self._column("num_tokens")
        self.supervised = self._column("num_supervised")

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> PreparedDataset:
        """Opens a folder.

        Args:
            folder: a cache entry.
            verify: also compare checksums, which reads everything once.

        Raises:
            StoreError: the folder is missing, unfinished or damaged.
        """
        meta = read_meta(folder)
        samples = folder / SAMPLES_NAME
        try:
            num_bytes = samples.stat().st_size
            if num_bytes != meta.samples_bytes:
                raise _damaged(folder, f"{SAMPLES_NAME} has {num_bytes} bytes, expected {meta.samples_bytes}")
            if verify:
                _verify(folder, meta)
            reader = pa.ipc.open_file(pa.memory_map(str(samples)))
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise _damaged(folder, str(error)) from error
        dataset = cls(folder, meta, batches)
        totals = (len(dataset), int(dataset.lengths.sum()), int(dataset.supervised.sum()))
        counts = meta.counts
        if totals != (counts.accepted, counts.tokens, counts.supervised_tokens):
            raise _damaged(
                folder, f"{META_NAME} and {SAMPLES_NAME} disagree about the number of samples or tokens"
            )
        return dataset

    @property
    def rejected_path(self) -> Path:
        """The list of rejects, one JSON object per line (`extractor.dataset.rejects.Reject`)."""
        return self.path / REJECTED_NAME

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int) -> PreparedSample:
        """One sample, without copying it.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, row = self._batches[number], index - int(self._starts[number])

        def cell(name: str) -> Any:  # Any: a scalar of pyarrow, which is untyped
            return batch.column(name)[row]

        return PreparedSample(
            index,
            cell("sample_id").as_py(),
            cell("source_file").as_py(),
            cell("source_line").as_py(),
            cell("input_ids").values.to_numpy(),
            cell("loss_mask").values.to_numpy(),
        )

    def _column(self, name: str) -> NDArray[np.int64]:
        parts = [batch.column(name).to_numpy() for batch in self._batches]
        joined: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *parts])
        return joined


def read_meta(folder: Path) -> PreparedMeta:
    """`meta.json` of a folder.

    Raises:
        StoreError: it is missing or cannot be read.
    """
    try:
        return msgspec.json.decode((folder / META_NAME).read_bytes(), type=PreparedMeta)
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(folder, f"{META_NAME}: {error}") from error


def file_checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, as hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def _verify(folder: Path, meta: PreparedMeta) -> None:
    for name, expected in ((SAMPLES_NAME, meta.samples_checksum), (REJECTED_NAME, meta.rejected_checksum)):
        if file_checksum(folder / name) != expected:
            raise _damaged(folder, f"the checksum of {name} is wrong")


def _damaged(folder: Path, why: str) -> StoreError:
    return StoreError(
        f"prepared data set {folder}: {why}",
        remedy="run `tapdeck prepare` again; it replaces a damaged entry",
        code="prepared_damaged",
    )
