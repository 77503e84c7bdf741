"""A process that stops at any call, and a machine that loses what was not synced."""

import os

import pytest
from store_support import Dataset, tree

from extractor.plan import Geometry
from extractor.store import names
from extractor.store.faults import FaultyFileSystem, Killed, kill_at, no_fault
from extractor.store.filesystem import RealFileSystem
from extractor.store.listing import clean_parts
from extractor.store.scan import scan

DATASET = Dataset([8, 7, 5], geometry=Geometry(max_tokens=8, shard_tokens=24))
REASONS = {1: "all_zero"}


def count_calls(output, reasons) -> int:
    files = FaultyFileSystem(no_fault)
    DATASET.write(output, files=files, threads=1, reasons=reasons)
    return len(files.calls)


def assert_whole_or_nothing(output, expected, *, committed: bool):
    found = scan(output, DATASET.shards, DATASET.fingerprint, checksums=True)
    assert found.bad == {}
    if committed:
        assert list(found.done) == [0]
    if found.done:
        assert tree(names.shard_folder(output, 0)) == expected
    clean_parts(output)
    assert {path.name for path in output.glob("shards/*")} <= {"000000"}


@pytest.mark.parametrize("reasons", [{}, REASONS], ids=["plain", "quarantine"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_kill_before_any_call_leaves_the_whole_shard_or_nothing(tmp_path, reasons, threads):
    num_calls = count_calls(tmp_path / "whole", reasons)
    expected = tree(names.shard_folder(tmp_path / "whole", 0))
    for number in range(num_calls):
        output = tmp_path / str(number)
        files = FaultyFileSystem(kill_at(number))
        outcome = DATASET.write(output, files=files, threads=threads, reasons=reasons, with_manifest=False)
        files.close_all()
        assert outcome.commits == []
        assert [type(error) for _, error in outcome.errors] == [Killed]
        assert_whole_or_nothing(output, expected, committed=False)
        again = DATASET.write(output, reasons=reasons)
        assert len(again.commits) == 1
        assert tree(names.shard_folder(output, 0)) == expected
        assert [path.name for path in output.glob("shards/*")] == ["000000"]


def damage(output) -> None:
    path = names.shard_folder(output, 0) / "final.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_kill_while_a_bad_shard_is_replaced_leaves_old_new_or_nothing(tmp_path):
    DATASET.write(tmp_path / "whole")
    expected = tree(names.shard_folder(tmp_path / "whole", 0))
    number, is_killed = 0, True
    seen = set()
    while is_killed:
        output = tmp_path / str(number)
        DATASET.write(output)
        damage(output)
        files = FaultyFileSystem(kill_at(number))
        outcome = DATASET.write(output, files=files, threads=1)
        files.close_all()
        is_killed = not outcome.commits
        found = scan(output, DATASET.shards, DATASET.fingerprint, checksums=True)
        seen.add("done" if found.done else "bad" if found.bad else "missing")
        if found.done:
            assert tree(names.shard_folder(output, 0)) == expected
        if is_killed and found.to_do:
            assert DATASET.write(output).commits
            assert tree(names.shard_folder(output, 0)) == expected
        clean_parts(output)
        assert [path.name for path in output.glob("shards/*")] == ["000000"]
        number += 1
    assert seen == {"done", "bad", "missing"}


class VolatileDisk(RealFileSystem):
    """Remembers what a power cut would take: unsynced contents, and names in unsynced folders."""

    def __init__(self) -> None:
        self.dirty: set[int] = set()
        self.unnamed: dict[str, set[int]] = {}

    def create(self, path):
        fd = super().create(path)
        inode = os.fstat(fd).st_ino
        self.dirty.add(inode)
        self.unnamed.setdefault(str(path.parent), set()).add(inode)
        return fd

    def write_at(self, fd, data, offset):
        self.dirty.add(os.fstat(fd).st_ino)
        return super().write_at(fd, data, offset)

    def truncate(self, fd, num_bytes):
        self.dirty.add(os.fstat(fd).st_ino)
        super().truncate(fd, num_bytes)

    def sync(self, fd):
        super().sync(fd)
        self.dirty.discard(os.fstat(fd).st_ino)

    def sync_folder(self, path):
        super().sync_folder(path)
        self.unnamed.pop(str(path), None)

    def rename(self, source, target):
        super().rename(source, target)
        if str(source) in self.unnamed:
            self.unnamed[str(target)] = self.unnamed.pop(str(source))

    def cut_power(self, root) -> None:
        lost = set().union(*self.unnamed.values())
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in lost:
                path.unlink()
            elif path.is_file() and path.stat().st_ino in self.dirty:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("reasons", [{}, REASONS], ids=["plain", "quarantine"])
def test_a_power_cut_before_any_call_leaves_the_whole_shard_or_nothing(tmp_path, reasons):
    num_calls = count_calls(tmp_path / "whole", reasons)
    expected = tree(names.shard_folder(tmp_path / "whole", 0))
    for number in range(num_calls + 1):
        output = tmp_path / str(number)
        disk = VolatileDisk()
        files = FaultyFileSystem(kill_at(number), disk)
        outcome = DATASET.write(output, files=files, threads=1, reasons=reasons, with_manifest=False)
        files.close_all()
        disk.cut_power(output)
        assert_whole_or_nothing(output, expected, committed=bool(outcome.commits))
        assert bool(outcome.commits) == (number == num_calls)
