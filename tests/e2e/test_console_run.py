"""A person at a terminal: the real console, the real supervisor and real ranks on the CPU.

Batches of the rank pass a gate, so that keys meet a run that works; everything else is as users have it.
"""

import itertools
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import outputs
from tests.support.job import Inputs
from tests.support.product import COMMAND_LINE, Tapdeck
from tests.support.pty import Terminal
from tests.support.supervised import Gate, Supervised

pytestmark = pytest.mark.slow
DEADLINE_S = 400.0
STALL_S = 30.0


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture
def run(tapdeck: Tapdeck, gate: Gate, inputs: Inputs, tmp_path: Path) -> Iterator[Supervised]:
    product = Tapdeck(tmp_path / "tapdeck", cache=tapdeck.cache, **gate.environment)
    output = tmp_path / "output"
    yield Supervised(product, inputs.config(tmp_path / "run.toml", output), output)
    product.close()


def open_terminal(run: Supervised, *args: str | Path, columns: int = 120, lines: int = 40) -> Terminal:
    """`tapdeck ARGS` on a terminal."""
    environment = run.tapdeck.environment | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    return Terminal([*COMMAND_LINE, *map(str, args)], environment, columns, lines, cwd=str(run.tapdeck.home))


def test_a_run_is_started_held_resumed_left_and_met_again_from_the_console(run, gate, reference):
    with open_terminal(run) as screen:
        screen.wait_for("new run")
        screen.send("N")
        screen.wait_for("start a run")
        screen.send(f"{run.config}\r")
        screen.wait_for("it fits", DEADLINE_S)
        assert "NCCL" in screen.screen_text()
        assert run.tapdeck.runs() == []
        screen.send("\r")
        screen.wait_for("Start output-")
        screen.send("y")
        screen.wait_for("LOADING", DEADLINE_S)
        screen.wait_for("RUNNING", DEADLINE_S)
        gate.allow(4)
        run.wait(lambda: run.num_done() == 1, "first shard")
        screen.send("P")
        screen.wait_for("hold")
        screen.send("h")
        # The batch in flight waits at the gate; then it passes, and no other does.
        run.wait_state("holding", "held")
        gate.allow(Gate.MANY)
        screen.wait_for("HELD", DEADLINE_S)
        held = run.snapshot()
        assert held["state"]["pauses"][0]["reason"] == "operator"
        assert run.num_done() == 1
        screen.send("R")
        screen.wait_for("RUNNING", DEADLINE_S)
        screen.send("q")
        assert screen.wait_end() == 0
        assert "run continues" in screen.screen_text()
    assert run.snapshot()["run"]["supervisor_pid"] == held["run"]["supervisor_pid"]
    with open_terminal(run, "attach", run.name, columns=80, lines=24) as screen:
        screen.wait_for("FINISHED", DEADLINE_S)
        screen.send("q")
        assert screen.wait_end() == 0
    run.started.append({"pid": held["run"]["supervisor_pid"]})
    run.wait_gone()
    outputs.require_same_bytes(run.output / "shards", reference.output / "shards")
    assert (run.output / "dataset.json").read_bytes() == (reference.output / "dataset.json").read_bytes()
    audit = [(e["action"], e["result"]) for e in run.events() if e["event"] == "action"]
    assert audit == [("pause", "ok"), ("resume", "ok")]
    run.tapdeck.require_no_process()


def test_a_run_does_not_notice_what_happens_to_its_consoles(run, gate, reference):
    """Killed, cut off, terminated, and one whose terminal takes nothing for half a minute."""
    run.start()
    run.wait_state("running")
    for how in ("kill", "hang up", "terminate"):
        with open_terminal(run, "attach", run.name) as screen:
            screen.wait_for("RUNNING")
            assert screen.modes() != modes_of_a_new_terminal()
            if how == "hang up":
                screen.hang_up()
                run.wait(lambda screen=screen: screen.exit_code is not None, "end of the console", 10.0)
            else:
                screen.kill(signal.SIGKILL if how == "kill" else signal.SIGTERM)
                assert screen.wait_end(10.0) != 0
            assert how != "terminate" or screen.modes() == modes_of_a_new_terminal()
        run.wait(
            lambda: run.snapshot()["clients"] == {"writers": 0, "readers": 0}, "the console being forgotten"
        )
        done = run.num_done()
        gate.allow(3)
        run.wait(lambda done=done: run.num_done() == done + 1, "the next shard")
    _require_a_stall_to_be_unnoticed(run, gate)
    gate.allow(Gate.MANY)
    assert run.wait_state("finished", "failed", "stopped") == "finished"
    run.wait_gone()
    outputs.require_same_bytes(run.output / "shards", reference.output / "shards")
    run.tapdeck.require_no_process()


