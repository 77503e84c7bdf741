"""Capture on a CUDA machine: each model class in bfloat16 against transformers, and what a long sample takes.

python -m tests.benchmarks.gpu_capture WORK [NAME ...] [--jobs N] [--device cuda|cpu] [--tiny]

Models are made here from seeds. Each is extracted with `tapdeck extract` in a process of its own under a time
limit, several at a time, Kimi first since its kernels take minutes to compile; as each ends, 16 stored samples are
judged by `extractor.commands.recompute` in this process and one line is printed, so that a run that is cut off
keeps what it had. The same lines are in WORK/capture.md, and all figures in WORK/capture.jsonl. Exits non-zero
when a comparison fails.

"own" is the error of transformers in bfloat16 on the same samples, times 1.5: what ours may be.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from tests.support import small_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.commands.recompute import CompareReport

COMMAND = ("-m", "console.cli", "extract")
SAMPLES = 16
CPU_PATIENCE = 5
"""How much longer a try without a GPU may take."""
PROOF = re.compile(r"start-up proof passed \((\d+) checks, largest error ([\d.e+-]+)\)")
HEAD = (
    "| model, attention | proof | worst tap, maximum (own) | worst tap, p99 (own) | not judged | verdict | s |\n"
    "|---|---|---|---|---|---|---|"
)
MEMORY_HEAD = (
    "| sample, budget | states, MB | device peak, MB | over the short one | host peak, MB | over the short one | s |\n"
    "|---|---|---|---|---|---|---|"
)


class Row(NamedTuple):
    """One model with one attention backend.

    Attributes:
        model: a name of `gpu_models.KINDS`, or "kimi".
        backend: of SGLang.
        layers: the taps; `embed`, `final` and `normed` are stored as well.
        limit_s: how long the extraction may take.
    """

    model: str
    backend: str = "triton"
    layers: tuple[int, ...] = (0, 2, 4)
    limit_s: int = 150


ROWS: dict[str, Row] = {
    # Its first forward compiles kernels for more than four minutes.
    "kimi": Row("kimi", layers=(0, 1), limit_s=480),
    "llama": Row("llama"),
    "qwen3": Row("qwen3"),
    "qwen3-moe": Row("qwen3-moe"),
    "deepseek-v3": Row("deepseek-v3", layers=(0, 1, 2)),
    "gpt-oss": Row("gpt-oss"),
    "gemma3": Row("gemma3"),
    "glm4-moe": Row("glm4-moe"),
    "qwen3-vl": Row("qwen3-vl"),
    "deepseek-v3-groups": Row("deepseek-v3-groups", layers=(0, 1, 2)),
    "qwen3-fa3": Row("qwen3", backend="fa3"),
}
MEMORY = "memory"
DEFAULT = [name for name in ROWS if name != "qwen3-fa3"] + [MEMORY]
"""All but what needs another archive of kernels."""


class Result(NamedTuple):
    """What became of a row.

    Attributes:
        name: of the row.
        backend: attention backend.
        seconds: from the start of the extraction to the verdict.
        proof: largest error of the start-up proof; None when it never passed.
        report: the judgement; None when it never came to it.
        error: why there is no report.
    """

    name: str
    backend: str
    seconds: float
    proof: float | None = None
    report: CompareReport | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Judged, and every tap within its bounds."""
        return self.report is not None and self.report.ok


def line(result: Result) -> str:
    """A row of the table."""
    proof = "-" if result.proof is None else f"{result.proof:.1e}"
    start = f"| {result.name}, {result.backend} | {proof} | "
    if result.report is None:
        return f"{start}{result.error.replace('|', '/')} | - | - | FAILED | {result.seconds:.0f} |"
    taps = result.report.taps
    worst = max(taps, key=lambda tap: _share(tap.max_rel_err, tap.bound))
    at_p99 = max(taps, key=lambda tap: _share(tap.p99, tap.p99_bound))
    share = result.report.num_excluded_tokens / result.report.num_tokens
    wrong = [f"{tap.name} ({tap.looks_like or 'not like any other tap'})" for tap in taps if not tap.ok]
    verdict = "ok" if not wrong else f"WRONG: {', '.join(wrong)}"
    return (
        f"{start}{worst.name} {worst.max_rel_err:.1e} ({worst.bound:.1e}) | "
        f"{at_p99.name} {at_p99.p99:.1e} ({at_p99.p99_bound:.1e}) | "
        f"{result.report.num_excluded_tokens:,} of {result.report.num_tokens:,} ({share:.1%}) | "
        f"{verdict} | {result.seconds:.0f} |"
    )


def _share(error: float, bound: float) -> float:
    return error / bound if bound else float(error > 0)


