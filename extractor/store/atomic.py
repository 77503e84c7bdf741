"""Small files replaced as a whole: written beside the target, synced, renamed, folder synced.

Owns no file of its own. Invariant: under the final name there is the old content or the new one, never a
part, whenever the process or the machine stops.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from extractor.errors import AccessError, DiskSpaceError, StoreError
from extractor.store import names
from extractor.store.filesystem import FileSystem, RealFileSystem, write_whole

if TYPE_CHECKING:
    from pathlib import Path

_NO_ACCESS = {errno.EPERM, errno.EACCES, errno.EROFS}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def replace_file(path: Path, data: bytes, *, files: FileSystem | None = None) -> None:
    """Gives `path` the content `data`, durably. Blocking.

    Raises:
        OSError: any step failed; `path` is as it was, or as it should be.
    """
    files = files or RealFileSystem()
    part = names.temporary(path)
    part.unlink(missing_ok=True)
    try:
        write_whole(files, part, data)
        files.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    files.sync_folder(path.parent)


def explain(error: OSError, path: Path, action: str) -> StoreError | AccessError | DiskSpaceError:
    """The error of tapdeck for an error of the operating system.

    Args:
        error: what the system said.
        path: what it was about.
        action: what was tried, as in "written".
    """
    message = f"{path}: cannot be {action}: {error.strerror or error}"
    if error.errno in _NO_ACCESS:
        return AccessError(message, remedy="give the user who runs tapdeck access to it")
    if error.errno in _NO_SPACE:
        return DiskSpaceError(message, remedy="free space, or choose another folder")
    return StoreError(message)
