"""Work of a run that needs libraries the supervisor must not load: preparing it, and writing its lists at the end.

Each task is a process of its own (`extractor.commands.tasks`), in a session of its own, tied to the
supervisor by a lifeline as the ranks are. It speaks in JSON lines on stdout; stderr goes to a log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

import msgspec

from extractor.errors import EngineError, TapdeckError
from extractor.supervisor import prepared_run
from extractor.supervisor.prepared_run import Concluded, Conclusion, Note, Prepared, TaskFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extractor.folders import RunFolder

MODULE = "extractor.commands.tasks"
LINE_LIMIT_BYTES = 1 << 20


class Tasks(Protocol):
    """What the supervisor has done elsewhere."""

    async def prepare(self, on_note: Callable[[str], None]) -> None:
        """Reads data and model folder, checks, plans, and leaves `job.json`.

        Raises:
            TapdeckError: the run is refused.
        """

    async def conclude(self, on_note: Callable[[str], None]) -> Conclusion:
        """Writes the lists of the data set from what is on the disk.

        Raises:
            TapdeckError: the data set cannot be read or written.
        """


class ProcessTasks:
    """Tasks as child processes."""

    def __init__(
        self, folder: RunFolder, *, environment: Mapping[str, str], keep_fds: Sequence[int] = ()
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._keep_fds = tuple(keep_fds)

    async def prepare(self, on_note: Callable[[str], None]) -> None:
        """See `Tasks`."""
        last = await self._run("prepare", on_note)
        if not isinstance(last, Prepared):
            raise self._silent("prepare")

    async def conclude(self, on_note: Callable[[str], None]) -> Conclusion:
        """See `Tasks`."""
        last = await self._run("conclude", on_note)
        if not isinstance(last, Concluded):
            raise self._silent("conclude")
        return last.conclusion

    async def _run(self, task: str, on_note: Callable[[str], None]) -> object:
        """The last message of a task; its process is gone when this returns, also when cancelled."""
        lifeline_read, lifeline_write = os.pipe()
        try:
            return await self._speak(task, on_note, lifeline_read)
        finally:
            os.close(lifeline_write)

    async def _speak(self, task: str, on_note: Callable[[str], None], lifeline_read: int) -> object:
        last: object = None
        try:
            with self._folder.log(task).open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    MODULE,
                    task,
                    str(self._folder.path),
                    env={**self._environment, "TAPDECK_LIFELINE_FD": str(lifeline_read)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=LINE_LIMIT_BYTES,
                    pass_fds=(lifeline_read, *self._keep_fds),
                    start_new_session=True,
                )
        finally:
            os.close(lifeline_read)
        try:
            if process.stdout is not None:
                async for line in process.stdout:
                    last = _message(line)
                    if isinstance(last, Note):
                        on_note(last.text)
            await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if isinstance(last, TaskFailed):
            raise TapdeckError(last.message, remedy=last.remedy, code=last.code, exit_code=last.exit_code)
        return last

    def _silent(self, task: str) -> EngineError:
        log = self._folder.log(task)
        tail = log.read_bytes().decode(errors="replace").splitlines()[-5:]
        return EngineError(
            f"the process that should {task} the run ended without a word\n" + "\n".join(tail),
            remedy=f"see {log}",
            code="task_died",
        )


def _message(line: bytes) -> object:
    try:
        return prepared_run.decode_message(line)
    except msgspec.DecodeError:
        # Some library printed: it is a note like any other.
        return Note(line.decode(errors="replace").rstrip("\n"))