class Bench:
    """Where things are, and how they are run."""

    def __init__(self, work: Path, device: str, *, tiny: bool) -> None:
        self.work = work
        self.device = device
        self.tiny = tiny
        rng = random.Random(0)
        longest = 260 if tiny else 1500
        small_models.conversations(
            work / "talks.jsonl", [rng.randrange(60, longest) for _ in range(8 if tiny else 40)]
        )

    def model(self, row: Row) -> tuple[Path, Path]:
        """The folder that is served and the one for transformers, made if they are not there."""
        from tests.benchmarks import gpu_models

        folder = self.work / "models" / row.model
        reference = folder.with_name(f"{row.model}-plain") if row.model == "kimi" else folder
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(reference, ignore_errors=True)
            if row.model == "kimi":
                gpu_models.make_kimi(folder, reference, device=self.device, tiny=self.tiny)
            else:
                gpu_models.make(folder, row.model, device=self.device, tiny=self.tiny)
            (folder / "made").touch()
        return folder, reference

    def extract(self, name: str, tree: dict[str, dict[str, Any]], limit_s: float) -> tuple[str, str]:
        """Runs `tapdeck extract`; returns its stderr and why it failed, or "".

        At the limit it is ended with its workers, which have sessions of their own and would keep the device.
        """
        config = self.work / f"{name}.toml"
        sections = [f"[{section}]\n{_toml(values)}" for section, values in tree.items()]
        config.write_text("\n".join(sections))
        command = [sys.executable, *COMMAND, str(config), "--json"]
        log = self.work / f"{name}.log"
        limit_s *= 1 if self.device == "cuda" else CPU_PATIENCE
        with log.open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    child.kill()
                process.wait()
                return log.read_text(), f"no end after {limit_s:.0f} s, see {log.name}"
        said = log.read_text()
        return said, "" if code == 0 else f"exit {code}: {_last_words(said)}"

    def run(self, name: str, row: Row, folder: Path) -> tuple[str, str]:
        """Extracts a row's samples."""
        shutil.rmtree(self.work / f"out-{name}", ignore_errors=True)
        tree: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder), "device": self.device, "dtype": "bfloat16"},
            "data": {"files": [str(self.work / "talks.jsonl")], "max_len": 1600},
            "taps": {"layers": list(row.layers), "embed": True, "final": True, "normed": True},
            "output": {"dir": str(self.work / f"out-{name}"), "shard_bytes": 200_000_000},
            "batch": {"max_tokens": 4096},
        }
        if self.device == "cuda":
            tree["model"]["attention_backend"] = row.backend
        return self.extract(name, tree, row.limit_s)

    def judge(self, name: str, reference: Path) -> CompareReport:
        """Recomputes stored samples with transformers."""
        from extractor.commands.recompute import compare_with_transformers
        from extractor.commands.verify import draw
        from extractor.store import manifest as manifests
        from extractor.taps import TapSelection

        output = self.work / f"out-{name}"
        manifest = manifests.read(output)
        return compare_with_transformers(
            draw(output, SAMPLES, seed=0),
            model_folder=reference,
            taps=TapSelection(manifest.taps.taps, manifest.model.num_layers),
            stored_dtype="bfloat16",
            compute_dtype="bfloat16",
            device=self.device,
        )


def _toml(values: dict[str, Any]) -> str:
    # JSON's strings, numbers, booleans and lists are also TOML's.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _last_words(said: str) -> str:
    lines = [text.strip() for text in said.splitlines() if text.strip()]
    errors = [text for text in lines if "error" in text.lower()]
    return (errors or lines or ["no output"])[-1][:200]


def compare_rows(bench: Bench, names: list[str], jobs: int, tell: Callable[[str], None]) -> list[Result]:
    """Runs rows side by side, tells each as it ends."""
    import torch

    results = []
    started: dict[str, float] = {}

    def extract(name: str, folder: Path) -> tuple[str, str]:
        started[name] = time.monotonic()
        return bench.run(name, ROWS[name], folder)

    with ThreadPoolExecutor(jobs) as pool:
        runs, references = {}, {}
        for name in names:
            try:
                folder, references[name] = bench.model(ROWS[name])
            except Exception as error:  # noqa: BLE001 - one model that cannot be made must not cost the others
                results.append(
                    Result(
                        name, ROWS[name].backend, 0, error=f"no model: {type(error).__name__}: {error}"[:200]
                    )
                )
                tell(line(results[-1]))
                continue
            runs[pool.submit(extract, name, folder)] = name
        for run in as_completed(runs):
            name = runs[run]
            said, error = run.result()
            found = PROOF.search(said)
            result = Result(name, ROWS[name].backend, 0, float(found[2]) if found else None, error=error)
            if not error:
                try:
                    result = result._replace(report=bench.judge(name, references[name]))
                except Exception as failure:  # noqa: BLE001 - as above
                    result = result._replace(error=f"{type(failure).__name__}: {failure}"[:200])
                if bench.device == "cuda":
                    torch.cuda.empty_cache()
            result = result._replace(seconds=time.monotonic() - started[name])
            results.append(result)
            tell(line(result))
    return results


