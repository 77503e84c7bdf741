"""Processes of ranks: nothing that one of them started is left when it is gone, however it went."""

import os
import signal

import psutil
import pytest

from extractor.supervisor.launcher import LocalLauncher
from tests.support.product import ROOT, wait_until


@pytest.fixture
def rank(tmp_path):
    """A rank with helpers: (its process, their pids)."""
    told = tmp_path / "pids"
    process = LocalLauncher("tests.support.forking_rank").start(
        told, environment=os.environ | {"PYTHONPATH": str(ROOT)}, log=tmp_path / "log", keep_fds=()
    )
    try:
        wait_until(
            told.exists, "the pids of the helpers", state=(tmp_path / "log").read_text, deadline_s=30.0
        )
        yield process, [int(pid) for pid in told.read_text().split()]
    finally:
        process.kill()


def require_gone(pids):
    def alive():
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]

    wait_until(lambda: not alive(), "the end of all helpers", state=alive, deadline_s=15.0)


def test_helpers_of_a_rank_that_was_killed_are_ended(rank):
    process, helpers = rank
    os.kill(process.pid, signal.SIGKILL)

    wait_until(lambda: process.poll() is not None, "its end", state=lambda: "", deadline_s=15.0)

    assert process.poll() == -signal.SIGKILL
    require_gone(helpers)


def test_helpers_of_a_rank_that_left_by_itself_are_ended(rank):
    process, helpers = rank
    process._drop_lifeline()

    assert process.wait(15.0) == 0
    require_gone(helpers)


def test_helpers_are_ended_with_their_rank(rank):
    process, helpers = rank
    process.kill()

    assert process.poll() == -signal.SIGKILL
    require_gone(helpers)


def test_waiting_for_a_rank_that_does_not_end_is_over_in_time(rank):
    process, _ = rank

    assert process.wait(0.05) is None
    assert process.poll() is None
