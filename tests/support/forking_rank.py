"""A rank that forks two helpers, one of which ignores SIGTERM, tells their pids and waits; for the launcher."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    pids = []
    for is_stubborn in (False, True):
        pid = os.fork()
        if not pid:
            if is_stubborn:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        pids.append(pid)
    told = Path(sys.argv[1])
    part = told.with_suffix(".part")
    part.write_text(" ".join(map(str, pids)))
    part.replace(told)
    os.read(int(os.environ["TAPDECK_LIFELINE_FD"]), 1)


if __name__ == "__main__":
    main()
