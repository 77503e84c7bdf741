"""The map of a run's shards: one letter each, kept as the queue moves. Pure state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extractor.protocol.api import MAX_CELLS, ShardMap

if TYPE_CHECKING:
    from collections.abc import Iterable

PENDING, RUNNING, DONE, FAILED = b".rdx"


class ShardBoard:
    """Letters of all shards of the plan."""

    def __init__(self, num_shards: int, done: Iterable[int]) -> None:
        self._cells = bytearray([PENDING]) * num_shards
        self._map: ShardMap | None = None
        for shard in done:
            self._cells[shard] = DONE

    def set(self, shard: int, letter: int) -> None:
        """Changes one shard."""
        self._cells[shard] = letter
        self._map = None

    def count(self, letter: int) -> int:
        """Shards with that letter."""
        return self._cells.count(letter)

    def as_map(self) -> ShardMap:
        """The map for consoles; for very many shards a cell stands for several, the worst of them shown."""
        if self._map is None:
            size = -(-len(self._cells) // MAX_CELLS) or 1
            cells = self._cells
            if size > 1:
                cells = bytearray(
                    _worst(self._cells[first : first + size]) for first in range(0, len(self._cells), size)
                )
            self._map = ShardMap(cells.decode("ascii"), size)
        return self._map


def _worst(cells: bytearray) -> int:
    """What a person must see first: a failure, then work, then what is not done yet."""
    return next(letter for letter in (FAILED, RUNNING, PENDING, DONE) if letter in cells)
