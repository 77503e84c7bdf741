"""A real rank that is held, resumed, drained, stopped and left alone; batches leave it one by one."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest

from extractor import config as configs
from extractor import protocol
from extractor.commands import job as jobs
from extractor.commands.output import Output
from extractor.supervisor.launcher import LocalLauncher
from extractor.supervisor.replica import Replica
from tests.support import outputs, small_models
from tests.support.product import ROOT, wait_until

DEADLINE_S = 120.0
QUIET_S = 1.0
MANY = 1000
LAUNCHER = LocalLauncher(module="tests.support.gated_worker")


class Rank:
    """A started rank, its gate, and every report it has sent."""

    def __init__(self, job, folder: Path, grace_s: float = 60.0):
        folder.mkdir()
        self.folder = folder
        self.output = job.output
        self.num_batches = [len(shard.batches) for shard in job.shards]
        self.reports = []
        self._num_heard = Counter()
        os.mkfifo(folder / "gate")
        # Read and write, so that opening it does not wait for the rank.
        self._gate = os.open(folder / "gate", os.O_RDWR)
        self.replica = Replica(
            lambda endpoint: msgspec.structs.replace(jobs.engine_spec(job, endpoint), grace_s=grace_s),
            launcher=LAUNCHER,
            run_folder=folder,
            environment={**os.environ, "PYTHONPATH": str(ROOT), "TAPDECK_TEST_GATE": str(folder)},
        )

    def close(self):
        self.replica.__exit__(None, None, None)
        os.close(self._gate)

    def allow(self, num_batches: int):
        os.write(self._gate, b"." * num_batches)

    def send(self, *requests):
        """Sends, and returns when the rank has heard it."""
        for request in requests:
            self.replica.send(request)
            self.wait_heard(type(request).__name__)

    def wait_heard(self, name: str):
        """The next time that the rank has taken note of something."""
        self._num_heard[name] += 1
        heard = self.folder / "heard"
        wait_until(
            lambda: heard.exists() and heard.read_text().split().count(name) >= self._num_heard[name],
            f"{name} heard",
            state=lambda: f"{self.reports}\n{self.replica.log_tail()}",
        )

    def wait_report(self, kind, **fields):
        """The next report of a kind, with all that come before it taken note of."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for report in self.replica.reports(0.1):
                self.reports.append(report)
                if isinstance(report, kind) and all(getattr(report, k) == v for k, v in fields.items()):
                    return report
        raise AssertionError(f"no {kind.__name__} {fields}:\n{self.reports}\n{self.replica.log_tail()}")

    def new_reports(self, for_s: float):
        """What it says within a time in which it should say nothing."""
        found = list(self.replica.reports(for_s))
        self.reports += found
        return found

    def wait_end(self) -> int:
        """Its exit code, whether or not its last words still arrive."""
        wait_until(lambda: self.replica.process.poll() is not None, "end", state=self.replica.log_tail)
        return self.replica.process.poll()

    def of(self, kind):
        return [report for report in self.reports if isinstance(report, kind)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_models.make(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def tree(model, talks):
    """The run: three shards or more, of four batches or more each; the first batch is a sample in chunks."""

    def make(output):
        return {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"files": [str(talks([100] * 4 + [600] + [100] * 36))], "max_len": 450},
            "taps": {"layers": [1, 3]},
            "output": {"dir": str(output), "shard_bytes": 1_800_000},
            "batch": {"max_tokens": 200, "chunk_tokens": 130},
        }

    return make


@pytest.fixture
def start(tree, tmp_path):
    """A function that starts a rank: name of its output -> rank."""
    ranks = []

    def run(name="out", **options):
        job = jobs.make(configs.build(tree(tmp_path / name), source="test"), out=Output(as_json=True))
        assert len(job.shards) >= 3
        assert min(len(shard.batches) for shard in job.shards[:2]) >= 4
        assert job.prepared.lengths[job.shards[0].batches[0][0]] == 450
        (job.output / "shards").mkdir(parents=True)
        rank = Rank(job, tmp_path / f"rank-{len(ranks)}", **options)
        ranks.append(rank)
        return rank

    yield run
    for rank in ranks:
        rank.close()


def in_the_middle_of_shard_0(rank: Rank, *requests) -> None:
    """Shard 0 has one batch behind it and one in flight, during which the requests are heard."""
    rank.wait_report(protocol.Ready)
    rank.send(protocol.WorkShard(0), protocol.WorkShard(1))
    rank.allow(1)
    rank.wait_report(protocol.BatchDone, shard=0, batch=0)
    rank.send(*requests)


def held_in_the_middle_of_shard_0(rank: Rank) -> None:
    in_the_middle_of_shard_0(rank, protocol.Hold())
    rank.allow(MANY)
    assert rank.wait_report(protocol.Held).shard == 0
    # The hold is heard with the second batch in flight, or just before it begins.
    assert [report.batch for report in rank.of(protocol.BatchDone)] in ([0], [0, 1])


def test_a_held_rank_computes_nothing_and_its_shards_do_not_show_it(start):
    rank = start()
    rank.wait_report(protocol.Hello)
    # While it loads: it takes effect once it is ready.
    rank.send(protocol.Hold())
    assert rank.wait_report(protocol.Held).shard is None
    assert rank.of(protocol.Ready)
    rank.send(protocol.WorkShard(0), protocol.WorkShard(1), protocol.Resume())
    rank.wait_report(protocol.ShardStarted, shard=0)
    rank.allow(1)
    rank.wait_report(protocol.BatchDone, shard=0, batch=0)

    rank.send(protocol.Hold())
    rank.allow(rank.num_batches[0] - 1)
    assert rank.wait_report(protocol.Held).shard == 0
    # The gate is open for the whole shard: what keeps its next batch from being computed is the hold.
    # The hold is heard with the second batch in flight, or just before it begins.
    assert [report.batch for report in rank.of(protocol.BatchDone)] in ([0], [0, 1])
    process = psutil.Process(rank.replica.process.pid)
    before = sum(process.cpu_times()[:2])
    assert rank.new_reports(QUIET_S) == []
    assert sum(process.cpu_times()[:2]) - before <= 0.05

    rank.send(protocol.Resume())
    rank.wait_report(protocol.ShardStarted, shard=1)
    rank.send(protocol.WorkShard(2), protocol.Drain())
    rank.allow(MANY)
    rank.wait_report(protocol.Bye)
    assert rank.wait_end() == 0
    assert [report.shard for report in rank.of(protocol.ShardStarted)] == [0, 1]
    assert [report.shard for report in rank.of(protocol.ShardDone)] == [0, 1]
    assert len(rank.of(protocol.Held)) == 2
    assert sorted(outputs.final_shards(rank.output)) == ["000000", "000001"]

    undisturbed = start("undisturbed")
    undisturbed.wait_report(protocol.Ready)
    undisturbed.allow(MANY)
    undisturbed.send(protocol.WorkShard(0), protocol.WorkShard(1), protocol.Finish())
    assert undisturbed.wait_end() == 0
    for name, shard in outputs.final_shards(rank.output).items():
        assert outputs.contents(shard) == outputs.contents(undisturbed.output / "shards" / name)


LEAVING = {
    "stop": lambda rank: rank.send(protocol.Stop()),
    "drain": lambda rank: rank.send(protocol.Drain()),
    "SIGTERM": lambda rank: os.kill(rank.replica.process.pid, signal.SIGTERM),
    "supervisor gone": lambda rank: rank.replica.process._drop_lifeline(),
}


@pytest.mark.parametrize(
    "way", ["stop", *(pytest.param(way, marks=pytest.mark.soak) for way in LEAVING if way != "stop")]
)
def test_a_held_rank_that_leaves_drops_the_shard_in_hand(start, way):
    rank = start()
    held_in_the_middle_of_shard_0(rank)
    LEAVING[way](rank)
    assert rank.wait_end() == 0
    assert outputs.final_shards(rank.output) == {}
    assert outputs.part_folders(rank.output) == []


@pytest.mark.soak
@pytest.mark.parametrize(("grace_s", "left"), [(60.0, ["000000"]), (0.0, [])])
def test_alone_the_shard_in_hand_is_finished_if_the_grace_time_allows(start, grace_s, left):
    rank = start(grace_s=grace_s)
    in_the_middle_of_shard_0(rank)
    rank.replica.process._drop_lifeline()
    rank.wait_heard("gone")
    rank.allow(MANY)
    assert rank.wait_end() == 0
    assert sorted(outputs.final_shards(rank.output)) == left
    assert outputs.part_folders(rank.output) == []


@pytest.mark.soak
def test_a_drain_commits_the_shard_in_hand_and_begins_no_other(start):
    rank = start()
    in_the_middle_of_shard_0(rank, protocol.Drain())
    rank.allow(MANY)
    rank.wait_report(protocol.Bye)
    assert rank.wait_end() == 0
    assert sorted(outputs.final_shards(rank.output)) == ["000000"]
    assert [report.shard for report in rank.of(protocol.ShardStarted)] == [0]


@pytest.mark.soak
def test_a_rank_that_hangs_in_a_batch_does_not_outlive_its_supervisor_for_long(start):
    rank = start(grace_s=1.0)
    in_the_middle_of_shard_0(rank)
    # No byte ever comes through the gate again: the batch in flight never ends.
    rank.replica.process._drop_lifeline()
    rank.wait_heard("gone")
    assert rank.wait_end() == 7
