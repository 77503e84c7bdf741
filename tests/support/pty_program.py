"""A program on a pseudo-terminal of its own, as under ssh; waits for what it writes, never for time."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


class PtyProgram:
    """Both ends of a terminal, and a process on the inner one. Use as a context manager.

    Args:
        command: arguments of this interpreter.
        controlling: whether the terminal is the process's controlling one, so that a hang-up sends SIGHUP.
        environ: instead of what a usual terminal sets.
    """

    def __init__(self, *command: str, controlling: bool = True, size=(120, 40), environ=None) -> None:
        self.outer, self.inner = os.openpty()
        columns, rows = size
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes_before = termios.tcgetattr(self.inner)
        self.written = b""
        dropped = {"NO_COLOR", "TAPDECK_ASCII", "LC_ALL", "COLORTERM"}
        inherited = {key: value for key, value in os.environ.items() if key not in dropped}
        program = [sys.executable, *command]
        if controlling:
            # The session leader takes the terminal on its standard input.
            program = [sys.executable, "-c", _TAKE_TERMINAL, *program]
        self.process = subprocess.Popen(
            program,
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
            start_new_session=True,
            cwd=ROOT,
            env={**inherited, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environ or {})},
        )

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for end in (self.outer, self.inner):
            if end >= 0:
                os.close(end)

    def read_until(self, wanted: bytes, *, within_s: float = 60.0) -> None:
        """Reads until the program has written something."""
        deadline = time.monotonic() + within_s
        while wanted not in self.written:
            if time.monotonic() > deadline or not self._read_some():
                raise AssertionError(f"{wanted!r} was never written; last: {self.written[-3000:]!r}")

    def read_to_end(self, *, within_s: float = 60.0) -> int:
        """Reads until the program ends; its exit code."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"it does not end; last: {self.written[-3000:]!r}")
            self._read_some()
        while select.select([self.outer], [], [], 0)[0] and self._read_some():
            pass
        return self.process.returncode

    def _read_some(self) -> bool:
        if not select.select([self.outer], [], [], 0.2)[0]:
            return self.process.poll() is None
        self.written += os.read(self.outer, 65536)
        return True

    def type(self, keys: bytes) -> None:
        os.write(self.outer, keys)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def modes(self):
        return termios.tcgetattr(self.inner)

    def hang_up(self) -> None:
        """Closes both ends that this process has."""
        os.close(self.inner)
        os.close(self.outer)
        self.inner = self.outer = -1

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
