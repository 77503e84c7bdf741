"""`tapdeck start`: a run under a supervisor, detached or in the foreground.

Refuses what can be refused without reading the data set, before any process is started. The supervisor is
started in a session of its own and outlives this command and its terminal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import tomlkit

from extractor import folders, preflight
from extractor.commands import job as jobs
from extractor.errors import EngineError, TapdeckError
from extractor.folders import RunFolder
from extractor.supervisor import daemon
from extractor.supervisor.daemon import Announcement, NotReady, Ready

if TYPE_CHECKING:
    from extractor.commands.output import Output
    from extractor.config import RunConfig

LOG_TAIL_LINES = 15
DAEMON = "extractor.supervisor.daemon"


class Started(msgspec.Struct, frozen=True):
    """What `start --detach --json` prints.

    Attributes:
        run: name of the run.
        folder: the run folder.
        pid: of the supervisor.
    """

    run: str
    folder: str
    pid: int


def run(
    config: RunConfig, *, mode: Literal["detach", "foreground"], deadline_s: float = 25.0, out: Output
) -> int:
    """The verb. Returns the exit code.

    Args:
        config: the run.
        mode: "detach" returns when the supervisor serves; "foreground" when the run has ended.
        deadline_s: seconds that SIGTERM leaves in the foreground.
        out: where to print.

    Raises:
        TapdeckError: the run was refused.
    """
    if mode == "foreground":
        return _foreground(config, deadline_s, out)
    started = detach(config)
    out.line(f"run {started.run}: supervisor pid {started.pid}, folder {started.folder}")
    out.line(f"next: tapdeck attach {started.run}; tapdeck status {started.run}; tapdeck wait {started.run}")
    out.result(msgspec.to_builtins(started))
    return 0


def detach(config: RunConfig) -> Started:
    """Starts the supervisor in a session of its own and waits until it serves. Blocking, a second or two.

    Raises:
        TapdeckError: the run was refused, or its supervisor is already there.
    """
    folder, config_file = _new_start(config)
    read_end, write_end = os.pipe()
    try:
        with folder.log("supervisor").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", DAEMON, str(folder.path), str(config_file), str(write_end)],
                env=os.environ | {"PYTHONPATH": _python_path()},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
            )
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        line = pipe.readline()
    if not line:
        code = process.wait()
        config_file.unlink(missing_ok=True)
        tail = folder.log("supervisor").read_bytes().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise EngineError(
            f"the supervisor ended with exit code {code} before it served\n" + "\n".join(tail),
            remedy=f"see {folder.log('supervisor')}",
            code="supervisor_died",
        )
    match msgspec.json.decode(line, type=Announcement):
        case Ready() as ready:
            # It is nobody's child that anybody waits for; ours it is only until this command ends.
            process.returncode = 0
            return Started(ready.run, ready.folder, ready.pid)
        case NotReady() as not_ready:
            process.wait()
            _remove_if_never_used(folder)
            raise TapdeckError(
                not_ready.message,
                remedy=not_ready.remedy,
                code=not_ready.code,
                exit_code=not_ready.exit_code,
            )


def _foreground(config: RunConfig, deadline_s: float, out: Output) -> int:
    folder, config_file = _new_start(config)

    def announce(announcement: Announcement) -> None:
        if isinstance(announcement, Ready):
            out.note(
                f"run {announcement.run}: supervisor pid {announcement.pid}; tapdeck attach {announcement.run}"
            )

    try:
        ending = daemon.supervise(
            folder, config_file, announce=announce, deadline_s=deadline_s, is_foreground=True
        )
    finally:
        config_file.unlink(missing_ok=True)
    out.line(f"{ending.state}: {ending.why}")
    conclusion = {} if ending.conclusion is None else msgspec.to_builtins(ending.conclusion)
    out.result({"run": folder.name, "folder": str(folder.path), "state": ending.state, **conclusion})
    return ending.exit_code


def _new_start(config: RunConfig) -> tuple[RunFolder, Path]:
    """The run folder, and in it the configuration of this start under a name of its own."""
    jobs.require_same_settings(config, preflight.check(config))
    folder = RunFolder(folders.run_folder(Path(config.output.dir)))
    config_file = folder.path / f"start-{os.getpid()}.toml"
    config_file.write_text(as_toml(config), encoding="utf-8")
    return folder, config_file


def _remove_if_never_used(folder: RunFolder) -> None:
    """A refused first start leaves no run behind that would be listed for ever."""
    if not folder.events.exists() or not folder.events.stat().st_size:
        shutil.rmtree(folder.path, ignore_errors=True)


def as_toml(config: RunConfig) -> str:
    """A configuration with all its values, as `run.toml`; loading it gives the same configuration."""
    return tomlkit.dumps(config.model_dump(mode="json", exclude_none=True))


def _python_path() -> str:
    """The daemon runs this very installation, wherever it is started from."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    root = str(Path(__file__).resolve().parents[2])
    return ":".join([*inherited, *([] if root in inherited else [root])])