class Peak:
    """The most memory that the device and a tree of processes held while it watched."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._floor = self._device_bytes()
        self.device_bytes = self.host_bytes = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.device_bytes = max(self.device_bytes, self._device_bytes() - self._floor)
            held = 0
            for child in psutil.Process().children(recursive=True):
                try:
                    held += child.memory_info().rss
                except psutil.Error:
                    continue
            self.host_bytes = max(self.host_bytes, held)

    def _device_bytes(self) -> int:
        if self._device == "cpu":
            return 0
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def measure_memory(bench: Bench, tell: Callable[[str], None]) -> bool:
    """One long sample of a wide model beside a short one: whole, and in chunks where this version has them."""
    from extractor.config import BatchSection

    folder, _ = bench.model(Row("wide"))
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    long, short, chunk = (1024, 128, 256) if bench.tiny else (32_768, 1024, 8192)
    runs = {"short": (short, {"max_tokens": long})}
    runs["long, whole"] = (long, {"max_tokens": long})
    if "chunk_tokens" in BatchSection.model_fields:
        runs["short, chunk's budget"] = (short, {"max_tokens": chunk})
        runs["long, in chunks"] = (long, {"max_tokens": chunk, "chunk_tokens": chunk})
    sound = True
    floor = (0, 0)
    for name, (length, batch) in runs.items():
        place = name.replace(", ", "-").replace(" ", "-").replace("'", "")
        data, output = bench.work / f"{place}.jsonl", bench.work / f"out-{place}"
        # A little shorter than the limit, for the template.
        small_models.conversations(data, [length - 40])
        shutil.rmtree(output, ignore_errors=True)
        tree: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder), "device": bench.device, "dtype": "bfloat16"},
            "data": {"files": [str(data)], "max_len": length},
            "taps": {"layers": [0, 1, 2], "final": True},
            "output": {"dir": str(output)},
            "batch": batch,
            "writer": {"buffers": 2},
        }
        if bench.device == "cuda":
            tree["model"]["attention_backend"] = "triton"
        begun = time.monotonic()
        with Peak(bench.device) as peak:
            _, error = bench.extract(place, tree, 150)
        seconds = time.monotonic() - begun
        if error:
            tell(
                f"| {name} of {length:,}, budget {batch['max_tokens']:,} | {error} | - | - | - | - | {seconds:.0f} |"
            )
            sound = False
            continue
        if name.startswith("short"):
            floor = (peak.device_bytes, peak.host_bytes)
        states = length * 4 * hidden * 2
        over = (peak.device_bytes - floor[0], peak.host_bytes - floor[1])
        figures = (states, peak.device_bytes, over[0], peak.host_bytes, over[1])
        told = " | ".join(f"{figure / 1e6:,.0f}" for figure in figures)
        tell(f"| {name} of {length:,}, budget {batch['max_tokens']:,} | {told} | {seconds:.0f} |")
    return sound


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: an unknown name.
    """
    parser = argparse.ArgumentParser(prog="gpu_capture")
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*ROWS, MEMORY])}")
    parser.add_argument("--jobs", type=int, default=3, help="extractions side by side")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a try without a GPU")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in {*ROWS, MEMORY}]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join([*ROWS, MEMORY])}")
    options.names = options.names or list(DEFAULT)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.work, options.device, tiny=options.tiny)
    table = options.work / "capture.md"

    def tell(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        with table.open("a") as file:
            file.write(text + "\n")

    ok = True
    rows = [name for name in options.names if name != MEMORY]
    if rows:
        tell(HEAD)
        results = compare_rows(bench, rows, options.jobs, tell)
        ok = all(result.ok for result in results)
        with (options.work / "capture.jsonl").open("a") as file:
            for result in results:
                taps = [] if result.report is None else result.report.taps
                figures = {tap.name: [tap.max_rel_err, tap.bound, tap.p99, tap.p99_bound] for tap in taps}
                file.write(json.dumps({"name": result.name, "ok": result.ok, "taps": figures}) + "\n")
    if MEMORY in options.names:
        # Alone on the device, or its peak would be somebody else's too.
        tell(f"\n{MEMORY_HEAD}")
        ok = measure_memory(bench, tell) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
