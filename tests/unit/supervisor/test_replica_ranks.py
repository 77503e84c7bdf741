"""A replica of several ranks: who is heard, what ends it, and which of several errors is told."""

import signal
from pathlib import Path

import pytest
import zmq

from extractor import protocol
from extractor.errors import EngineError
from extractor.plan import Geometry
from extractor.protocol import EngineSpec
from extractor.supervisor import replica as replicas
from extractor.supervisor.replica import Replica
from extractor.taps import select
from tests.support.product import wait_until


class PlayedRank:
    """The process of a rank, and its end of the line; both are moved by the test."""

    def __init__(self, spec, rank, make_socket):
        self.pid = 1000 + rank
        self.code = None
        self.kills = 0
        self.rank = rank
        self.socket = make_socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"{spec.replica}.{rank}".encode())
        self.socket.connect(spec.endpoint)

    def poll(self):
        return self.code

    def wait(self, timeout_s):
        return self.code

    def kill(self, *, wait=True):
        if self.code is None:
            self.kills += 1
            self.code = -signal.SIGKILL

    def say(self, *reports):
        for report in reports:
            self.socket.send(protocol.encode(report))

    def fail(self, code, message, at_s, *, leaves=True):
        self.say(protocol.Failed(code, 7, message, None, "", self.rank, at_s))
        if leaves:
            self.say(protocol.Bye(10, self.rank))


class PlayedLauncher:
    def __init__(self, make_socket):
        self.make_socket = make_socket
        self.ranks = []
        self.fails_at = None

    def start(self, spec, *, environment, log, keep_fds, rank=0):
        if rank == self.fails_at:
            raise OSError("no more processes")
        log.write_text(f"last words of rank {rank}\n")
        self.ranks.append(PlayedRank(protocol_spec(spec), rank, self.make_socket))
        return self.ranks[-1]


def protocol_spec(path):
    import msgspec

    return msgspec.json.decode(path.read_bytes(), type=EngineSpec)


def spec_for(endpoint, tp):
    return EngineSpec(
        model_folder="",
        trust_remote_code=False,
        allow_unverified_sglang=False,
        dtype="float32",
        device="cpu",
        attention_backend=None,
        mem_fraction=None,
        sglang_args={},
        taps=select(num_layers=4, layers=(1,), embed=False, final=True, normed=False, convention="after"),
        hidden_size=8,
        store_dtype="float32",
        geometry=Geometry(max_tokens=16, shard_tokens=16),
        max_batch_samples=1,
        prepared="",
        num_samples=0,
        output="",
        fingerprint="",
        replica="0-abc",
        writer_threads=1,
        buffers=2,
        endpoint=endpoint,
        tp=tp,
    )


class Played:
    def __init__(self, folder, make_socket, tp=3):
        self.launcher = PlayedLauncher(make_socket)
        self.replica = Replica(
            lambda endpoint: spec_for(endpoint, tp), launcher=self.launcher, run_folder=folder, environment={}
        )
        self.ranks = self.launcher.ranks
        self.heard = []

    def hear(self, number):
        """Reports, until so many have come."""

        def enough():
            self.heard += self.replica.reports(0.01)
            return len(self.heard) >= number

        wait_until(enough, f"{number} reports", state=lambda: self.heard, deadline_s=20.0)
        return self.heard

    def end(self):
        """What the replica ends with: an error, or `Failed` and `Bye`."""
        try:
            wait_until(
                lambda: self.hear(0) and self.replica.has_left,
                "end",
                state=lambda: self.heard,
                deadline_s=20.0,
            )
        except EngineError as error:
            return error.message
        failed, bye = self.heard[-2:]
        assert isinstance(bye, protocol.Bye)
        return failed.message


@pytest.fixture
def make_socket():
    sockets = []
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)

        def make(kind):
            sockets.append(context.socket(kind))
            return sockets[-1]

        yield make
        for socket in sockets:
            socket.close()


@pytest.fixture
def played(tmp_path, make_socket):
    made = Played(tmp_path, make_socket)
    with made.replica:
        yield made


def test_each_rank_has_its_log_and_its_number(played, tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "replica-0.1.log",
        "replica-0.2.log",
        "replica-0.json",
        "replica-0.log",
    ]
    assert played.replica.pids == (1000, 1001, 1002)


def test_of_followers_only_hello_is_passed_on(played):
    for rank in played.ranks:
        rank.say(protocol.Hello(protocol.PROTOCOL_VERSION, rank.pid, 0.0, rank.rank), protocol.Stage("load"))
    heard = played.hear(4)
    assert sorted(report.rank for report in heard if isinstance(report, protocol.Hello)) == [0, 1, 2]
    assert [report for report in heard if isinstance(report, protocol.Stage)] == [protocol.Stage("load")]


