"""What the documents show is what the product takes."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import typer.testing

import extractor
from console.cli import app
from extractor import config, errors
from tests.support import models_page

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def commands_shown() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(tapdeck [^`]+)`", README)
    return [line for line in [*lines, *inline] if line.startswith("tapdeck ")]


def test_the_run_toml_of_the_readme_is_valid():
    (text,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)

    run = config.build(tomllib.loads(text), source="README.md", text=text)

    assert run.model.path


def test_the_readme_shows_commands():
    assert len(commands_shown()) >= 6


@pytest.mark.parametrize("command", commands_shown())
def test_verbs_and_flags_of_the_readme_exist(command):
    _, verb, *words = command.split()

    shown = typer.testing.CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})

    assert shown.exit_code == 0
    for flag in (word for word in words if word.startswith("--")):
        assert flag in shown.output


def test_the_python_of_the_readme_uses_what_the_package_offers():
    (text,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    program = ast.parse(text)
    imported = [a.name for node in ast.walk(program) if isinstance(node, ast.ImportFrom) for a in node.names]
    (made,) = (
        n for n in ast.walk(program) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in imported
    )

    assert imported == ["HiddenStatesGenerator"]
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in made.keywords}
    inspect.signature(extractor.HiddenStatesGenerator).bind(**arguments)


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in re.findall(r"(?:`|^)make (?:PYTHON=\S+ )?(\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_exit_code_of_an_error_is_documented():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", ARCHITECTURE, flags=re.MULTILINE)}
    family = [errors.TapdeckError]
    for known in family:
        family.extend(known.__subclasses__())

    assert {known.exit_code for known in family if known.__module__ == errors.__name__} <= documented


def test_the_page_of_model_classes_is_what_the_table_gives():
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")

    assert written == models_page.page(), "python -m tests.support.models_page > docs/models.md"
