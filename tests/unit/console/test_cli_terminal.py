"""The command line on a real terminal: what is asked there, and what reaches it."""

import sys

import pytest

from extractor.folders import RunFolder
from tests.support.fake_supervisor import FakeSupervisor, snapshot_of
from tests.support.pty import Terminal, usual_environment

TAPDECK = [sys.executable, "-m", "console.cli"]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "tapdeck" / "runs" / "small-1a2b"
    folder.mkdir(parents=True)
    return RunFolder(folder)


@pytest.fixture
def terminal(tmp_path):
    """A function that runs tapdeck on a terminal."""
    opened = []

    def start(*arguments, **env):
        environment = usual_environment(XDG_STATE_HOME=str(tmp_path)) | env
        shown = Terminal([*TAPDECK, *arguments], environment, columns=100, lines=30)
        opened.append(shown)
        return shown

    yield start
    for shown in opened:
        shown.close()


@pytest.mark.parametrize(
    ("answer", "exit_code", "asked"), [("small-1a2b", 0, ["kill"]), ("yes", 1, []), ("", 1, [])]
)
def test_kill_asks_for_the_name_and_takes_nothing_else(run, terminal, answer, exit_code, asked):
    with FakeSupervisor(run, snapshot_of(run)) as supervisor:
        shown = terminal("kill", "small")
        shown.wait_for("type its name")
        shown.send(f"{answer}\r")
        assert shown.wait_end() == exit_code
        assert [name for name, _ in supervisor.asked] == asked


def test_control_characters_of_a_log_are_shown_on_a_terminal_and_not_obeyed(run, terminal):
    run.log("supervisor").write_bytes(b"before\x1b[2J\x1b]0;title\x07after\n")
    shown = terminal("logs", "small", "supervisor")
    assert shown.wait_end() == 0
    assert "before\u241b[2J\u241b]0;title\u2407after" in shown.screen_text()
    assert b"\x1b" not in shown.bytes_received


def test_without_a_capable_terminal_tapdeck_prints_help_and_says_why(terminal):
    shown = terminal(TERM="dumb")
    assert shown.wait_end() == 0
    assert "TERM=dumb" in shown.screen_text()
    assert b"Usage" in shown.bytes_received


def test_on_a_dumb_terminal_status_has_no_escape_and_ascii_on_request(run, terminal):
    with FakeSupervisor(run, snapshot_of(run)):
        shown = terminal("status", "small", TERM="dumb", TAPDECK_ASCII="1")
        assert shown.wait_end() == 0
    assert b"\x1b" not in shown.bytes_received
    assert b"* RUNNING" in shown.bytes_received
    assert shown.bytes_received.isascii()
