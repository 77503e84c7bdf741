"""Samples GPUs, host and disk, and has the last values ready for whoever asks.

Threads: one that keeps NVML, one per GPU, one for the host, one for the disk; none is started later for
a value that does not come. `latest` and `disk` put together what the threads left behind: they take no
lock that a sampling thread holds, call nothing that can block, and cost the same for any number of consoles.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec
import psutil

from extractor.protocol.api import Gpu, Host, Telemetry, Unavailable
from extractor.telemetry.disk import DiskProbe, DiskUsage
from extractor.telemetry.gpus import NOT_YET, GpuKeeper
from extractor.telemetry.host import HostProbe, HostSource
from extractor.telemetry.nvml import Nvml, PyNvml
from extractor.telemetry.periodic import Clock, Periodic, RealClock

if TYPE_CHECKING:
    from pathlib import Path

DISK_EVERY_S = 5.0
STOP_WITHIN_S = 0.5


class Sampler:
    """Telemetry of this machine. Start once, stop once."""

    def __init__(
        self,
        *,
        nvml: Nvml | None = None,
        host: HostSource | None = None,
        disk_path: Path | None = None,
        clock: Clock | None = None,
        interval_s: float = 1.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            nvml: None: this machine's driver.
            host: None: this machine.
            disk_path: whose file system is watched; need not exist. None: no disk.
            clock: None: this machine's.
            interval_s: between samples of busy, memory and power of a GPU and of the host.
        """
        self._clock = clock or RealClock()
        self._interval_s = interval_s
        self._gpus = GpuKeeper(nvml or PyNvml(), self._clock, interval_s)
        self._host_source = host or HostProbe()
        self._host: tuple[Host | Unavailable, float] | None = None
        self._disk: DiskUsage | None = None
        self._ranks: dict[str, str] = {}
        self._threads = [Periodic("telemetry-host", self._sample_host, self._clock)]
        if disk_path is not None:
            self._disk_probe = DiskProbe(disk_path, self._clock.now_utc)
            self._threads.append(Periodic("telemetry-disk", self._sample_disk, self._clock))

    def start(self) -> None:
        """Starts the threads. Does not wait for a first sample."""
        self._gpus.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads, but for one that is in a call that blocks: that one ends when the call does.

        Returns within about half a second.
        """
        self._gpus.stop()
        for thread in self._threads:
            thread.stop()
        deadline = time.monotonic() + STOP_WITHIN_S
        for thread in (*self._threads, *self._gpus.threads()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def set_rank(self, uuid: str, rank: str | None) -> None:
        """Says which rank ("REPLICA.RANK") of this run computes on a GPU; None: none does any more."""
        ranks = {known: value for known, value in self._ranks.items() if known != uuid}
        if rank is not None:
            ranks[uuid] = rank
        self._ranks = ranks

    def latest(self) -> Telemetry | None:
        """The last values; None before the first. Never blocks."""
        gpus, host = self._gpus.latest(), self._host
        times_utc = [] if host is None else [host[1]]
        if not isinstance(gpus, Unavailable):
            times_utc += [gpu.sampled_utc for gpu in gpus]
            gpus = tuple(self._with_rank(gpu) for gpu in gpus)
        if not times_utc:
            return None
        return Telemetry(
            gpus=gpus,
            host=NOT_YET if host is None else host[0],
            sampled_utc=max(times_utc),
            interval_s=self._interval_s,
        )

    def disk(self) -> DiskUsage | None:
        """The last known space on the output's file system; None before the first sample. Never blocks."""
        return self._disk

    def _with_rank(self, gpu: Gpu) -> Gpu:
        rank = self._ranks.get(gpu.uuid)
        return gpu if rank is None else msgspec.structs.replace(gpu, rank=rank)

    def _sample_host(self) -> float:
        now_utc = self._clock.now_utc()
        try:
            value: Host | Unavailable = self._host_source.sample()
        except (OSError, psutil.Error) as error:
            value = Unavailable("transient", str(error))
        self._host = (value, now_utc)
        return self._interval_s

    def _sample_disk(self) -> float:
        with contextlib.suppress(OSError):  # the last value stays, and its time tells its age
            self._disk = self._disk_probe.sample()
        return DISK_EVERY_S
