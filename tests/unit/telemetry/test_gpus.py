import pytest

from extractor.protocol.api import Unavailable
from extractor.telemetry.fakes import FakeClock, FakeNvml
from extractor.telemetry.gpus import GpuReader, retry_delay_s
from extractor.telemetry.nvml import Memory, Status

START_UTC = 1_700_000_000.0
SINCE = "since 2023-11-14 22:13:20 UTC"


@pytest.fixture
def clock():
    return FakeClock(START_UTC)


@pytest.fixture
def nvml():
    nvml = FakeNvml(2)
    nvml.init()
    return nvml


@pytest.fixture
def reader(nvml, clock):
    return GpuReader(nvml, 1, clock, 1.0)


def steps(reader, clock, num_steps):
    for _ in range(num_steps):
        clock.advance(reader.step())


def test_a_sample_has_every_value(reader):
    reader.step()
    gpu = reader.latest
    assert (gpu.uuid, gpu.index, gpu.name, gpu.sampled_utc) == ("GPU-1", 1, "Fake GPU", START_UTC)
    assert (gpu.busy_percent, gpu.power_watts, gpu.power_limit_watts) == (50.0, 400.0, 600.0)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (40e9, 96e9)
    assert gpu.temperature_celsius == 70.0


def test_before_the_first_step_nothing_is_known(reader):
    assert reader.latest.busy_percent == Unavailable("not_yet", "not sampled yet")


def test_busy_stays_between_0_and_100(reader, nvml):
    nvml.gpus[1].busy_percent = 130.0
    reader.step()
    assert reader.latest.busy_percent == 100.0


def test_a_minute_fetches_one_handle_and_reads_slow_values_every_five_seconds(reader, nvml, clock):
    nvml.calls.clear()
    steps(reader, clock, 60)
    assert nvml.calls == {
        "handle": 1,
        "uuid": 1,
        "name": 1,
        "utilization": 60,
        "memory": 60,
        "power": 60,
        "power_limit": 12,
        "temperature": 12,
    }


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.NOT_SUPPORTED, "not_supported"),
        (Status.NO_PERMISSION, "no_permission"),
        (Status.UNKNOWN, "transient"),
    ],
)
def test_one_value_that_fails_leaves_the_others(reader, nvml, status, reason):
    nvml.fail(status, call="power")
    reader.step()
    assert reader.latest.power_watts.reason == reason
    assert reader.latest.busy_percent == 50.0
    assert reader.failure is None
    reader.step()
    assert nvml.calls["handle"] == 1


def test_a_lost_gpu_says_so_and_since_when_and_keeps_its_name(reader, nvml, clock):
    reader.step()
    nvml.fail(Status.GPU_IS_LOST, index=1)
    steps(reader, clock, 20)
    lost = Unavailable("lost", f"Gpu Is Lost, {SINCE}")
    gpu = reader.latest
    assert (gpu.uuid, gpu.name) == ("GPU-1", "Fake GPU")
    assert {gpu.busy_percent, gpu.memory_used_bytes, gpu.power_watts, gpu.temperature_celsius} == {lost}
    assert gpu.sampled_utc == START_UTC + 19


def test_a_lost_gpu_is_asked_for_a_new_handle_less_and_less_often(reader, nvml, clock):
    reader.step()
    nvml.fail(Status.GPU_IS_LOST, index=1)
    steps(reader, clock, 130)
    # After 2, 4, 8, 16, 32 and 60 seconds.
    assert nvml.calls["handle"] == 1 + 6


def test_a_gpu_that_comes_back_is_read_again(reader, nvml, clock):
    reader.step()
    nvml.fail(Status.GPU_IS_LOST, index=1)
    steps(reader, clock, 3)
    nvml.heal()
    nvml.gpus[1].memory = Memory(1, 2)
    steps(reader, clock, 5)
    assert reader.latest.memory_used_bytes == 1.0
    assert reader.latest.temperature_celsius == 70.0
    assert reader.failure is None


def test_a_gpu_that_is_lost_from_the_start_is_listed(reader, nvml):
    nvml.fail(Status.GPU_IS_LOST, index=1)
    reader.step()
    assert (reader.latest.index, reader.latest.uuid) == (1, "")
    assert reader.latest.power_watts.reason == "lost"


def test_a_closed_reader_does_not_touch_the_driver(reader, nvml):
    with reader.quiet:
        reader.close()
    reader.step()
    assert nvml.calls == {"init": 1}


def test_delays_double_up_to_a_minute():
    assert [retry_delay_s(n) for n in (1, 2, 3, 5, 6, 100)] == [2, 4, 8, 32, 60, 60]
