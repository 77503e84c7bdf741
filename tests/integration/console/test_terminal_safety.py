"""The terminal is given back as it was found, whatever ends the console. On real pseudo-terminals."""

import re
import resource
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.pty import Terminal, usual_environment

PROGRAM = (sys.executable, "-m", "tests.support.console_program")
ROOT = Path(__file__).parents[3]
PAINTED = b"RUNNING"
LEFT = b"\x1b[?1049l"
CURSOR = b"\x1b[?25h"
FAREWELL = b"detached; the run continues: tapdeck attach kimi-k25-eagle3\r\n"


def open_console(*flags: str, is_controlling: bool = True, **environ: str) -> Terminal:
    return Terminal(
        [*PROGRAM, *flags],
        usual_environment(**environ),
        columns=120,
        lines=40,
        cwd=ROOT,
        is_controlling=is_controlling,
    )


def assert_given_back(terminal: Terminal) -> None:
    assert terminal.modes() == terminal.modes_before
    assert terminal.bytes_received.rfind(LEFT) > terminal.bytes_received.rfind(b"\x1b[?1049h")
    assert terminal.bytes_received.rfind(CURSOR) > terminal.bytes_received.rfind(b"\x1b[?25l")


@pytest.mark.parametrize("key", [b"q", b"\x03", b"\x11"], ids=["q", "ctrl+c", "ctrl+q"])
def test_detaching_gives_the_terminal_back_and_says_that_the_run_continues(key):
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        assert terminal.modes() != terminal.modes_before
        terminal.send(key)
        assert terminal.wait_end() == 0
        assert_given_back(terminal)
        assert terminal.bytes_received.endswith(FAREWELL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_gives_the_terminal_back(number):
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.kill(number)
        assert terminal.wait_end() == 128 + number
        assert_given_back(terminal)


def test_an_error_of_the_console_gives_the_terminal_back_and_shows_a_traceback():
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.send(b"x")
        assert terminal.wait_end() == 1
        assert_given_back(terminal)
        after = terminal.bytes_received.rpartition(LEFT)[2]
        assert b"Traceback (most recent call last)" in after
        assert b"RuntimeError: crash asked for by a test" in after
        assert b"run continues" in after


@pytest.mark.parametrize("data", [b"\xff", b"\xc3(", b"\xe9t\xe9 "], ids=["no lead", "cut", "Latin-1"])
def test_bytes_that_are_no_text_are_survived(data):
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.send(data)
        terminal.send(b"?")
        terminal.wait_for(b"Log: the first line")
        terminal.send(b"\x11")
        assert terminal.wait_end() == 0
        assert_given_back(terminal)


def test_leaving_at_once_leaves_no_warning_behind():
    with open_console() as terminal:
        terminal.wait_for(b"tapdeck")
        terminal.send(b"q")
        assert terminal.wait_end() == 0
        assert_given_back(terminal)
        assert b"Warning" not in terminal.bytes_received


def test_mouse_reports_are_never_asked_for():
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.send(b"q")
        terminal.wait_end()
        assert b"\x1b[?1000h" not in terminal.bytes_received
        assert b"\x1b[?1003h" not in terminal.bytes_received


def test_a_hang_up_without_a_signal_ends_the_process_soon_and_cheaply():
    with open_console(is_controlling=False) as terminal:
        terminal.wait_for(PAINTED)
        before_s = terminal.cpu_seconds() + seconds_of_ended_children()
        terminal.hang_up()
        assert terminal.wait_end_unread() == 128 + signal.SIGHUP
        assert seconds_of_ended_children() - before_s < 1.0


def seconds_of_ended_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_hang_up_of_the_controlling_terminal_ends_the_process():
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.hang_up()
        assert terminal.wait_end_unread(30) == 128 + signal.SIGHUP


def test_a_terminal_that_takes_no_more_output_does_not_keep_the_process():
    # Words come fast, so that the terminal's buffer is full soon; then nobody reads.
    with open_console("--interval", "0.01") as terminal:
        terminal.wait_for(PAINTED)
        wait_until_stalled(terminal)
        terminal.kill(signal.SIGTERM)
        assert terminal.wait_end_unread(30) == 128 + signal.SIGTERM
        assert terminal.modes() == terminal.modes_before
        terminal.wait_end()
        assert LEFT in terminal.bytes_received


def wait_until_stalled(terminal: Terminal) -> None:
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


@pytest.mark.parametrize("term", ["dumb", ""], ids=["dumb", "unset"])
def test_a_terminal_that_cannot_be_drawn_on_gets_plain_text(term):
    with open_console(TERM=term) as terminal:
        assert terminal.wait_end() == 2
        assert b"\x1b" not in terminal.bytes_received
        assert b"tapdeck status" in terminal.bytes_received


def test_an_unknown_terminal_works_and_no_color_means_no_colour():
    with open_console(TERM="xterm-ghostty", NO_COLOR="1") as terminal:
        terminal.wait_for(PAINTED)
        terminal.send(b"q")
        assert terminal.wait_end() == 0
        assert not has_colour(terminal.bytes_received)


def test_colours_are_the_sixteen_of_the_terminal():
    with open_console() as terminal:
        terminal.wait_for(PAINTED)
        terminal.send(b"q")
        terminal.wait_end()
        assert b"38;2;" not in terminal.bytes_received
        assert b"48;2;" not in terminal.bytes_received


def has_colour(written: bytes) -> bool:
    codes = {code for found in re.findall(rb"\x1b\[([0-9;]*)m", written) for code in found.split(b";")}
    return bool(codes & {str(code).encode() for code in (*range(30, 39), *range(40, 49), *range(90, 108))})
