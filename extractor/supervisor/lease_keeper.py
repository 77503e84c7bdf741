"""The supervisor's hold on its output folder: taken at the start, kept alive, given up at the end.

Owns the lease and the task of its heartbeats. A heartbeat that cannot be written is told and tried again; a lease
that another run has taken, or that is gone, is lost, and nothing more may be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from extractor.errors import LeaseBusyError, LeaseError, TapdeckError
from extractor.store import lease
from extractor.supervisor.waiting import until_set

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from extractor.store.lease import Lease

HEARTBEAT_S = 10.0
LEASE_WAIT_S = 120.0
"""How long the ranks of a former supervisor may take to leave the output."""
LEASE_POLL_S = 0.5


class LeaseKeeper:
    """The lease of one output folder.

    Attributes:
        held: the lease; None before it is taken.
        is_lost: somebody else has it, or it is gone.
    """

    def __init__(
        self,
        output: Path,
        run: str,
        *,
        clock: Callable[[], float],
        on_lost: Callable[[LeaseError], None],
        note_once: Callable[[str], None],
    ) -> None:
        """Takes nothing yet.

        Args:
            output: the output folder.
            run: name of the run.
            clock: monotonic seconds.
            on_lost: called when the lease is lost; nothing may be written from then on.
            note_once: told of heartbeats that could not be written.
        """
        self.held: Lease | None = None
        self.is_lost = False
        self._output = output
        self._run = run
        self._clock = clock
        self._on_lost = on_lost
        self._note_once = note_once
        self._beats: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def take(self) -> None:
        """Takes the lease, unless the last worker of a former start still writes. Blocking.

        Raises:
            LeaseError: another run has it.
            TapdeckError: the folder cannot be written.
        """
        with contextlib.suppress(LeaseBusyError):
            self.held = lease.acquire(self._output, self._run)

    async def wait(self, is_wanted: Callable[[], bool], stop: asyncio.Event) -> None:
        """Waits until the last worker of a former start is gone, as long as the lease is wanted.

        Raises:
            LeaseError: another run has it, or the worker does not go.
        """
        end = self._clock() + LEASE_WAIT_S
        while self.held is None and is_wanted():
            # One look at a time: a thread that waits could take the lease when nobody wants it any more.
            try:
                self.held = await asyncio.to_thread(lease.acquire, self._output, self._run)
            except LeaseBusyError:
                if self._clock() >= end:
                    raise
                await until_set(stop, LEASE_POLL_S)

    def begin_beats(self) -> None:
        """Says from now on that we live: preparing alone takes longer than a lease lasts."""
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    async def add_worker(self, pid: int) -> None:
        """Names a process that may outlive us.

        Raises:
            LeaseError: the lease is lost.
            TapdeckError: it cannot be written, and there is no lock that would say the same.
        """
        held = self.held
        if held is None:
            return
        try:
            async with self._lock:
                await asyncio.to_thread(held.add_worker, pid)
        except LeaseError:
            raise
        except TapdeckError as error:
            # A full disk is no reason to end the run: the lock that the rank has inherited says the same.
            if held.lock_fd is None:
                raise
            self._note_once(error.message)

    async def release(self, *, remove_if_empty: bool) -> None:
        """Gives the folder up.

        Raises:
            TapdeckError: the lease cannot be removed.
        """
        if self._beats is not None:
            # Not while one is being written: it would be there after the lease was given up.
            async with self._lock:
                self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        if self.held is not None:
            await asyncio.to_thread(self.held.release, remove_if_empty=remove_if_empty)

    async def _beat(self) -> None:
        while self.held is not None:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                async with self._lock:
                    await asyncio.to_thread(self.held.heartbeat)
            except LeaseError as error:
                self.is_lost = True
                self._on_lost(error)
                return
            except TapdeckError as error:
                self._note_once(error.message)
