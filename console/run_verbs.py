"""The verbs on a run and their flags: look, act, wait, read, attach. `console.cli` puts them beside those on data.

Only flags and their checks are here; what a verb does is in `console.control`, imported when it is called. RUN is
a run's name, a unique beginning of it, its folder or its output; without it the only run that is running is meant.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extractor.errors import ConfigError, TapdeckError
from extractor.protocol.states import Action, Depth

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.folders import RunFolder

Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Name, run folder or output; the only running one if left out."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; everything else on stderr.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it has come about.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]


@dataclass(frozen=True)
class Verbs:
    """The verbs, given how they print.

    Attributes:
        output: makes what a verb prints through; the argument says whether JSON was asked for.
    """

    output: Callable[[bool], Any]

    def add_to(self, app: typer.Typer) -> None:
        """Adds them to the command line."""
        for verb in (
            self.attach,
            self.status,
            self.wait,
            self.pause,
            self.resume,
            self.stop,
            self.kill,
            self.logs,
            self.events,
        ):
            app.command()(verb)
        app.command(name="list")(self.list_)

    def attach(
        self,
        name: Run = None,
        *,
        read_only: Annotated[
            bool, typer.Option("--read-only", help="Look only; the supervisor refuses the rest.")
        ] = False,
        low_bandwidth: Annotated[
            bool, typer.Option("--low-bandwidth", help="Half as many bytes over a slow line.")
        ] = False,
    ) -> None:
        """Open the console on a run, live or ended."""
        run = _resolve(name)
        from console.app import run_console

        _end(run_console(run, read_only=read_only, low_bandwidth=low_bandwidth))

    def list_(self, *, as_json: Json = False) -> None:
        """All runs: state, progress, and whether they are running."""
        from console import control

        _end(control.list_runs(out=self.output(as_json), ascii_only=_ascii()))

    def status(
        self,
        name: Run = None,
        *,
        as_json: Json = False,
        watch: Annotated[
            bool, typer.Option("--watch", help="Print what changes, line by line, until the run ends.")
        ] = False,
    ) -> None:
        """What a run is doing and why, how far it is, and when it will be done."""
        from console import control

        run, out = _resolve(name), self.output(as_json)
        if watch:
            _end(control.interruptible(lambda: control.watch(run, out=out, ascii_only=_ascii())))
        else:
            _end(control.status(run, out=out, ascii_only=_ascii()))

    def wait(
        self,
        name: Run = None,
        *,
        timeout: Annotated[
            float | None, typer.Option(min=0.0, help="Give up after so many seconds, with exit code 75.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Return when a run has ended: 0 finished, 7 failed, 1 stopped. A pause is waited out."""
        from console import control

        run, out = _resolve(name), self.output(as_json)
        _end(
            control.interruptible(lambda: control.wait(run, timeout_s=timeout, out=out, ascii_only=_ascii()))
        )

    def pause(
        self,
        name: Run = None,
        *,
        depth: Annotated[
            Depth,
            typer.Option(
                help="hold keeps everything loaded, park frees GPU memory, unload frees everything."
            ),
        ] = Depth.HOLD,
        wait: Wait = False,
        as_json: Json = False,
    ) -> None:
        """Pause a run; nothing is lost, and it stays paused until somebody resumes it."""
        self._act(name, Action.PAUSE, depth=depth, wait_for_it=wait, as_json=as_json)

    def resume(self, name: Run = None, *, wait: Wait = False, as_json: Json = False) -> None:
        """Go on with a paused run."""
        self._act(name, Action.RESUME, wait_for_it=wait, as_json=as_json)

    def stop(self, name: Run = None, *, wait: Wait = False, as_json: Json = False) -> None:
        """End a run after the shard in hand; `tapdeck start` goes on with it later."""
        self._act(name, Action.STOP, wait_for_it=wait, as_json=as_json)

    def kill(
        self,
        name: Run = None,
        *,
        yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the run's name.")] = False,
        wait: Wait = False,
        as_json: Json = False,
    ) -> None:
        """End a run at once; the shard in hand is computed anew when it is started again."""
        from console.client import supervisor_of

        run = _resolve(name)
        # Without a supervisor there is nothing to ask about; the answer is then that it is not running.
        if not yes and supervisor_of(run) is not None:
            _confirm(run)
        self._act(str(run.path), Action.KILL, wait_for_it=wait, as_json=as_json)

    def logs(
        self,
        name: Run = None,
        source: Annotated[
            str | None, typer.Argument(metavar="SOURCE", help="supervisor, replica-0, ...; all if left out.")
        ] = None,
        *,
        follow: Follow = False,
        lines: Annotated[int, typer.Option("-n", min=0, help="So many lines of each log.")] = 40,
    ) -> None:
        """The logs of a run's processes, also when it has ended."""
        from console import control

        run, out = _resolve(name), self.output(False)
        _end(
            control.interruptible(lambda: control.logs(run, source, num_lines=lines, follow=follow, out=out))
        )

    def events(
        self,
        name: Run = None,
        *,
        follow: Follow = False,
        lines: Annotated[
            int | None, typer.Option("-n", min=0, help="The last so many; all if left out.")
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="The lines of events.jsonl as they are: one JSON object each.")
        ] = False,
    ) -> None:
        """What happened to a run and who did it, also when it has ended."""
        from console import control

        run, out = _resolve(name), self.output(False)
        _end(
            control.interruptible(
                lambda: control.events(
                    run, num_lines=lines, follow=follow, raw=as_json, out=out, ascii_only=_ascii()
                )
            )
        )

    def _act(
        self,
        name: str | None,
        action: Action,
        *,
        depth: Depth | None = None,
        wait_for_it: bool,
        as_json: bool,
    ) -> None:
        from console import control

        run, out = _resolve(name), self.output(as_json)
        _end(
            control.interruptible(
                lambda: control.act(
                    run, action, depth=depth, wait_for_it=wait_for_it, out=out, ascii_only=_ascii()
                )
            )
        )


def no_console() -> str | None:
    """Why the console cannot be shown on this terminal, in words; None when it can."""
    from console import terminal

    return terminal.refusal(os.environ, are_terminals=terminal.are_terminals())


def _resolve(name: str | None) -> RunFolder:
    from console import control

    return control.resolve(name)


def _ascii() -> bool:
    from console import terminal

    return terminal.wants_ascii(os.environ)


def _confirm(run: RunFolder) -> None:
    """Asks for the run's name.

    Raises:
        ConfigError: nobody can be asked.
        TapdeckError: the answer was another one.
    """
    from console.widgets.lines import visible

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            f"kill asks for the name of the run, and there is no terminal to ask on; {run.name} goes on",
            remedy="add --yes",
        )
    answer = typer.prompt(
        f"kill {visible(run.name)}: type its name", default="", show_default=False, err=True
    )
    if answer.strip() != run.name:
        raise TapdeckError(f"that is not its name; {run.name} goes on", code="not_confirmed")


def _end(exit_code: int) -> None:
    if exit_code:
        raise typer.Exit(exit_code)
