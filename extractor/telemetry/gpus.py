"""The GPUs of the machine: one reader per GPU, and the keeper of NVML that they read through.

Invariants:
* each GPU is read by one thread of its own: a call that blocks makes that GPU's values grow old, not others';
* a GPU that is lost is listed with its reason; it gets a new handle after a while, and the others are read on;
* NVML is closed and opened anew only when no GPU at all can be read (or NVML says that it is not open), and
  never while a thread is in the driver, since that would take handles from under a call;
* no number of questions to `latest` causes a call of NVML.
Lost telemetry is not a lost run: nothing here is told to the engine.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from extractor.protocol.api import Gpu, Unavailable
from extractor.telemetry.nvml import Memory, NvmlError, Status, unavailable
from extractor.telemetry.periodic import Clock, Periodic

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.telemetry.nvml import Handle, Nvml

SLOW_EVERY_S = 5.0
"""Temperature and power limit change slowly."""
NO_DRIVER_RETRY_S = 30.0
FIRST_RETRY_S = 2.0
LAST_RETRY_S = 60.0
QUIET_WITHIN_S = 0.5
"""How long the keeper waits for readers to come out of the driver before it gives up for now."""
NOT_YET = Unavailable("not_yet", "not sampled yet")
_Value = TypeVar("_Value")


def retry_delay_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: 2, 4, 8, ... 60."""
    return float(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(failures - 1, 10)))


@dataclass(frozen=True)
class _Values:
    """What is read of a GPU; units as in `api.Gpu`."""

    busy: float | Unavailable
    memory: Memory | Unavailable
    power: float | Unavailable
    power_limit: float | Unavailable
    temperature: float | Unavailable

    @classmethod
    def none(cls, why: Unavailable) -> _Values:
        return cls(why, why, why, why, why)


class GpuReader:
    """Reads one GPU. `step` belongs to one thread; the rest may be called from any.

    Attributes:
        latest: as of the last step that has come back; temperature and power limit may be `SLOW_EVERY_S` older.
        failure: why nothing at all could be read in that step; None when something was.
        lost_since_utc: when that began.
        quiet: held while this reader is in the driver; who holds it knows that it is not.
    """

    def __init__(
        self, nvml: Nvml, index: int, clock: Clock, interval_s: float, before: GpuReader | None = None
    ) -> None:
        """Touches no driver yet.

        Args:
            nvml: open.
            index: of the GPU.
            clock: of the machine.
            interval_s: between two steps.
            before: reader of this GPU until NVML was opened anew: what it knew is shown until the first step.
        """
        self._nvml = nvml
        self._index = index
        self._clock = clock
        self._interval_s = interval_s
        self._handle: Handle | None = None
        self._uuid = ""
        self._name = "unknown GPU"
        self._values = _Values.none(NOT_YET)
        self._slow_due = 0.0
        self._num_failures = 0
        self.lost_since_utc: float | None = None
        self._retry_due = 0.0
        self._is_closed = False
        self.quiet = threading.Lock()
        self.failure: NvmlError | None = None
        self.latest = self._gpu(clock.now_utc())
        if before is not None:
            self.latest, self.failure = before.latest, before.failure
            self.lost_since_utc = before.lost_since_utc
            self._uuid, self._name = before.latest.uuid, before.latest.name

    def step(self) -> float:
        """Reads the GPU once. Blocks for as long as the driver does.

        Returns:
            Seconds until the next step.
        """
        with self.quiet:
            if not self._is_closed:
                # The time before the first call, so that a call that blocks makes no old value look new.
                read_utc = self._clock.now_utc()
                self._sample()
                self.latest = self._gpu(read_utc)
        return self._interval_s

    def close(self) -> None:
        """No step reaches the driver any more. Only for who holds `quiet`."""
        self._is_closed = True

    def _sample(self) -> None:
        try:
            if self._handle is None:
                if self._clock.monotonic() < self._retry_due:
                    return
                self._attach()
            self._read()
        except NvmlError as error:
            self._lose(error)

    def _attach(self) -> None:
        handle = self._nvml.handle(self._index)
        self._uuid = self._nvml.uuid(handle)
        with contextlib.suppress(NvmlError):  # a GPU without a name can still be watched
            self._name = self._nvml.name(handle)
        self._handle = handle
        self._slow_due = 0.0

    def _read(self) -> None:
        errors: list[NvmlError] = []
        busy = self._ask(self._nvml.utilization, errors)
        memory = self._ask(self._nvml.memory, errors)
        power = self._ask(self._nvml.power, errors)
        breaking = [error for error in errors if error.breaks_handle]
        # One value that a driver fails to give, while it gives others, is that value's matter.
        if len(errors) == 3 and breaking:
            raise breaking[0]
        limit, temperature = self._values.power_limit, self._values.temperature
        if self._clock.monotonic() >= self._slow_due:
            self._slow_due = self._clock.monotonic() + SLOW_EVERY_S
            limit = self._ask(self._nvml.power_limit, errors)
            temperature = self._ask(self._nvml.temperature, errors)
        if isinstance(busy, float):
            busy = min(100.0, max(0.0, busy))
        self._values = _Values(busy, memory, power, limit, temperature)
        self.failure, self._num_failures, self.lost_since_utc = None, 0, None

    def _ask(self, call: Callable[[Handle], _Value], errors: list[NvmlError]) -> _Value | Unavailable:
        if self._handle is None:
            return NOT_YET
        try:
            return call(self._handle)
        except NvmlError as error:
            errors.append(error)
            return unavailable(error)

    def _lose(self, error: NvmlError) -> None:
        self._handle = None
        self._num_failures += 1
        self._retry_due = self._clock.monotonic() + retry_delay_s(self._num_failures)
        if self.lost_since_utc is None:
            self.lost_since_utc = self._clock.now_utc()
        why = unavailable(error)
        self._values = _Values.none(
            Unavailable(why.reason, f"{why.detail}, since {_moment(self.lost_since_utc)}")
        )
        self.failure = error

    def _gpu(self, read_utc: float) -> Gpu:
        memory = self._values.memory
        return Gpu(
            uuid=self._uuid,
            index=self._index,
            name=self._name,
            busy_percent=self._values.busy,
            memory_used_bytes=float(memory.used_bytes) if isinstance(memory, Memory) else memory,
            memory_total_bytes=float(memory.total_bytes) if isinstance(memory, Memory) else memory,
            power_watts=self._values.power,
            power_limit_watts=self._values.power_limit,
            temperature_celsius=self._values.temperature,
            sampled_utc=read_utc,
        )


