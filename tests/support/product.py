"""The product as its users meet it: real processes of `tapdeck`, with folders of their own.

Owns the processes it starts and ends them all, workers included. Waiting is always for a condition, with a
deadline, and a wait that fails says what was last seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = [sys.executable, "-m", "console.cli"]
START_S = 120.0
"""Longest start of a run on a busy machine: imports, tokenizer, SGLang, model."""
POLL_S = 0.002


def wait_until(
    condition: Callable[[], Any], what: str, *, state: Callable[[], Any], deadline_s: float = START_S
) -> Any:
    """The first true value of `condition`; fails with the last state when the deadline passes."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"no {what} within {deadline_s:.0f} s; last state:\n{state()}")
        pause.wait(POLL_S)
    return value


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit code (negative: the signal that killed it) and what it printed."""

    args: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; anything else there is an error."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        assert self.stdout.count("\n") == 1
        return value

    def require(self, code: int = 0) -> Finished:
        """Itself, if it ended with `code`."""
        assert self.code == code, self
        return self

    def __str__(self) -> str:
        """Everything a person needs who reads a failed test."""
        return (
            f"tapdeck {' '.join(self.args)}\nended with {self.code} after {self.seconds:.1f} s\n"
            f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"
        )


@dataclass
class Command:
    """A command that runs. Its output goes to files, so that it never waits for a reader."""

    args: tuple[str, ...]
    process: subprocess.Popen[bytes]
    stdout_file: Path
    stderr_file: Path
    started_at: float = field(default_factory=time.monotonic)

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self.stdout_file.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """Its diagnostics so far."""
        return self.stderr_file.read_text(encoding="utf-8")

    @property
    def worker_pid(self) -> int | None:
        """The worker it has started, as it said itself."""
        found = re.search(r"^worker: pid (\d+), ", self.stderr, re.MULTILINE)
        return None if found is None else int(found[1])

    def wait_for(self, condition: Callable[[], Any], what: str, deadline_s: float = START_S) -> Any:
        """The first true value of `condition`; fails at once when the command ends before."""

        def seen() -> Any:
            has_ended = self.process.poll() is not None
            value = condition()
            assert value or not has_ended, f"it ended before {what}:\n{self.wait()}"
            return value

        return wait_until(seen, what, state=lambda: f"{self.stdout}\n{self.stderr}", deadline_s=deadline_s)

    def wait_for_text(self, text: str) -> None:
        """Returns when its diagnostics hold `text`."""
        self.wait_for(lambda: text in self.stderr, f"{text!r} on stderr")

    def wait(self, deadline_s: float = START_S) -> Finished:
        """Waits for its end."""
        wait_until(
            lambda: self.process.poll() is not None,
            "end of the command",
            state=lambda: self.stderr,
            deadline_s=deadline_s,
        )
        seconds = time.monotonic() - self.started_at
        return Finished(self.args, self.process.returncode, self.stdout, self.stderr, seconds)


class Tapdeck:
    """An installation: the commands of one user, with state and cache folders of their own.

    Attributes:
        home: where state, cache and the output of commands are.
        environment: of every command.
    """

    def __init__(self, home: Path, *, cache: Path | None = None, **environment: str) -> None:
        self.home = home
        self.state = home / "state"
        self.cache = cache or home / "cache"
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(self.cache),
            # What a machine without an installation has on its path stays there.
            "PYTHONPATH": ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **environment,
        }
        self._console = home / "console"
        self._console.mkdir(parents=True)
        self._commands: list[Command] = []

    def start(self, *args: str | Path, prefix: tuple[str, ...] = ()) -> Command:
        """Starts a verb and returns at once."""
        texts = tuple(str(arg) for arg in args)
        base = self._console / str(len(self._commands))
        out, err = base.with_suffix(".out"), base.with_suffix(".err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*prefix, *COMMAND_LINE, *texts],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.environment,
                cwd=self.home,
            )
        command = Command(texts, process, out, err)
        self._commands.append(command)
        return command

    def run(self, *args: str | Path, deadline_s: float = START_S, prefix: tuple[str, ...] = ()) -> Finished:
        """Runs a verb to its end."""
        return self.start(*args, prefix=prefix).wait(deadline_s)

    def runs(self) -> list[Path]:
        """The run folders."""
        return sorted((self.state / "tapdeck" / "runs").glob("*"))

    def events(self, output: Path) -> list[dict[str, Any]]:
        """The events of the runs into an output folder; a line that is being written does not count."""
        folders = [folder for folder in self.runs() if folder.name.startswith(f"{output.name}-")]
        lines = [line for folder in folders for line in _lines(folder / "events.jsonl")]
        return [json.loads(line) for line in lines]

    def processes(self) -> list[int]:
        """Pids of all its processes: what it started, and what they started. A zombie has ended."""
        mark = f"XDG_STATE_HOME={self.state}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def require_no_process(self, deadline_s: float = 15.0) -> None:
        """Fails when something it started still runs; helpers of Python get a moment to notice."""
        wait_until(
            lambda: not self.processes(),
            "end of all processes",
            state=lambda: [_describe(pid) for pid in self.processes()],
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """Ends what a failed test left behind."""
        for pid in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for command in self._commands:
            command.process.wait()


def _lines(path: Path) -> list[bytes]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return text[: text.rfind(b"\n") + 1].splitlines()


def _describe(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"{pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    return f"{pid} gone"
