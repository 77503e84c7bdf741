import shutil
import socket
from pathlib import Path

import pytest

from extractor.folders import existing_parent
from extractor.telemetry.disk import DiskProbe
from extractor.telemetry.host import HostProbe


def test_the_host_is_this_machine():
    probe = HostProbe()
    for _ in range(2):
        host = probe.sample()
        assert host.name == socket.gethostname()
        assert host.num_cpus >= 1
        assert 0 <= host.cpu_percent <= 100
        assert 0 < host.memory_used_bytes < host.memory_total_bytes
        assert host.load_1m >= 0


def test_processor_load_is_that_since_the_sample_before(monkeypatch):
    times = type("Times", (tuple,), {"idle": property(lambda t: t[1]), "iowait": property(lambda t: t[2])})
    probe = HostProbe()
    readings = iter([times((10.0, 80.0, 10.0)), times((13.0, 86.0, 11.0)), times((13.0, 86.0, 11.0))])
    monkeypatch.setattr("psutil.cpu_times", lambda: next(readings))
    assert [probe.sample().cpu_percent for _ in range(3)] == pytest.approx([10.0, 30.0, 0.0])


def test_a_disk_is_that_of_the_nearest_folder_that_exists(tmp_path):
    usage = DiskProbe(tmp_path / "a" / "b", lambda: 7.0).sample()
    assert usage.total_bytes == shutil.disk_usage(tmp_path).total
    assert 0 <= usage.free_bytes <= usage.total_bytes
    assert usage.sampled_utc == 7.0
    assert existing_parent(tmp_path / "a" / "b") == tmp_path


def test_a_relative_path_has_a_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert existing_parent(Path("x") / "y") == tmp_path