class GpuKeeper:
    """Opens NVML, has one `GpuReader` per GPU, and opens NVML anew when all of them are lost.

    `step` belongs to one thread (start with `start`); `latest` may be called from any and never blocks.
    """

    def __init__(self, nvml: Nvml, clock: Clock, interval_s: float) -> None:
        self._nvml = nvml
        self._clock = clock
        self._interval_s = interval_s
        self._readers: tuple[GpuReader, ...] = ()
        self._threads: tuple[Periodic, ...] = ()
        self._failure = Unavailable("not_yet", "waiting for the NVIDIA driver")
        self._num_failures = 0
        self._retry_due = 0.0
        self._lost_since_utc: float | None = None
        self._is_open = False
        self._thread = Periodic("telemetry-gpus", self.step, clock, finish=self._finish)

    def start(self) -> None:
        """Starts the keeper's thread; the readers' follow when NVML is open."""
        self._thread.start()

    def stop(self) -> None:
        """Asks all threads to end. Does not wait."""
        self._thread.stop()
        for thread in self._threads:
            thread.stop()

    def threads(self) -> tuple[Periodic, ...]:
        """The keeper's and the readers'."""
        return (self._thread, *self._threads)

    def latest(self) -> tuple[Gpu, ...] | Unavailable:
        """The GPUs by index, or why there are none. Never blocks."""
        readers = self._readers
        return tuple(reader.latest for reader in readers) if readers else self._failure

    def step(self) -> float:
        """Looks after NVML once. Blocks for as long as the driver does.

        Returns:
            Seconds until the next step.
        """
        if self._readers and not self._is_lost():
            if any(reader.failure is None for reader in self._readers):
                self._num_failures, self._lost_since_utc = 0, None
            return self._interval_s
        since_utc = [reader.lost_since_utc for reader in self._readers if reader.lost_since_utc is not None]
        if self._lost_since_utc is None and since_utc:
            self._lost_since_utc = min(since_utc)
        if self._clock.monotonic() < self._retry_due or not self._close():
            return self._interval_s
        return self._open()

    def _is_lost(self) -> bool:
        failures = [reader.failure for reader in self._readers]
        is_closed = any(error is not None and error.status == Status.UNINITIALIZED for error in failures)
        return is_closed or all(failures)

    def _open(self) -> float:
        try:
            self._nvml.init()
            self._is_open = True
            count = self._nvml.count()
        except NvmlError as error:
            return self._fail(unavailable(error))
        if count == 0:
            return self._fail(Unavailable("no_driver", "the NVIDIA driver lists no GPU"))
        # Opening is not yet success: that is a GPU that can be read. Until then the delays go on growing.
        self._num_failures += 1
        self._retry_due = self._clock.monotonic() + retry_delay_s(self._num_failures)
        self._start_readers(count)
        return self._interval_s

    def _start_readers(self, count: int) -> None:
        before = dict(enumerate(self._readers))
        self._readers = tuple(
            GpuReader(self._nvml, i, self._clock, self._interval_s, before.get(i)) for i in range(count)
        )
        self._threads = tuple(
            Periodic(f"telemetry-gpu-{i}", reader.step, self._clock) for i, reader in enumerate(self._readers)
        )
        for thread in self._threads:
            thread.start()

    def _fail(self, why: Unavailable) -> float:
        self._num_failures += 1
        if self._lost_since_utc is not None:
            why = Unavailable(why.reason, f"lost since {_moment(self._lost_since_utc)}: {why.detail}")
        self._failure = why
        self._readers = ()
        delay = NO_DRIVER_RETRY_S if why.reason == "no_driver" else retry_delay_s(self._num_failures)
        self._retry_due = self._clock.monotonic() + delay
        return delay

    def _close(self) -> bool:
        """Ends the readers and closes NVML; False, with nothing changed, while one is in the driver."""
        held = []
        for reader in self._readers:
            if not reader.quiet.acquire(timeout=QUIET_WITHIN_S):
                break
            held.append(reader)
        is_quiet = len(held) == len(self._readers)
        for reader in held:
            if is_quiet:
                reader.close()
            reader.quiet.release()
        if is_quiet:
            for thread in self._threads:
                thread.stop()
            self._threads = ()
            self._shut_down()
        return is_quiet

    def _shut_down(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(NvmlError):  # it was broken; that is why it is being closed
            self._nvml.shutdown()

    def _finish(self) -> None:
        # A stop may have come while this thread was starting readers.
        for thread in self._threads:
            thread.stop()
        self._close()


def _moment(time_utc: float) -> str:
    return datetime.datetime.fromtimestamp(time_utc, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
