"""Runs under a supervisor: paused, killed, left alone and started again, with real ranks on the CPU.

Where it matters on which side of a batch something happens, the rank's batches pass a gate that the test opens.
"""

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import outputs
from tests.support.job import Inputs, Reference
from tests.support.product import Tapdeck
from tests.support.supervised import Gate, Supervised, request

pytestmark = pytest.mark.slow
BATCHES_PER_SHARD = 3


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture
def product(tmp_path: Path, tapdeck: Tapdeck) -> Iterator[Tapdeck]:
    """An installation of its own, so that no process of another test counts."""
    made = Tapdeck(tmp_path / "tapdeck", cache=tapdeck.cache)
    yield made
    made.close()


@pytest.fixture
def run(product: Tapdeck, inputs: Inputs, reference: Reference, tmp_path: Path) -> Supervised:
    output = tmp_path / "output"
    return Supervised(product, inputs.config(tmp_path / "run.toml", output), output)


@pytest.fixture
def gated(run: Supervised, gate: Gate) -> Supervised:
    run.tapdeck.environment |= gate.environment
    return run


def require_finished(run: Supervised, reference: Reference) -> None:
    """The run has finished, and its output is that of an undisturbed run, byte for byte."""
    assert run.wait_state("finished", "failed", "stopped") == "finished", run.describe()
    run.wait_gone()
    outputs.require_same_bytes(run.output / "shards", reference.output / "shards")
    for name in ("dataset.json", "samples.parquet", "rejected.jsonl", "quarantine.jsonl"):
        assert (run.output / name).read_bytes() == (reference.output / name).read_bytes(), name
    assert outputs.part_folders(run.output) == []
    assert outputs.lease(run.output) is None
    done = Counter(event["shard"] for event in run.events() if event["event"] == "shard_done")
    assert [shard for shard, count in done.items() if count > 1] == []
    run.tapdeck.require_no_process()


def batches_done(run: Supervised) -> tuple[int, int | None]:
    """Shards committed, and the batch of the one in hand that was reported last."""
    return run.num_done(), run.snapshot()["replicas"][0]["batch"]


def test_a_hold_takes_effect_at_the_batch_and_a_resume_goes_on_with_the_next(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: gated.num_done() == 1, "first shard")
    before = gated.snapshot()["revision"]

    answer = gated.act("pause", depth="hold", expected_revision=before)
    assert (answer.status, answer.body["state"], answer.body["revision"]) == (200, "holding", before + 1)
    # The batch in flight, and then the whole run, could pass.
    gate.allow(Gate.MANY)
    gated.wait_state("held")
    seen = batches_done(gated)
    held = gated.snapshot()
    assert held["replicas"][0]["phase"] == "held"
    assert held["state"]["pauses"][0]["reason"] == "operator"
    assert seen[0] <= 1
    # Nothing is computed any more: the rank has no CPU time to show.
    rank = psutil.Process(gated.worker_pid)
    spent = sum(rank.cpu_times()[:2])
    gated.wait(lambda: gated.snapshot()["time_utc"] > held["time_utc"] + 2, "two seconds more")
    assert batches_done(gated) == seen
    assert sum(rank.cpu_times()[:2]) - spent < 0.5

    assert gated.act("resume").status == 200
    require_finished(gated, reference)
    changes = [(e["old"], e["new"]) for e in gated.events() if e["event"] == "state"]
    assert ("running", "holding") in changes
    assert ("holding", "held") in changes
    assert ("held", "running") in changes


@pytest.mark.soak
def test_an_unload_finishes_the_shard_in_hand_and_frees_the_processes(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: gated.num_done() == 1, "first shard")
    rank = gated.worker_pid

    assert gated.act("pause", depth="unload").body["state"] == "unloading"
    gate.allow(Gate.MANY)
    gated.wait_state("unloaded")
    assert not psutil.pid_exists(rank)
    assert outputs.part_folders(gated.output) == []
    assert gated.num_done() == 2
    assert gated.snapshot()["replicas"][0]["pid"] is None

    assert gated.act("resume").status == 200
    require_finished(gated, reference)


def test_a_pause_outlives_every_process_and_is_lifted_by_an_operator_alone(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: gated.num_done() == 1, "first shard")
    gated.act("pause", depth="hold")
    gate.allow(Gate.MANY)
    gated.wait_state("held")
    pause = gated.snapshot()["state"]["pauses"]
    gated.kill_supervisor()
    # A paused run computes nothing: its rank leaves at once, and drops what it has in hand.
    gated.tapdeck.require_no_process()
    done = gated.num_done()

    status = gated.tapdeck.run("status", gated.name)
    assert status.code == 3
    assert "not running" in status.stdout
    assert "operator" in status.stdout
    gated.start()
    gated.wait_state("unloaded")
    again = gated.snapshot()
    assert again["state"]["pauses"] == pause
    assert "operator" in again["state"]["why"]
    assert again["replicas"][0]["pid"] is None
    assert gated.num_done() == done

    assert gated.act("resume").status == 200
    require_finished(gated, reference)


