"""What the console can reach besides one run: the list of runs, and tapdeck's own commands.

`Desk` is the seam for tests. The real one looks into the run folders, asks live supervisors, and starts
`tapdeck` verbs as processes: the console itself prepares no data and starts no supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from console.feed import LiveFeed
from extractor.errors import NoRunError, TapdeckError
from extractor.folders import RunFolder, all_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from console.feed import Feed
    from extractor.protocol.api import Snapshot

ASK_TIMEOUT_S = 2.0
LINE_LIMIT_BYTES = 1 << 22


@dataclass(frozen=True)
class RunRow:
    """One run in the list.

    Attributes:
        path: its run folder.
        is_live: whether it has a supervisor.
        snapshot: the last one; None if it never got so far.
    """

    name: str
    path: Path
    is_live: bool
    snapshot: Snapshot | None


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: 0 is well.
        output: what it wrote on stdout.
        errors: what it wrote on stderr, line by line.
    """

    exit_code: int
    output: bytes
    errors: tuple[str, ...]


class Desk(Protocol):
    """Everything that is not the one run on the screen."""

    async def runs(self) -> list[RunRow]:
        """All runs of this user, live ones first, then the latest first."""

    def open(self, path: Path) -> Feed:
        """A feed of the run in a run folder."""

    async def command(self, arguments: Sequence[str], tell: Callable[[str], None]) -> Outcome:
        """Runs a verb of tapdeck; tells the lines of its stderr as they come. Ended with its task."""


class RealDesk:
    """The runs of this user on this machine.

    Args:
        read_only: whether feeds may only look.
        interval_s: in which feeds are to speak.
    """

    def __init__(self, *, read_only: bool, interval_s: float) -> None:
        self._read_only = read_only
        self._interval_s = interval_s

    async def runs(self) -> list[RunRow]:
        """Reads the folders, asks the live supervisors."""
        folders = await asyncio.to_thread(all_runs)
        rows = await asyncio.gather(*(self._row(run) for run in folders))
        return sorted(rows, key=lambda row: (not row.is_live, -_last_word(row), row.name))

    def open(self, path: Path) -> Feed:
        """Follows a run."""
        return LiveFeed(RunFolder(path), read_only=self._read_only, interval_s=self._interval_s)

    async def _row(self, run: RunFolder) -> RunRow:
        from console.client import Client, last_snapshot

        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), Client(run, read_only=True) as client:
                return RunRow(run.name, run.path, is_live=True, snapshot=await client.snapshot())
        except NoRunError:
            is_live = False
        except (TapdeckError, TimeoutError):
            is_live = True
        return RunRow(
            run.name, run.path, is_live=is_live, snapshot=await asyncio.to_thread(last_snapshot, run)
        )

    async def command(self, arguments: Sequence[str], tell: Callable[[str], None]) -> Outcome:
        """Runs `tapdeck ARGUMENTS` in this interpreter's environment."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "console.cli",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
        )
        if process.stdout is None or process.stderr is None:
            raise TapdeckError("the command has no pipes")
        try:
            output, errors = await asyncio.gather(process.stdout.read(), _lines(process.stderr, tell))
            return Outcome(await process.wait(), output, tuple(errors))
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()


async def _lines(stream: asyncio.StreamReader, tell: Callable[[str], None]) -> list[str]:
    found = []
    async for raw in stream:
        text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        found.append(text)
        # A progress line rewrites itself with carriage returns; what it says last counts.
        tell(text.rpartition("\r")[2])
    return found


def _last_word(row: RunRow) -> float:
    return row.snapshot.time_utc if row.snapshot else 0.0
