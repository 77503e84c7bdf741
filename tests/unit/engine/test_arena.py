"""Ranges of a fixed amount of memory: never two owners, never for ever, and in the order of asking."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.engine.arena import Arena
from extractor.errors import BugError

SIZE = 64
DEADLINE_S = 30.0


def disjoint(ranges):
    ordered = sorted(ranges)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))


@given(st.lists(st.tuples(st.integers(1, SIZE), st.integers(0, 10)), max_size=40))
def test_ranges_in_use_are_disjoint_inside_the_arena_and_bounded(requests):
    arena = Arena(SIZE)
    used = {}
    for size, which in requests:
        # Room for certain: a request that nobody can make room for would wait.
        while sum(used.values()) + size > SIZE or arena._find(size) is None:
            begin = sorted(used)[which % len(used)]
            arena.give_back(begin)
            del used[begin]
        begin = arena.take(size)
        used[begin] = size
        assert 0 <= begin <= begin + size <= SIZE
        assert disjoint([(begin, begin + size) for begin, size in used.items()])
        assert arena.used_bytes == sum(used.values()) <= arena.peak_bytes <= SIZE
    for begin in used:
        arena.give_back(begin)
    assert arena.take(SIZE) == 0


@given(st.lists(st.lists(st.integers(1, SIZE), max_size=8), min_size=2, max_size=6))
def test_threads_never_share_a_byte_and_all_are_served(requests_of_threads):
    arena = Arena(SIZE)
    owners = [None] * SIZE
    everybody = threading.Barrier(len(requests_of_threads))

    def work(name, sizes):
        everybody.wait(DEADLINE_S)
        for size in sizes:
            begin = arena.take(size)
            assert owners[begin : begin + size] == [None] * size
            owners[begin : begin + size] = [name] * size
            assert owners[begin : begin + size] == [name] * size
            owners[begin : begin + size] = [None] * size
            arena.give_back(begin)

    with ThreadPoolExecutor(len(requests_of_threads)) as threads:
        done = [threads.submit(work, *request) for request in enumerate(requests_of_threads)]
        for one in done:
            one.result(DEADLINE_S)
    assert arena.used_bytes == 0
    assert arena.peak_bytes <= SIZE


@given(st.lists(st.integers(1, SIZE // 3), max_size=40))
def test_three_ranges_have_room_for_one_beside_another_wherever_it_lies(sizes):
    # As the engine of the Python API takes and gives back, in a single thread: nobody could end its waiting.
    arena = Arena(SIZE // 3 * 3)
    held = None
    for size in sizes:
        assert arena._find(size) is not None
        begin = arena.take(size)
        if held is not None:
            arena.give_back(held)
        held = begin


class Waiting:
    """A request in a thread of its own."""

    def __init__(self, arena, size, served):
        def ask():
            begin = arena.take(size)
            served.append(size)
            self.begin = begin

        before = arena.num_waiting
        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()
        while arena.num_waiting == before and self._thread.is_alive():
            self._thread.join(0.001)

    def result(self):
        self._thread.join(DEADLINE_S)
        return self.begin


def test_a_large_request_is_not_passed_over_for_small_ones_that_would_fit():
    arena, served = Arena(SIZE), []
    first, second = arena.take(40), arena.take(10)
    large = Waiting(arena, 60, served)
    small = Waiting(arena, 4, served)
    assert arena.num_waiting == 2
    arena.give_back(second)
    assert (arena.num_waiting, served) == (2, [])
    arena.give_back(first)
    assert large.result() == 0
    assert small.result() == 60
    assert served == [60, 4]


def test_what_was_given_back_serves_all_that_fit():
    arena, served = Arena(SIZE), []
    whole = arena.take(SIZE)
    waiting = [Waiting(arena, size, served) for size in (30, 20, 10)]
    arena.give_back(whole)
    assert [one.result() for one in waiting] == [0, 30, 50]


@pytest.mark.parametrize("size", [0, SIZE + 1])
def test_a_request_that_could_never_be_served_is_refused_at_once(size):
    with pytest.raises(BugError, match=f"{size} bytes were asked of an arena of {SIZE}"):
        Arena(SIZE).take(size)


def test_a_range_is_given_back_once():
    arena = Arena(SIZE)
    begin = arena.take(8)
    arena.give_back(begin)
    with pytest.raises(BugError, match="given back twice"):
        arena.give_back(begin)
