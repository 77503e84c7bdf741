"""Which terminals the console draws on, and with which signs."""

import pytest

from console import app, terminal


@pytest.mark.parametrize("environ", [{}, {"TERM": ""}, {"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_be_drawn_on_is_refused(environ):
    assert "TERM" in terminal.refusal(environ, are_terminals=True)


def test_a_pipe_is_refused():
    assert "needs a terminal" in terminal.refusal({"TERM": "xterm"}, are_terminals=False)


@pytest.mark.parametrize("term", ["xterm-256color", "xterm-ghostty", "linux", "screen", "made-up-terminal"])
def test_any_other_terminal_is_taken(term):
    assert terminal.refusal({"TERM": term}, are_terminals=True) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, False),
        ({"LANG": "C.utf8"}, False),
        ({"LANG": "C"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, True),
        ({"LANG": "en_US.UTF-8", "TAPDECK_ASCII": "1"}, True),
        ({"LANG": "en_US.UTF-8", "TAPDECK_ASCII": "0"}, False),
    ],
)
def test_ascii_is_drawn_where_it_is_asked_for_or_all_there_is(environ, expected):
    assert terminal.wants_ascii(environ) is expected


def test_the_console_refuses_with_a_hint_and_without_an_escape(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert app.run_console(None) == 2
    found = capsys.readouterr()
    assert "tapdeck status RUN --watch" in found.err
    assert "\x1b" not in found.out + found.err
