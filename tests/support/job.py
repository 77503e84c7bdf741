"""The job of the end-to-end tests: a small model, 40 conversations, 12 shards of some three batches each."""

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import small_models
from tests.support.product import ROOT, Finished

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


def make_inputs(folder: Path) -> Inputs:
    """Makes the model and the conversations."""
    # A process of its own: importing torch and transformers here would slow down every other test.
    subprocess.run([sys.executable, "-c", MAKE_MODEL, folder / "model"], cwd=ROOT, check=True)
    rng = random.Random(5)
    lengths = [rng.randint(150, 600) for _ in range(NUM_SAMPLES)]
    conversations = small_models.conversations(folder / "conversations.jsonl", lengths, seed=1)
    return Inputs(folder / "model", conversations)
