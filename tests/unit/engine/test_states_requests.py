import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.engine.states_server import Requests
from extractor.errors import BugError
from extractor.protocol import Compute, Finish, Taken


def ordered(*numbers):
    requests = Requests()
    for number in numbers:
        requests.tell(Compute(number, (1,), b"\0\0\0\0"))
    return requests


def all_of(requests):
    found = []
    while (request := requests.next(wait=False)) is not None:
        found.append(request.number)
    return found


def test_batches_come_in_their_order():
    assert all_of(ordered(0, 1, 2)) == [0, 1, 2]


@given(st.integers(0, 20), st.integers(-1, 25))
def test_what_an_interrupted_call_has_left_is_not_computed(count, taken):
    requests = ordered(*range(count))
    requests.tell(Taken(taken))

    assert all_of(requests) == list(range(taken + 1, count))


def test_a_number_that_was_taken_stays_taken():
    requests = ordered()
    requests.tell(Taken(5))
    requests.tell(Taken(3))
    requests.wait_until_taken(5)

    assert not requests.is_wanted(5)
    assert requests.is_wanted(6)


def test_the_first_batch_waits_for_nobody():
    Requests().wait_until_taken(-1)


def test_a_request_for_ranks_of_a_run_is_refused():
    with pytest.raises(BugError, match="Finish"):
        Requests().tell(Finish())
