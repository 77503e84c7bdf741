"""What a rank was told, and what that means for it between two batches. No socket, no torch.

The channel's thread tells it requests the moment they arrive, so that `Hold`, `Stop` and `Drain` overtake the
shards that still wait; the compute thread asks it at every boundary and blocks in it while there is nothing
to do, without a clock and without using the CPU. It decides nothing but that, and touches no shard.

Invariants: nothing is computed after `Held` was reported and before `Resume`; every `Hold` is answered by one
`Held`, unless a `Resume` overtakes it; who is held when it is to leave, or when its supervisor is gone, drops
the shard in hand.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from extractor.protocol import Drain, Finish, Held, Hold, Resume, Stop, WorkShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.protocol import AnyRequest


class Orders:
    """The requests of one rank."""

    def __init__(
        self,
        *,
        grace_s: float,
        on_held: Callable[[Held], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing was told yet.

        Args:
            grace_s: how long the shard in hand may go on once the supervisor is gone.
            on_held: called with the report to send when a hold takes effect. In the compute thread; it
                must not block, since no request is taken meanwhile: none can come between hold and report.
            clock: monotonic seconds.
        """
        self._grace_s = grace_s
        self._on_held = on_held
        self._clock = clock
        self._lock = threading.Lock()
        # Its put may interrupt itself, which a condition's notify may not: `stop` is called by a signal handler.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._shards: deque[int] = deque()
        self._is_finishing = False
        self._is_stopping = False
        self._is_draining = False
        self._is_holding = False
        self._owes_held = False
        self._hold_number = 0
        self._alone_since: float | None = None

    def tell(self, request: AnyRequest) -> None:
        """Takes a request. Any thread; never blocks for long."""
        with self._lock:
            match request:
                case WorkShard():
                    self._shards.append(request.shard)
                case Finish():
                    self._is_finishing = True
                case Stop():
                    self._is_stopping = True
                case Drain():
                    self._is_draining = True
                case Hold():
                    self._is_holding = self._owes_held = True
                    self._hold_number = request.number
                case Resume():
                    self._is_holding = self._owes_held = False
        self._news.put(None)

    def stop(self) -> None:
        """As the request `Stop`. For signal handlers: takes no lock."""
        self._is_stopping = True
        self._news.put(None)

    def lose_supervisor(self) -> None:
        """Nobody will tell anything any more. Any thread."""
        with self._lock:
            self._alone_since = self._clock()
        self._news.put(None)

    def next_shard(self) -> int | None:
        """The shard to compute, or None when the rank is to leave. Blocks while there is neither."""
        while True:
            with self._lock:
                self._report_hold(None)
                if self._is_stopping or self._is_draining or self._alone_since is not None:
                    return None
                if not self._is_holding and self._shards:
                    return self._shards.popleft()
                if not self._is_holding and self._is_finishing:
                    return None
            self._news.get()

    def may_go_on(self, shard: int) -> bool:
        """Whether the next batch of the shard in hand is to be computed; if not, drop it. Blocks while held."""
        while True:
            with self._lock:
                self._report_hold(shard)
                if self._is_stopping:
                    return False
                if not self._is_holding:
                    return self._alone_since is None or self._clock() - self._alone_since < self._grace_s
                if self._is_draining or self._alone_since is not None:
                    return False
            self._news.get()

    def _report_hold(self, shard: int | None) -> None:
        # Under the lock: a Held that follows a Resume would be taken for the answer to the next Hold.
        if self._owes_held:
            self._owes_held = False
            self._on_held(Held(shard, self._hold_number))
