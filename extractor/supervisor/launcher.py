"""Starts the processes of a replica on this machine.

The supervisor knows processes only through `Launcher`, so that another one (several machines, a fake in a
test) can take its place. A rank runs in a session of its own: a Ctrl-C in the terminal does not reach it,
and closing the terminal does not end it. It holds the read end of a pipe whose other end only this process
has, so that it learns of our death whatever the cause.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""

    def wait(self, timeout_s: float) -> int | None:
        """As `poll`, after waiting up to `timeout_s`."""

    def kill(self, *, wait: bool = True) -> None:
        """Ends it at once. Does nothing when it has ended.

        Args:
            wait: return when it is gone; freeing the memory of many GPUs takes seconds.
        """


class Launcher(Protocol):
    """Starts ranks."""

    def start(
        self,
        spec: Path,
        *,
        environment: Mapping[str, str],
        log: Path,
        keep_fds: Sequence[int],
        rank: int = 0,
    ) -> RankProcess:
        """Starts one rank.

        Args:
            spec: file with its `EngineSpec`.
            environment: its whole environment.
            log: its stdout and stderr are appended here.
            keep_fds: descriptors it inherits (the output's lease).
            rank: its number within the replica.
        """


class LocalLauncher:
    """Ranks as child processes of this one."""

    def __init__(self, module: str = "extractor.engine.worker") -> None:
        self._module = module

    def start(
        self,
        spec: Path,
        *,
        environment: Mapping[str, str],
        log: Path,
        keep_fds: Sequence[int],
        rank: int = 0,
    ) -> RankProcess:
        """See `Launcher`."""
        lifeline_read, lifeline_write = os.pipe()
        try:
            with log.open("ab") as log_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(spec), str(rank)],
                    env={**environment, "TAPDECK_LIFELINE_FD": str(lifeline_read)},
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lifeline_read, *keep_fds),
                    start_new_session=True,
                )
        except BaseException:
            os.close(lifeline_write)
            raise
        finally:
            os.close(lifeline_read)
        return _LocalRank(process, lifeline_write)


class _LocalRank:
    """A child process and our end of its lifeline."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline_fd: int) -> None:
        self._process = process
        self._lifeline_fd: int | None = lifeline_fd

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        self._end_helpers()
        code = self._process.poll()
        if code is not None:
            self._drop_lifeline()
        return code

    def wait(self, timeout_s: float) -> int | None:
        # Not `Popen.wait`, which would reap the process before its helpers are ended.
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._process.pid)
            try:
                select.select([fd], [], [], timeout_s)
            finally:
                os.close(fd)
        return self.poll()

    def kill(self, *, wait: bool = True) -> None:
        if self.poll() is None:
            # Its own session: this ends helpers that SGLang may have forked, and nothing else.
            os.killpg(self._process.pid, signal.SIGKILL)
            if wait:
                self._process.wait()
                self._drop_lifeline()

    def _end_helpers(self) -> None:
        """Ends what a process that has ended left in its session: such helpers keep GPU memory for ever.

        Before it is reaped, since until then nobody else can have its number.
        """
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _drop_lifeline(self) -> None:
        # Two threads may end a rank: who takes the descriptor closes it.
        fd, self._lifeline_fd = self._lifeline_fd, None
        if fd is not None:
            os.close(fd)
