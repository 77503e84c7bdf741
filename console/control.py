"""What the verbs on a run do: look at it, act on it, wait for it, read its files.

Each function is one verb, blocks until it is done, and returns its exit code. It knows a run from its supervisor
(`console.client`) or, when there is none, from its folder; which of the two is always said. It prints through
the `Out` it is given, decides nothing about a run, and never repeats an action.

Invariants: with JSON, stdout has JSON and nothing else. Text from outside reaches a terminal with its control
characters visible; a pipe gets the lines of log files and events as they are.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from console import report, words
from console.tail import GrowingFile
from console.widgets.lines import visible
from extractor.errors import ConfigError, ConflictError, NoRunError, TapdeckError, UnreachableError
from extractor.folders import all_runs, find_run
from extractor.processes import RealMachine
from extractor.protocol.states import Action, Depth, State, deepest
from extractor.quantities import duration_words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from extractor.folders import RunFolder
    from extractor.protocol.api import ActionResult, Snapshot, StateInfo

WATCH_S = 2.0
"""A report is printed again after so long at the earliest."""
FOLLOW_S = 0.25
"""How often a followed file is looked at."""
LEAVE_S = 10.0
"""How long a supervisor may take to exit after its last word."""
NOT_RUNNING = 3
FAILED = 7
TRY_AGAIN = 75
_DEPTHS = list(Depth)


class Out(Protocol):
    """Where a verb prints; `extractor.commands.output.Output` is one."""

    as_json: bool
    stdout: TextIO

    def line(self, text: str = "") -> None:
        """A line of the result for people; a diagnostic when JSON was asked for."""

    def note(self, text: str) -> None:
        """A diagnostic."""

    def result(self, value: Mapping[str, Any]) -> None:
        """The result for programs; nothing is printed unless JSON was asked for."""


def resolve(name: str | None) -> RunFolder:
    """The run that is meant; without a name the only one that is running.

    Raises:
        NoRunError: no run is known by that name.
        ConfigError: no name, and not exactly one run is running.
    """
    if name is not None:
        return find_run(name)
    from console.client import supervisor_of

    known = all_runs()
    live = [run for run in known if supervisor_of(run) is not None]
    if len(live) == 1:
        return live[0]
    names = ", ".join(run.name for run in (live or known)[:8]) or "none; tapdeck start RUN.toml begins one"
    raise ConfigError(
        f"RUN is missing, and {len(live) or 'no'} runs are running", remedy=f"name one of: {names}"
    )


# -- looking --------------------------------------------------------------------------------------------


def list_runs(*, out: Out, ascii_only: bool) -> int:
    """All runs of this user, live ones first."""
    from console.desk import RealDesk

    found = asyncio.run(RealDesk(read_only=True, interval_s=WATCH_S).runs())
    rows = [report.Row(row.name, str(row.path), row.is_live, row.snapshot) for row in found]
    lines = report.table(rows, _style(ascii_only)) if rows else ["no runs; tapdeck start RUN.toml begins one"]
    _print(out, lines, {"runs": [_row_json(row) for row in rows]})
    return 0


def status(run: RunFolder, *, out: Out, ascii_only: bool) -> int:
    """The run as it is now, or as it was last."""
    from console.client import last_snapshot

    try:
        snapshot: Snapshot | None = asyncio.run(_snapshot(run))
        is_live = True
    except NoRunError:
        snapshot, is_live = last_snapshot(run), False
    _print_status(run, snapshot, is_live=is_live, out=out, ascii_only=ascii_only)
    return 0 if is_live else NOT_RUNNING


def watch(run: RunFolder, *, out: Out, ascii_only: bool) -> int:
    """The run as it is now, then every line of that report that changes, until the run ends."""
    return asyncio.run(_watch(run, out=out, ascii_only=ascii_only))


async def _watch(run: RunFolder, *, out: Out, ascii_only: bool) -> int:
    from console.client import last_snapshot

    known: list[str] = []
    last: Snapshot | None = None
    async for snapshot in _live(run, interval_s=WATCH_S):
        lines = report.status(snapshot, _style(ascii_only), is_live=True)
        news = report.changed(known, lines)
        if news:
            _print(out, news, _status_json(run, snapshot, is_live=True))
        known, last = lines, snapshot
    if last is None or not last.state.state.is_terminal:
        last = await asyncio.to_thread(last_snapshot, run)
        _print_status(run, last, is_live=False, out=out, ascii_only=ascii_only)
        return NOT_RUNNING
    return 0


def wait(run: RunFolder, *, timeout_s: float | None, out: Out, ascii_only: bool) -> int:
    """Returns when the run has ended: 0 finished, 7 failed, 1 stopped; 75 when that takes too long."""
    try:
        snapshot = asyncio.run(_end_of(run, timeout_s, out, ascii_only=ascii_only))
    except TimeoutError:
        raise TapdeckError(
            f"{run.name} has not ended within {duration_words(timeout_s or 0.0)}",
            remedy="wait again; the run itself goes on",
            code="timeout",
            exit_code=TRY_AGAIN,
        ) from None
    info = snapshot.state
    out.line(_state_line(run, info, ascii_only=ascii_only))
    out.result({"run": run.name, "folder": str(run.path), "state": info.state, "why": info.why})
    return {State.FINISHED: 0, State.FAILED: FAILED}.get(info.state, 1)


async def _end_of(run: RunFolder, timeout_s: float | None, out: Out, *, ascii_only: bool) -> Snapshot:
    from console.client import last_snapshot

    known: StateInfo | None = None
    async with asyncio.timeout(timeout_s):
        async for snapshot in _live(run):
            info = snapshot.state
            if not info.state.is_terminal and (known is None or known.state != info.state):
                out.note(_state_line(run, info, ascii_only=ascii_only))
            known = info
    last = await asyncio.to_thread(last_snapshot, run)
    if last is not None and last.state.state.is_terminal:
        return last
    raise _not_running(run, last)


# -- acting ---------------------------------------------------------------------------------------------


def act(
    run: RunFolder,
    action: Action,
    *,
    depth: Depth | None = None,
    wait_for_it: bool = False,
    out: Out,
    ascii_only: bool,
) -> int:
    """Asks the supervisor once and prints what it says; with `wait_for_it` returns when it has come about."""
    result = asyncio.run(_act(run, action, depth, wait_for_it=wait_for_it, out=out, ascii_only=ascii_only))
    out.result({"run": run.name, **result})
    return 0


async def _act(
    run: RunFolder, action: Action, depth: Depth | None, *, wait_for_it: bool, out: Out, ascii_only: bool
) -> dict[str, Any]:
    from console.client import Client

    async with Client(run) as client:
        result: ActionResult = await client.act(action, depth=depth)
    out.line(visible(result.message, ascii_only=ascii_only))
    if not wait_for_it:
        return msgspec.to_builtins(result)  # type: ignore[no-any-return]  # a struct becomes a dict
    state = await _reached(run, action, depth or Depth.HOLD)
    out.line(f"the run is {state}")
    return {**msgspec.to_builtins(result), "state": state}


async def _reached(run: RunFolder, action: Action, depth: Depth) -> State:
    """Waits until an action has its effect; the state then."""
    from console.client import last_snapshot

    async for snapshot in _live(run):
        info = snapshot.state
        if info.state.is_terminal:
            continue
        if action == Action.PAUSE:
            in_force = deepest(info.pauses)
            if in_force is None or _DEPTHS.index(in_force) < _DEPTHS.index(depth):
                raise ConflictError(
                    f"{run.name}: the pause was lifted before it took effect; the run is {info.state}",
                    remedy=f"tapdeck events {run.name} shows who did that",
                )
            if info.state.is_paused and _depth_of(info.state) >= _DEPTHS.index(depth):
                return info.state
        elif action == Action.RESUME and (info.state == State.RUNNING or info.pauses):
            # What somebody else paused meanwhile, or a pause that only its own reason lifts, is for the caller to see.
            return info.state
    last = await asyncio.to_thread(last_snapshot, run)
    if last is None or not last.state.state.is_terminal:
        raise _not_running(run, last)
    if action in {Action.STOP, Action.KILL}:
        return last.state.state
    raise ConflictError(
        f"{run.name} is {last.state.state}: {last.state.why}", remedy="start it again to go on", code="ended"
    )


def _depth_of(state: State) -> int:
    return [State.HELD, State.PARKED, State.UNLOADED].index(state)


# -- reading --------------------------------------------------------------------------------------------


def logs(run: RunFolder, source: str | None, *, num_lines: int, follow: bool, out: Out) -> int:
    """The end of the run's log files, or of one of them, and what is added while its supervisor lives.

    Raises:
        ConfigError: there is no such log.
    """
    known = run.logs()
    if source is not None and source not in known:
        raise ConfigError(
            f"{run.name} has no log {source}", remedy=f"use one of: {', '.join(known) or 'none yet'}"
        )
    shown = ""

    def show(name: str, line: str) -> None:
        nonlocal shown
        if source is None and name != shown:
            out.line(f"==> {name} <==")
        shown = name
        out.line(visible(line.expandtabs()) if out.stdout.isatty() else line)

    def sources() -> list[str]:
        return [source] if source is not None else run.logs()

    _print_files(run, sources, run.log, show, num_lines=num_lines, follow=follow)
    return 0


def events(
    run: RunFolder, *, num_lines: int | None, follow: bool, raw: bool, out: Out, ascii_only: bool
) -> int:
    """What happened to the run; `raw`: the lines of events.jsonl as they are."""
    style = _style(ascii_only)

    def show(_: str, line: str) -> None:
        out.line(line if raw else report.event(line, style))

    _print_files(run, lambda: ["events"], lambda _: run.events, show, num_lines=num_lines, follow=follow)
    return 0


def _print_files(
    run: RunFolder,
    sources: Callable[[], Sequence[str]],
    path_of: Callable[[str], Any],
    show: Callable[[str, str], None],
    *,
    num_lines: int | None,
    follow: bool,
) -> None:
    """The last lines of some files, then what is added to them, or to further ones, until the run has ended."""
    from console.client import supervisor_of

    files: dict[str, GrowingFile] = {}
    pause = threading.Event()
    while True:
        # Asked before reading: what was written before the end is not missed.
        is_last = not follow or supervisor_of(run) is None
        for name in sources():
            if name not in files:
                files[name] = GrowingFile(path_of(name))
                lines = files[name].last(num_lines)
            else:
                lines = files[name].new()
            for line in [*lines, *(files[name].rest() if is_last else [])]:
                show(name, line)
        if is_last:
            return
        pause.wait(FOLLOW_S)


# -- shared ---------------------------------------------------------------------------------------------


def _style(ascii_only: bool) -> report.Style:
    return report.Style(now_utc=RealMachine().now_utc(), ascii_only=ascii_only)


async def _snapshot(run: RunFolder) -> Snapshot:
    from console.client import Client

    async with Client(run, read_only=True) as client:
        return await client.snapshot()


async def _live(run: RunFolder, *, interval_s: float = 1.0) -> AsyncIterator[Snapshot]:
    """What the supervisor says, until it is gone; nothing when there is none.

    Raises:
        UnreachableError: it is there and does not answer.
    """
    from console.client import Client

    lost: UnreachableError | None = None
    try:
        async with Client(run, read_only=True) as client:
            async for snapshot in client.stream(interval_s=interval_s):
                yield snapshot
    except NoRunError:
        return
    except UnreachableError as error:
        lost = error
    # Its last word is not its end: whoever waits for it may start the run again, and that must not be refused.
    is_gone = await asyncio.to_thread(_wait_gone, run)
    if lost is not None and not is_gone:
        raise lost


def _wait_gone(run: RunFolder) -> bool:
    """Whether the supervisor's process has ended, after waiting for it. Blocking, up to `LEAVE_S`."""
    from console.client import supervisor_of

    pause = threading.Event()
    end = time.monotonic() + LEAVE_S
    while supervisor_of(run) is not None:
        if time.monotonic() > end:
            return False
        pause.wait(FOLLOW_S / 5)
    return True


