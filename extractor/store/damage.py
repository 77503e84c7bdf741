"""What is wrong with one shard folder, if anything: the checks that scanning and verifying share.

Reads, never writes. Invariants: every damage names its file and a stable kind; a file is never mapped, so
one that is cut while it is read is a damage and not a signal; memory is bounded by one chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from extractor.errors import StoreError
from extractor.store import names
from extractor.store.record import read_record
from extractor.store.tensors import CHUNK_BYTES, dtype_code, open_plain, read_array, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from extractor.store.record import FileRecord, ShardRecord
    from extractor.store.tensors import TensorInfo

# Bits of the exponent: a value is NaN or infinite if all of them are set.
_EXPONENT = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}


class Damage(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    Attributes:
        path: the file or folder.
        kind: stable word for programs: `file_missing`, `wrong_size`, `data_truncated`, `checksum`, ...
        reason: the sentence for people.
    """

    path: str
    kind: str
    reason: str


class Tokens(msgspec.Struct, frozen=True):
    """Contents of `tokens.safetensors`.

    Attributes:
        input_ids: int32 [T].
        loss_mask: uint8 [T].
        cu_seqlens: int64 [n+1]; sample i has rows cu_seqlens[i] to cu_seqlens[i+1].
        sample_index: int64 [n].
    """

    input_ids: Any  # msgspec does not know numpy arrays
    loss_mask: Any
    cu_seqlens: Any
    sample_index: Any

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, int64 [n]."""
        return np.diff(self.cu_seqlens)


def read_tokens(folder: Path) -> Tokens:
    """Reads the tokens of a shard and checks that they fit together. Blocking.

    Raises:
        StoreError: the file is missing or damaged (codes of `read_header`, and `tokens_invalid`).
    """
    path = folder / names.TOKENS
    infos = read_header(path)
    expected = {"input_ids": "I32", "loss_mask": "U8", "cu_seqlens": "I64", "sample_index": "I64"}
    if {name: info.dtype for name, info in infos.items()} != expected:
        raise StoreError(f"{path}: holds other tensors than {', '.join(expected)}", code="header_invalid")
    tokens = Tokens(**{name: read_array(path, info) for name, info in infos.items()})
    fault = next(_token_faults(tokens), None)
    if fault is not None:
        raise StoreError(f"{path}: {fault}", code="tokens_invalid")
    return tokens


def shard_damages(
    folder: Path,
    *,
    index: int,
    fingerprint: str | None,
    checksums: bool,
    record: ShardRecord | None = None,
) -> list[Damage]:
    """Everything wrong with a shard by itself. Blocking.

    Args:
        folder: its final folder.
        index: the number its name stands for.
        fingerprint: of the data set; None asks for none.
        checksums: read every byte: checksums, and that all states are finite.
        record: its record, if it was read already.
    """
    try:
        record = record or read_record(folder)
    except StoreError as error:
        return [damage_of(folder / names.RECORD, error)]
    path = folder / names.RECORD
    found: list[Damage] = []
    if record.index != index:
        found.append(Damage(str(path), "wrong_shard", f"{path}: says that it is shard {record.index}"))
    if fingerprint is not None and record.fingerprint != fingerprint:
        found.append(
            Damage(
                str(path),
                "wrong_fingerprint",
                f"{path}: belongs to data set {record.fingerprint}, not to {fingerprint}",
            )
        )
    expected = {names.TOKENS} | {names.tap_file(tap.name) for tap in record.taps}
    if set(record.files) != expected:
        found.append(Damage(str(path), "record_invalid", f"{path}: lists other files than its taps need"))
        return found
    for name, file in record.files.items():
        found.extend(file_damages(folder / name, file, checksums=checksums))
    if not found:
        found.extend(_record_damages(folder, record))
    return found


def file_damages(path: Path, file: FileRecord, *, checksums: bool) -> list[Damage]:
    """What is wrong with one file of a shard; at most one finding. Blocking."""
    try:
        infos = read_header(path)
        size = max((info.stop for info in infos.values()), default=0)
        if size != file.bytes:
            return [Damage(str(path), "wrong_size", f"{path}: {size} bytes, {file.bytes} were written")]
        if checksums:
            states = infos.get(names.STATES_KEY)
            _check_contents(path, file, states if states and states.dtype in _EXPONENT else None)
    except StoreError as error:
        return [damage_of(path, error)]
    except OSError as error:
        return [Damage(str(path), "file_unreadable", f"{path}: {error.strerror or error}")]
    return []


def damage_of(path: Path, error: StoreError) -> Damage:
    """A finding from an error."""
    return Damage(str(path), error.code, error.message)


def chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file by plain reads, in chunks whose size is a multiple of 4. Blocking.

    Raises:
        StoreError: it cannot be opened.
        OSError: a read failed.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_plain(path) as source:
        while count := source.readinto(buffer):
            yield buffer[:count]


def _check_contents(path: Path, file: FileRecord, states: TensorInfo | None) -> None:
    digest = xxhash.xxh3_128()
    position = 0
    first_bad: int | None = None
    for piece in chunks(path):
        digest.update(piece)
        if states is not None and first_bad is None:
            first_bad = _first_non_finite(piece, position, states)
        position += piece.nbytes
    if position < file.bytes:
        raise StoreError(f"{path}: cut off while it was read, at byte {position}", code="data_truncated")
    if digest.hexdigest() != file.xxh3_128:
        raise StoreError(
            f"{path}: the checksum is {digest.hexdigest()}, {file.xxh3_128} was written", code="checksum"
        )
    if states is not None and first_bad is not None:
        row = (first_bad - states.start) // ((states.stop - states.start) // states.shape[0])
        raise StoreError(f"{path}: row {row} holds NaN or infinity", code="non_finite")


def _first_non_finite(piece: memoryview, position: int, states: TensorInfo) -> int | None:
    """Byte offset in the file of the first value that is not finite."""
    word, exponent = _EXPONENT[states.dtype]
    begin = max(states.start - position, 0)
    width = np.dtype(word).itemsize
    # A file that is cut while it is read may end inside a value.
    values = np.frombuffer(piece[begin : piece.nbytes - (piece.nbytes - begin) % width], dtype=word)
    bad = np.flatnonzero((values & exponent) == exponent)
    return position + begin + int(bad[0]) * width if bad.size else None


def _record_damages(folder: Path, record: ShardRecord) -> list[Damage]:
    """Where headers, tokens and record contradict each other; at most one finding."""
    shape = (record.num_tokens, record.hidden_size)
    for tap in record.taps:
        path = folder / names.tap_file(tap.name)
        try:
            info = read_header(path).get(names.STATES_KEY)
        except StoreError as error:
            return [damage_of(path, error)]
        if info is None or info.shape != shape or info.dtype != dtype_code(record.dtype):
            return [
                Damage(str(path), "wrong_shape", f"{path}: no states of shape {shape} and {record.dtype}")
            ]
    path = folder / names.TOKENS
    try:
        tokens = read_tokens(folder)
    except StoreError as error:
        return [damage_of(path, error)]
    num_tokens = tokens.input_ids.size
    counts = (tokens.sample_index.size, num_tokens, int(tokens.loss_mask.sum()), num_tokens)
    said = (record.num_samples, record.num_tokens, record.num_supervised_tokens, record.num_finite_tokens)
    if counts != said:
        reason = f"samples, tokens, supervised and finite tokens are {counts}; shard.json says {said}"
        return [Damage(str(path), "wrong_counts", f"{path}: {reason}")]
    return []


def _token_faults(tokens: Tokens) -> Iterator[str]:
    """What is wrong; only the first is certain, later checks rely on earlier ones."""
    edges, num_tokens = tokens.cu_seqlens, tokens.input_ids.size
    if any(array.ndim != 1 for array in (tokens.input_ids, tokens.loss_mask, edges, tokens.sample_index)):
        yield "a tensor has not one dimension"
    if tokens.loss_mask.size != num_tokens:
        yield f"{tokens.loss_mask.size} values of loss_mask for {num_tokens} tokens"
    if edges.size != tokens.sample_index.size + 1 or edges[0] != 0 or edges[-1] != num_tokens:
        yield f"cu_seqlens does not run from 0 to {num_tokens} over {tokens.sample_index.size} samples"
    if (np.diff(edges) <= 0).any():
        yield "cu_seqlens holds an empty sample or goes back"
    if (tokens.loss_mask > 1).any():
        yield "loss_mask holds values other than 0 and 1"
    if np.unique(tokens.sample_index).size != tokens.sample_index.size:
        yield "a sample is stored twice"
