"""A command on a real terminal of its own, and what a person would see on it.

`Terminal` runs a command on a pty of a given size and feeds what it writes to a pyte screen. It owns the process
and ends it. Waiting is for a condition, with a deadline; a wait that fails shows the screen. It does not fork:
tests have threads (pexpect and ptyprocess fork, which Python warns of then).
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
from typing import Any, Self

import pyte

from tests.support.pty_program import _TAKE_TERMINAL

READ_BYTES = 65_536
LOOK_S = 0.05


class Terminal:
    """Use as a context manager, or call `close`.

    Attributes:
        bytes_received: everything that the command has written so far.
        exit_code: of the command (negative: the signal that ended it); None while it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        lines: int = 24,
        cwd: str | None = None,
    ) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        try:
            self._process = subprocess.Popen(
                # The session leader takes the terminal as its controlling one.
                [sys.executable, "-c", _TAKE_TERMINAL, *command],
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
        return "\n".join(line.rstrip() for line in self._screen.display)

    def send(self, keys: str | bytes) -> None:
        """Types."""
        os.write(self._fd, keys.encode() if isinstance(keys, str) else keys)

    def wait_for(self, wanted: str | Callable[[str], Any], deadline_s: float = 60.0) -> str:
        """The screen once it shows a text, or satisfies a condition; fails when the command ends before."""
        is_there = (lambda screen: wanted in screen) if isinstance(wanted, str) else wanted
        end = time.monotonic() + deadline_s
        while True:
            # Asked first: what was written before the end is still read after it.
            code = self.exit_code
            screen = self.screen_text()
            if is_there(screen):
                return screen
            if code is not None:
                raise AssertionError(f"it ended with {code} before {wanted!r}; screen:\n{screen}")
            if time.monotonic() > end:
                raise AssertionError(f"no {wanted!r} within {deadline_s:.0f} s; screen:\n{screen}")
            self._read(LOOK_S)

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
            self._stream.feed(data)
            wait_s = 0.0
