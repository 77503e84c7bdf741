"""On a CUDA machine: a run under its supervisor, held, unloaded, resumed; NVML seen by it; for `gpu.sh SUPERVISED`.

    python tests/benchmarks/gpu_supervised.py WORK BACKEND

WORK holds what `gpu_models.py` makes. Batches pass a gate, so that each pause meets a run that works. Prints what
consoles are told of the GPU, GPU memory at each depth, and whether the output equals that of `tapdeck extract`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import outputs
from tests.support.product import Tapdeck
from tests.support.supervised import Gate, Supervised

BATCHES = 12


def main() -> None:
    """Prints the table; raises when something is not as it must be."""
    work, backend = Path(sys.argv[1]), sys.argv[2]
    product = Tapdeck(work / f"supervised-{time.time():.0f}")
    config = product.home / "run.toml"
    headless = _config(config.with_name("headless.toml"), work, product.home / "headless", backend)
    product.run("extract", headless, "--json", deadline_s=300).require(0)
    gate = Gate(product.home / "gate")
    product.environment |= gate.environment
    run = Supervised(
        product, _config(config, work, product.home / "output", backend), product.home / "output"
    )
    try:
        _supervise(run, gate)
        outputs.require_same_bytes(run.output / "shards", product.home / "headless" / "shards")
        print("output: byte-identical to the headless run")
    except BaseException:
        print(run.describe())
        raise
    finally:
        product.close()
        gate.close()


def _supervise(run: Supervised, gate: Gate) -> None:
    run.start()
    gate.allow(BATCHES)
    run.wait(lambda: run.num_done() >= 1, "first shard")
    run.wait(lambda: isinstance(run.snapshot()["telemetry"]["gpus"], list), "GPU telemetry")
    print(json.dumps(run.snapshot()["telemetry"], indent=1))
    print(f"| running | {_gpu_memory()} | |")
    for depth, state in (("hold", "held"), ("unload", "unloaded")):
        begun = time.monotonic()
        run.act("pause", depth=depth)
        gate.allow(BATCHES)
        run.wait_state(state)
        print(f"| {state} | {_gpu_memory()} | {time.monotonic() - begun:.1f} s after {depth} |")
    gate.close_again()
    begun = time.monotonic()
    run.act("resume")
    run.wait_state("running")
    print(f"| running again | {_gpu_memory()} | {time.monotonic() - begun:.1f} s after resume |")
    pid = run.kill_worker()
    begun = time.monotonic()
    run.wait(lambda: any(e["event"] == "rank_died" for e in run.events()), "death noticed")
    print(f"| rank {pid} killed | {_gpu_memory()} | noticed after {time.monotonic() - begun:.1f} s |")
    gate.allow(Gate.MANY)
    run.wait_state("finished", "failed", "stopped")
    last: dict[str, Any] = run.last()
    print(f"| {last['state']['state']} | {_gpu_memory()} | {last['state']['why']} |")


def _gpu_memory() -> str:
    """As nvidia-smi has it, which is not what we sample with."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _config(path: Path, work: Path, output: Path, backend: str) -> Path:
    path.write_text(
        f"""[model]
path = "{work}/qwen3"
device = "cuda"
dtype = "bfloat16"
attention_backend = "{backend}"
[data]
files = ["{work}/letters.jsonl"]
max_len = 700
[taps]
layers = [0, 2, 4]
[output]
dir = "{output}"
shard_bytes = 8000000
reserve_bytes = 0
[batch]
max_tokens = 1024
""",
        encoding="utf-8",
    )
    return path


if __name__ == "__main__":
    main()
