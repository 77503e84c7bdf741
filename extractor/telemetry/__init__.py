"""What the machine is doing: GPUs, host and disk, sampled once per machine however many consoles look.

Owns no file and no process. Sampling runs in daemon threads, so that a driver or a file system that does not
answer holds up nothing but its own value. What cannot be read is `Unavailable` with its reason; lost
telemetry says nothing about the run.
"""

from extractor.telemetry.disk import DiskUsage
from extractor.telemetry.sampler import Sampler

__all__ = ["DiskUsage", "Sampler"]
