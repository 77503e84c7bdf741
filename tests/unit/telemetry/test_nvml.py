import inspect
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest

from extractor.protocol.api import Unavailable
from extractor.telemetry import nvml
from extractor.telemetry.nvml import Memory, NvmlError, PyNvml, Status, unavailable


def test_the_real_module_has_everything_that_is_used():
    assert [name for name in nvml.NEEDED if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize("status", [status for status in Status if status > 0])
def test_return_codes_are_those_of_the_real_module(status):
    assert getattr(pynvml, f"NVML_ERROR_{status.name}") == status


@pytest.mark.parametrize(
    ("name", "num_arguments"),
    [
        ("nvmlInit", 0),
        ("nvmlShutdown", 0),
        ("nvmlDeviceGetCount", 0),
        ("nvmlDeviceGetHandleByIndex", 1),
        ("nvmlDeviceGetUUID", 1),
        ("nvmlDeviceGetName", 1),
        ("nvmlDeviceGetUtilizationRates", 1),
        ("nvmlDeviceGetMemoryInfo", 1),
        ("nvmlDeviceGetPowerUsage", 1),
        ("nvmlDeviceGetEnforcedPowerLimit", 1),
        ("nvmlDeviceGetTemperature", 2),
    ],
)
def test_functions_of_the_real_module_take_our_arguments(name, num_arguments):
    inspect.signature(getattr(pynvml, name)).bind(*range(num_arguments))


def test_fields_of_the_real_module_are_there():
    assert {"gpu"} <= {name for name, _ in pynvml.c_nvmlUtilization_t._fields_}
    assert {"used", "total"} <= {name for name, _ in pynvml.c_nvmlMemory_t._fields_}


class LibraryError(Exception):
    def __init__(self, value, text="Some Error"):
        super().__init__(text)
        self.value = value


@pytest.fixture
def library(monkeypatch):
    """A module that answers as nvidia-ml-py does, with NVML's own units."""
    values = dict.fromkeys(nvml.NEEDED, lambda *_: None)
    values |= {
        "__file__": "/site/pynvml.py",
        "NVMLError": LibraryError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=12),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(
            total=96 * 10**9, free=8 * 10**9, used=88 * 10**9
        ),
        "nvmlDeviceGetPowerUsage": lambda _: 402_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 600_000,
        "nvmlDeviceGetTemperature": lambda _, sensor: 71 if sensor == 0 else 0,
    }
    module = SimpleNamespace(**values)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_values_have_our_units(library):
    driver = PyNvml()
    driver.init()
    handle = driver.handle(1)
    assert driver.count() == 2
    assert (driver.uuid(handle), driver.name(handle)) == ("GPU-handle 1", "NVIDIA H200")
    assert driver.utilization(handle) == 97.0
    assert driver.memory(handle) == Memory(used_bytes=88 * 10**9, total_bytes=96 * 10**9)
    assert (driver.power(handle), driver.power_limit(handle)) == (402.5, 600.0)
    assert driver.temperature(handle) == 71.0
    driver.shutdown()


def raising(error):
    def call(*_):
        raise error

    return call


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.NOT_SUPPORTED, Unavailable("not_supported", "Some Error")),
        (Status.FUNCTION_NOT_FOUND, Unavailable("not_supported", "Some Error")),
        (Status.NO_PERMISSION, Unavailable("no_permission", "Some Error")),
        (Status.GPU_IS_LOST, Unavailable("lost", "Some Error")),
        (Status.UNKNOWN, Unavailable("transient", "Some Error")),
        (10, Unavailable("transient", "Some Error")),
        (Status.DRIVER_NOT_LOADED, Unavailable("no_driver", "NVIDIA driver not loaded")),
        (Status.LIBRARY_NOT_FOUND, Unavailable("no_driver", "no NVIDIA driver library")),
        (
            Status.LIB_RM_VERSION_MISMATCH,
            Unavailable("no_driver", "driver/library version mismatch (reboot or reload needed)"),
        ),
    ],
)
def test_each_error_has_its_reason(library, status, expected):
    library.nvmlDeviceGetPowerUsage = raising(LibraryError(int(status)))
    driver = PyNvml()
    driver.init()
    with pytest.raises(NvmlError) as caught:
        driver.power(driver.handle(0))
    assert caught.value.status == status
    assert unavailable(caught.value) == expected


def test_a_name_that_is_no_text_is_an_error_of_that_value(library):
    library.nvmlDeviceGetName = lambda _: b"\xff\xfe".decode()
    driver = PyNvml()
    driver.init()
    with pytest.raises(NvmlError, match="unreadable"):
        driver.name(driver.handle(0))


def test_a_machine_without_a_driver_says_so():
    driver = PyNvml()
    try:
        driver.init()
    except NvmlError as error:
        assert unavailable(error).reason == "no_driver"  # noqa: PT017 -- with a driver there is no error
    else:
        driver.shutdown()


def test_a_foreign_module_of_that_name_is_named(tmp_path, monkeypatch):
    foreign = tmp_path / "pynvml.py"
    foreign.write_text("def nvmlInit(): pass\ndef nvmlShutdown(): pass\n")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(NvmlError) as caught:
        PyNvml().init()
    monkeypatch.delitem(sys.modules, "pynvml")
    assert unavailable(caught.value) == Unavailable(
        "no_driver", f"wrong pynvml module at {foreign}, install nvidia-ml-py"
    )


def test_no_module_of_that_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="install nvidia-ml-py"):
        PyNvml().init()


def test_the_distributions_that_own_the_module_are_listed():
    assert "nvidia-ml-py" in nvml.module_owners()


def test_importing_telemetry_does_not_import_the_module():
    program = "import sys, extractor.telemetry; sys.exit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