def test_ranks_whose_supervisor_was_killed_finish_their_shard_and_leave(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: batches_done(gated) == (1, 0), "one batch of the second shard")
    os.kill(gated.supervisor_pid, signal.SIGKILL)
    gate.allow(Gate.MANY)
    gated.tapdeck.require_no_process(deadline_s=60.0)
    assert gated.num_done() == 2
    assert outputs.part_folders(gated.output) == []

    gated.start()
    require_finished(gated, reference)
    # The second shard was committed when nobody listened.
    assert len([e for e in gated.events() if e["event"] == "shard_done"]) == reference.num_shards - 1


def test_a_killed_rank_is_noticed_within_seconds_and_started_again(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: batches_done(gated) == (1, 0), "one batch of the second shard")
    pid = gated.kill_worker()
    died = gated.wait(
        lambda: [e for e in gated.events() if e["event"] == "rank_died"],
        "the death being noticed",
        deadline_s=5.0,
    )
    assert (died[0]["pid"], died[0]["shard"]) == (pid, 1)
    assert "SIGKILL" in died[0]["error"]
    gate.close_again()
    gate.allow(Gate.MANY)
    require_finished(gated, reference)
    assert gated.last()["replicas"][0]["restarts"] == 1


def test_a_second_start_is_refused_with_the_place_of_the_first(run):
    first = run.start()
    second = run.try_start()
    second.require(6)
    assert f"already running: pid {first['pid']} on " in second.stderr
    assert "supervisor.sock" in second.stderr
    assert second.stdout == ""
    assert run.act("kill").status == 200
    run.wait_gone()
    run.tapdeck.require_no_process()


def test_sockets_and_pids_of_dead_supervisors_are_in_nobodys_way(run):
    left = set()
    for _ in range(3):
        run.start()
        assert run.get("/v1/run").status == 200
        left.add(run.record["socket"])
        run.kill_supervisor()
        assert Path(run.record["socket"]).exists()
    # Two at once: one wins.
    together = [run.tapdeck.start("start", run.config, "--detach", "--json") for _ in range(2)]
    ended = [command.wait() for command in together]
    assert sorted(finished.code for finished in ended) == [0, 6]
    loser = next(finished for finished in ended if finished.code == 6)
    assert "already running" in loser.stderr
    run.started.append(next(finished for finished in ended if finished.code == 0).json)
    assert run.get("/v1/run").status == 200
    assert run.act("kill").status == 200
    run.wait_gone()
    run.tapdeck.require_no_process()
    assert [path for path in left if Path(path).exists()] == []


def test_a_read_only_client_is_refused_by_the_supervisor(run):
    run.start()
    path = run.record["readonly_socket"]
    before = run.snapshot()
    for action in before["actions"]:
        answer = request(path, "POST", f"/v1/actions/{action}", {})
        assert (answer.status, answer.body["code"]) == (403, "read_only"), action
    for method in ("PUT", "PATCH", "DELETE", "POST"):
        assert request(path, method, "/v1/run", {}).status in {403, 404, 405}
    assert request(path, "GET", "/v1/run").status == 200
    after = run.snapshot()
    assert after["revision"] == before["revision"]
    assert after["state"]["pauses"] == []
    audit = [e for e in run.events() if e["event"] == "action"]
    assert [e["action"] for e in audit] == list(before["actions"])
    assert {e["result"] for e in audit} == {"this client is read-only"}
    assert {e["who"]["pid"] for e in audit} == {os.getpid()}
    assert run.act("kill").status == 200
    run.wait_gone()


def test_the_second_of_two_operators_gets_a_conflict_and_is_told_what_the_first_did(run):
    run.start()
    revision = run.snapshot()["revision"]
    first = run.act("pause", expected_revision=revision, idempotency_key="a")
    second = run.act("stop", expected_revision=revision)
    repeated = run.act("pause", expected_revision=revision, idempotency_key="a")
    assert (first.status, second.status) == (200, 409)
    assert second.body["code"] == "conflict"
    assert "pause by" in second.body["message"]
    assert second.body["revision"] == first.body["revision"]
    assert repeated == first
    for body, status in (({"depth": "nap"}, 400), ({"depht": "hold"}, 400), ({"depth": "park"}, 409)):
        assert request(run.record["socket"], "POST", "/v1/actions/pause", body).status == status
    assert run.act("explode").status == 404
    assert (
        request(run.record["socket"], "GET", "/v1/run", headers={"Tapdeck-Api": "99"}).body["code"]
        == "api_version"
    )
    assert run.act("kill").status == 200
    run.wait_gone()


