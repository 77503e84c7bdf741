"""How fast a run computes: tokens/s now and on average, their history, and what follows for the time left.

Pure state, fed by events; the clock is passed in. Knows nothing of shards, pauses or processes: the supervisor
says when the model computes (`set_active`), what a batch held (`on_tokens`), and that time passes (`tick`).

Invariants and rules:
* time counts only while active, so pauses and loading lower no rate; the axis of all rates is active time;
* a batch's tokens are spread over the active time since the batch before, so that batches which take longer
  than an interval give a level line and not peaks with zeros between;
* while the batch in hand is not late (1.5 times the second longest of the last `RECENT_BATCHES`: one stall
  does not excuse the next), rates end with the last batch and are carried on from there; once it is late they
  end now, and fall to 0.0;
* a clock that goes back, and a gap without any event (a suspended or stopped process), count as no time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extractor.errors import BugError
from extractor.estimate import eta
from extractor.protocol.api import Rates

if TYPE_CHECKING:
    from collections.abc import Callable

NOW_WINDOW_S = 15.0
MAX_GAP_S = 30.0
"""No event for so long (or for three intervals): this process did not run."""
RECENT_BATCHES = 8
LATE_FACTOR = 1.5


@dataclass
class _Span:
    """Tokens that were computed between two moments of active time (seconds)."""

    begin_s: float
    end_s: float
    tokens: float = 0.0

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def overlap_s(self, begin_s: float, end_s: float) -> float:
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


class Meter:
    """Rates of one start of a run. Call `tick` at least once per interval. For one thread.

    Attributes:
        interval_s: length of an interval of `history`, in seconds of the clock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, interval_s: float = 5.0, keep: int = 60
    ) -> None:
        """Not active, nothing counted.

        Args:
            clock: monotonic seconds.
            interval_s: length of an interval.
            keep: intervals that `history` holds at most.
        """
        self._clock = clock
        self.interval_s = interval_s
        self._keep = keep
        self._max_gap_s = max(MAX_GAP_S, 3 * interval_s)
        self._at = clock()
        self._is_active = False
        self._running_s = 0.0
        self._tokens = 0
        self._unplaced = 0
        self._batches: deque[_Span] = deque()
        self._batch_times_s: deque[float] = deque(maxlen=RECENT_BATCHES)
        self._closed: deque[_Span] = deque(maxlen=keep)
        self._open = _Span(0.0, 0.0)
        self._open_left_s = interval_s

    def set_active(self, is_active: bool) -> None:
        """Says whether the model computes from now on."""
        self.tick()
        self._is_active = is_active

    def on_tokens(self, num_tokens: int) -> None:
        """Counts a batch that has been computed.

        Raises:
            BugError: a negative number.
        """
        if num_tokens < 0:
            raise BugError(f"a batch of {num_tokens} tokens")
        self.tick()
        self._tokens += num_tokens
        self._unplaced += num_tokens
        begin_s = self._batch_end_s
        if self._running_s > begin_s:
            self._batches.append(_Span(begin_s, self._running_s))
            self._batch_times_s.append(self._running_s - begin_s)
        # Batches without active time between them count as one; before any active time they wait for it.
        if self._batches:
            self._place(self._batches[-1])

    def tick(self) -> None:
        """Takes the time."""
        now = self._clock()
        passed_s, self._at = max(0.0, now - self._at), now
        is_counted = self._is_active and passed_s <= self._max_gap_s
        # No more intervals without active time than `history` can show.
        left_s = min(passed_s, (self._keep + 1) * self.interval_s) if not is_counted else passed_s
        while left_s > 0:
            step_s = min(left_s, self._open_left_s)
            if is_counted:
                self._running_s += step_s
                self._open.end_s = self._running_s
            left_s -= step_s
            self._open_left_s -= step_s
            if self._open_left_s <= 0:
                self._closed.append(self._open)
                self._open = _Span(self._running_s, self._running_s)
                self._open_left_s = self.interval_s
        self._forget()

    @property
    def running_s(self) -> float:
        """Seconds of computing, as of the last event."""
        return self._running_s

    @property
    def now(self) -> float:
        """Tokens/s of the last 15 s of active time or so; 0.0 while nothing is computed."""
        return self._latest_rate() if self._is_active else 0.0

    @property
    def mean(self) -> float | None:
        """Tokens/s of all active time; None before the first tokens."""
        return self._tokens / self._end_s if self._tokens and self._end_s > 0 else None

    @property
    def history(self) -> tuple[float | None, ...]:
        """Tokens/s of the last whole intervals, oldest first; None where there was no active time."""
        carried_on = 0.0 if self._is_late else self._latest_rate()
        return tuple(self._rate(span, carried_on) for span in self._closed)

    def rates(self, tokens_left: int, now_utc: float) -> Rates:
        """Everything that consoles show of it, at this moment.

        Args:
            tokens_left: to compute.
            now_utc: seconds since the epoch.
        """
        self.tick()
        history = self.history
        left = eta(
            tokens_left=tokens_left,
            tokens_done=self._tokens,
            running_s=self._end_s,
            recent=[rate for rate in history if rate is not None],
            interval_s=self.interval_s,
        )
        return Rates(
            tokens_per_s_now=self.now,
            tokens_per_s_mean=self.mean,
            history=history,
            history_interval_s=self.interval_s,
            eta_s=None if left is None else left.mean_s,
            eta_low_s=None if left is None else left.low_s,
            eta_high_s=None if left is None else left.high_s,
            finish_utc=now_utc + left.mean_s if left is not None and self._is_active else None,
            running_s=self._running_s,
        )

    def _latest_rate(self) -> float:
        end_s = self._end_s
        begin_s = max(0.0, end_s - NOW_WINDOW_S)
        if end_s <= begin_s:
            return 0.0
        return sum(_share(batch, begin_s, end_s) for batch in self._batches) / (end_s - begin_s)

    @property
    def _batch_end_s(self) -> float:
        """Active time when the last batch was done."""
        return self._batches[-1].end_s if self._batches else 0.0

    @property
    def _is_late(self) -> bool:
        """The batch in hand takes much longer than those before."""
        usual_s = max(sorted(self._batch_times_s)[-2:-1] or self._batch_times_s, default=0.0)
        return self._running_s - self._batch_end_s > LATE_FACTOR * usual_s

    @property
    def _end_s(self) -> float:
        """Active time up to which it is known what was computed."""
        return self._running_s if self._is_late else self._batch_end_s

    def _place(self, batch: _Span) -> None:
        """Gives the tokens that have no place yet to a batch, and to the intervals that it lies in."""
        for span in itertools.chain([self._open], reversed(self._closed)):
            if span.end_s < batch.begin_s:
                break
            span.tokens += self._unplaced * span.overlap_s(batch.begin_s, batch.end_s) / batch.length_s
        batch.tokens += self._unplaced
        self._unplaced = 0

    def _rate(self, span: _Span, carried_on: float) -> float | None:
        if span.length_s <= 0:
            return None
        unknown_s = span.overlap_s(self._batch_end_s, self._running_s)
        return (span.tokens + carried_on * unknown_s) / span.length_s

    def _forget(self) -> None:
        """Drops the batches that no rate needs any more, but never the last."""
        horizon_s = self._batch_end_s - NOW_WINDOW_S
        while len(self._batches) > 1 and self._batches[0].end_s < horizon_s:
            self._batches.popleft()


def _share(batch: _Span, begin_s: float, end_s: float) -> float:
    """Tokens of a batch that fall into a stretch of active time."""
    return batch.tokens * batch.overlap_s(begin_s, end_s) / batch.length_s
