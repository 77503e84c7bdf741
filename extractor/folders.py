"""Where tapdeck keeps things of its own: the user's cache and state folders.

Source: the XDG base directory specification, through platformdirs. On local disk, unlike an output folder.
"""

from __future__ import annotations

from pathlib import Path

import platformdirs
import xxhash


def cache_folder() -> Path:
    """Prepared data sets and downloaded models; may be deleted at any time."""
    return Path(platformdirs.user_cache_path("tapdeck"))


def run_folder(output: Path) -> Path:
    """The run folder that belongs to an output folder, made if need be: events, worker log and spec.

    Raises:
        OSError: it cannot be made.
    """
    resolved = output.resolve()
    digest = xxhash.xxh3_64_hexdigest(str(resolved).encode())[:8]
    folder = Path(platformdirs.user_state_path("tapdeck")) / "runs" / f"{resolved.name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
