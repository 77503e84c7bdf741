"""`tapdeck`: the verbs, their flags and their exit codes.

Verbs on data live in `extractor.commands` and are imported when they are called, so that `--help` does not
wait for torch; verbs on a run are in `console.run_verbs`. This is the only place that turns errors into exit codes.
"""

from __future__ import annotations

import io
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.run_verbs import Json, Verbs, no_console
from extractor import release
from extractor.errors import ConfigError, TapdeckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extractor.config import RunConfig

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Extract EAGLE-3 training data: hidden states of chosen layers through SGLang, verified and resumable.",
)

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of run.toml.")
]
RunToml = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Configuration of the run.")]
OutputFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of a run.")]


@app.command()
def demo(
    *,
    headless: Annotated[bool, typer.Option("--headless", help="No console; plain lines.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the data goes.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Conversations to build and extract.")] = 64,
    as_json: Json = False,
) -> None:
    """The whole job on this machine, no GPU needed: a real small model, real text, real SGLang, verified."""
    from extractor.commands import demo as command

    out = _output(as_json=as_json)
    if headless or as_json or no_console() is not None:
        _end(command.run(folder=folder, num_samples=samples, out=out))
        return
    from console.app import run_console
    from extractor.folders import find_run

    demo = command.set_up(folder=folder, num_samples=samples, out=out)
    code = run_console(find_run(command.start(demo, out)))
    _end(code or command.check(demo, out))


@app.command()
def extract(
    *,
    run_toml: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Configuration of the run.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option(help="Model folder, or hub id in the local cache.")
    ] = None,
    layer_ids: Annotated[
        str | None, typer.Option(help='Layers, "after" ids, as 2,14,26 (the last layer is final).')
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len", "--max-seq-len", help="Samples are cut to this many tokens less one."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Upper bound on the share of GPU memory.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option("--tensor-parallel-size", "--tp-size")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Conversation file; may be repeated.")] = None,
    output: Annotated[str | None, typer.Option(help="Output folder.")] = None,
    layout: Annotated[str | None, typer.Option(help="Layout on disk: shards.")] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Extract hidden states in the foreground, from RUN.toml or from the flags of the older script."""
    from extractor.commands import extract as command

    flags = {
        "model.path": model_path,
        "model.mem_fraction": gpu_memory_utilization,
        "model.tp": tensor_parallel_size,
        "taps.layers": None if layer_ids is None else _layer_ids(layer_ids),
        # The older script cut to max_model_len - 1: the last position was kept for a generated token.
        "data.max_len": None if max_model_len is None else max_model_len - 1,
        "data.files": data or None,
        "output.dir": output,
        "output.layout": layout,
    }
    config = _load(run_toml, overrides, {key: value for key, value in flags.items() if value is not None})
    _end(command.run(config, out=_output(as_json=as_json)))


@app.command()
def prepare(
    run_toml: RunToml,
    *,
    show: Annotated[
        int | None, typer.Option(min=1, help="Print so many samples, supervised spans coloured.")
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Data set only: token ids, loss masks, rejects."""
    from extractor.commands import prepare as command

    _end(command.run(_load(run_toml, overrides), show=show, out=_output(as_json=as_json)))


@app.command()
def estimate(run_toml: RunToml, *, overrides: Set = None, as_json: Json = False) -> None:
    """Tokens, bytes per token, total bytes and free disk of a run."""
    from extractor.commands import estimate as command

    _end(command.run(_load(run_toml, overrides), out=_output(as_json=as_json)))


