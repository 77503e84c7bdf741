"""`tapdeck demo`: the whole job on this machine, from nothing to a verified data set; no GPU needed.

A real small model (SmolLM2-135M-Instruct), real text (Python's own documentation), real SGLang on the CPU
in float32, and at the end a comparison of stored samples with plain transformers.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import platformdirs

from extractor import config, folders
from extractor.commands import extract as extraction
from extractor.commands import start as starting
from extractor.commands import verify
from extractor.commands.demo_data import ensure_model
from extractor.commands.demo_text import build_conversations
from extractor.config import RunConfig
from extractor.errors import EngineError, StoreError, TapdeckError
from extractor.store import manifest

if TYPE_CHECKING:
    from extractor.commands.output import Output

LAYERS = [2, 14, 26]
SEED = 1
VERIFY_SAMPLES = 8


class Demo(msgspec.Struct, frozen=True):
    """A demo that is ready to run.

    Attributes:
        config: of its run.
        model: the model's folder.
    """

    config: RunConfig
    model: Path


def run(*, folder: Path | None, num_samples: int, out: Output) -> int:
    """The verb without a console. Returns the exit code.

    Args:
        folder: where conversations and data go; None takes the user's data folder.
        num_samples: conversations to build.
        out: where to print.

    Raises:
        TapdeckError: no model, no space, or the run failed.
    """
    demo = set_up(folder=folder, num_samples=num_samples, out=out)
    with extraction.StopSignals() as stop:
        try:
            result = extraction.extract(demo.config, out=out, stop=stop)
        except KeyboardInterrupt:
            return stop.exit_code
        if stop.number is not None:
            return stop.exit_code
    if not result.complete:
        return EngineError.exit_code
    return _check(demo, msgspec.to_builtins(result), out)


def set_up(*, folder: Path | None, num_samples: int, out: Output) -> Demo:
    """Model and conversations, made where they are missing. Blocking.

    Raises:
        TapdeckError: the model cannot be had, or there is no space.
    """
    folder = (folder or Path(platformdirs.user_data_path("tapdeck")) / "demo").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    model = ensure_model(folders.cache_folder(), out.note)
    conversations = folder / "conversations.jsonl"
    build_conversations(conversations, num_samples=num_samples, seed=SEED)
    return Demo(demo_config(model, conversations, folder / "data"), model)


def start(demo: Demo, out: Output) -> str:
    """Starts the demo under a supervisor, or finds the one that runs already; the name of its run.

    Raises:
        TapdeckError: it was refused.
    """
    try:
        return starting.detach(demo.config).run
    except TapdeckError as error:
        if error.code != "already_running":
            raise
        out.note(error.message)
        return folders.run_folder_of(Path(demo.config.output.dir)).name


def check(demo: Demo, out: Output) -> int:
    """After the console: recomputes samples of a complete data set, and says what to do next.

    Raises:
        TapdeckError: the data set cannot be read.
    """
    output = Path(demo.config.output.dir)
    there = manifest.read_if_any(output)
    stored = sum(range_.last - range_.first + 1 for range_ in there.shards) if there is not None else 0
    if there is None or stored < there.totals.shards:
        return 0
    return _check(demo, {"run": folders.run_folder_of(output).name, "output": str(output)}, out)


def _check(demo: Demo, result: dict[str, Any], out: Output) -> int:
    outcome = verify.verify(
        Path(demo.config.output.dir),
        sample=VERIFY_SAMPLES,
        against="transformers",
        seed=0,
        model_folder=demo.model,
        out=out,
    )
    out.result({**result, "verify": outcome.as_json()})
    _say_what_next(demo.config.output.dir, out)
    return 0 if outcome.ok else StoreError.exit_code


def demo_config(model: Path, conversations: Path, output: Path) -> RunConfig:
    """The run of the demo: small batches and shards for a small machine."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu", "dtype": "float32"},
        "data": {"files": [str(conversations)], "max_len": 1024},
        "taps": {"layers": LAYERS, "final": True},
        "output": {"dir": str(output), "shard_bytes": 32_000_000},
        "batch": {"max_tokens": 2048},
    }
    return config.build(tree, source="the demo")


def _say_what_next(output: str, out: Output) -> None:
    out.line(f"data: {output}")
    out.line("next:")
    for line in next_steps(command_name(sys.argv[0], sys.executable), output):
        out.line(f"  {line}")


def next_steps(command: str, output: str) -> list[str]:
    """Commands for a shell, each with what it is for. Pure."""
    output = shlex.quote(output)
    steps = [
        (f"{command} export {output} OUT --layout speculators-v1", "what a trainer reads"),
        (f"{command} verify {output} --sample 16 --against transformers", "more samples, recomputed"),
        (f"{command} extract RUN.toml", "your own model and data; see README.md"),
    ]
    width = max(len(step) for step, _ in steps)
    return [f"{step:<{width}}  {purpose}" for step, purpose in steps]


def command_name(program: str, interpreter: str) -> str:
    """What to type, in the folder where this command was typed, to run `tapdeck`.

    Args:
        program: how this process was started (`sys.argv[0]`).
        interpreter: its Python, beside which `tapdeck` is installed.
    """
    path = Path(program)
    if path.name != "tapdeck" or not path.exists():
        path = Path(interpreter).with_name("tapdeck")
    found = shutil.which("tapdeck")
    if not path.exists() or (found is not None and Path(found).samefile(path)):
        return "tapdeck"
    return shlex.quote(str(path) if "/" in str(path) else f"./{path}")
