"""The process of a supervisor: `python -m extractor.supervisor.daemon RUN_FOLDER CONFIG`.

Started by `tapdeck start` in a session of its own, or run in the foreground by it. It takes the lock of the
run, ignores a hang-up, says on a pipe when it serves (or why it does not), and ends when the run has ended.
SIGTERM stops the run after the batch in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from extractor import config as configs
from extractor import preflight, release
from extractor.errors import BugError, EngineError, TapdeckError
from extractor.folders import RunFolder
from extractor.processes import RealMachine, user_name
from extractor.protocol import api
from extractor.protocol.states import State
from extractor.store.manifest import EnvVariable
from extractor.supervisor.actions import Actions
from extractor.supervisor.core import Stop, Supervisor
from extractor.supervisor.environment import worker_environment
from extractor.supervisor.events import Event, EventLog
from extractor.supervisor.launcher import LocalLauncher
from extractor.supervisor.meter import Meter
from extractor.supervisor.pauses import PauseBook
from extractor.supervisor.place import Place
from extractor.supervisor.prepared_run import Conclusion
from extractor.supervisor.server import Server
from extractor.supervisor.snapshot import SnapshotMaker
from extractor.supervisor.tasks import ProcessTasks
from extractor.supervisor.waiting import until_set
from extractor.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extractor.config import RunConfig

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
SAVE_EVERY_S = 15.0
DESCRIPTORS = 65_536
END_MARGIN_S = 5.0
"""Before the deadline, what does not end by itself is ended: there must be time to clean up."""
WORKER_VARIABLE = "TAPDECK_WORKER_MODULE"
"""Names another module than the engine's worker; for tests that plant faults into ranks."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The supervisor serves."""

    run: str
    folder: str
    pid: int


class NotReady(msgspec.Struct, frozen=True, tag="not_ready"):
    """It does not, and why; nothing was changed."""

    code: str
    exit_code: int
    message: str
    remedy: str | None


Announcement = Ready | NotReady


class Ending(msgspec.Struct, frozen=True):
    """How a run ended.

    Attributes:
        exit_code: 0 finished, 1 stopped by an operator, 128+n by a signal, else the failure's.
        why: in words.
    """

    state: State
    exit_code: int
    why: str
    conclusion: Conclusion | None


def supervise(
    folder: RunFolder,
    config_file: Path,
    *,
    announce: Callable[[Announcement], None],
    deadline_s: float | None = None,
    is_foreground: bool = False,
) -> Ending:
    """Supervises a run in this process until it has ended. Blocking.

    Args:
        folder: the run folder.
        config_file: the configuration of this start; becomes `run.toml` of the folder once the lock is held.
        announce: called once, when consoles can attach.
        deadline_s: seconds that SIGTERM leaves; None: as long as the batch in flight takes.
        is_foreground: SIGINT stops the run as SIGTERM does; otherwise it is ignored.

    Raises:
        TapdeckError: the run could not be started; nothing was changed.
    """
    _raise_descriptor_limit()
    with Place(folder) as place:
        run = _Run(folder, configs.load(config_file))
        with run.closing():
            run.supervisor.lease.take()
            config_file.replace(folder.config)
            return asyncio.run(_serve(run, place, announce, deadline_s, is_foreground=is_foreground))