@app.command()
def verify(
    folder: OutputFolder,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and headers only.")] = False,
    sample: Annotated[int | None, typer.Option(min=1, help="Recompute so many stored samples.")] = None,
    against: Annotated[str | None, typer.Option(help="What recomputes them: transformers.")] = None,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = 0,
    model_path: Annotated[Path | None, typer.Option(help="Model folder, when it has moved.")] = None,
    as_json: Json = False,
) -> None:
    """Check every shard; with --against, recompute samples and compare."""
    from extractor.commands import verify as command

    if against not in (None, "transformers"):
        raise ConfigError(f"--against {against}: unknown", remedy="use --against transformers")
    _end(
        command.run(
            folder,
            sample=sample,
            against="transformers" if against else None,
            seed=seed,
            quick=quick,
            model_folder=model_path,
            out=_output(as_json=as_json),
        )
    )


@app.command()
def export(
    folder: OutputFolder,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    *,
    layout: Annotated[str, typer.Option(help="Layout to write: speculators-v1.")],
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Export what is there, although samples are missing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a data set into the layout a trainer reads."""
    from extractor.commands import export as command

    _end(
        command.run(
            folder,
            layout=layout,
            target=target,
            allow_incomplete=allow_incomplete,
            out=_output(as_json=as_json),
        )
    )


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tapdeck {release.version()}")
        raise typer.Exit


@app.command()
def start(
    run_toml: RunToml,
    *,
    overrides: Set = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the supervisor is there.")] = False,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", help="Supervise in this process, for batch systems and containers."),
    ] = False,
    deadline: Annotated[
        float, typer.Option(min=1.0, help="With --foreground: seconds from SIGTERM to the end.")
    ] = 25.0,
    as_json: Json = False,
) -> None:
    """Start a run, or go on with it, under a supervisor that outlives this terminal; opens the console."""
    if detach and foreground:
        raise ConfigError("--detach and --foreground exclude each other", remedy="use one of them")
    from extractor.commands import start as command

    config, out = _load(run_toml, overrides), _output(as_json=as_json)
    if foreground:
        _end(command.run(config, mode="foreground", deadline_s=deadline, out=out))
        return
    _end(command.run(config, mode="detach", deadline_s=deadline, out=out))
    if detach or as_json:
        return
    why_not = no_console()
    if why_not is not None:
        out.note(f"{why_not}; the run goes on without it, as with --detach")
        return
    from console.app import run_console
    from extractor.folders import RunFolder, run_folder_of

    _end(run_console(RunFolder(run_folder_of(Path(config.output.dir)))))


@app.callback()
def _root(
    context: typer.Context,
    *,
    # By callback, since the body of this function is not reached before a verb's flags are read.
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    why_not = no_console()
    if why_not is not None:
        typer.echo(context.get_help())
        typer.echo(f"tapdeck: {why_not}; name a verb", err=True)
        return
    from console.app import run_console

    _end(run_console(None))


def main() -> None:
    """Entry point. Ends the process with the exit code of the verb."""
    for stream in (sys.stdout, sys.stderr):
        # Text is data: a terminal that cannot show a character gets its escape, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except TapdeckError as error:
        typer.echo(_safe(f"tapdeck: {error}"), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # noqa: BLE001 - the top of the command line: nothing may end in a bare traceback
        traceback.print_exc()
        typer.echo("tapdeck: this should not have happened; please report the lines above", err=True)
        sys.exit(1)


def _safe(text: str) -> str:
    """Text for a terminal: it may quote names and answers from outside."""
    from console.widgets.lines import visible

    return "\n".join(visible(line) for line in text.split("\n"))


def _output(*, as_json: bool) -> Any:
    from extractor.commands.output import Output

    return Output(as_json=as_json)


def _end(exit_code: int) -> None:
    if exit_code:
        raise typer.Exit(exit_code)


def _load(
    path: Path | None, overrides: Sequence[str] | None, flags: dict[str, Any] | None = None
) -> RunConfig:
    """The configuration of run.toml, `--set` and flags; later ones win."""
    from extractor import config

    return config.load(path, overrides or (), flags or {})


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--layer-ids {text!r}: expected numbers, as in 2,14,26") from None


Verbs(lambda as_json: _output(as_json=as_json)).add_to(app)

if __name__ == "__main__":
    main()
