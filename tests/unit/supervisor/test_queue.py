import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extractor.errors import BugError
from extractor.supervisor.queue import MAX_ATTEMPTS, ShardQueue

SHARDS = range(8)


class QueueMachine(RuleBasedStateMachine):
    """Random leases, completions, failures and lost replicas against the invariants of the queue."""

    def __init__(self):
        super().__init__()
        self.queue = ShardQueue(SHARDS)
        self.leased: dict[int, str] = {}
        self.failures = dict.fromkeys(SHARDS, 0)

    @precondition(lambda self: self.queue.has_pending)
    @rule(replica=st.sampled_from("ab"))
    def lease(self, replica):
        shard = self.queue.lease(replica)
        assert shard not in self.leased
        self.leased[shard] = replica

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def complete(self, data):
        shard = data.draw(st.sampled_from(sorted(self.leased)))
        self.queue.complete(shard)
        del self.leased[shard]

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def fail(self, data):
        shard = data.draw(st.sampled_from(sorted(self.leased)))
        self.failures[shard] += 1
        assert self.queue.fail(shard, "broken") == (self.failures[shard] < MAX_ATTEMPTS)
        del self.leased[shard]

    @rule(replica=st.sampled_from("ab"))
    def lose(self, replica):
        mine = sorted(shard for shard, owner in self.leased.items() if owner == replica)
        assert self.queue.give_back(replica) == mine
        for shard in mine:
            del self.leased[shard]

    @invariant()
    def every_shard_is_in_exactly_one_place(self):
        places = [*self.queue._pending, *self.leased, *self.queue.done, *self.queue.failed]
        assert sorted(places) == list(SHARDS)
        assert self.queue.is_finished == (not self.queue.has_pending and not self.leased)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None)


def test_shards_are_leased_in_order_and_a_failed_one_comes_next():
    queue = ShardQueue([3, 1, 2])
    assert queue.lease("a") == 1
    assert queue.lease("a") == 2
    queue.fail(1, "disk")
    assert queue.lease("a") == 1


def test_poison_shard_is_given_up_with_its_error_and_others_go_on():
    queue = ShardQueue([0, 1])
    for _ in range(MAX_ATTEMPTS):
        assert queue.lease("a") == 0
        queue.fail(0, "cannot be written")
    assert queue.failed == {0: "cannot be written"}
    assert queue.lease("a") == 1


def test_completing_what_is_not_leased_is_a_bug():
    with pytest.raises(BugError, match="shard 4 is not leased"):
        ShardQueue([4]).complete(4)
