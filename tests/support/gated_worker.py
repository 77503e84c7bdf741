"""A rank whose every batch waits for a byte, and that tells what it heard; takes the place of the real worker.

Through it a test knows for certain on which side of a batch a request arrived. The environment variable
TAPDECK_TEST_GATE names a folder: the FIFO `gate` holds one byte for each batch that may leave the engine, and
`heard` gets a line for each request that has taken effect. Everything else is the real worker.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from extractor.engine import worker
from extractor.engine.model import Engine
from extractor.engine.orders import Orders


def gate_the_batches(folder: Path) -> None:
    gate = os.open(folder / "gate", os.O_RDONLY)
    compute, work = Engine.compute, worker.Worker._work

    def when_allowed(self, sequences):
        block = compute(self, sequences)
        assert os.read(gate, 1), "nobody holds the gate any more"
        return block

    def begin(self, engine, shard):
        # Not before the first shard: the warm-up computes as well.
        Engine.compute = when_allowed
        work(self, engine, shard)

    worker.Worker._work = begin


def tell_what_is_heard(folder: Path) -> None:
    def telling(method, name):
        def told(self, *args):
            method(self, *args)
            with (folder / "heard").open("a", encoding="utf-8") as file:
                file.write(f"{name or type(args[0]).__name__}\n")

        return told

    Orders.tell = telling(Orders.tell, None)
    Orders.lose_supervisor = telling(Orders.lose_supervisor, "gone")
    Orders.stop = telling(Orders.stop, "SIGTERM")


if __name__ == "__main__":
    FOLDER = Path(os.environ["TAPDECK_TEST_GATE"])
    gate_the_batches(FOLDER)
    tell_what_is_heard(FOLDER)
    sys.exit(worker.main(sys.argv[1:]))
