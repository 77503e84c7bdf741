"""Small random models and their inputs for `gpu.sh`; see there.

python tests/benchmarks/gpu_models.py WORK
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from extractor.commands.demo_text import build_conversations
from tests.support import small_models


def main() -> None:
    work = Path(sys.argv[1])
    build_conversations(work / "conversations.jsonl", num_samples=64, seed=1)
    rng = random.Random(0)
    lengths = [rng.randrange(60, 700) for _ in range(48)]
    small_models.conversations(work / "letters.jsonl", lengths)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    for kind in ("qwen3", "qwen3-moe"):
        small_models.make(work / kind, kind, "bfloat16", **shape)


if __name__ == "__main__":
    main()
