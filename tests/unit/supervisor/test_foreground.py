"""The loop of a run against a replica that is played: what it asks for, and how it ends."""

import contextlib
import json
import threading
from collections import deque
from pathlib import Path

import pytest

from extractor import protocol
from extractor.errors import EngineError
from extractor.supervisor.events import EventLog
from extractor.supervisor.foreground import AHEAD, ForegroundRun


class PlayedReplica:
    """A replica that answers each shard as it is told to, in order."""

    name = "0"
    log = Path("replica-0.log")

    def __init__(self, answer=None, first=()):
        self.answer = answer or (lambda shard: protocol.ShardDone(shard, 1, 10, 5, 100, 0))
        self.waiting = deque([protocol.Hello(1, 7, 0.0), *first])
        self.asked: list[int] = []
        self.most_in_hand = 0
        self.in_hand: deque[int] = deque()
        self.has_left = False
        self.killed = False
        self.process = self

    def kill(self):
        self.killed = True

    def send(self, request):
        match request:
            case protocol.WorkShard(shard):
                self.asked.append(shard)
                self.in_hand.append(shard)
                self.most_in_hand = max(self.most_in_hand, len(self.in_hand))
            case protocol.Finish() | protocol.Stop():
                self.waiting.append(protocol.Bye(999))

    def reports(self, timeout_s):
        if not self.waiting and self.in_hand:
            self.waiting.append(self.answer(self.in_hand.popleft()))
        while self.waiting:
            report = self.waiting.popleft()
            self.has_left = isinstance(report, protocol.Bye)
            yield report

    def wait(self):
        return 0


class Silent:
    def on_report(self, report):
        pass

    def on_tick(self):
        pass


READY = protocol.Ready(1.0, (), {}, {}, 0)


@pytest.fixture
def play(tmp_path):
    def run(replica, todo, stop=None, watcher=None):
        with contextlib.closing(EventLog(tmp_path / "events.jsonl")) as log:
            return ForegroundRun(
                replica, todo, events=log, watcher=watcher or Silent(), stop=stop or threading.Event()
            ).run()

    run.events = lambda: [
        json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ]
    return run


def test_all_shards_are_asked_for_once_and_a_few_ahead(play):
    replica = PlayedReplica(first=[READY])
    outcome = play(replica, [0, 1, 2, 3, 4])
    assert replica.asked == [0, 1, 2, 3, 4]
    assert replica.most_in_hand == AHEAD
    assert outcome.done == [0, 1, 2, 3, 4]
    assert (outcome.num_tokens, outcome.num_bytes, outcome.peak_rss_bytes) == (50, 500, 999)
    assert not outcome.was_stopped


def test_nothing_is_asked_for_before_the_replica_is_ready(play):
    stop = threading.Event()

    class StopAfterHello(Silent):
        def on_report(self, report):
            stop.set()

    replica = PlayedReplica()
    outcome = play(replica, [0, 1], stop, StopAfterHello())
    assert replica.asked == []
    assert replica.killed
    assert outcome.was_stopped


def test_stop_ends_the_run_with_what_is_done(play):
    stop = threading.Event()

    class StopAfterFirst(Silent):
        def on_report(self, report):
            if isinstance(report, protocol.ShardDone):
                stop.set()

    outcome = play(PlayedReplica(first=[READY]), [0, 1, 2, 3], stop, StopAfterFirst())
    assert outcome.was_stopped
    assert outcome.done == [0]
    assert "stopping" in play.events()


def test_failed_shard_is_tried_again(play):
    failures = iter([True, False])

    def answer(shard):
        if shard == 1 and next(failures):
            return protocol.ShardFailed(1, "EIO", "EIO")
        return protocol.ShardDone(shard, 1, 10, 5, 100, 0)

    replica = PlayedReplica(answer, [READY])
    outcome = play(replica, [0, 1, 2])
    assert sorted(outcome.done) == [0, 1, 2]
    assert replica.asked.count(1) == 2
    assert outcome.failed == {}
    assert play.events().count("shard_retry") == 1


def test_poison_shard_is_given_up_and_named(play):
    def answer(shard):
        done = protocol.ShardDone(shard, 1, 10, 5, 100, 0)
        return protocol.ShardFailed(1, "cannot", None) if shard == 1 else done

    outcome = play(PlayedReplica(answer, [READY]), [0, 1, 2])
    assert outcome.done == [0, 2]
    assert outcome.failed == {1: "cannot"}


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS"])
def test_error_that_the_next_shard_would_meet_too_ends_the_run(play, name):
    replica = PlayedReplica(lambda shard: protocol.ShardFailed(shard, "full", name), [READY])
    with pytest.raises(EngineError, match="shard 0 could not be written: full") as caught:
        play(replica, [0, 1])
    assert caught.value.code == "write_failed"
    assert replica.asked == [0, 1]


def test_failure_of_the_worker_is_passed_on_with_code_and_remedy(play):
    failed = protocol.Failed("proof", 7, "captured one layer early", "report it", "trace")
    with pytest.raises(EngineError, match="captured one layer early") as caught:
        play(PlayedReplica(first=[failed]), [0])
    assert (caught.value.code, caught.value.remedy) == ("proof", "report it")
