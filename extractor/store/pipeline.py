"""The threads that carry batches from the engine's host buffers to the disk.

Owns the threads and the queue of lanes that have work. What a shard is, and when it is done, is in
`extractor.store.shard`. Lanes are served first come, first served and one batch at a time, so the oldest
block in memory is written to all its files first and several shards can be in flight.

Invariants: a lane is in the queue at most once; no thread of the pool ever ends before `close`, whatever
a block, a disk or a callback raises; after `close` nothing is open and every block is released.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from extractor.errors import BugError
from extractor.store.block import HostBlock, Sample
from extractor.store.filesystem import FileSystem, RealFileSystem
from extractor.store.shard import ShardRecord, ShardSpec, ShardState, ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.store.shard import Lane
    from extractor.store.shares import Share

__all__ = ["HostBlock", "Sample", "ShardRecord", "ShardSpec", "ShardState", "ShardWriter", "WriterPool"]


class WriterPool:
    """Writer threads, shared by all shards in flight.

    Attributes:
        threads: how many.
    """

    def __init__(
        self,
        threads: int,
        on_commit: Callable[[ShardRecord], None],
        on_error: Callable[[int, BaseException], None],
        *,
        on_share: Callable[[Share], None] | None = None,
        files: FileSystem | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            threads: how many files are written at the same time, at most.
            on_commit: called by a writer thread when a shard is on the disk under its final name.
            on_error: called by a writer thread with (shard index, error) when a shard failed and its part
                folder is gone. Also called when `on_commit` itself raises.
            on_share: called by a writer thread of rank 1 and on with what it has written of a shard, or why it
                failed, in place of both.
            files: the file system; None takes the real one.
        """
        self.threads = threads
        self._on_commit = on_commit
        self._on_error = on_error
        self._on_share = on_share or _nobody
        self._files = files or RealFileSystem()
        self._wake = threading.Condition()
        self._ready: deque[Lane] = deque()
        self._num_working = 0
        self._is_closing = False
        self._shards: list[ShardWriter] = []
        self._attempts: dict[tuple[int, str], int] = {}
        # Daemons, so that a device that never finishes a copy cannot keep the process from ending.
        self._threads = [
            threading.Thread(target=self._work, name=f"writer-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def open_shard(self, spec: ShardSpec) -> ShardWriter:
        """Begins a shard. Does not block: the disk is first touched by a writer thread.

        Raises:
            BugError: the pool is closed, or the shard has no taps for this rank.
        """
        if not spec.own_taps:
            raise BugError(f"shard {spec.index}: no taps for rank {spec.rank}")
        with self._wake:
            if self._is_closing:
                raise BugError("open_shard() after close()")
            key = (spec.index, str(spec.replica))
            attempt = self._attempts.get(key, 0)
            self._attempts[key] = attempt + 1
            shard = ShardWriter(
                spec,
                self._files,
                self,
                self._on_commit,
                self._on_error,
                on_share=self._on_share,
                attempt=attempt,
            )
            self._shards = [other for other in self._shards if other.state in _UNFINISHED]
            self._shards.append(shard)
        return shard

    def take_share(self, share: Share) -> None:
        """Takes what another rank has written; of a shard that has ended here it is removed. Blocking then.

        Raises:
            OSError: it is of no use any more and cannot be removed.
        """
        with self._wake:
            found = [
                shard
                for shard in self._shards
                if (shard.index, shard.attempt) == (share.index, share.attempt)
            ]
        if found and found[0].take_share(share):
            return
        self._files.remove_tree(Path(share.folder))

    def schedule(self, lane: Lane) -> None:
        """Puts a lane into the queue. Called by its shard."""
        with self._wake:
            self._ready.append(lane)
            self._wake.notify()

    def close(self) -> None:
        """Commits what is finished, abandons what is not, and joins the threads. Blocking.

        Also waits for the shares of other ranks that a finished shard lacks: who ends those ranks ends this one.
        """
        with self._wake:
            shards = list(self._shards)
        for shard in shards:
            if shard.state is ShardState.OPEN:
                shard.abandon()
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (lane := self._next_lane()) is not None:
            # `serve` is the border handler: it raises nothing.
            lane.shard.serve(lane)
            with self._wake:
                self._num_working -= 1
                if self._is_closing:
                    self._wake.notify_all()

    def _next_lane(self) -> Lane | None:
        """Blocks until a lane has work; None when the pool is closed and drained."""
        with self._wake:
            while not self._ready:
                # A lane that is being served may still put itself or another one into the queue, and so does
                # a share that comes.
                if self._is_closing and not self._num_working and not self._awaits_shares():
                    return None
                self._wake.wait()
            self._num_working += 1
            return self._ready.popleft()

    def _awaits_shares(self) -> bool:
        return any(shard.state is ShardState.FINISHING for shard in self._shards)


def _nobody(share: Share) -> None:
    raise BugError(f"shard {share.index}: rank {share.rank} has nobody to hand its share to")


_UNFINISHED = {ShardState.OPEN, ShardState.FINISHING, ShardState.PUBLISHING}
