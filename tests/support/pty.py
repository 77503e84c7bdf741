"""A command on a real terminal of its own, and what a person would see on it.

`Terminal` runs a command on a pty of a given size and keeps what it writes, as bytes and on a pyte screen. It owns
the process and ends it. Waiting is for a condition, with a deadline; a wait that fails shows the screen. It does not
fork: tests have threads (pexpect and ptyprocess fork, which Python warns of then).
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyte

READ_BYTES = 65_536
LOOK_S = 0.05
NOT_INHERITED = {"COLORTERM", "LC_ALL", "NO_COLOR", "TAPDECK_ASCII"}
# The session leader takes the terminal on its standard input as its controlling one.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def usual_environment(**changes: str) -> dict[str, str]:
    """This process's environment with what a usual terminal sets, wherever the tests run."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return inherited | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | changes


class Terminal:
    """Use as a context manager, or call `close`.

    Args:
        is_controlling: whether the terminal is the command's controlling one, so that a hang-up sends SIGHUP.

    Attributes:
        modes_before: the terminal's attributes before the command had it.
        bytes_received: everything that the command has written and that was read so far.
        exit_code: of the command (negative: the signal that ended it); None while it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        lines: int = 24,
        *,
        cwd: str | Path | None = None,
        is_controlling: bool = True,
    ) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes_before = self.modes()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", TAKE_TERMINAL, *command] if is_controlling else list(command),
                stdin=inner,
                stdout=inner,
                stderr=inner,
                start_new_session=True,
                env=dict(os.environ if env is None else env),
                cwd=cwd,
            )
        finally:
            os.close(inner)
        self._is_open = True
        self._num_shown = 0
        self.bytes_received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def screen_text(self) -> str:
        """The screen now, without blanks at the ends of lines."""
        self._read()
        self._stream.feed(self.bytes_received[self._num_shown :])
        self._num_shown = len(self.bytes_received)
        return "\n".join(line.rstrip() for line in self._screen.display)

    def send(self, keys: str | bytes) -> None:
        """Types."""
        os.write(self._fd, keys.encode() if isinstance(keys, str) else keys)

    def wait_for(self, wanted: str | bytes | Callable[[str], Any], deadline_s: float = 60.0) -> str:
        """The screen once it shows a text, bytes were written, or it satisfies a condition.

        Fails when the command ends before.
        """
        end = time.monotonic() + deadline_s
        while True:
            # Asked first: what was written before the end is still read after it.
            code = self.exit_code
            screen = self.screen_text()
            if self._is_there(wanted, screen):
                return screen
            if code is not None:
                raise AssertionError(f"it ended with {code} before {wanted!r}; screen:\n{screen}")
            if time.monotonic() > end:
                raise AssertionError(f"no {wanted!r} within {deadline_s:.0f} s; screen:\n{screen}")
            self._read(LOOK_S)

    def _is_there(self, wanted: str | bytes | Callable[[str], Any], screen: str) -> bool:
        match wanted:
            case str():
                return wanted in screen
            case bytes():
                return wanted in self.bytes_received
            case _:
                return bool(wanted(screen))

    def wait_end(self, deadline_s: float = 60.0) -> int:
        """Reads until the command has ended; its exit code."""
        end = time.monotonic() + deadline_s
        while (code := self.exit_code) is None:
            if time.monotonic() > end:
                raise AssertionError(
                    f"it did not end within {deadline_s:.0f} s; screen:\n{self.screen_text()}"
                )
            self._read(LOOK_S)
        self._read()
        return code

    def wait_end_unread(self, deadline_s: float = 60.0) -> int:
        """Waits until the command has ended, while nobody reads what it writes; its exit code."""
        return self._process.wait(deadline_s)

    def cpu_seconds(self) -> float:
        """Processor time that the command has used; it must run."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def modes(self) -> list[Any]:
        """The terminal's attributes, as `termios.tcgetattr` gives them."""
        return termios.tcgetattr(self._fd)

    def hang_up(self) -> None:
        """The line is gone: the kernel sends SIGHUP to the command's session."""
        if self._is_open:
            self._read()
            self._is_open = False
            os.close(self._fd)

    def kill(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the command."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Ends the command and the terminal."""
        self._process.kill()
        self._process.wait()
        self.hang_up()

    def _read(self, wait_s: float = 0.0) -> None:
        while self._is_open and select.select([self._fd], [], [], wait_s)[0]:
            try:
                data = os.read(self._fd, READ_BYTES)
            except OSError:
                # EIO: nobody has the other end open any more.
                return
            if not data:
                return
            self.bytes_received += data
            wait_s = 0.0