def _raise_descriptor_limit() -> None:
    """`DESCRIPTORS` open files, or as many as may be had: connections must not take those that the run needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Run:
    """The parts of a supervisor, put together.

    Attributes:
        supervisor: of the run.
        info: what consoles are told of it.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        output = Path(config.output.dir)
        device = preflight.device_of(config)
        environment, variables = worker_environment(
            os.environ,
            config.nccl,
            device=device,
            package_root=PACKAGE_ROOT,
            gpus=config.model.gpus,
        )
        self.folder = folder
        self.info = _run_info(folder, config, device, variables)
        self._events = EventLog(folder.events)
        self._sampler = Sampler(disk_path=output)
        self.supervisor = Supervisor(
            folder,
            output=output,
            launcher=LocalLauncher(os.environ.get(WORKER_VARIABLE, "extractor.engine.worker")),
            tasks=lambda held: ProcessTasks(
                folder, environment=environment, keep_fds=() if held.lock_fd is None else (held.lock_fd,)
            ),
            environment=environment,
            env_record={v.name: EnvVariable(v.value, v.origin) for v in variables},
            events=self._events,
            pauses=PauseBook(folder.pauses, now_utc=time.time),
            meter=Meter(),
            sampler=self._sampler,
            is_new_output=not output.exists(),
        )

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Samples until this is left."""
        self._sampler.start()
        try:
            yield
        finally:
            self._sampler.stop()
            self._events.close()


async def _serve(
    run: _Run,
    place: Place,
    announce: Callable[[Announcement], None],
    deadline_s: float | None,
    *,
    is_foreground: bool,
) -> Ending:
    folder, supervisor = run.folder, run.supervisor
    server = Server(supervisor, Actions(supervisor), folder)
    server.snapshots = SnapshotMaker(supervisor, run.info, clients=server.clients)
    signals = _Signals(supervisor, deadline_s, is_foreground=is_foreground)
    with signals:
        await server.start(place.socket, place.readonly_socket)
        place.announce()
        supervisor.events.add(Event.SUPERVISOR_STARTED, pid=os.getpid())
        announce(Ready(folder.name, str(folder.path), os.getpid()))
        saver = _Saver(folder, server.snapshots, supervisor)
        await supervisor.run()
    await server.finish()
    await saver.end()
    last = server.snapshots.make()
    _save(folder, last)
    supervisor.events.add(Event.SUPERVISOR_ENDED, pid=os.getpid())
    return _ending(supervisor, last.state.why, signals.number)


def _ending(supervisor: Supervisor, why: str, signal_number: int | None) -> Ending:
    match supervisor.state:
        case State.FINISHED:
            exit_code = 0
        case State.FAILED:
            exit_code = supervisor.failure.exit_code if supervisor.failure else EngineError.exit_code
        case _:
            exit_code = 1 if signal_number is None else 128 + signal_number
    return Ending(supervisor.state, exit_code, why, supervisor.conclusion)


class _Signals:
    """SIGTERM (and SIGINT in the foreground) stop the run; SIGHUP does nothing.

    Attributes:
        number: the first one that stopped it.
    """

    def __init__(self, supervisor: Supervisor, deadline_s: float | None, *, is_foreground: bool) -> None:
        self.number: int | None = None
        self._supervisor = supervisor
        self._deadline_s = deadline_s
        self._stopping = [signal.SIGTERM, *([signal.SIGINT] if is_foreground else [])]
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        if signal.SIGINT not in self._stopping:
            loop.add_signal_handler(signal.SIGINT, lambda: None)
        for number in self._stopping:
            loop.add_signal_handler(number, self._on_signal, number)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.number is not None:
            # A second one: whoever sends it does not want to wait.
            self._supervisor.events.add(Event.STOPPING, text=f"{name} received again")
            self._supervisor.request_stop(Stop.KILL, by=name)
            return
        self.number = number
        self._supervisor.events.add(Event.STOPPING, text=f"{name} received")
        self._supervisor.request_stop(Stop.NOW, by=name)
        if self._deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, self._deadline_s - END_MARGIN_S),
                lambda: self._supervisor.request_stop(Stop.KILL, by=f"{name}, deadline"),
            )


def _run_info(
    folder: RunFolder, config: RunConfig, device: str, variables: list[api.Variable]
) -> api.RunInfo:
    return api.RunInfo(
        name=folder.name,
        folder=str(folder.path),
        output=config.output.dir,
        config_file=str(folder.config),
        model=config.model.path,
        device=device,
        nccl_preset=config.nccl.preset,
        environment=tuple(variables),
        host=RealMachine().host(),
        supervisor_pid=os.getpid(),
        started_utc=time.time(),
        user=user_name(os.getuid()),
        tapdeck_version=release.version(),
    )


class _Saver:
    """Keeps `snapshot.json` near the truth, for those who come when this process is gone."""

    def __init__(self, folder: RunFolder, snapshots: SnapshotMaker, supervisor: Supervisor) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._change = supervisor.watch()
        self._is_ending = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """No older snapshot is written after this."""
        self._is_ending = True
        self._change.set()
        await self._task

    async def _run(self) -> None:
        while not self._is_ending:
            self._change.clear()
            await asyncio.to_thread(_save, self._folder, self._snapshots.make())
            await until_set(self._change, SAVE_EVERY_S)


def _save(folder: RunFolder, snapshot: api.Snapshot) -> None:
    # No fsync: it is a convenience, and what it says is rebuilt from the truth at the next start. A full
    # disk leaves the one from before.
    part = folder.snapshot.with_suffix(".part")
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(snapshot) + b"\n")
        part.replace(folder.snapshot)


def main(argv: list[str]) -> int:
    """Entry point of the daemon's process.

    Args:
        argv: run folder, configuration of this start, descriptor to announce on.
    """
    folder, config_file, ready_fd = RunFolder(Path(argv[0])), Path(argv[1]), int(argv[2])

    def announce(announcement: Announcement) -> None:
        # Whoever started us may be gone; the run does not need anybody to hear this.
        with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(msgspec.json.encode(announcement) + b"\n")

    is_announced = False

    def announce_once(announcement: Announcement) -> None:
        nonlocal is_announced
        if not is_announced:
            is_announced = True
            announce(announcement)

    # From the first moment: the terminal that started us may close while we start.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return supervise(folder, config_file, announce=announce_once).exit_code
    except TapdeckError as error:
        # Whoever started us says it; the log may be that of the supervisor that runs.
        announce_once(NotReady(error.code, error.exit_code, error.message, error.remedy))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported
        traceback.print_exc()
        announce_once(NotReady(BugError.code, 1, f"{type(error).__name__}: {error}", "please report this"))
        return 1
    finally:
        config_file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
