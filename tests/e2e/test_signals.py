"""SIGINT and SIGTERM stop a run at a batch, and the same command goes on from there."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import outputs
from tests.support.job import Inputs, Reference
from tests.support.product import Command, Finished, Tapdeck

LOADING = "loading the model"
STOPPING = "stopping after the batch in flight"


@dataclass(frozen=True)
class Stop:
    """A command that was stopped, and what was there when it had ended.

    Attributes:
        before: shards with a final name when the signal was sent.
        after: shards with a final name afterwards.
        parts: shards in the making afterwards.
        processes: what still ran.
    """

    finished: Finished
    before: set[str]
    after: set[str]
    parts: list[str]
    processes: list[int]


@dataclass(frozen=True)
class Stopped:
    """One run, stopped three times, then completed."""

    output: Path
    interrupt: Stop
    terminate: Stop
    twice: Stop
    last: Finished


@dataclass(frozen=True)
class Loading:
    """A run that was met by a second one, and stopped, while its model loaded."""

    output: Path
    first: Finished
    first_pid: int
    second: Finished
    seconds_to_end: float
    processes: list[int]


def stop_at(command: Command, tapdeck: Tapdeck, output: Path, *numbers: int, num_new_shards: int) -> Stop:
    """Sends signals once so many more shards are committed; the second as soon as the first was heard."""
    start = set(outputs.final_shards(output))
    command.wait_for(
        lambda: len(outputs.final_shards(output)) >= len(start) + num_new_shards, "shards committed"
    )
    before = set(outputs.final_shards(output))
    for position, number in enumerate(numbers):
        if position:
            command.wait_for_text(STOPPING)
        command.process.send_signal(number)
    finished = command.wait()
    # Asked at once: the worker must be gone before its command is.
    processes = tapdeck.processes()
    return Stop(finished, before, set(outputs.final_shards(output)), outputs.part_folders(output), processes)


@pytest.fixture(scope="module")
def stopped(
    tapdeck: Tapdeck, inputs: Inputs, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    output = folder / "stopped"
    config = inputs.config(folder / "run.toml", output)
    command = tapdeck.start("extract", config)
    interrupt = stop_at(command, tapdeck, output, signal.SIGINT, num_new_shards=2)
    command = tapdeck.start("extract", config, "--json")
    terminate = stop_at(command, tapdeck, output, signal.SIGTERM, num_new_shards=2)
    command = tapdeck.start("extract", config)
    twice = stop_at(command, tapdeck, output, signal.SIGTERM, signal.SIGTERM, num_new_shards=1)
    last = tapdeck.run("extract", config, "--json")
    return Stopped(output, interrupt, terminate, twice, last)


@pytest.fixture(scope="module")
def loading(tapdeck: Tapdeck, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Loading:
    folder = tmp_path_factory.mktemp("loading")
    output = folder / "loading"
    config = inputs.config(folder / "run.toml", output)
    first = tapdeck.start("extract", config)
    first.wait_for_text(LOADING)
    second = tapdeck.run("extract", config)
    assert first.process.poll() is None, first.wait()
    first.process.send_signal(signal.SIGINT)
    finished = first.wait(30)
    processes = tapdeck.processes()
    return Loading(output, finished, first.process.pid, second, finished.seconds, processes)


def test_an_interrupt_ends_the_command_with_130_and_a_termination_with_143(stopped):
    stopped.interrupt.finished.require(130)
    stopped.terminate.finished.require(143)


def test_a_stopped_command_says_what_is_there_and_how_to_go_on(stopped):
    said = stopped.interrupt.finished

    assert STOPPING in said.stderr
    assert f"{len(stopped.interrupt.after)} of " in said.stdout
    assert "not complete: run the same command again to resume" in said.stdout


def test_a_stopped_command_prints_true_figures_as_json(stopped):
    said = stopped.terminate.finished.json

    assert said["complete"] is False
    assert said["shards"] == len(stopped.terminate.after)
    assert said["shards_computed"] == len(stopped.terminate.after - stopped.interrupt.after)


def test_a_stop_keeps_what_is_committed_and_drops_the_shard_in_hand(stopped, reference):
    for stop in (stopped.interrupt, stopped.terminate):
        assert stop.before <= stop.after
        # The one in hand and the one that was being committed at most: it stopped at a batch, not at the end.
        assert len(stop.after) < reference.num_shards
        assert len(stop.after - stop.before) <= 2
        assert stop.parts == []


def test_no_process_outlives_a_stopped_command(stopped):
    for stop in (stopped.interrupt, stopped.terminate, stopped.twice):
        assert stop.processes == []


def test_a_second_signal_stops_at_once_with_the_exit_code_of_the_signal(stopped):
    stop = stopped.twice

    stop.finished.require(143)
    assert "stopped at once; the same command resumes" in stop.finished.stderr
    assert "Traceback" not in stop.finished.stderr
    assert stop.before <= stop.after


def test_a_run_that_was_stopped_ends_byte_identical_to_an_undisturbed_one(stopped, reference):
    stopped.last.require(0)

    assert stopped.last.json["complete"] is True
    assert outputs.part_folders(stopped.output) == []
    outputs.require_same_bytes(stopped.output / "shards", reference.output / "shards")


def test_an_interrupt_while_the_model_loads_ends_command_and_worker_with_130(loading):
    loading.first.require(130)

    assert loading.processes == []
    assert "model ready" not in loading.first.stderr
    assert outputs.final_shards(loading.output) == {}
    assert outputs.lease(loading.output) is None


def test_a_second_run_on_the_same_output_is_refused_and_names_the_first(loading):
    said = loading.second.require(6).stderr

    assert f"pid {loading.first_pid} on " in said
    assert str(loading.output) in said
    assert "What to do: " in said
    assert "worker: pid" not in said


def test_the_run_that_was_there_first_is_not_disturbed_by_the_second(loading):
    # It was stopped by its signal, not by the loss of its lease.
    assert "lease" not in loading.first.stderr
