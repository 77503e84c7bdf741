"""Leader and followers over real sockets, each in a thread of its own."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from extractor.engine.lockstep import Alone, Follower, Leader
from extractor.errors import BugError
from extractor.store.shares import Share
from extractor.supervisor.place import make_socket_folder, remove_socket_folder

WAIT_S = 30


class Group:
    """Three ranks."""

    def __init__(self, folder):
        self.shares = queue.SimpleQueue()
        self.faults = queue.SimpleQueue()
        self.threads = ThreadPoolExecutor(3)
        leader = self.threads.submit(Leader, folder, 3, on_share=self.on_share, on_fault=self.faults.put)
        self.followers = [Follower(folder, rank) for rank in (1, 2)]
        self.leader = leader.result(WAIT_S)
        self.refused = None

    def on_share(self, share):
        if share.index == self.refused:
            raise OSError("no")
        self.shares.put(share)

    def all(self, action):
        """Runs `action` on all ranks at the same time; results or errors in the order of ranks."""
        ranks = [self.leader, *self.followers]
        running = [self.threads.submit(action, rank) for rank in ranks]
        return [future.result(WAIT_S) for future in running]

    def close(self):
        self.all(lambda rank: rank.close(is_in_step=False))
        self.threads.shutdown()


@pytest.fixture
def folder():
    made = make_socket_folder()
    yield f"ipc://{made}"
    remove_socket_folder(made)


@pytest.fixture
def group(folder):
    made = Group(folder)
    yield made
    made.close()


def share(index):
    return Share(index=index, attempt=0, rank=1, folder="/nowhere")


def test_all_ranks_get_the_leader_s_answers_in_their_order(group):
    answers = iter([3, None, True])

    def ask(rank):
        return [rank.agree(what, lambda: next(answers)) for what in ("shard", "shard", "batch")]

    assert group.all(ask) == [[3, None, True]] * 3


def test_a_follower_waits_for_as_long_as_the_leader_is_held(group):
    decided = threading.Event()
    answers = [
        group.threads.submit(rank.agree, "batch", lambda: decided.wait(WAIT_S))
        for rank in (group.leader, *group.followers)
    ]
    assert not any(answer.done() for answer in answers)
    decided.set()
    assert [answer.result(WAIT_S) for answer in answers] == [True] * 3


def test_the_leader_gathers_values_in_the_order_of_ranks_also_from_one_that_is_ahead(group):
    # Rank 1 is two words ahead of rank 2.
    group.followers[0].gather("first", b"1a")
    group.followers[0].gather("second", b"1b")
    group.followers[1].gather("first", b"2a")
    assert group.leader.gather("first", b"0a") == [b"0a", b"1a", b"2a"]
    group.followers[1].gather("second", b"2b")
    assert group.leader.gather("second", b"0b") == [b"0b", b"1b", b"2b"]
    assert group.followers[0].gather("third", None) == []


def test_ranks_that_ask_different_questions_are_stopped(group):
    group.leader.agree("the next shard", lambda: 1)
    with pytest.raises(
        BugError, match="out of step: 'the next batch' here, 'the next shard' from the leader"
    ):
        group.followers[0].agree("the next batch", lambda: 1)
    group.followers[0].gather("ready", None)
    group.followers[1].gather("proof", None)
    with pytest.raises(BugError, match="'ready' here, 'proof' from rank 2"):
        group.leader.gather("ready", None)


def test_shares_arrive_whatever_the_leader_is_doing(group):
    for number, rank in enumerate(group.followers):
        rank.hand_over(share(number))
    assert {group.shares.get(timeout=WAIT_S).index for _ in group.followers} == {0, 1}


def test_a_share_that_is_refused_is_told_and_the_next_one_still_comes(group):
    group.refused = 7
    group.followers[0].hand_over(share(7))
    group.followers[0].hand_over(share(8))
    assert group.shares.get(timeout=WAIT_S).index == 8
    assert isinstance(group.faults.get(timeout=WAIT_S), OSError)


def test_who_leaves_in_step_loses_nothing_that_was_handed_over(folder):
    group = Group(folder)

    def leave(rank):
        if rank is not group.leader:
            for number in range(50):
                rank.hand_over(share(number))
        rank.close(is_in_step=True)

    group.all(leave)
    group.threads.shutdown()
    assert group.shares.qsize() == 100


def test_a_single_rank_asks_itself():
    alone = Alone()
    assert alone.agree("shard", lambda: 4) == 4
    assert alone.gather("ready", 5) == [5]
    with pytest.raises(BugError):
        alone.hand_over(share(0))
