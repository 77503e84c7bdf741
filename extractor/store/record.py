"""What a shard is to be, and what it says about itself once it is written (`shard.json`).

Pure but for `read_record`. Invariants: a record holds no times and no host names, so equal shards have
equal records; its version is checked before anything in it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from extractor.errors import StoreError
from extractor.plan import Geometry
from extractor.store import names
from extractor.taps import Tap

FORMAT_VERSION = 1
StatesDtype = Literal["bfloat16", "float16", "float32"]


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is about to be written.

    Attributes:
        output: the output folder.
        index: number of the shard.
        samples: its sample indices in row order, as planned (`extractor.plan.Shard.samples`).
        num_tokens: tokens of all its samples, as planned.
        geometry: what the plan depended on.
        taps: the stored tensors, in stored order.
        dtype: type of the states on disk.
        hidden_size: H.
        fingerprint: of the data set it belongs to (`extractor.store.manifest.fingerprint`).
        replica: who writes it; part of the temporary folder's name only.
        rank: which of its writers this is; rank 0 publishes the shard.
        num_ranks: how many write it together, each its own taps.
    """

    output: Path
    index: int
    samples: tuple[int, ...]
    num_tokens: int
    geometry: Geometry
    taps: tuple[Tap, ...]
    dtype: StatesDtype
    hidden_size: int
    fingerprint: str
    replica: int | str = 0
    rank: int = 0
    num_ranks: int = 1

    @property
    def own_taps(self) -> tuple[Tap, ...]:
        """The taps that this rank writes, in stored order."""
        return self.taps[self.rank :: self.num_ranks]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a shard: its size in bytes and its checksum (`xxhsum -H2`)."""

    bytes: int
    xxh3_128: str


class Quarantined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample that was computed and not stored.

    Attributes:
        sample_index: its index in the prepared data set.
        sample_id: its stable id.
        reason: `non_finite` or `all_zero`.
    """

    sample_index: int
    sample_id: str
    reason: str


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`shard.json`.

    Attributes:
        format_version: of this file and of the files it lists.
        index: number of the shard.
        fingerprint: of the data set it belongs to.
        geometry: what the plan depended on.
        taps: the stored tensors, in stored order.
        dtype: type of the states.
        hidden_size: H.
        num_samples: samples that are stored.
        num_tokens: T, rows of every tap file.
        num_supervised_tokens: of those, how many have a loss mask of 1.
        num_finite_tokens: of those, how many have only finite states (all, or the writer was wrong).
        quarantined: samples planned for this shard and left out, in row order.
        files: name -> size and checksum of every file of the shard but this one.
    """

    format_version: int
    index: int
    fingerprint: str
    geometry: Geometry
    taps: tuple[Tap, ...]
    dtype: StatesDtype
    hidden_size: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    num_finite_tokens: int
    quarantined: tuple[Quarantined, ...]
    files: dict[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(file.bytes for file in self.files.values())


def encode_record(record: ShardRecord) -> bytes:
    """The bytes of `shard.json`; equal records give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=2) + b"\n"


def decode_record(data: bytes, where: str) -> ShardRecord:
    """The record in `data`.

    Raises:
        StoreError: it is damaged (`record_invalid`) or of another version (`record_version`).
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{where}: format version {version}; this tapdeck reads version {FORMAT_VERSION}",
                remedy="use the release of tapdeck that wrote it",
                code="record_version",
            )
        return msgspec.json.decode(data, type=ShardRecord)
    except msgspec.DecodeError as error:
        raise StoreError(f"{where}: damaged: {error}", code="record_invalid") from error


def read_record(folder: Path) -> ShardRecord:
    """Reads the `shard.json` of a shard folder. Blocking.

    Raises:
        StoreError: it is missing (`file_missing`), unreadable, damaged or of another version.
    """
    path = folder / names.RECORD
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{path}: the file is missing", code="file_missing") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", code="file_unreadable") from error
    return decode_record(data, str(path))


class _Version(msgspec.Struct):
    format_version: int
