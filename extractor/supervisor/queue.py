"""Which shards are to be done, in hand, done or failed. Pure state: no clock, no process, no disk.

Invariants: a shard is in exactly one of the four sets; it is leased to at most one replica; a shard that
failed `MAX_ATTEMPTS` times is failed for good and the others go on.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from extractor.errors import BugError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ATTEMPTS = 3


class ShardQueue:
    """The work of one run.

    Attributes:
        done: shards with their final name.
        failed: shards given up, with their last error.
    """

    def __init__(self, todo: Iterable[int]) -> None:
        self._pending: deque[int] = deque(sorted(todo))
        self._leases: dict[int, str] = {}
        self._attempts: Counter[int] = Counter()
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}

    @property
    def is_finished(self) -> bool:
        """Nothing is pending or in hand."""
        return not self._pending and not self._leases

    @property
    def has_pending(self) -> bool:
        """A shard could be leased now."""
        return bool(self._pending)

    def num_leased(self, replica: str) -> int:
        """Shards in the hands of a replica."""
        return sum(owner == replica for owner in self._leases.values())

    def lease(self, replica: str) -> int:
        """Hands the next shard to a replica.

        Raises:
            BugError: nothing is pending.
        """
        if not self._pending:
            raise BugError("lease of an empty queue")
        shard = self._pending.popleft()
        self._leases[shard] = replica
        return shard

    def complete(self, shard: int) -> None:
        """A leased shard has its final name."""
        self._drop_lease(shard)
        self.done.add(shard)

    def fail(self, shard: int, error: str) -> bool:
        """A leased shard could not be done; returns whether it will be tried again."""
        self._drop_lease(shard)
        self._attempts[shard] += 1
        if self._attempts[shard] < MAX_ATTEMPTS:
            self._pending.appendleft(shard)
            return True
        self.failed[shard] = error
        return False

    def put_back(self, shard: int) -> None:
        """A leased shard could not be done, and that was not its fault: it is pending again."""
        self._drop_lease(shard)
        self._pending.appendleft(shard)

    @property
    def leased(self) -> tuple[int, ...]:
        """The shards in hand, in order."""
        return tuple(sorted(self._leases))

    @property
    def next_pending(self) -> int | None:
        """The shard that would be leased next."""
        return self._pending[0] if self._pending else None

    def give_back(self, replica: str) -> list[int]:
        """A replica is gone: its shards are pending again, without blame."""
        shards = sorted(shard for shard, owner in self._leases.items() if owner == replica)
        for shard in reversed(shards):
            del self._leases[shard]
            self._pending.appendleft(shard)
        return shards

    def _drop_lease(self, shard: int) -> None:
        if self._leases.pop(shard, None) is None:
            raise BugError(f"shard {shard} is not leased")
