"""A rank with a planted fault; takes the place of `extractor.engine.worker` through the launcher.

The fault is named by the environment variable TAPDECK_TEST_FAULT, and TAPDECK_TEST_RANK names the only rank that
has it. Everything else is the real worker.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

from extractor.engine import worker
from extractor.engine.adapters import FlagAdapter, ListAdapter
from extractor.engine.capture import Capture
from extractor.engine.hostcopy import HostPool
from extractor.store import faults

FLAG = Path(os.environ.get("TAPDECK_TEST_FLAG", "/nonexistent"))


def one_layer_early() -> None:
    """SGLang's capture is one layer off, as its own setters have been."""
    for adapter in (ListAdapter, FlagAdapter):
        set_, active = adapter.set, adapter.active
        adapter.set = lambda self, boundaries, set_=set_: set_(self, [k - 1 for k in boundaries])
        adapter.active = lambda self, active=active: tuple(k + 1 for k in active(self))


def disk_fills_up() -> None:
    """There is room for the first shards and no more."""
    _write_to(faults.full_after(int(os.environ["TAPDECK_TEST_BYTES"])))


def input_output_error_once() -> None:
    """One write of shard 1 fails, the next try succeeds."""
    _write_to(faults.fail_on("write_at", "/000001.", times=1))


def input_output_error_always() -> None:
    """No write of shard 1 ever succeeds."""
    _write_to(faults.fail_on("write_at", "/000001."))


def disk_is_full_for_a_while() -> None:
    """Nothing can be written while the file TAPDECK_TEST_FLAG is there, once the first shard is."""

    def rule(call):
        if call.name == "write_at" and "/000000." not in call.path and FLAG.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)

    _write_to(rule)


def dies_of_shard_1() -> None:
    """Whoever computes shard 1 is killed, as by the out-of-memory killer or a broken kernel."""
    work = worker.Worker._work

    def begin(self, engine, shard):
        if shard.index == 1:
            HostPool.copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        work(self, engine, shard)

    worker.Worker._work = begin


def _write_to(rule) -> None:
    pool = worker.WriterPool
    worker.WriterPool = lambda *args, **options: pool(*args, files=faults.FaultyFileSystem(rule), **options)


def not_a_number() -> None:
    """The first sample of every batch of three and more has a NaN in one tap, once the proof has passed."""
    copy, work = HostPool.copy, worker.Worker._work

    def with_nan(self, states, lengths):
        if len(lengths) >= 3:
            name = next(iter(states))
            states = states | {name: states[name].clone()}
            states[name][0, 0] = float("nan")
        return copy(self, states, lengths)

    def begin(self, engine, shard):
        HostPool.copy = with_nan
        work(self, engine, shard)

    worker.Worker._work = begin


def partial_sum() -> None:
    """One tap is captured before the ranks' parts of its layer's MLP are added up."""
    import torch

    begin, collect = Capture.__init__, Capture.collect
    sums = {}

    def watch(module, args, output):
        sums["part"] = torch.nn.functional.linear(args[0], module.weight)
        sums["whole"] = output[0]

    def begin_and_watch(self, anatomy, **options):
        begin(self, anatomy, **options)
        anatomy.layers[1].mlp.down_proj.register_forward_hook(watch)

    def unreduced(self, num_tokens):
        states = collect(self, num_tokens)
        return states | {"layer_001": states["layer_001"] - sums["whole"] + sums["part"]}

    Capture.__init__, Capture.collect = begin_and_watch, unreduced


def rows_swapped_in_host_copy() -> None:
    """The first two rows of every tap change places on their way to the host."""
    copy = HostPool.copy

    def swapped(self, states, lengths):
        block = copy(self, states, lengths)
        for tap in block.own_taps:
            rows = block.tensor(tap)
            rows[:2] = rows[[1, 0]].clone()
        return block

    HostPool.copy = swapped


def another_value() -> None:
    """One value of `final` is another one, once the proof has passed."""
    copy, work = HostPool.copy, worker.Worker._work

    def off(self, states, lengths):
        states = states | {"final": states["final"].clone()}
        states["final"][0] *= 1.5
        return copy(self, states, lengths)

    def begin(self, engine, shard):
        HostPool.copy = off
        work(self, engine, shard)

    worker.Worker._work = begin


if __name__ == "__main__":
    if os.environ.get("TAPDECK_TEST_RANK", sys.argv[2]) == sys.argv[2]:
        globals()[os.environ["TAPDECK_TEST_FAULT"]]()
    sys.exit(worker.main(sys.argv[1:]))
