"""The seam to NVIDIA's management library: the few calls that are made, their units and their errors.

Owns the mapping from NVML's return codes to reasons. Refuses to be clever: no cache, no retry, no thread.
`pynvml` is imported by `PyNvml.init` and nowhere else, so a machine without a driver, or with a foreign module
of that name, loses its GPU telemetry and nothing more. Invariant: an `Nvml` raises `NvmlError` only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NewType, Protocol

import msgspec

from extractor.errors import TapdeckError
from extractor.protocol.api import Unavailability, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

Handle = NewType("Handle", object)
"""What NVML knows a GPU by, from `Nvml.init` to `Nvml.shutdown`."""


class Status(IntEnum):
    """Return codes of nvml.h that mean something here; `WRONG_MODULE` is ours."""

    WRONG_MODULE = -1
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


_REASONS: dict[int, Unavailability] = {
    Status.WRONG_MODULE: "no_driver",
    Status.DRIVER_NOT_LOADED: "no_driver",
    Status.LIBRARY_NOT_FOUND: "no_driver",
    Status.LIB_RM_VERSION_MISMATCH: "no_driver",
    Status.NOT_SUPPORTED: "not_supported",
    Status.FUNCTION_NOT_FOUND: "not_supported",
    Status.ARGUMENT_VERSION_MISMATCH: "not_supported",
    Status.NO_PERMISSION: "no_permission",
    Status.OPERATING_SYSTEM: "no_permission",  # the control group of a container blocks the device
    Status.GPU_IS_LOST: "lost",
    Status.RESET_REQUIRED: "lost",
}
_DETAILS: dict[int, str] = {
    Status.DRIVER_NOT_LOADED: "NVIDIA driver not loaded",
    Status.LIBRARY_NOT_FOUND: "no NVIDIA driver library",
    Status.LIB_RM_VERSION_MISMATCH: "driver/library version mismatch (reboot or reload needed)",
}
_BREAKING = frozenset(
    {
        Status.UNINITIALIZED,
        Status.INVALID_ARGUMENT,  # what a stale handle gives
        Status.DRIVER_NOT_LOADED,
        Status.GPU_IS_LOST,
        Status.RESET_REQUIRED,
        Status.LIB_RM_VERSION_MISMATCH,
        Status.UNKNOWN,
    }
)

NEEDED = (
    "NVMLError",
    "NVML_TEMPERATURE_GPU",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetUtilizationRates",
    "nvmlInit",
    "nvmlShutdown",
)
"""Names of `pynvml` that `PyNvml` uses; a module without one of them is not nvidia-ml-py."""


class NvmlError(TapdeckError):
    """A call of NVML failed. Never leaves this package: it becomes `Unavailable`.

    Attributes:
        status: return code; one that `Status` does not have is an error that may pass.
    """

    code = "nvml"

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(_DETAILS.get(status) or text or f"NVML error {status}")
        self.status = status

    @property
    def breaks_handle(self) -> bool:
        """The handle (or all of NVML) may be of no use any more: worth a new one, after a while."""
        return self.status in _BREAKING


def unavailable(error: NvmlError) -> Unavailable:
    """Why a value cannot be had."""
    return Unavailable(_REASONS.get(error.status, "transient"), error.message)


class Memory(msgspec.Struct, frozen=True):
    """Memory of one GPU; what the driver keeps for itself counts as used."""

    used_bytes: int
    total_bytes: int


class Nvml(Protocol):
    """NVML, as far as it is used. Each call may block in the driver and raises `NvmlError`."""

    def init(self) -> None:
        """Opens the library; before every other call."""

    def shutdown(self) -> None:
        """Closes it. No other call may be under way, and no handle is valid afterwards."""

    def count(self) -> int:
        """GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says."""

    def handle(self, index: int) -> Handle:
        """A GPU by its index in PCI order, which is the index of nvidia-smi."""

    def uuid(self, handle: Handle) -> str:
        """Its identity, over restarts as well."""

    def name(self, handle: Handle) -> str:
        """Its model."""

    def utilization(self, handle: Handle) -> float:
        """Percent of the last sample period in which a kernel ran, 0 to 100."""

    def memory(self, handle: Handle) -> Memory:
        """Its memory."""

    def power(self, handle: Handle) -> float:
        """Watts drawn."""

    def power_limit(self, handle: Handle) -> float:
        """Watts that it may draw: the smallest of all limits in force."""

    def temperature(self, handle: Handle) -> float:
        """Degrees Celsius of the GPU core."""


class PyNvml:
    """NVML through nvidia-ml-py. Safe to use from several threads, as NVML is."""

    def __init__(self) -> None:
        self._lib: Any = None  # nvidia-ml-py ships no types

    def init(self) -> None:
        """Imports the module, checks that it is the right one, and opens the library."""
        self._lib = _load()
        self._call(self._lib.nvmlInit)

    def shutdown(self) -> None:
        """As the protocol says."""
        self._call(self._lib.nvmlShutdown)

    def count(self) -> int:
        """As the protocol says."""
        return int(self._call(self._lib.nvmlDeviceGetCount))

    def handle(self, index: int) -> Handle:
        """As the protocol says."""
        return Handle(self._call(lambda: self._lib.nvmlDeviceGetHandleByIndex(index)))

    def uuid(self, handle: Handle) -> str:
        """As the protocol says."""
        return str(self._call(lambda: self._lib.nvmlDeviceGetUUID(handle)))

    def name(self, handle: Handle) -> str:
        """As the protocol says."""
        return str(self._call(lambda: self._lib.nvmlDeviceGetName(handle)))

    def utilization(self, handle: Handle) -> float:
        """As the protocol says."""
        return float(self._call(lambda: self._lib.nvmlDeviceGetUtilizationRates(handle)).gpu)

    def memory(self, handle: Handle) -> Memory:
        """As the protocol says."""
        info = self._call(lambda: self._lib.nvmlDeviceGetMemoryInfo(handle))
        return Memory(int(info.used), int(info.total))

    def power(self, handle: Handle) -> float:
        """As the protocol says; NVML counts milliwatts."""
        return float(self._call(lambda: self._lib.nvmlDeviceGetPowerUsage(handle))) / 1000

    def power_limit(self, handle: Handle) -> float:
        """As the protocol says; NVML counts milliwatts."""
        return float(self._call(lambda: self._lib.nvmlDeviceGetEnforcedPowerLimit(handle))) / 1000

    def temperature(self, handle: Handle) -> float:
        """As the protocol says."""
        core = self._lib.NVML_TEMPERATURE_GPU
        return float(self._call(lambda: self._lib.nvmlDeviceGetTemperature(handle, core)))

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._lib.NVMLError as error:
            raise NvmlError(int(getattr(error, "value", Status.UNKNOWN)), str(error)) from error
        except UnicodeDecodeError as error:
            # A driver of another branch than the module expects may fill a text buffer with anything.
            raise NvmlError(Status.ARGUMENT_VERSION_MISMATCH, f"unreadable text: {error}") from error


def module_owners() -> tuple[str, ...]:
    """Installed distributions that provide a module named pynvml; more than one is a conflict. Blocking."""
    return tuple(sorted(set(importlib.metadata.packages_distributions().get("pynvml", ()))))


def _load() -> Any:
    try:
        module = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlError(Status.WRONG_MODULE, "no pynvml module, install nvidia-ml-py") from error
    if any(not hasattr(module, name) for name in NEEDED):
        path = getattr(module, "__file__", None) or "an unknown place"
        raise NvmlError(Status.WRONG_MODULE, f"wrong pynvml module at {path}, install nvidia-ml-py")
    return module
