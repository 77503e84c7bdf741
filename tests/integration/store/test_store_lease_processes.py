"""Leases between real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from extractor.errors import LeaseBusyError, LeaseError
from extractor.store.lease import acquire, read_lease

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


class Holder:
    """A process that holds the lease of a folder, and can start a worker that outlives it."""

    def __init__(self, output: Path) -> None:
        worker_stdin, self.worker = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "store_children.py"), str(output), str(worker_stdin)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
            pass_fds=[worker_stdin],
        )
        os.close(worker_stdin)
        self.hears("ready")

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hears(self, word: str) -> None:
        line = self.process.stdout.readline()
        assert line.startswith(word), line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end_worker(self) -> None:
        if self.worker >= 0:
            os.close(self.worker)
            self.worker = -1

    def end(self) -> None:
        self.end_worker()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)


@pytest.fixture
def holder(tmp_path):
    child = Holder(tmp_path)
    yield child
    child.end()


def test_the_second_run_is_told_who_holds_the_folder(tmp_path, holder):
    with pytest.raises(LeaseError, match=f"run-of-a-child, pid {holder.process.pid} ") as caught:
        acquire(tmp_path, "second")
    assert not isinstance(caught.value, LeaseBusyError)


def test_a_killed_run_does_not_keep_the_folder(tmp_path, holder):
    holder.kill()
    lease = acquire(tmp_path, "second")
    assert read_lease(tmp_path) == lease.record
    lease.release()


def test_a_worker_keeps_the_folder_of_a_killed_run_until_it_ends(tmp_path, holder):
    holder.tell("worker")
    holder.hears("working")
    holder.kill()
    with pytest.raises(LeaseBusyError):
        acquire(tmp_path, "second")
    holder.end_worker()
    lease = acquire(tmp_path, "second", wait_seconds=30)
    lease.release()


def test_a_worker_keeps_the_folder_although_its_run_gave_it_up(tmp_path, holder):
    holder.tell("worker")
    holder.hears("working")
    holder.tell("release")
    holder.hears("released")
    with pytest.raises(LeaseBusyError):
        acquire(tmp_path, "second")
    holder.end_worker()
    acquire(tmp_path, "second", wait_seconds=30).release()
