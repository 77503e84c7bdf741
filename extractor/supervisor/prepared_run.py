"""`job.json` of a run folder: a run that is ready to be computed, as its preparation leaves it.

Preparing needs a tokenizer and reads all data, so it happens in a process of its own; the supervisor, which
imports none of that, reads what it needs to know from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extractor.errors import StoreError
from extractor.protocol import EngineSpec
from extractor.store import atomic
from extractor.store.manifest import Manifest

if TYPE_CHECKING:
    from pathlib import Path

FILE_VERSION = 1


class PreparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows of a run.

    Attributes:
        spec: of the ranks; without endpoint and replica.
        manifest: dataset.json, without versions, settings and environment.
        shard_tokens: tokens of every shard of the plan.
        shard_samples: samples of every shard of the plan.
        done: shards that were there already, whole.
        done_bytes: of their files.
        quarantined: samples left out of them.
        bytes_per_token: on disk.
        reserve_bytes: that must stay free on the output's file system.
        ids_after, ids_before: the taps in both conventions.
        notes: what a person should know (damaged shards, other versions).
        version: of this file.
    """

    version: int = FILE_VERSION
    spec: EngineSpec
    manifest: Manifest
    shard_tokens: tuple[int, ...]
    shard_samples: tuple[int, ...]
    done: tuple[int, ...]
    done_bytes: int
    quarantined: int
    bytes_per_token: int
    reserve_bytes: int
    ids_after: tuple[int, ...]
    ids_before: tuple[int, ...]
    notes: tuple[str, ...] = ()


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What the output folder holds when a run has ended, from what is really on the disk.

    Attributes:
        missing: samples planned and neither stored nor quarantined.
    """

    samples: int
    tokens: int
    supervised_tokens: int
    shards: int
    bytes: int
    rejected: int
    quarantined: int
    missing: int


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A line of progress of a task process."""

    text: str


class TaskFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A task process met an error."""

    code: str
    exit_code: int
    message: str
    remedy: str | None


class Concluded(msgspec.Struct, frozen=True, tag="concluded"):
    """The lists of the data set are written."""

    conclusion: Conclusion


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """`job.json` is written."""


TaskMessage = Note | TaskFailed | Concluded | Prepared
encode_message = msgspec.json.Encoder().encode
decode_message = msgspec.json.Decoder(TaskMessage).decode


def write(path: Path, run: PreparedRun) -> None:
    """Writes `job.json`, atomically. Blocking.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        atomic.replace_file(path, msgspec.json.encode(run) + b"\n")
    except OSError as error:
        raise atomic.explain(error, path, "written") from error


def read(path: Path) -> PreparedRun:
    """Reads `job.json`. Blocking.

    Raises:
        StoreError: it is not there, or cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PreparedRun)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", remedy="start the run again") from error
