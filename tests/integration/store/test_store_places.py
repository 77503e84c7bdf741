"""Outputs on other file systems, and what importing the store costs."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from store_support import Dataset

from extractor.store import lease, manifest, names
from extractor.store.layouts import speculators_v1
from extractor.store.scan import scan
from extractor.store.verify import check

ROOT = Path(__file__).resolve().parents[3]
MEMORY = Path("/dev/shm")  # noqa: S108 - a second file system is the point


@pytest.fixture
def other_mount(tmp_path):
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["TMPDIR elsewhere", "output is a link", "shards is a link"])
def test_nothing_is_renamed_across_file_systems(tmp_path, other_mount, monkeypatch, kind):
    output = tmp_path / "out"
    if kind == "TMPDIR elsewhere":
        monkeypatch.setenv("TMPDIR", str(other_mount))
    elif kind == "output is a link":
        output.symlink_to(other_mount, target_is_directory=True)
    else:
        output.mkdir()
        (output / names.SHARDS).symlink_to(other_mount, target_is_directory=True)
    dataset = Dataset([8, 5, 3])
    held = lease.acquire(output, "run")
    outcome = dataset.write(output)
    held.release()
    assert outcome.errors == []
    assert scan(output, dataset.shards, dataset.fingerprint, checksums=True).to_do == ()
    assert check(output).is_complete
    assert manifest.read(output)
    speculators_v1.export(output, tmp_path / "v1", note=lambda _text: None)
    left = {path.name for path in [*other_mount.rglob("*"), *tmp_path.rglob("*")]}
    assert not {name for name in left if ".part" in name}
    if kind == "TMPDIR elsewhere":
        assert list(other_mount.iterdir()) == []


@pytest.mark.parametrize(
    "module",
    ["names", "manifest", "lease", "scan", "shard", "pipeline", "verify", "index", "tensors", "atomic"],
)
def test_torch_is_not_imported_where_no_tensors_are_handed_out(module):
    code = f"import sys, extractor.store.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