def test_the_replica_has_left_when_the_last_rank_has(played):
    for rank in played.ranks[:2]:
        rank.say(protocol.Bye(10, rank.rank))
        rank.code = 0
    assert list(played.replica.reports(0.05)) == []
    assert not played.replica.has_left
    played.ranks[2].say(protocol.Bye(5, 2))
    assert played.hear(1) == [protocol.Bye(25)]
    assert played.replica.has_left


def test_a_follower_that_does_not_leave_is_ended(played, monkeypatch):
    monkeypatch.setattr(replicas, "EXIT_WAIT_S", 0.0)
    played.ranks[0].say(protocol.Bye(10, 0))
    assert played.hear(1) == [protocol.Bye(10)]
    assert [rank.kills for rank in played.ranks[1:]] == [1, 1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_rank_that_dies_ends_all_and_is_named(played, number):
    played.ranks[number].code = -signal.SIGKILL
    message = played.end()
    assert f"of rank {number} (pid 100{number}) ended without a word: killed by SIGKILL" in message
    assert f"last words of rank {number}" in message
    assert all(rank.code is not None for rank in played.ranks)


def test_what_others_say_of_a_rank_that_was_killed_does_not_hide_it(played):
    played.ranks[1].code = -signal.SIGKILL
    played.ranks[0].fail("crash", "RuntimeError: Connection closed by peer", at_s=1.0)
    played.ranks[2].fail("crash", "RuntimeError: Connection closed by peer", at_s=2.0)
    assert "of rank 1 (pid 1001) ended without a word" in played.end()


def test_of_several_errors_the_first_is_told_whatever_order_they_come_in(played):
    played.ranks[0].fail("crash", "RuntimeError: Connection closed by peer", at_s=5.5)
    assert list(played.replica.reports(0.05)) == []
    played.ranks[2].fail("crash", "RuntimeError: Connection closed by peer", at_s=5.6)
    played.ranks[1].fail("proof", "layer_003 is not what enters layer 4", at_s=5.0)
    assert played.end() == "rank 1: layer_003 is not what enters layer 4"
    (failed,) = [report for report in played.heard if isinstance(report, protocol.Failed)]
    assert (failed.code, failed.exit_code) == ("proof", 7)
    assert failed.remedy.endswith("replica-0.1.log")


def test_a_rank_that_its_library_aborts_after_another_one_failed_is_not_the_cause(played):
    played.ranks[0].fail("capture_count", "one tap is missing", at_s=5.0)
    played.ranks[1].code = -signal.SIGABRT
    assert played.end() == "rank 0: one tap is missing"


def test_who_waits_for_a_rank_that_failed_is_ended(played, monkeypatch):
    monkeypatch.setattr(replicas, "SETTLE_S", 0.05)
    played.ranks[1].fail("proof", "wrong", at_s=1.0)
    assert played.end() == "rank 1: wrong"
    assert [rank.kills for rank in (played.ranks[0], played.ranks[2])] == [1, 1]


def test_a_rank_that_says_that_it_failed_and_stays_is_ended(played, monkeypatch):
    monkeypatch.setattr(replicas, "SETTLE_S", 0.05)
    played.ranks[0].fail("ranks_disagree", "shard 3: ranks disagree", at_s=1.0, leaves=False)
    assert played.end() == "rank 0: shard 3: ranks disagree"
    assert [rank.kills for rank in played.ranks] == [1, 1, 1]


def test_a_single_rank_is_not_named(tmp_path, make_socket):
    played = Played(tmp_path, make_socket, tp=1)
    with played.replica:
        played.ranks[0].fail("proof", "wrong", at_s=1.0)
        assert played.end() == "wrong"


def test_ranks_that_were_started_are_ended_when_another_cannot_be(tmp_path, make_socket):
    launcher = PlayedLauncher(make_socket)
    launcher.fails_at = 2
    with pytest.raises(OSError, match="no more processes"):
        Replica(
            lambda endpoint: spec_for(endpoint, 3), launcher=launcher, run_folder=tmp_path, environment={}
        )
    assert [rank.kills for rank in launcher.ranks] == [1, 1]


def test_leaving_it_ends_every_rank(tmp_path, make_socket):
    played = Played(tmp_path, make_socket)
    with played.replica:
        folder = Path(protocol_spec(tmp_path / "replica-0.json").endpoint.removeprefix("ipc://")).parent
        assert folder.is_dir()
    assert [rank.kills for rank in played.ranks] == [1, 1, 1]
    assert not folder.exists()
