"""Who has which bytes of the host memory between the engine and the writers.

Owns no memory, only the account of it: ranges of a fixed number of bytes, taken in the order in which they were
asked for and given back in any. Invariants: ranges in use never overlap; whoever asked first is served first,
so a large range is never passed over for small ones that would fit; an empty arena serves any request up to
its size, so a request waits only for ranges that are in use.
"""

from __future__ import annotations

import threading
from collections import deque

from extractor.errors import BugError


class Arena:
    """Ranges of `num_bytes` bytes. All methods may be called from any thread.

    Attributes:
        num_bytes: the size.
        peak_bytes: most bytes that were in use at once.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.peak_bytes = 0
        self._used: dict[int, int] = {}
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        with self._changed:
            return sum(self._used.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._waiting)

    def take(self, num_bytes: int) -> int:
        """The first byte of a free range, which is in use from now on. Blocks until there is one.

        Raises:
            BugError: it could never be served, or is empty.
        """
        if not 0 < num_bytes <= self.num_bytes:
            raise BugError(f"{num_bytes} bytes were asked of an arena of {self.num_bytes}")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (begin := self._find(num_bytes)) is None:
                    self._changed.wait()
            finally:
                self._waiting.remove(ticket)
                # The next one may fit as well.
                self._changed.notify_all()
            self._used[begin] = num_bytes
            self.peak_bytes = max(self.peak_bytes, sum(self._used.values()))
            return begin

    def give_back(self, begin: int) -> None:
        """Makes a range free again.

        Raises:
            BugError: no range in use begins there.
        """
        with self._changed:
            if self._used.pop(begin, None) is None:
                raise BugError(f"nothing in use begins at byte {begin}; it was given back twice")
            self._changed.notify_all()

    def _find(self, num_bytes: int) -> int | None:
        """The lowest place with room; None while there is none."""
        end = 0
        for begin in sorted(self._used):
            if begin - end >= num_bytes:
                return end
            end = begin + self._used[begin]
        return end if self.num_bytes - end >= num_bytes else None