@pytest.mark.soak
def test_a_run_in_the_foreground_ends_before_its_deadline_and_leaves_nothing_half_written(
    gated, gate, reference
):
    command = gated.tapdeck.start("start", gated.config, "--foreground", "--json")
    gate.allow(BATCHES_PER_SHARD + 1)
    command.wait_for(lambda: gated.tapdeck.runs() and gated.num_done() == 1, "first shard")
    gate.allow(2)
    command.process.terminate()
    gate.allow(Gate.MANY)
    ended = command.wait(deadline_s=25.0)
    ended.require(128 + signal.SIGTERM)
    assert ended.json["state"] == "stopped"
    assert outputs.part_folders(gated.output) == []
    assert outputs.lease(gated.output) is None
    gated.tapdeck.require_no_process()
    assert 0 < gated.num_done() < reference.num_shards

    gated.tapdeck.run("start", gated.config, "--foreground").require(0)
    outputs.require_same_bytes(gated.output / "shards", reference.output / "shards")


@pytest.mark.soak
def test_stop_finishes_the_shard_in_hand_and_a_start_goes_on(gated, gate, reference):
    gated.start()
    gate.allow(BATCHES_PER_SHARD + 1)
    gated.wait(lambda: batches_done(gated) == (1, 0), "one batch of the second shard")
    assert gated.act("stop").body["state"] == "draining"
    gate.allow(Gate.MANY)
    gated.wait_state("stopped")
    gated.wait_gone()
    assert gated.num_done() == 2
    assert gated.tapdeck.run("wait", gated.name).code == 1
    gated.tapdeck.require_no_process()

    gated.start()
    require_finished(gated, reference)
    assert gated.tapdeck.run("wait", gated.name).code == 0


@pytest.mark.soak
def test_a_shard_that_kills_its_rank_is_given_up_and_the_others_are_done(run, reference):
    run.tapdeck.environment |= {
        "TAPDECK_WORKER_MODULE": "tests.support.faulty_worker",
        "TAPDECK_TEST_FAULT": "dies_of_shard_1",
    }
    run.start()
    assert run.wait_state("finished", "failed", "stopped") == "failed"
    run.wait_gone()
    last = run.last()
    assert last["progress"]["shards_failed"] == 1
    assert last["progress"]["shards_done"] == reference.num_shards - 1
    assert "the first is shard 1" in last["state"]["why"]
    assert last["shards"]["cells"] == "dx" + "d" * (reference.num_shards - 2)
    assert last["replicas"][0]["restarts"] == 3
    assert run.tapdeck.run("wait", run.name).code == 7
    outputs.require_sound(run.output, reference.output)
    run.tapdeck.require_no_process()

    del run.tapdeck.environment["TAPDECK_WORKER_MODULE"]
    run.start()
    assert run.wait_state("finished", "failed") == "finished"
    outputs.require_same_bytes(run.output / "shards", reference.output / "shards")


@pytest.mark.soak
def test_a_full_disk_holds_the_run_until_there_is_room(run, reference, tmp_path):
    flag = tmp_path / "full"
    flag.touch()
    run.tapdeck.environment |= {
        "TAPDECK_WORKER_MODULE": "tests.support.faulty_worker",
        "TAPDECK_TEST_FAULT": "disk_is_full_for_a_while",
        "TAPDECK_TEST_FLAG": str(flag),
    }
    run.start()
    run.wait_state("held")
    state = run.snapshot()["state"]
    assert [p["reason"] for p in state["pauses"]] == ["disk"]
    assert "No space left on device" in state["why"]
    assert outputs.final_shards(run.output).keys() <= {"000000"}
    flag.unlink()
    # By itself, after the policy's half minute.
    require_finished(run, reference)
    assert [e["reason"] for e in run.events() if e["event"] == "resumed"] == ["disk"]


def test_nothing_that_the_supervisor_did_not_start_is_ended(run):
    bystander = psutil.Popen(["sleep", "600"], env=run.tapdeck.environment | {"XDG_STATE_HOME": "/elsewhere"})
    try:
        run.start()
        run.wait_state("loading")
        assert run.act("kill").status == 200
        run.wait_gone()
        run.tapdeck.require_no_process()
        assert bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


def test_a_client_that_does_not_read_holds_up_nobody(run):
    run.start()
    slow = socket.socket(socket.AF_UNIX)
    slow.connect(run.record["socket"])
    slow.sendall(
        b"GET /v1/stream?interval_s=0.2 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    run.wait(lambda: run.snapshot()["clients"]["writers"] == 1, "the stream being counted")
    for _ in range(20):
        before = run.snapshot()["time_utc"]
        run.wait(lambda before=before: run.snapshot()["time_utc"] > before, "an answer", deadline_s=5.0)
    slow.close()
    run.wait(lambda: run.snapshot()["clients"]["writers"] == 0, "the stream being forgotten")
    assert run.act("kill").status == 200
    run.wait_gone()
