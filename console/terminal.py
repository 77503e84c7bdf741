"""The terminal is the operator's: it is given back as it was found, whatever ends the console.

Textual 8.2.8 installs no handlers for SIGTERM and SIGHUP, leaves the terminal raw when one arrives, reads in a
tight loop from a terminal that is gone, and waits without end for one that takes no more output. `TerminalGuard`
covers these: it turns the signals into a normal end of the app, ends the process when the other end of the
terminal is closed, and when a normal end does not come about within seconds it restores the modes itself.

It refuses to run on what is not a terminal that can be drawn on (`refusal`). It knows nothing of runs.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import select
import signal
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
END_GRACE_S = 4.0
"""How long a normal end may take before the process is ended."""
HANGUP_GRACE_S = 0.3
"""The same when nobody is there to see it; Textual's reader spins meanwhile."""
LOOK_EVERY_S = 0.5
RESTORE_ATTEMPTS = 100
TEXTUAL_WRITER = "textual-output"
"""Name of the thread in which Textual writes (`textual/drivers/_writer_thread.py`, 8.2.8)."""
# Mouse, focus and paste reports off, line wrap on, keyboard protocol popped, alternate screen left, cursor shown.
RESTORE = b"".join(
    b"\x1b[" + mode
    for mode in (
        b"?1000l",
        b"?1003l",
        b"?1006l",
        b"?1004l",
        b"?2004l",
        b"?2048l",
        b"?7h",
        b"<u",
        b"?1049l",
        b"?25h",
        b"0m",
    )
)
_NO_SCREEN = {"", "dumb", "unknown"}


def refusal(environ: Mapping[str, str], *, are_terminals: bool) -> str | None:
    """Why the console cannot be drawn here, in words; None when it can."""
    if not are_terminals:
        return "the console needs a terminal, and input or output is none"
    term = environ.get("TERM", "")
    if term in _NO_SCREEN:
        told = f"TERM={term}" if term else "TERM is not set"
        return f"the console cannot draw on this terminal ({told})"
    return None


def take_any_bytes() -> None:
    """Has Textual read bytes that are no UTF-8 (a Latin-1 paste, 8-bit Meta keys) as a replacement character.

    Its reader (`textual/drivers/linux_driver.py`, 8.2.8) decodes strictly, and one such byte ends the app.
    """
    from textual.drivers import linux_driver

    def decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
        return functools.partial(codecs.getincrementaldecoder(encoding), errors="replace")

    linux_driver.getincrementaldecoder = decoder  # type: ignore[attr-defined,assignment]  # looked up there


def are_terminals() -> bool:
    """Whether input, output and errors are all terminals. Textual draws on the last one."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return False


def wants_ascii(environ: Mapping[str, str]) -> bool:
    """Whether signs beyond ASCII are to be avoided: asked for, or the locale has none."""
    if environ.get("TAPDECK_ASCII", "0") not in {"", "0"}:
        return True
    locale = next((environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(name)), "")
    # No locale at all is usual in containers, and their terminals are UTF-8; "C" and "POSIX" are a choice.
    return bool(locale) and "utf-8" not in locale.lower().replace("utf8", "utf-8")


class TerminalGuard:
    """Holds the terminal's modes while an app draws on it. Use as a context manager around the app.

    Args:
        leave: ends the app in order, with an exit code; called in any thread, also in a signal handler.
        leaving: the app's exit code, once it is at its end.
        fd: the terminal.
    """

    def __init__(
        self, leave: Callable[[int], None], leaving: Callable[[], int | None], *, fd: int = 0
    ) -> None:
        self._leave = leave
        self._leaving = leaving
        self._fd = fd
        self._modes: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._done = threading.Event()
        self._code: int | None = None
        """What the process is to end with, once that has been asked for."""

    def __enter__(self) -> Self:
        """Remembers the modes, installs handlers, begins to watch."""
        with contextlib.suppress(termios.error):
            self._modes = termios.tcgetattr(self._fd)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, name="tapdeck-terminal", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts everything back."""
        self._done.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._restore_modes()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._code = 128 + number
        self._leave(self._code)

    def _watch(self) -> None:
        deadline: float | None = None
        hangups = select.poll()
        hangups.register(self._fd, 0)
        while not self._done.is_set():
            # With no event asked for, poll reports hang-up and error alone; it sleeps while all is well.
            is_gone = bool(hangups.poll(int(LOOK_EVERY_S * 1000))) or not os.isatty(self._fd)
            if is_gone:
                self._code = code = self._code or 128 + signal.SIGHUP
                self._leave(code)
                if not self._done.wait(HANGUP_GRACE_S):
                    os._exit(code)
            # A signal counts at once: an app that is blocked in a write does not hear of it.
            self._code = self._leaving() if self._code is None else self._code
            if self._code is not None:
                deadline = deadline or time.monotonic() + END_GRACE_S
                if time.monotonic() > deadline:
                    self._end_hard(self._code)

    def _end_hard(self, code: int) -> None:
        """Ends the process although the app does not end: the terminal takes no output, as a rule."""
        self._restore_modes()
        with contextlib.suppress(OSError, termios.error):
            # A description of our own: O_NONBLOCK on the shared one would change the shell's as well.
            own = os.open(os.ttyname(self._fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            self._turn_writer_away()
            for _ in range(RESTORE_ATTEMPTS):
                # What waits to be sent is dropped, or there would be no room.
                termios.tcflush(own, termios.TCOFLUSH)
                with contextlib.suppress(BlockingIOError):
                    if os.write(own, RESTORE) == len(RESTORE):
                        break
                self._done.wait(0.01)
        os._exit(code)

    def _turn_writer_away(self) -> None:
        """Frees the terminal of Textual's blocked writer, which holds the kernel's lock for writes to it.

        Its stream leads to nowhere from now on, and a signal to its thread ends the write that it is in; Python
        then repeats the write, on what the stream is now.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        for thread in threading.enumerate():
            if thread.name == TEXTUAL_WRITER and thread.ident is not None:
                signal.pthread_kill(thread.ident, signal.SIGTERM)

    def _restore_modes(self) -> None:
        if self._modes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)
