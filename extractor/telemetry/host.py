"""The machine itself: processors, memory and load, through psutil.

Owns nothing but the processor times of its last sample. Numbers are those of the host, also in a container
that may use a part of it only.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol

import psutil

from extractor.protocol.api import Host


class HostSource(Protocol):
    """Where facts about the machine come from."""

    def sample(self) -> Host:
        """The machine now. Raises OSError or psutil.Error where it does not say."""


class HostProbe:
    """This machine. For one thread."""

    def __init__(self) -> None:
        self._name = socket.gethostname()
        self._num_cpus = psutil.cpu_count() or 1
        self._busy_s = 0.0
        self._total_s = 0.0

    def sample(self) -> Host:
        """The machine now; the first sample's processor load is the mean since boot.

        Raises:
            OSError: /proc cannot be read.
            psutil.Error: likewise.
        """
        memory = psutil.virtual_memory()
        return Host(
            name=self._name,
            num_cpus=self._num_cpus,
            cpu_percent=self._cpu_percent(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            load_1m=os.getloadavg()[0],
        )

    def _cpu_percent(self) -> float:
        """Share of all processors since the sample before. psutil's own counts per calling thread."""
        times = psutil.cpu_times()
        # Linux counts a guest's time in `user` and `nice` as well.
        total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy_s = total_s - times.idle - getattr(times, "iowait", 0.0)
        passed_s, worked_s = total_s - self._total_s, busy_s - self._busy_s
        self._total_s, self._busy_s = total_s, busy_s
        if passed_s <= 0:
            return 0.0
        return min(100.0, max(0.0, 100 * worked_s / passed_s))
