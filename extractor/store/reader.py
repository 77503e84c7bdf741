"""Samples back from the shards, as tensors.

Opens one shard at a time: its tap files and nothing else, so any number of shards can be read with few
open files. Files are mapped by safetensors; where the file system cannot map, they are read plainly and
give the same tensors. Sizes are checked before a file is mapped: a shard that is damaged is refused by
name, since a mapped file that is too short ends the process with SIGBUS.

Shape legend: T tokens of the shard, t tokens of a sample, H hidden size.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from extractor.errors import StoreError
from extractor.store import names
from extractor.store.damage import file_damages, read_tokens, shard_damages
from extractor.store.record import read_record
from extractor.store.tensors import open_plain, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from io import BufferedReader
    from pathlib import Path
    from types import TracebackType

    from extractor.store.damage import Damage, Tokens
    from extractor.store.record import ShardRecord

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class StoredSample(msgspec.Struct, frozen=True):
    """One sample as it is stored: unshifted, all tensors of equal length.

    Attributes:
        sample_index: its index in the prepared data set.
        input_ids: int32 [t].
        loss_mask: uint8 [t].
        states: tap name -> [t, H] in the type of the data set, in stored order; owns its memory.
    """

    sample_index: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: dict[str, torch.Tensor]


class StatesFile(Protocol):
    """An open tap file."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """A copy of the rows [begin, end) as [end - begin, H]. Blocking."""

    def close(self) -> None:
        """Closes the file."""


class MappedStates:
    """A tap file through safetensors, which maps it."""

    def __init__(self, path: Path) -> None:
        """Opens and maps the file.

        Raises:
            OSError: it cannot be opened or mapped.
        """
        self._stack = contextlib.ExitStack()
        self._slice = self._stack.enter_context(safe_open(path, framework="pt")).get_slice(names.STATES_KEY)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """A copy of some rows, so that nothing refers to the mapping once the file is closed."""
        rows: torch.Tensor = self._slice[begin:end]
        return rows.clone()

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()


class PlainStates:
    """A tap file by plain reads."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            StoreError: it is missing or damaged.
        """
        self._path = path
        self._info = read_header(path)[names.STATES_KEY]
        self._dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self._info.dtype]
        self._source: BufferedReader = open_plain(path)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Some rows, read into memory of their own.

        Raises:
            StoreError: the file has become shorter.
        """
        hidden_size = self._info.shape[1]
        rows = torch.empty((end - begin, hidden_size), dtype=self._dtype)
        into = rows.view(-1).view(torch.uint8).numpy().data
        self._source.seek(self._info.start + begin * hidden_size * rows.element_size())
        if self._source.readinto(into) != into.nbytes:
            raise StoreError(f"{self._path}: cut off while it was read", code="data_truncated")
        return rows

    def close(self) -> None:
        """Closes the file."""
        self._source.close()


def open_states(path: Path, mapped: Callable[[Path], StatesFile] = MappedStates) -> StatesFile:
    """Opens a tap file, mapped if the file system can, else for plain reads. Blocking.

    Raises:
        StoreError: it is missing or damaged.
    """
    read_header(path)
    try:
        return mapped(path)
    except (OSError, RuntimeError, SafetensorError):
        # RuntimeError is how torch, which maps the file for safetensors, reports an errno.
        return PlainStates(path)


class ShardReader:
    """One committed shard, open for reading; a context manager. For one thread at a time.

    Attributes:
        record: what the shard says about itself.
        taps: the taps that are read, in stored order.
    """

    def __init__(
        self,
        folder: Path,
        taps: Sequence[str] | None = None,
        *,
        mapped: Callable[[Path], StatesFile] = MappedStates,
    ) -> None:
        """Opens the shard and checks sizes and tokens, not checksums. Blocking.

        Args:
            folder: its final folder.
            taps: names of the taps to read; None reads all that are stored.
            mapped: how a file is mapped.

        Raises:
            StoreError: the shard is damaged, or a tap is not stored in it.
        """
        self.record: ShardRecord = read_record(folder)
        found = shard_damages(
            folder, index=self.record.index, fingerprint=None, checksums=False, record=self.record
        )
        if found:
            raise _damaged(found[0])
        stored = [tap.name for tap in self.record.taps]
        absent = [name for name in taps or () if name not in stored]
        if absent:
            raise StoreError(
                f"{folder}: tap {', '.join(absent)} is not stored here, but {', '.join(stored)}",
                remedy="ask for taps that are stored in all shards",
                code="tap_missing",
            )
        self._folder = folder
        self.taps: tuple[str, ...] = tuple(name for name in stored if taps is None or name in taps)
        self._tokens: Tokens = read_tokens(folder)
        self._files: dict[str, StatesFile] = {}
        try:
            for name in self.taps:
                self._files[name] = open_states(folder / names.tap_file(name), mapped)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of stored samples."""
        return self.record.num_samples

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StoredSample]:
        """The samples in row order."""
        return (self.sample(position) for position in range(len(self)))

    def sample(self, position: int) -> StoredSample:
        """The sample at a position 0..n-1 of the shard. Blocking.

        Raises:
            IndexError: there is no such position.
            StoreError: a file has become shorter.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a shard of {len(self)}")
        begin, end = (int(edge) for edge in self._tokens.cu_seqlens[position : position + 2])
        return StoredSample(
            int(self._tokens.sample_index[position]),
            torch.tensor(self._tokens.input_ids[begin:end]),
            torch.tensor(self._tokens.loss_mask[begin:end]),
            {name: file.rows(begin, end) for name, file in self._files.items()},
        )

    def check_contents(self) -> None:
        """Reads every byte of the tokens and of the taps that are read, against their checksums. Blocking.

        Raises:
            StoreError: a file is damaged; the message names it.
        """
        for name in (names.TOKENS, *map(names.tap_file, self.taps)):
            found = file_damages(self._folder / name, self.record.files[name], checksums=True)
            if found:
                raise _damaged(found[0])

    def close(self) -> None:
        """Closes the files; may be repeated."""
        while self._files:
            self._files.popitem()[1].close()


def _damaged(found: Damage) -> StoreError:
    return StoreError(
        f"damaged shard: {found.reason}",
        remedy="run `tapdeck verify`, which says how to repair it",
        code=found.kind,
    )
