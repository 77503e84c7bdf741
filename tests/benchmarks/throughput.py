"""Tokens per second, side by side in one run: bare SGLang prefill, capture, whole extraction, transformers.

    python tests/benchmarks/throughput.py                                   SmolLM2 on this CPU, float32
    python tests/benchmarks/throughput.py --device cuda --shape qwen3-8b    dummy weights of that shape

Bare prefill, capture and extraction alternate, and ratios are taken within a round, so that drift of the
machine shows as spread and not as a ratio. The extraction is the product itself, `tapdeck extract`, in
processes of its own, from the first batch to the last commit. All see the same samples in the same batches (but
transformers, which takes one at a time).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from extractor.engine import sglang_compat
from tests.support import small_models

BARE = "bare SGLang prefill"
CAPTURE = "capture (states stay on the device)"
WHOLE = "whole extraction (tapdeck extract)"
TRANSFORMERS = "transformers, one sample at a time"
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}


def main() -> None:
    args = _arguments()
    # As `tapdeck extract` does for its worker.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sglang_compat.prepare_process(args.device)
    work = Path(tempfile.mkdtemp(prefix="tapdeck-bench-", dir=args.dir))
    tree = _demo_run(args, work) if args.shape == "smollm2" else _dummy_run(args, work)

    from extractor import config as configs
    from extractor.commands import job as jobs
    from extractor.commands.output import Output

    job = jobs.make(configs.build(tree, source="benchmark"), out=Output(as_json=True))
    batches = [
        [job.prepared.sample(index).input_ids for index in batch]
        for shard in job.shards
        for batch in shard.batches
    ]
    tokens = sum(len(ids) for batch in batches for ids in batch)
    rows: dict[str, list[float]] = {BARE: [], CAPTURE: [], WHOLE: []}
    with Measurer(jobs.engine_spec(job, "none"), batches, tokens) as measurer:
        for number in range(args.rounds):
            # One after the other, so that each ratio compares neighbours in time.
            rows[BARE].append(measurer.rate(BARE))
            rows[CAPTURE].append(measurer.rate(CAPTURE))
            rows[WHOLE].append(_extract(tree, work / f"out{number}"))
    if args.transformers:
        sequences = [ids for batch in batches for ids in batch][: args.transformers]
        rows[TRANSFORMERS] = [_transformers(job, sequences, args)]
    _print(rows, tokens, len(batches), args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="smollm2", choices=("smollm2", "qwen3-8b"))
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=2048, help="token budget of a batch")
    parser.add_argument(
        "--transformers", type=int, default=48, help="samples of the transformers loop; 0: none"
    )
    parser.add_argument("--threads", type=int, default=8, help="writer threads")
    parser.add_argument("--buffers", type=int, default=4, help="host buffers")
    parser.add_argument("--backend", default=None, help="attention backend")
    parser.add_argument("--dir", default=None, help="where the data is written (the disk that is measured)")
    return parser.parse_args()


def _demo_run(args: argparse.Namespace, work: Path) -> dict:
    from extractor import folders
    from extractor.commands.demo import demo_config
    from extractor.commands.demo_data import ensure_model
    from extractor.commands.demo_text import build_conversations

    model = ensure_model(folders.cache_folder(), print)
    conversations = work / "conversations.jsonl"
    build_conversations(conversations, num_samples=args.samples, seed=1)
    tree = demo_config(model, conversations, work / "out").model_dump()
    tree["batch"]["max_tokens"] = args.max_tokens
    tree["writer"] = {"threads": args.threads, "buffers": args.buffers}
    return tree


def _dummy_run(args: argparse.Namespace, work: Path) -> dict:
    """A model folder without real weights, and samples of log-normal lengths (mean about 1,050 tokens)."""
    model = work / "model"
    _make_dummy_model(model)
    conversations = work / "conversations.jsonl"
    rng = random.Random(0)
    lengths = [min(4000, max(64, int(rng.lognormvariate(6.7, 0.7)))) for _ in range(args.samples)]
    small_models.conversations(conversations, lengths)
    return {
        "model": {
            "path": str(model),
            "device": args.device,
            "dtype": "bfloat16",
            "attention_backend": args.backend,
            "sglang": {"load_format": "dummy"},
        },
        "data": {"files": [str(conversations)], "max_len": 4096},
        "taps": {"layers": [1, 17, 32], "final": True},
        "output": {"dir": str(work / "out"), "shard_bytes": 1_000_000_000},
        "batch": {"max_tokens": args.max_tokens},
        "writer": {"threads": args.threads, "buffers": args.buffers},
    }


def _make_dummy_model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config

    folder.mkdir()
    config = Qwen3Config(**QWEN3_8B)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    # SGLang draws dummy weights; the file only shows that the folder is a model's.
    save_file({"placeholder": torch.zeros(1)}, folder / "model.safetensors")
    small_models.add_tokenizer(folder)


class Measurer:
    """A model in a process of its own that runs all batches once when asked; idle in between."""

    def __init__(self, spec, batches, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, spec, batches, tokens))

    def __enter__(self) -> Measurer:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def rate(self, what: str) -> float:
        """Tokens per second of one pass over all batches."""
        self._pipe.send(what)
        return self._pipe.recv()


def _serve(pipe, spec, batches, tokens: int) -> None:
    sglang_compat.prepare_process(spec.device)
    import torch

    from extractor.engine.model import Engine

    engine = Engine(spec)
    for batch in batches:
        engine.forward(batch)
    while (what := pipe.recv()) is not None:
        # Bare: SGLang's own prefill, capture switched off; states of a batch are dropped with the next one.
        if what == BARE:
            engine.capture._adapter.set(())
        else:
            engine.capture.set_taps(spec.taps)
        step = engine.runner.prefill if what == BARE else engine.forward
        if what == BARE:
            engine.capture._boundaries = ()
        _sync(spec.device, torch)
        start = time.monotonic()
        for batch in batches:
            step(batch)
        _sync(spec.device, torch)
        pipe.send(tokens / (time.monotonic() - start))
    sys.stdout.flush()
    os._exit(0)  # SGLang's own teardown is not measured


def _sync(device: str, torch) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _extract(tree: dict, output: Path) -> float:
    """tokens/s of `tapdeck extract` as a user runs it."""
    overrides = {**tree, "output": {**tree["output"], "dir": str(output)}}
    run_toml = output.with_suffix(".toml")
    run_toml.write_text(_toml(overrides))
    command = [sys.executable, "-m", "console.cli", "extract", str(run_toml), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    shutil.rmtree(output)
    print(
        f"  extract: {result['tokens_per_s']:,.0f} tokens/s, load {result['load_s']:.0f} s, "
        f"{result['bytes'] / result['seconds'] / 1e6:,.0f} MB/s, peak RSS {result['peak_rss_bytes'] / 1e9:.1f} GB",
        flush=True,
    )
    return result["tokens_per_s"]


def _toml(tree: dict) -> str:
    import tomlkit

    def without_none(value):
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return tomlkit.dumps(without_none(tree))


def _transformers(job, sequences, args: argparse.Namespace) -> float:
    """What a plain script does: one sample at a time, all hidden states, taps to the host."""
    import torch
    from transformers import AutoModelForCausalLM

    if args.shape == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(
            job.facts.model.folder, dtype=getattr(torch, job.facts.dtype)
        )
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(job.facts.model.folder)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.facts.dtype))
    model = model.to(args.device).eval()
    boundaries = job.facts.taps.boundaries
    with torch.no_grad():
        for timed in (sequences[:2], sequences):
            _sync(args.device, torch)
            start = time.monotonic()
            for ids in timed:
                batch = torch.from_numpy(ids.astype("int64"))[None].to(args.device)
                states = model.model(batch, output_hidden_states=True).hidden_states
                _ = [states[k][0].cpu() for k in boundaries]
            _sync(args.device, torch)
    return sum(len(ids) for ids in sequences) / (time.monotonic() - start)


def _print(rows: dict[str, list[float]], tokens: int, num_batches: int, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{args.shape} on {args.device}, {tokens:,} tokens, {num_batches} batches of at most {args.max_tokens}"
    )
    for heading in ("what", "tokens/s (median)", "min", "max", "of bare prefill (median of rounds)"):
        table.add_column(heading)
    for name, rates in rows.items():
        middle = statistics.median(rates)
        ratio = statistics.median(mine / bare for mine, bare in zip(rates, rows[BARE], strict=False))
        table.add_row(name, f"{middle:,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", f"{ratio:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
