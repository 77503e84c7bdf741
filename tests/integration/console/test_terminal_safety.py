"""The terminal is given back as it was found, whatever ends the console. On real pseudo-terminals."""

import os
import re
import select
import signal
import time

import pytest

from tests.support.pty_program import PtyProgram

PROGRAM = ("-m", "tests.support.console_program")
PAINTED = b"RUNNING"
LEFT = b"\x1b[?1049l"
CURSOR = b"\x1b[?25h"
FAREWELL = b"detached; the run continues: tapdeck attach kimi-k25-eagle3\r\n"


def assert_given_back(terminal: PtyProgram) -> None:
    assert terminal.modes() == terminal.modes_before
    assert terminal.written.rfind(LEFT) > terminal.written.rfind(b"\x1b[?1049h")
    assert terminal.written.rfind(CURSOR) > terminal.written.rfind(b"\x1b[?25l")


@pytest.mark.parametrize("key", [b"q", b"\x03", b"\x11"], ids=["q", "ctrl+c", "ctrl+q"])
def test_detaching_gives_the_terminal_back_and_says_that_the_run_continues(key):
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        assert terminal.modes() != terminal.modes_before
        terminal.type(key)
        assert terminal.read_to_end() == 0
        assert_given_back(terminal)
        assert terminal.written.endswith(FAREWELL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_gives_the_terminal_back(number):
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.send(number)
        assert terminal.read_to_end() == 128 + number
        assert_given_back(terminal)


def test_an_error_of_the_console_gives_the_terminal_back_and_shows_a_traceback():
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.type(b"x")
        assert terminal.read_to_end() == 1
        assert_given_back(terminal)
        after = terminal.written.rpartition(LEFT)[2]
        assert b"Traceback (most recent call last)" in after
        assert b"RuntimeError: crash asked for by a test" in after
        assert b"run continues" in after


@pytest.mark.parametrize("data", [b"\xff", b"\xc3(", b"\xe9t\xe9 "], ids=["no lead", "cut", "Latin-1"])
def test_bytes_that_are_no_text_are_survived(data):
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.type(data)
        terminal.type(b"?")
        terminal.read_until(b"Log: the first line")
        terminal.type(b"\x11")
        assert terminal.read_to_end() == 0
        assert_given_back(terminal)


def test_leaving_at_once_leaves_no_warning_behind():
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(b"tapdeck")
        terminal.type(b"q")
        assert terminal.read_to_end() == 0
        assert_given_back(terminal)
        assert b"Warning" not in terminal.written


def test_mouse_reports_are_never_asked_for():
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.type(b"q")
        terminal.read_to_end()
        assert b"\x1b[?1000h" not in terminal.written
        assert b"\x1b[?1003h" not in terminal.written


def test_a_hang_up_without_a_signal_ends_the_process_soon_and_cheaply():
    with PtyProgram(*PROGRAM, controlling=False) as terminal:
        terminal.read_until(PAINTED)
        before_s = terminal.cpu_seconds()
        terminal.hang_up()
        _, status, usage = os.wait4(terminal.process.pid, 0)
        # Reaped here; the process object must not look for it again.
        terminal.process.returncode = os.waitstatus_to_exitcode(status)
        assert terminal.process.returncode == 128 + signal.SIGHUP
        assert usage.ru_utime + usage.ru_stime - before_s < 1.0


def test_a_hang_up_of_the_controlling_terminal_ends_the_process():
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.hang_up()
        assert terminal.process.wait(timeout=30) == 128 + signal.SIGHUP


def test_a_terminal_that_takes_no_more_output_does_not_keep_the_process():
    # Words come fast, so that the terminal's buffer is full soon; then nobody reads.
    with PtyProgram(*PROGRAM, "--interval", "0.01") as terminal:
        terminal.read_until(PAINTED)
        wait_until_stalled(terminal)
        terminal.send(signal.SIGTERM)
        assert terminal.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert terminal.modes() == terminal.modes_before
        terminal.read_to_end()
        assert LEFT in terminal.written


def wait_until_stalled(terminal: PtyProgram) -> None:
    """Until the program uses no more processor time: its output is blocked."""
    poll = select.poll()
    deadline = time.monotonic() + 60
    last, same = -1.0, 0
    while same < 5:
        assert time.monotonic() < deadline, "it never stalls"
        poll.poll(200)
        now = terminal.cpu_seconds()
        same = same + 1 if now == last else 0
        last = now


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": ""}], ids=["dumb", "unset"])
def test_a_terminal_that_cannot_be_drawn_on_gets_plain_text(environ):
    with PtyProgram(*PROGRAM, environ=environ) as terminal:
        assert terminal.read_to_end() == 2
        assert b"\x1b" not in terminal.written
        assert b"tapdeck status" in terminal.written


def test_an_unknown_terminal_works_and_no_color_means_no_colour():
    with PtyProgram(*PROGRAM, environ={"TERM": "xterm-ghostty", "NO_COLOR": "1"}) as terminal:
        terminal.read_until(PAINTED)
        terminal.type(b"q")
        assert terminal.read_to_end() == 0
        assert not has_colour(terminal.written)


def test_colours_are_the_sixteen_of_the_terminal():
    with PtyProgram(*PROGRAM) as terminal:
        terminal.read_until(PAINTED)
        terminal.type(b"q")
        terminal.read_to_end()
        assert b"38;2;" not in terminal.written
        assert b"48;2;" not in terminal.written


def has_colour(written: bytes) -> bool:
    codes = {code for found in re.findall(rb"\x1b\[([0-9;]*)m", written) for code in found.split(b";")}
    return bool(codes & {str(code).encode() for code in (*range(30, 39), *range(40, 49), *range(90, 108))})
