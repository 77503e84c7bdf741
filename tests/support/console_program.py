"""The real console on the real terminal, over a feed that says something new every second.

    python -m tests.support.console_program [--interval S]

For tests of the terminal and for the benchmark: everything but the supervisor is what operators run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from console.app import TapdeckApp, run_app, terminal_refusal
from console.feed import Heard
from tests.support import console_snapshots
from tests.support.fake_feed import FakeFeed


class MovingFeed(FakeFeed):
    """A run of 8 GPUs and 2,310 shards; all that moves has moved at each word."""

    async def updates(self):
        second = 0
        while True:
            yield Heard(console_snapshots.running(second))
            await asyncio.sleep(self.interval_s)
            second += max(1, round(self.interval_s))


class CrashingApp(TapdeckApp):
    """Fails on a key."""

    def on_key(self, event) -> None:
        if event.key == "x":
            raise RuntimeError("crash asked for by a test")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval", type=float, default=1.0)
    options = parser.parse_args()
    refusal = terminal_refusal("RUN")
    if refusal is not None:
        sys.stderr.write(refusal)
        return 2
    app = CrashingApp(MovingFeed(interval_s=options.interval), interval_s=options.interval)
    return run_app(app)


if __name__ == "__main__":
    sys.exit(main())
