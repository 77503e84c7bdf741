"""A program that uses `HiddenStatesGenerator`, is interrupted in the middle of a call, goes on, and is then killed.

    python -m tests.support.generator_caller MODEL_FOLDER

Prints one line per step. Its last act is to fork a child that outlives it, as the workers of a data loader would.
"""

from __future__ import annotations

import os
import signal
import sys

from extractor import HiddenStatesGenerator

SHORT = [[5, 6, 7], [8, 9]]
LONG = [[number % 500 for number in range(200)]] * 20_000


def main() -> None:
    generator = HiddenStatesGenerator(
        sys.argv[1], max_model_len=256, max_num_batched_tokens=256, device="cpu"
    )
    print(f"engine {generator._client.pid}", flush=True)
    before = generator.generate(SHORT)
    print("computing", flush=True)
    try:
        generator.generate(LONG)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    after = generator.generate(SHORT)
    same = all(
        bool((a == b).all())
        for one, two in zip(before, after, strict=True)
        for a, b in zip(one["hidden_states"], two["hidden_states"], strict=True)
    )
    print(f"again {same}", flush=True)
    child = os.fork()
    if not child:
        try:
            generator.generate(SHORT)
        except RuntimeError as error:
            print(f"fork refused: {'this is a fork of it' in str(error)}", flush=True)
        generator.close()
        print(f"fork {os.getpid()}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