def _not_running(run: RunFolder, last: Snapshot | None) -> NoRunError:
    state = (
        f"its last known state is {last.state.state}" if last else "it never got so far as to have a state"
    )
    return NoRunError(
        f"{run.name} is not running; {state}",
        remedy=f"tapdeck start {run.config} goes on with it; see tapdeck logs {run.name} supervisor",
        code="not_running",
    )


def _state_line(run: RunFolder, info: StateInfo, *, ascii_only: bool) -> str:
    why = f": {info.why}" if info.why else ""
    return visible(
        f"{run.name}  {words.state_words(info, ascii_only=ascii_only)}{why}", ascii_only=ascii_only
    )


def _print_status(
    run: RunFolder, snapshot: Snapshot | None, *, is_live: bool, out: Out, ascii_only: bool
) -> None:
    if snapshot is None:
        nothing = f"{run.name}  not running; it never got so far as to have a state"
        lines = [visible(nothing, ascii_only=ascii_only)]
    else:
        lines = report.status(snapshot, _style(ascii_only), is_live=is_live)
    _print(out, lines, _status_json(run, snapshot, is_live=is_live))


def _print(out: Out, lines: Sequence[str], value: Mapping[str, Any]) -> None:
    """The same for people or for programs: whoever asked for JSON needs no report on stderr."""
    if out.as_json:
        out.result(value)
        return
    for line in lines:
        out.line(line)


def _status_json(run: RunFolder, snapshot: Snapshot | None, *, is_live: bool) -> dict[str, Any]:
    supervisor = {"supervisor": report.supervisor_words(is_live=is_live)}
    if snapshot is None:
        return {"run": {"name": run.name, "folder": str(run.path)}, **supervisor}
    return {**msgspec.to_builtins(snapshot, str_keys=True), **supervisor}


def _row_json(row: report.Row) -> dict[str, Any]:
    last = row.snapshot
    return {
        "name": row.name,
        "folder": row.folder,
        "supervisor": report.supervisor_words(is_live=row.is_live),
        "state": None if last is None else msgspec.to_builtins(last.state),
        "progress": None if last is None else msgspec.to_builtins(last.progress),
        "rates": None if last is None else msgspec.to_builtins(last.rates),
        "output": None if last is None else last.run.output,
        "time_utc": None if last is None else last.time_utc,
    }


def interruptible(verb: Callable[[], int]) -> int:
    """Runs a verb that is ended by hand, as a rule; returns 130 for Ctrl-C."""
    try:
        return verb()
    except KeyboardInterrupt:
        sys.stdout.flush()
        return 130
