"""What the end-to-end tests share: one installation, one small model with its data, one undisturbed run.

A start of SGLang takes most of the time of a test, so runs that several tests look at are made once.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import small_models
from tests.support.product import ROOT, Finished, Tapdeck

NUM_SAMPLES = 40
MAX_TOKENS = 640
TAPS = ("layer_001", "layer_009", "final")
HIDDEN_SIZE = 256
SHARD_BYTES = 1500 * HIDDEN_SIZE * 4 * len(TAPS)
"""Some 1500 tokens: three batches."""
# Large enough that a shard takes a few tenths of a second: a kill must find it at work.
MAKE_MODEL = f"""
import sys
from pathlib import Path
from tests.support import small_models
small_models.make(
    Path(sys.argv[1]), "qwen3", hidden_size={HIDDEN_SIZE}, head_dim=64, intermediate_size=1024,
    num_hidden_layers=12,
)
"""


@dataclass(frozen=True)
class Inputs:
    """Model and conversations, and the `run.toml` made of them."""

    model: Path
    conversations: Path

    def config(self, path: Path, output: Path, *, model: Path | str | None = None, more: str = "") -> Path:
        """Writes `run.toml`; `more` is further TOML at its end."""
        path.write_text(
            f"""[model]
path = "{model or self.model}"
device = "cpu"
dtype = "float32"

[data]
files = ["{self.conversations}"]
max_len = {MAX_TOKENS}

[taps]
layers = [1, 9]

[output]
dir = "{output}"
shard_bytes = {SHARD_BYTES}
reserve_bytes = 0

[batch]
max_tokens = {MAX_TOKENS}
{more}""",
            encoding="utf-8",
        )
        return path


@dataclass(frozen=True)
class Reference:
    """The undisturbed run. Nobody may change its output."""

    config: Path
    output: Path
    finished: Finished

    @property
    def num_shards(self) -> int:
        return int(self.finished.json["shards"])


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    # A process of its own: importing torch and transformers here would slow down every other test.
    subprocess.run([sys.executable, "-c", MAKE_MODEL, folder / "model"], cwd=ROOT, check=True)
    rng = random.Random(5)
    lengths = [rng.randint(150, 600) for _ in range(NUM_SAMPLES)]
    return Inputs(
        folder / "model", small_models.conversations(folder / "conversations.jsonl", lengths, seed=1)
    )


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


@pytest.fixture(scope="session")
def read_only() -> Callable[[Path], tuple[str, ...]]:
    """Makes the words before a command for which a folder is a read-only file system."""

    def prefix(folder: Path) -> tuple[str, ...]:
        script = f'mount -t tmpfs -o ro tmpfs "{folder}" && exec "$@"'
        return ("unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh")

    return prefix
