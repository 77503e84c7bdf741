"""What the console costs on the wire: bytes per second, first paint, processor share. Measures, never asserts.

    .venv/bin/python tests/benchmarks/console_bytes.py [--seconds 60]

Starts the real app on a pty for each row, with a feed in which everything that moves has moved at each word:
8 GPUs, 2,310 shards. Bytes are counted after the first five seconds, so that the first paint is not among them.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path
from typing import NamedTuple

import ptyprocess

TESTS = Path(__file__).parent.parent
SETTLE_S = 5.0
LAST_ON_SCREEN = b"attached from ssh"
"""The last of the events: when it is there, the first overview with data is complete."""


class Case(NamedTuple):
    """One row of the table."""

    label: str
    columns: int
    rows: int
    interval_s: float


class Result(NamedTuple):
    """What was measured."""

    bytes_per_s: float
    worst_second: int
    first_paint_s: float
    first_paint_bytes: int
    cpu_share: float


CASES = (
    Case("120x40, 1 Hz", 120, 40, 1.0),
    Case("80x24, 1 Hz", 80, 24, 1.0),
    Case("120x40, --low-bandwidth", 120, 40, 2.0),
    Case("80x24, --low-bandwidth", 80, 24, 2.0),
)


def measure(case: Case, seconds: float) -> Result:
    """Runs the console for a while, as a terminal that answers nothing."""
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in {"NO_COLOR", "COLORTERM", "TAPDECK_ASCII"}
    }
    environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    begin = time.monotonic()
    process = ptyprocess.PtyProcess.spawn(
        [sys.executable, "-m", "tests.support.console_program", "--interval", f"{case.interval_s:g}"],
        dimensions=(case.rows, case.columns),
        env=environ,
        cwd=str(TESTS.parent),
    )
    first, painted_s = b"", 0.0
    while not painted_s:
        first += process.read(65536)
        if LAST_ON_SCREEN in first:
            painted_s = time.monotonic() - begin
    _count(process, SETTLE_S)
    cpu_before = _cpu_seconds(process.pid)
    counts = _count(process, seconds)
    share = (_cpu_seconds(process.pid) - cpu_before) / seconds
    process.write(b"q")
    while True:
        try:
            process.read(65536)
        except EOFError:
            break
    process.wait()
    return Result(sum(counts) / seconds, max(counts), painted_s, len(first), share)


def _count(process: ptyprocess.PtyProcess, seconds: float) -> list[int]:
    """Bytes in each second."""
    begin = time.monotonic()
    counts = [0] * (int(seconds) + 1)
    while (passed := time.monotonic() - begin) < seconds:
        if select.select([process.fd], [], [], min(0.2, seconds - passed))[0]:
            counts[int(time.monotonic() - begin)] += len(process.read(65536))
    return counts


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="rows whose label has this text")
    options = parser.parse_args()
    print(f"{'':26}{'KiB/s':>8}{'worst s':>10}{'first paint':>14}{'its bytes':>11}{'CPU':>8}")
    for case in CASES:
        if options.only not in case.label:
            continue
        found = measure(case, options.seconds)
        print(
            f"{case.label:26}{found.bytes_per_s / 1024:8.2f}{found.worst_second / 1024:10.2f}"
            f"{found.first_paint_s:12.2f} s{found.first_paint_bytes:11,}{found.cpu_share:8.1%}"
        )


if __name__ == "__main__":
    main()
