"""What is really loaded. The import contracts of pyproject.toml cannot see what a call imports."""

import subprocess
import sys

import pytest

HEAVY = ("sglang", "textual", "torch", "transformers")


def loaded_by(program: str) -> list[str]:
    """Heavy packages that a fresh interpreter has loaded after running a program."""
    report = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, check=True
    )
    found: list[str] = eval(done.stdout.splitlines()[-1], {})  # noqa: S307 -- a list that we just printed
    return found


@pytest.mark.parametrize(
    "module",
    [
        "console",
        "console.cli",
        "console.client",
        "console.control",
        "extractor",
        "extractor.checkpoint",
        "extractor.commands.demo_data",
        "extractor.commands.verify",
        "extractor.config",
        "extractor.estimate",
        "extractor.plan",
        "extractor.preflight",
        "extractor.protocol",
        "extractor.supervisor",
        "extractor.supervisor.daemon",
        "extractor.supervisor.foreground",
        "extractor.telemetry",
    ],
)
def test_importing_a_module_that_needs_no_model_loads_none(module):
    assert loaded_by(f"import {module}") == []


def test_the_console_draws_and_loads_no_model():
    assert loaded_by("import console.app, console.screens.start, console.screens.log") == ["textual"]


def test_the_supervisor_loads_neither_arrays_nor_tables():
    # 80 MB is what it may take; each of these is a good part of that.
    program = "import extractor.supervisor.daemon, sys; print([m for m in ('numpy', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["extract", "--help"], ["verify", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    program = f"""
import sys
from console.cli import main
sys.argv = ["tapdeck", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code
"""
    assert loaded_by(program) == []
