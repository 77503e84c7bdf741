"""A driver, a host and a clock that do as they are told.

For tests, of ours and of those who build on telemetry; nothing in the product uses them. `FakeNvml` counts its
calls, fails or blocks by rule, and complains like the real library about a handle from before a shutdown.
Time of `FakeClock` moves only by `advance`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from extractor.protocol.api import Host
from extractor.telemetry.nvml import Handle, Memory, NvmlError, Status

POLL_S = 0.01


@dataclass
class FakeGpu:
    """What a GPU says; change it at will."""

    uuid: str
    name: str = "Fake GPU"
    busy_percent: float = 50.0
    memory: Memory = field(default_factory=lambda: Memory(40_000_000_000, 96_000_000_000))
    watts: float = 400.0
    limit_watts: float = 600.0
    celsius: float = 70.0


@dataclass
class _Rule:
    call: str
    index: int | None
    after: int
    status: Status | None
    gate: threading.Event | None

    def is_for(self, call: str, index: int | None) -> bool:
        return self.call in {"*", call} and self.index in {None, index}


@dataclass(frozen=True)
class _FakeHandle:
    index: int
    session: int


class FakeNvml:
    """A driver with GPUs. Safe to use from several threads.

    Attributes:
        gpus: what they say.
        calls: how often each method was called.
        num_waiting: threads that are blocked in a call now.
        max_waiting: the most there ever were.
    """

    def __init__(self, num_gpus: int = 1) -> None:
        self.gpus = [FakeGpu(f"GPU-{index}") for index in range(num_gpus)]
        self.calls: Counter[str] = Counter()
        self.num_waiting = 0
        self.max_waiting = 0
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._session = 0
        self._is_open = False

    def fail(self, status: Status, *, call: str = "*", index: int | None = None, after: int = 0) -> None:
        """From now on calls raise an error.

        Args:
            status: of the error.
            call: name of a method; "*": all.
            index: of a GPU; None: every GPU, and calls that are about none.
            after: so many more matching calls succeed before.
        """
        self._add(_Rule(call, index, after, status, None))

    def block(self, *, call: str = "*", index: int | None = None, after: int = 0) -> threading.Event:
        """From now on calls block, until the event that is returned is set. Arguments as of `fail`."""
        gate = threading.Event()
        self._add(_Rule(call, index, after, None, gate))
        return gate

    def heal(self) -> None:
        """Forgets all rules; calls that are blocked go on."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            if rule.gate is not None:
                rule.gate.set()

    def init(self) -> None:
        """As the protocol says."""
        self._enter("init", None)
        self._session += 1
        self._is_open = True

    def shutdown(self) -> None:
        """As the protocol says."""
        self._enter("shutdown", None)
        self._is_open = False

    def count(self) -> int:
        """As the protocol says."""
        self._enter("count", None)
        return len(self.gpus)

    def handle(self, index: int) -> Handle:
        """As the protocol says."""
        self._enter("handle", index)
        self._check_open()
        return Handle(_FakeHandle(index, self._session))

    def uuid(self, handle: Handle) -> str:
        """As the protocol says."""
        return self._gpu("uuid", handle).uuid

    def name(self, handle: Handle) -> str:
        """As the protocol says."""
        return self._gpu("name", handle).name

    def utilization(self, handle: Handle) -> float:
        """As the protocol says."""
        return self._gpu("utilization", handle).busy_percent

    def memory(self, handle: Handle) -> Memory:
        """As the protocol says."""
        return self._gpu("memory", handle).memory

    def power(self, handle: Handle) -> float:
        """As the protocol says."""
        return self._gpu("power", handle).watts

    def power_limit(self, handle: Handle) -> float:
        """As the protocol says."""
        return self._gpu("power_limit", handle).limit_watts

    def temperature(self, handle: Handle) -> float:
        """As the protocol says."""
        return self._gpu("temperature", handle).celsius

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _gpu(self, call: str, handle: object) -> FakeGpu:
        if not isinstance(handle, _FakeHandle):
            raise NvmlError(Status.INVALID_ARGUMENT, "Invalid Argument")
        self._enter(call, handle.index)
        self._check_open()
        if handle.session != self._session:
            raise NvmlError(Status.INVALID_ARGUMENT, "Invalid Argument")
        return self.gpus[handle.index]

    def _check_open(self) -> None:
        if not self._is_open:
            raise NvmlError(Status.UNINITIALIZED, "Uninitialized")

    def _enter(self, call: str, index: int | None) -> None:
        with self._lock:
            self.calls[call] += 1
            rule = self._next_rule(call, index)
            if rule is None:
                return
            if rule.gate is not None:
                self.num_waiting += 1
                self.max_waiting = max(self.max_waiting, self.num_waiting)
        if rule.status is not None:
            raise NvmlError(rule.status, rule.status.name.replace("_", " ").title())
        if rule.gate is not None:
            rule.gate.wait()
            with self._lock:
                self.num_waiting -= 1

    def _next_rule(self, call: str, index: int | None) -> _Rule | None:
        for rule in self._rules:
            if rule.is_for(call, index):
                if rule.after == 0:
                    return rule
                rule.after -= 1
        return None


class FakeHost:
    """A machine that is always the same.

    Attributes:
        error: raised by `sample` when set.
    """

    def __init__(self) -> None:
        self.host = Host("gpu-box", 64, 12.5, 100_000_000_000, 512_000_000_000, 3.5)
        self.error: OSError | None = None

    def sample(self) -> Host:
        """As the protocol says."""
        if self.error is not None:
            raise self.error
        return self.host


class FakeClock:
    """Time by hand: `monotonic` starts at 0, `now_utc` at `start_utc`. Safe to use from several threads."""

    def __init__(self, start_utc: float = 1_700_000_000.0) -> None:
        self._start_utc = start_utc
        self._now_s = 0.0
        self._changed = threading.Condition()
        self._dues: list[float] = []

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a time that has not come; the rest has still to do what is due."""
        with self._changed:
            return sum(due > self._now_s for due in self._dues)

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def now_utc(self) -> float:
        """Seconds since the epoch."""
        return self._start_utc + self._now_s

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Blocks until the time has been moved that far, or `stop` is set."""
        with self._changed:
            due = self._now_s + seconds
            self._dues.append(due)
            while self._now_s < due and not stop.is_set():
                self._changed.wait(POLL_S)
            self._dues.remove(due)

    def advance(self, seconds: float) -> None:
        """Moves the time and wakes who waits for it."""
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()
