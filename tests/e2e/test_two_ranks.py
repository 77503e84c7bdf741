"""One model on two ranks: the data set of one rank within rounding, and its own byte for byte, whatever happens.

A batch passes the gate when each rank has had a byte.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.support import outputs
from tests.support.job import NUM_SAMPLES, TAPS, Inputs, Reference
from tests.support.product import Tapdeck
from tests.support.supervised import Gate, Supervised

pytestmark = pytest.mark.slow
RANKS = 2
TWO_RANKS = ("--set", f"model.tp={RANKS}")
FLOAT32_BOUND = 1e-5


@pytest.fixture(scope="module")
def product(tapdeck: Tapdeck, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tapdeck]:
    made = Tapdeck(tmp_path_factory.mktemp("ranks") / "tapdeck", cache=tapdeck.cache)
    yield made
    made.close()


@pytest.fixture(scope="module")
def make_run(product: Tapdeck, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory):
    def make(name: str) -> Supervised:
        folder = tmp_path_factory.mktemp(name)
        return Supervised(product, inputs.config(folder / "run.toml", folder / name), folder / name)

    return make


@pytest.fixture(scope="module")
def both(make_run, reference: Reference) -> Supervised:
    """A run on two ranks that has finished; one write of rank 1 has failed in it."""
    run = make_run("both")
    faulty = {
        "TAPDECK_WORKER_MODULE": "tests.support.faulty_worker",
        "TAPDECK_TEST_FAULT": "input_output_error_once",
        "TAPDECK_TEST_RANK": "1",
    }
    run.tapdeck.environment |= faulty
    run.start(*TWO_RANKS)
    require_finished(run)
    for name in faulty:
        del run.tapdeck.environment[name]
    return run


def require_finished(run: Supervised) -> None:
    assert run.wait_state("finished", "failed", "stopped") == "finished", run.describe()
    run.wait_gone()
    assert outputs.part_folders(run.output) == []
    run.tapdeck.require_no_process()


def test_a_write_that_fails_on_rank_1_costs_its_shard_a_try(both: Supervised):
    retries = [event for event in both.events() if event["event"] == "shard_retry"]
    assert [event["shard"] for event in retries] == [1]
    assert "Input/output error (rank 1)" in retries[0]["error"]
    assert [event["event"] for event in both.events()].count("rank_died") == 0


def test_files_tokens_and_lists_are_those_of_one_rank(both: Supervised, reference: Reference):
    ours, theirs = outputs.final_shards(both.output), outputs.final_shards(reference.output)
    assert ours.keys() == theirs.keys()
    for name, shard in ours.items():
        assert {path.name for path in shard.iterdir()} == {path.name for path in theirs[name].iterdir()}
        tokens = "tokens.safetensors"
        assert (shard / tokens).read_bytes() == (theirs[name] / tokens).read_bytes()
        for tap in TAPS:
            a, b = (load_file(folder / f"{tap}.safetensors")["states"] for folder in (shard, theirs[name]))
            assert float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) <= FLOAT32_BOUND
    for name in ("samples.parquet", "rejected.jsonl", "quarantine.jsonl"):
        assert (both.output / name).read_bytes() == (reference.output / name).read_bytes()


def test_every_token_of_every_tap_is_what_transformers_computes(both: Supervised):
    checked = both.tapdeck.run(
        "verify",
        both.output,
        "--sample",
        str(NUM_SAMPLES),
        "--against",
        "transformers",
        "--json",
        deadline_s=300,
    ).require(0)
    assert checked.json["compared_samples"] == NUM_SAMPLES
    assert checked.json["max_rel_err"].keys() == set(TAPS)
    assert max(checked.json["max_rel_err"].values()) <= FLOAT32_BOUND


def test_an_output_is_not_gone_on_with_on_another_number_of_ranks(both: Supervised):
    refused = both.try_start().require(6)
    assert "model.tp: 2 -> 1" in refused.stdout + refused.stderr


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def ranks_of(run: Supervised) -> list[int]:
    return list(run.snapshot()["replicas"][0]["pids"])


def step(run: Supervised, gate: Gate) -> None:
    """Lets one batch through, and waits for it."""

    def seen():
        return run.num_done(), run.snapshot()["replicas"][0]["shard"], run.snapshot()["replicas"][0]["batch"]

    before = seen()
    gate.allow(RANKS)
    run.wait(lambda: seen() != before, "next batch")


def test_ranks_hold_resume_die_and_are_left_alone_together(make_run, gate: Gate, both: Supervised):
    run = make_run("disturbed")
    run.tapdeck.environment |= gate.environment
    num_shards = len(outputs.final_shards(both.output))
    run.start(*TWO_RANKS)
    gate.allow(RANKS)
    run.wait(lambda: run.snapshot()["replicas"][0]["batch"] == 0, "first batch")
    first = ranks_of(run)
    assert len(first) == RANKS

    # Held: neither rank goes on, though both could.
    assert run.act("pause", depth="hold").status == 200
    gate.allow(RANKS)
    held_at = run.wait(lambda: run.state == "held" and run.snapshot()["time_utc"], "hold")
    gate.allow(4 * RANKS)
    spent = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in first]
    done = run.snapshot()["replicas"][0]["batch"], run.num_done()
    run.wait(lambda: run.snapshot()["time_utc"] > held_at + 2, "two seconds more")
    assert (run.snapshot()["replicas"][0]["batch"], run.num_done()) == done
    assert all(
        sum(psutil.Process(pid).cpu_times()[:2]) - before < 0.5
        for pid, before in zip(first, spent, strict=True)
    )
    gate.close_again()
    assert run.act("resume").status == 200
    run.wait_state("running")
    step(run, gate)

    # Rank 1 dies in the middle of a shard.
    os.killpg(first[1], signal.SIGKILL)
    (died,) = run.wait(lambda: [e for e in run.events() if e["event"] == "rank_died"], "death noticed")
    assert f"of rank 1 (pid {first[1]}) ended without a word: killed by SIGKILL" in died["error"]
    run.wait(lambda: (pids := ranks_of(run)) and set(pids).isdisjoint(first), "new ranks")
    assert not any(psutil.pid_exists(pid) for pid in first)
    gate.close_again()
    run.wait(lambda: run.snapshot()["replicas"][0]["phase"] == "ready", "ranks ready")
    while run.num_done() < num_shards - 1:
        step(run, gate)
    step(run, gate)

    # The supervisor dies with the last shard in hand: both ranks finish it, and leave.
    run.kill_supervisor()
    run.wait(lambda: "gone" in gate.heard(), "the loss is noticed")
    gate.allow(Gate.MANY)
    run.tapdeck.require_no_process(deadline_s=60)
    assert run.num_done() == num_shards

    run.start(*TWO_RANKS)
    require_finished(run)
    outputs.require_same_bytes(run.output / "shards", both.output / "shards")
    for name in ("dataset.json", "samples.parquet", "rejected.jsonl", "quarantine.jsonl"):
        assert (run.output / name).read_bytes() == (both.output / name).read_bytes(), name