def _require_a_stall_to_be_unnoticed(run, gate):
    with open_terminal(run, "attach", run.name) as screen:
        screen.wait_for("RUNNING")
        # From here on nobody reads what the console writes: its terminal is full in no time.
        begun = run.snapshot()["time_utc"]
        saved = run.last()["time_utc"]
        beats = [lease_beat(run)]
        done, steps = run.num_done(), 0
        while (now := run.snapshot()["time_utc"]) < begun + STALL_S:
            if lease_beat(run) != beats[-1]:
                beats.append(lease_beat(run))
            if now - begun > steps * 10:
                steps += 1
                gate.allow(3)
                run.wait(lambda steps=steps: run.num_done() >= done + steps, "work during the stall", 10.0)
        assert steps >= 3
        # Every ten seconds; a gap would be twice that and more.
        gaps = [after - before for before, after in itertools.pairwise(beats)]
        assert len(gaps) >= 2
        assert max(gaps) < 19
        assert run.last()["time_utc"] - saved >= 10
        # It is read again, and shows how things are now.
        screen.wait_for(lambda text: "RUNNING" in text and "STALE" not in text)
        screen.send("q")
        assert screen.wait_end() == 0


def modes_of_a_new_terminal():
    outer, inner = os.openpty()
    try:
        return termios.tcgetattr(inner)
    finally:
        os.close(outer)
        os.close(inner)


def lease_beat(run: Supervised) -> float:
    """When the supervisor last said in the output folder that it lives."""
    lease = outputs.lease(run.output)
    assert lease is not None
    return float(lease["heartbeat_utc"])


HANG_UP_WITHOUT_TERMINAL = """
import os, subprocess, sys
outer, inner = os.openpty()
# A session of its own, and no controlling terminal: the kernel tells it nothing when the line is gone.
child = subprocess.Popen(sys.argv[1:], stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
os.close(inner)
seen = b""
while b"PREPARING" not in seen and b"LOADING" not in seen:
    seen += os.read(outer, 65536)
os.close(outer)
child.wait(30)
"""


def test_ten_consoles_whose_line_is_gone_end_by_themselves_and_are_forgotten(run):
    run.start()
    environment = run.tapdeck.environment | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-c", HANG_UP_WITHOUT_TERMINAL, *COMMAND_LINE, "attach", run.name]
    for _ in range(2):
        together = [subprocess.Popen(command, env=environment) for _ in range(5)]
        assert [guard.wait(DEADLINE_S) for guard in together] == [0] * 5
    run.wait(
        lambda: run.snapshot()["clients"] == {"writers": 0, "readers": 0}, "the consoles being forgotten"
    )
    assert run.act("kill").status == 200
    run.wait_gone()


def test_a_read_only_console_shows_the_run_and_cannot_change_it(run):
    run.start()
    with open_terminal(run, "attach", run.name, "--read-only", columns=80, lines=24) as screen:
        screen.wait_for("read-only")
        screen.send("P")
        run.wait(lambda: run.snapshot()["clients"]["readers"] == 1, "the reader being counted")
        screen.send("q")
        assert screen.wait_end() == 0
    assert run.snapshot()["state"]["pauses"] == []
    assert run.act("kill").status == 200
    run.wait_gone()


def test_a_terminal_that_can_do_nothing_gets_plain_words(run):
    run.start()
    environment = {key: value for key, value in run.tapdeck.environment.items() if key != "TERM"}
    for term in ({}, {"TERM": "dumb"}):
        with Terminal([*COMMAND_LINE, "attach", run.name], environment | term, 80, 24) as screen:
            assert screen.wait_end() == 2
            assert b"\x1b" not in screen.bytes_received
            assert f"tapdeck status {run.name} --watch" in " ".join(screen.screen_text().split())
    assert run.act("kill").status == 200
    run.wait_gone()
