import contextlib
import threading
import time

import pytest

from extractor.protocol.api import Unavailable
from extractor.telemetry import Sampler
from extractor.telemetry.fakes import FakeClock, FakeHost, FakeNvml
from extractor.telemetry.nvml import Status

START_UTC = 1_700_000_000.0
DEADLINE_S = 20.0


def until(condition, state=lambda: None):
    """Waits for a condition; says what was last seen when it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen; last seen: {state()}"
        threading.Event().wait(0.001)


def is_read(gpus):
    return not isinstance(gpus, Unavailable) and all(isinstance(gpu.busy_percent, float) for gpu in gpus)


def sampling_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("telemetry-")}


class Machine:
    """A sampler on fake hardware whose time moves second by second, after everybody has done what was due."""

    def __init__(self, num_gpus, disk_path=None):
        self.clock = FakeClock(START_UTC)
        self.nvml = FakeNvml(num_gpus)
        self.host = FakeHost()
        self.sampler = Sampler(nvml=self.nvml, host=self.host, disk_path=disk_path, clock=self.clock)
        self.num_threads = 2 + num_gpus + (disk_path is not None)

    def settle(self, num_away=0):
        expected = self.num_threads - num_away
        until(lambda: self.clock.num_waiting == expected, lambda: (self.clock.num_waiting, expected))

    def run(self, seconds, num_away=0):
        for _ in range(seconds):
            self.settle(num_away)
            self.clock.advance(1.0)
        self.settle(num_away)

    @property
    def gpus(self):
        return self.sampler.latest().gpus

    def ages(self):
        return [self.clock.now_utc() - gpu.sampled_utc for gpu in self.gpus]


@pytest.fixture
def machine_of():
    with contextlib.ExitStack() as stack:

        def make(num_gpus, **options):
            machine = Machine(num_gpus, **options)
            stack.callback(machine.sampler.stop)
            stack.callback(machine.nvml.heal)
            return machine

        yield make


def test_there_is_nothing_before_the_start(machine_of):
    machine = machine_of(1)
    assert machine.sampler.latest() is None
    assert machine.sampler.disk() is None


def test_a_sample_has_gpus_host_and_disk(machine_of, tmp_path):
    machine = machine_of(2, disk_path=tmp_path / "not" / "yet")
    machine.sampler.set_rank("GPU-1", "0.0")
    machine.sampler.start()
    machine.run(3)
    telemetry = machine.sampler.latest()
    assert [(gpu.index, gpu.uuid, gpu.rank) for gpu in telemetry.gpus] == [
        (0, "GPU-0", None),
        (1, "GPU-1", "0.0"),
    ]
    assert telemetry.host == machine.host.host
    assert (telemetry.sampled_utc, telemetry.interval_s) == (START_UTC + 3, 1.0)
    assert machine.sampler.disk().total_bytes > 0
    machine.sampler.set_rank("GPU-1", None)
    assert machine.gpus[1].rank is None


def test_a_host_that_does_not_say_is_unavailable(machine_of):
    machine = machine_of(1)
    machine.host.error = OSError("no /proc")
    machine.sampler.start()
    machine.settle()
    assert machine.sampler.latest().host == Unavailable("transient", "no /proc")


def test_a_blocked_call_makes_one_gpu_old_and_no_other(machine_of):
    machine = machine_of(4)
    machine.sampler.start()
    machine.run(9)
    threads = sampling_threads()
    gate = machine.nvml.block(call="power", index=2)
    machine.settle()
    machine.clock.advance(1.0)  # t = 10: the call blocks
    machine.run(119, num_away=1)
    assert machine.ages() == [0, 0, 120, 0]
    assert machine.nvml.max_waiting == 1
    assert sampling_threads() <= threads
    before = time.monotonic()
    for _ in range(100):
        machine.sampler.latest()
    assert time.monotonic() - before < 0.2
    machine.nvml.heal()
    gate.set()
    machine.run(2)
    assert machine.ages() == [0, 0, 0, 0]


def test_a_driver_that_blocks_from_the_start_leaves_the_host(machine_of):
    machine = machine_of(1)
    machine.nvml.block(call="init")
    machine.sampler.start()
    machine.num_threads = 2
    machine.run(5, num_away=1)
    telemetry = machine.sampler.latest()
    assert telemetry.gpus == Unavailable("not_yet", "waiting for the NVIDIA driver")
    assert telemetry.sampled_utc == START_UTC + 5


def test_stop_returns_while_a_call_is_blocked(machine_of):
    machine = machine_of(2)
    machine.sampler.start()
    machine.run(1)
    machine.nvml.block(call="utilization", index=0)
    machine.clock.advance(1.0)
    until(lambda: machine.nvml.num_waiting == 1)
    before = time.monotonic()
    machine.sampler.stop()
    assert time.monotonic() - before < 2.0
    assert machine.nvml.calls["shutdown"] == 0


def test_stop_closes_the_driver_and_ends_all_threads(machine_of):
    machine = machine_of(3)
    machine.sampler.start()
    machine.run(1)
    machine.sampler.stop()
    until(lambda: not sampling_threads(), sampling_threads)
    assert machine.nvml.calls["shutdown"] == 1


def test_stop_before_start_does_nothing(machine_of):
    machine_of(1).sampler.stop()


def test_one_lost_gpu_hides_no_other_and_does_not_reopen_the_driver(machine_of):
    machine = machine_of(3)
    machine.sampler.start()
    machine.run(2)
    machine.nvml.fail(Status.GPU_IS_LOST, index=1)
    machine.run(100)
    reasons = [getattr(gpu.busy_percent, "reason", None) for gpu in machine.gpus]
    assert reasons == [None, "lost", None]
    assert [gpu.uuid for gpu in machine.gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    assert machine.nvml.calls["init"] == 1


def test_telemetry_that_is_lost_as_a_whole_says_since_when_and_comes_back(machine_of):
    machine = machine_of(2)
    machine.sampler.start()
    machine.run(30)
    machine.nvml.fail(Status.UNKNOWN)
    seen = []
    machine.settle()
    for _ in range(90):
        machine.clock.advance(1.0)
        # The readers' threads end when NVML is closed; what is left are the keeper's and the host's.
        until(lambda: machine.clock.num_waiting in {2, 4})
        gpus = machine.gpus
        seen.append(gpus if isinstance(gpus, Unavailable) else None)
    lost = [gpus for gpus in seen if gpus is not None]
    assert len(lost) > 80
    assert set(lost) == {Unavailable("transient", "lost since 2023-11-14 22:13:51 UTC: Unknown")}
    assert machine.nvml.calls["init"] <= 8
    machine.nvml.heal()
    machine.clock.advance(60.0)
    until(lambda: is_read(machine.gpus), lambda: machine.gpus)


def test_handles_from_before_a_reopening_are_not_used(machine_of):
    machine = machine_of(2)
    machine.sampler.start()
    machine.run(3)
    machine.nvml.init()  # as if somebody else had closed and opened it: all handles are stale
    machine.run(20)
    assert [gpu.busy_percent for gpu in machine.gpus] == [50.0, 50.0]
    assert machine.ages() == [0, 0]


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (Status.LIB_RM_VERSION_MISMATCH, "driver/library version mismatch (reboot or reload needed)"),
        (Status.LIBRARY_NOT_FOUND, "no NVIDIA driver library"),
    ],
)
def test_without_a_driver_it_is_said_why_and_tried_twice_a_minute(machine_of, status, detail):
    machine = machine_of(0)
    machine.nvml.fail(status, call="init")
    machine.sampler.start()
    machine.run(119)
    assert machine.sampler.latest().gpus == Unavailable("no_driver", detail)
    assert machine.nvml.calls == {"init": 4}


def test_a_driver_without_a_gpu_is_no_driver(machine_of):
    machine = machine_of(0)
    machine.sampler.start()
    machine.settle()
    assert machine.sampler.latest().gpus == Unavailable("no_driver", "the NVIDIA driver lists no GPU")


def test_calls_do_not_depend_on_the_number_of_consoles(machine_of):
    def calls_of(num_consoles):
        machine = machine_of(8)
        machine.sampler.start()
        for _ in range(60):
            machine.run(1)
            for _ in range(num_consoles):
                machine.sampler.latest()
        return machine.nvml.calls

    alone, crowded = calls_of(0), calls_of(5)
    assert alone == crowded
    assert alone["handle"] == 8
    assert alone["power"] == 8 * 61
    assert alone["temperature"] == 8 * 13
