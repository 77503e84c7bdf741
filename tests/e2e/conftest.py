"""What the end-to-end tests share: one installation, one small model with its data, one undisturbed run.

A start of SGLang takes most of the time of a test, so runs that several tests look at are made once.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.job import Inputs, Reference, make_inputs
from tests.support.product import Tapdeck


@dataclass(frozen=True)
class Unwritable:
    """A folder that may not be written, the words before a command for which that is so, and the reason."""

    folder: Path
    prefix: tuple[str, ...]
    reason: str


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def tapdeck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tapdeck]:
    """The installation that most tests use; its cache is warm after the reference run."""
    product = Tapdeck(tmp_path_factory.mktemp("tapdeck"))
    yield product
    product.close()


@pytest.fixture
def fresh_tapdeck(tmp_path: Path, tapdeck: Tapdeck) -> Iterator[Tapdeck]:
    """An installation without any run, for tests that ask what was started."""
    product = Tapdeck(tmp_path / "tapdeck", cache=tapdeck.cache, HF_HOME=str(tmp_path / "no-hub-cache"))
    yield product
    product.close()


@pytest.fixture(scope="session")
def reference(tapdeck: Tapdeck, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    config = inputs.config(folder / "run.toml", folder / "reference")
    finished = tapdeck.run("extract", config, "--json").require(0)
    return Reference(config, folder / "reference", finished)


@pytest.fixture
def unwritable(tmp_path: Path) -> Unwritable:
    folder = tmp_path / "frozen"
    folder.mkdir()
    if os.getuid():
        folder.chmod(0o555)
        return Unwritable(folder, (), f"may not be written by user {os.getuid()}")
    # Permissions do not bind root; a read-only mount, in a name space of its own, binds everybody.
    script = f'mount -t tmpfs -o ro tmpfs "{folder}" && exec "$@"'
    prefix = ("unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh")
    can_mount = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    # A container in which root may not mount has its /sys read-only.
    return Unwritable(
        folder if can_mount else Path("/sys"), prefix if can_mount else (), "is on a read-only file system"
    )
