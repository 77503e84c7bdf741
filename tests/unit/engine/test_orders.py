"""What a rank does with what it is told, without a rank."""

import queue
import threading

import pytest

from extractor.engine.orders import Orders
from extractor.protocol import Drain, Finish, Hold, Resume, Stop, WorkShard

DEADLINE_S = 10.0


class Rank:
    """Orders, a clock set by hand, and what was reported."""

    def __init__(self):
        self.now = 0.0
        self.held = queue.SimpleQueue()
        self.orders = Orders(
            grace_s=60.0, on_held=lambda held: self.held.put(held.shard), clock=lambda: self.now
        )

    def told(self, *requests):
        for request in requests:
            self.orders.tell(request)
        return self

    def reports(self):
        found = []
        while not self.held.empty():
            found.append(self.held.get())
        return found


@pytest.fixture
def rank():
    return Rank()


@pytest.fixture
def in_background(rank):
    """A function that runs a blocking question in a thread of its own: question -> queue of its answer."""
    threads = []

    def ask(question, *args):
        answer = queue.Queue()
        thread = threading.Thread(target=lambda: answer.put(question(*args)), daemon=True)
        thread.start()
        threads.append(thread)
        return answer

    yield ask
    rank.orders.stop()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_shards_come_in_order_and_then_the_end(rank):
    rank.told(WorkShard(4), WorkShard(2), Finish())
    assert [rank.orders.next_shard() for _ in range(3)] == [4, 2, None]


def test_a_shard_that_comes_later_is_waited_for(rank, in_background):
    answer = in_background(rank.orders.next_shard)
    rank.told(WorkShard(7))
    assert answer.get(timeout=DEADLINE_S) == 7


def test_stop_overtakes_shards_that_wait(rank):
    rank.told(WorkShard(0), WorkShard(1), Stop())
    assert not rank.orders.may_go_on(0)
    assert rank.orders.next_shard() is None


def test_drain_finishes_the_shard_in_hand_and_begins_no_other(rank):
    rank.told(WorkShard(1), Drain())
    assert rank.orders.may_go_on(0)
    assert rank.orders.next_shard() is None


def test_a_hold_stops_the_shard_in_hand_until_resume(rank, in_background):
    rank.told(Hold())
    answer = in_background(rank.orders.may_go_on, 3)
    assert rank.held.get(timeout=DEADLINE_S) == 3
    assert answer.empty()
    rank.told(Resume())
    assert answer.get(timeout=DEADLINE_S) is True


def test_a_hold_between_two_shards_names_none_and_begins_none(rank, in_background):
    rank.told(Hold(), WorkShard(5))
    answer = in_background(rank.orders.next_shard)
    assert rank.held.get(timeout=DEADLINE_S) is None
    rank.told(WorkShard(6), Finish())
    assert answer.empty()
    rank.told(Resume())
    assert answer.get(timeout=DEADLINE_S) == 5


def test_a_resume_that_overtakes_a_hold_leaves_no_trace(rank):
    rank.told(Hold(), Resume())
    assert rank.orders.may_go_on(0)
    assert rank.reports() == []


def test_every_hold_gets_exactly_one_report(rank, in_background):
    for _ in range(3):
        rank.told(Hold(), Resume(), Hold())
        answer = in_background(rank.orders.may_go_on, 8)
        assert rank.held.get(timeout=DEADLINE_S) == 8
        rank.told(Resume())
        assert answer.get(timeout=DEADLINE_S)
    assert rank.reports() == []


@pytest.mark.parametrize("request_", [Stop(), Drain()], ids=["stop", "drain"])
@pytest.mark.parametrize("is_held_first", [True, False])
def test_who_is_to_leave_while_held_drops_the_shard(rank, request_, is_held_first):
    rank.told(*((Hold(), request_) if is_held_first else (request_, Hold())))
    assert not rank.orders.may_go_on(2)
    assert rank.orders.next_shard() is None
    assert rank.reports() == [2]


@pytest.mark.parametrize("leave", ["stop", "lose_supervisor"])
def test_what_ends_a_hold_wakes_it(rank, in_background, leave):
    rank.told(Hold())
    answer = in_background(rank.orders.may_go_on, 0)
    rank.held.get(timeout=DEADLINE_S)
    getattr(rank.orders, leave)()
    assert answer.get(timeout=DEADLINE_S) is False


def test_alone_the_shard_in_hand_goes_on_for_the_grace_time_and_no_longer(rank):
    rank.now = 1000.0
    rank.told(WorkShard(1)).orders.lose_supervisor()
    rank.now = 1059.9
    assert rank.orders.may_go_on(0)
    rank.now = 1060.0
    assert not rank.orders.may_go_on(0)


def test_alone_no_other_shard_is_begun(rank):
    rank.told(WorkShard(1)).orders.lose_supervisor()
    assert rank.orders.next_shard() is None


def test_alone_and_held_nothing_more_is_computed(rank):
    rank.told(Hold()).orders.lose_supervisor()
    assert not rank.orders.may_go_on(0)
