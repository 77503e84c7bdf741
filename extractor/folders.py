"""Where tapdeck keeps things of its own: the user's cache and state folders, and the names in a run folder.

Source: the XDG base directory specification, through platformdirs. On local disk, unlike an output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import platformdirs
import xxhash

from extractor.errors import AccessError, NoRunError

MAX_NAME = 64
"""Of an output folder's name, in the name of its run."""


def cache_folder() -> Path:
    """Prepared data sets and downloaded models; may be deleted at any time."""
    return Path(platformdirs.user_cache_path("tapdeck"))


def runs_folder() -> Path:
    """Holds the run folders of this user; need not exist."""
    return Path(platformdirs.user_state_path("tapdeck")) / "runs"


def run_folder(output: Path) -> Path:
    """The run folder that belongs to an output folder, made if need be: events, logs, sockets.

    Raises:
        AccessError: it cannot be made.
    """
    folder = run_folder_of(output)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise AccessError(
            f"{folder}: cannot be made: {error.strerror}",
            remedy="runs are kept in your state folder: set XDG_STATE_HOME to a local folder that you may write",
        ) from error
    return folder


class RunFolder(NamedTuple):
    """The files of one run. Nothing here says that they exist."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def config(self) -> Path:
        """`run.toml` as the run was last started, with all its values."""
        return self.path / "run.toml"

    @property
    def lock(self) -> Path:
        """Held by the supervisor for life."""
        return self.path / "supervisor.lock"

    @property
    def supervisor(self) -> Path:
        """Where the supervisor is: `extractor.protocol.api.SupervisorRecord`."""
        return self.path / "supervisor.json"

    @property
    def pauses(self) -> Path:
        """What must survive a restart: pauses and revision."""
        return self.path / "pauses.json"

    @property
    def job(self) -> Path:
        """The prepared run: plan, spec of the ranks, sizes."""
        return self.path / "job.json"

    @property
    def snapshot(self) -> Path:
        """The last snapshot of the run: `extractor.protocol.api.Snapshot`."""
        return self.path / "snapshot.json"

    @property
    def events(self) -> Path:
        """What happened, one JSON object a line."""
        return self.path / "events.jsonl"

    def log(self, source: str) -> Path:
        """A log file: "supervisor", "prepare", "replica-NAME"."""
        return self.path / f"{source}.log"

    def logs(self) -> list[str]:
        """The sources that have a log, by name."""
        return sorted(file.stem for file in self.path.glob("*.log"))


def all_runs() -> list[RunFolder]:
    """The run folders of this user, by name."""
    try:
        return sorted(RunFolder(entry) for entry in runs_folder().iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise AccessError(f"{runs_folder()}: cannot be read: {error.strerror}") from error


def find_run(name: str) -> RunFolder:
    """A run by its name, a unique beginning of it, its run folder or its output folder.

    Raises:
        NoRunError: none, or several; says which there are.
    """
    known = all_runs()
    exact = [run for run in known if run.name == name]
    path = Path(name).expanduser()
    if not exact and _is_folder(path):
        resolved = path.resolve()
        by_output = run_folder_of(resolved)
        exact = [run for run in known if run.path.resolve() == resolved] or [
            run for run in known if run.path == by_output
        ]
    found = exact or [run for run in known if run.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(run.name for run in (found or known)[:8]) or "none; tapdeck start RUN.toml begins one"
    raise NoRunError(
        f"{name}: {'several runs begin so' if found else 'no such run'}",
        remedy=f"name one of: {names}",
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # A name that is too long for a path is no path.
        return False


def run_folder_of(output: Path) -> Path:
    """Where the run folder of an output folder is, whether it exists or not."""
    resolved = output.resolve()
    digest = xxhash.xxh3_64_hexdigest(str(resolved).encode())[:8]
    return runs_folder() / f"{resolved.name[:MAX_NAME]}-{digest}"


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists. May block."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
