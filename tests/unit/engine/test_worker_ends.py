"""How a rank leaves when nobody is left who could end it."""

import contextlib
import subprocess
import sys

import psutil

from extractor.errors import EngineError
from tests.support.product import ROOT

# Two helpers, one of them the other's, that nothing but a kill ends. They hold the output: it ends with them.
PROGRAM = """
import os, signal, sys
from extractor.engine import worker
if os.fork() == 0:
    os.fork()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # One write for each: what print writes in two pieces may be mixed.
    os.write(1, b"up\\n")
    while True:
        signal.pause()
sys.stdin.readline()
worker.LEAST_GRACE_S = 0.0
worker._end_late(0.0)
"""


def test_a_rank_whose_time_is_over_ends_its_helpers_and_theirs():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        helpers = []
        try:
            assert [rank.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
            helpers = psutil.Process(rank.pid).children(recursive=True)
            rank.communicate("\n", timeout=20)
        finally:
            for process in (rank, *helpers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert len(helpers) == 2
    assert rank.returncode == EngineError.exit_code
