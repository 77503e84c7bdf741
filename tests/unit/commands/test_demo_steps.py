"""What the demo says to do next."""

import shlex
from pathlib import Path

import pytest

from extractor.commands.demo import command_name, next_steps


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `tapdeck` that is not on the path, in the current folder's `.venv`."""
    program = tmp_path / ".venv" / "bin" / "tapdeck"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return program


def test_the_command_is_named_as_it_was_typed(installed):
    assert command_name(".venv/bin/tapdeck", "/usr/bin/python3") == ".venv/bin/tapdeck"


def test_a_module_run_by_python_names_the_command_beside_that_python(installed):
    python = installed.with_name("python")
    assert command_name("/somewhere/console/cli.py", str(python)) == str(installed)


def test_a_command_on_the_path_is_named_alone(installed, monkeypatch):
    monkeypatch.setenv("PATH", str(installed.parent))
    assert command_name(str(installed), "/usr/bin/python3") == "tapdeck"


def test_the_next_steps_are_commands_of_a_shell():
    export, verify, _ = next_steps("'/a b/tapdeck'", "/data of mine/out")
    assert shlex.split(export)[:4] == ["/a b/tapdeck", "export", "/data of mine/out", "OUT"]
    assert shlex.split(verify)[:3] == ["/a b/tapdeck", "verify", "/data of mine/out"]
