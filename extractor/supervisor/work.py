"""The work of a prepared run: its shards, who has them, and how far each is. Pure state: no clock, no disk.

Keeps queue, map and counters in step: what happens to a shard is told here once. What is said of a shard that is
not in hand changes nothing, since a rank whose shard was taken away may still speak of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extractor.protocol import api
from extractor.supervisor.board import DONE, FAILED, PENDING, RUNNING, ShardBoard
from extractor.supervisor.queue import ShardQueue

if TYPE_CHECKING:
    from extractor.protocol import ShardDone
    from extractor.supervisor.prepared_run import PreparedRun


class Work:
    """The shards of one run.

    Attributes:
        prepared: the plan.
        queue, board: of its shards.
        tokens_total: of the whole data set.
        quarantined: samples left out of finished shards.
        done_bytes: of the finished shards.
        started_bytes: of those finished since the start.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        done = set(prepared.done)
        num_shards = len(prepared.shard_tokens)
        self.prepared = prepared
        self.queue = ShardQueue(shard for shard in range(num_shards) if shard not in done)
        self.board = ShardBoard(num_shards, done)
        self.tokens_total = sum(prepared.shard_tokens)
        self.quarantined = prepared.quarantined
        self.done_bytes = prepared.done_bytes
        self.started_bytes = 0
        self._done_tokens = sum(prepared.shard_tokens[shard] for shard in done)
        self._in_hand: dict[int, int] = {}

    @property
    def tokens_done(self) -> int:
        """Tokens of finished shards and of the batches in hand."""
        return self._done_tokens + sum(self._in_hand.values())

    @property
    def needed_bytes(self) -> int:
        """That the shards to do will still take on the disk."""
        return (self.tokens_total - self._done_tokens) * self.prepared.bytes_per_token

    @property
    def next_bytes(self) -> int:
        """That the shards in hand and the next one will still take; 0 when there is no next one."""
        following = self.queue.next_pending
        if following is None:
            return 0
        tokens = self.prepared.shard_tokens
        left = sum(tokens[shard] - self._in_hand.get(shard, 0) for shard in self.queue.leased)
        return (left + tokens[following]) * self.prepared.bytes_per_token

    def begin(self, shard: int) -> None:
        """Its computation has begun."""
        if self._is_in_hand(shard):
            self._in_hand[shard] = 0
            self.board.set(shard, RUNNING)

    def add_batch(self, shard: int, num_tokens: int) -> None:
        """A batch of it was computed."""
        # A shard whose writing has failed may still be computed for a while.
        if shard in self._in_hand:
            self._in_hand[shard] += num_tokens

    def complete(self, report: ShardDone) -> bool:
        """It has its final name; returns whether that is news."""
        if not self._is_in_hand(report.shard):
            return False
        self.queue.complete(report.shard)
        self._let_go(report.shard, DONE)
        self._done_tokens += self.prepared.shard_tokens[report.shard]
        self.done_bytes += report.num_bytes
        self.started_bytes += report.num_bytes
        self.quarantined += report.quarantined
        return True

    def fail(self, shard: int, error: str) -> bool | None:
        """One attempt less for it; returns whether it is tried again, or None when it is not in hand."""
        if not self._is_in_hand(shard):
            return None
        again = self.queue.fail(shard, error)
        self._let_go(shard, PENDING if again else FAILED)
        return again

    def put_back(self, shard: int) -> bool:
        """It could not be done, and not by its fault; returns whether it was in hand."""
        if not self._is_in_hand(shard):
            return False
        self.queue.put_back(shard)
        self._let_go(shard, PENDING)
        return True

    def give_back(self, replica: str) -> None:
        """A replica is gone: what it had is to be done again."""
        for shard in self.queue.give_back(replica):
            self._let_go(shard, PENDING)

    def progress(self) -> api.Progress:
        """How far it is, for consoles."""
        prepared = self.prepared
        return api.Progress(
            tokens_total=self.tokens_total,
            tokens_done=self.tokens_done,
            samples_total=sum(prepared.shard_samples),
            shards_total=len(prepared.shard_tokens),
            shards_done=len(prepared.done) + len(self.queue.done),
            shards_running=self.board.count(RUNNING),
            shards_failed=self.board.count(FAILED),
            rejected=prepared.manifest.totals.rejected,
            quarantined=self.quarantined,
        )

    def _is_in_hand(self, shard: int) -> bool:
        return shard in self.queue.leased

    def _let_go(self, shard: int, letter: int) -> None:
        self._in_hand.pop(shard, None)
        self.board.set(shard, letter)
