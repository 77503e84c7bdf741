"""What the supervisor costs while its run is paused: processor share and memory. Measures, never asserts.

    .venv/bin/python tests/benchmarks/supervisor_idle.py [--seconds 60]

A real supervisor with a small run that is unloaded by an operator, first alone, then with streams attached
as consoles attach them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.job import make_inputs
from tests.support.product import COMMAND_LINE, Tapdeck
from tests.support.supervised import Supervised

CASES = ((0, "no console"), (1, "one console at 1 Hz"), (5, "five consoles at 1 Hz"))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "inputs").mkdir()
        inputs = make_inputs(folder / "inputs")
        product = Tapdeck(folder / "tapdeck")
        run = Supervised(product, inputs.config(folder / "run.toml", folder / "out"), folder / "out")
        try:
            run.start()
            run.act("pause", depth="unload")
            run.wait_state("unloaded")
            print("| | processor share | resident memory | threads |\n|---|---|---|---|")
            for num_consoles, label in CASES:
                print(_row(run, num_consoles, label, seconds))
            run.act("kill")
            run.wait_gone()
        finally:
            product.close()


def _row(run: Supervised, num_consoles: int, label: str, seconds: float) -> str:
    watchers = [
        psutil.Popen(
            [*COMMAND_LINE, "status", run.name, "--watch"],
            env=run.tapdeck.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(num_consoles)
    ]
    try:
        run.wait(lambda: sum(run.snapshot()["clients"].values()) == num_consoles, "the consoles")
        supervisor = psutil.Process(run.supervisor_pid)
        before = supervisor.cpu_times()
        threading.Event().wait(seconds)
        after = supervisor.cpu_times()
        spent = (after.user - before.user) + (after.system - before.system)
        memory = supervisor.memory_info().rss / 1e6
        return f"| {label} | {spent / seconds:.2%} | {memory:.0f} MB | {supervisor.num_threads()} |"
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()


if __name__ == "__main__":
    main()
