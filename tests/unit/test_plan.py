import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.errors import BugError, ConfigError
from extractor.plan import Geometry, chunk_edges, plan_batches, plan_shards, shard_tokens_for

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)
GEOMETRY = st.builds(
    Geometry,
    max_tokens=st.integers(64, 300),
    shard_tokens=st.integers(1, 2000),
    seed=st.none() | st.integers(0, 9),
)


@given(LENGTHS, GEOMETRY)
def test_every_sample_is_in_exactly_one_shard(lengths, geometry):
    shards = plan_shards(lengths, geometry)
    assert sorted(sample for shard in shards for sample in shard.samples) == list(range(len(lengths)))
    assert [shard.index for shard in shards] == list(range(len(shards)))


@given(LENGTHS, GEOMETRY)
def test_no_batch_is_empty_or_over_budget(lengths, geometry):
    for shard in plan_shards(lengths, geometry):
        for batch in shard.batches:
            assert 1 <= sum(lengths[sample] for sample in batch) <= geometry.max_tokens


@given(LENGTHS, GEOMETRY)
def test_shard_is_within_its_budget_unless_it_is_one_sample(lengths, geometry):
    for shard in plan_shards(lengths, geometry):
        assert shard.num_tokens == sum(lengths[sample] for sample in shard.samples)
        assert shard.num_tokens <= geometry.shard_tokens or len(shard.samples) == 1


@given(LENGTHS, GEOMETRY)
def test_plan_is_a_function_of_its_arguments(lengths, geometry):
    assert plan_shards(lengths, geometry) == plan_shards(list(lengths), geometry)


@given(LENGTHS, GEOMETRY, st.integers(64, 300))
def test_batch_budget_does_not_move_samples_between_shards(lengths, geometry, other_budget):
    other = Geometry(other_budget, geometry.shard_tokens, geometry.seed)
    members = [sorted(shard.samples) for shard in plan_shards(lengths, geometry)]
    assert members == [sorted(shard.samples) for shard in plan_shards(lengths, other)]


def test_without_a_seed_shards_follow_the_input():
    shards = plan_shards([10] * 10, Geometry(max_tokens=10, shard_tokens=30))
    assert [sorted(shard.samples) for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_seed_shuffles_samples_over_shards():
    lengths = [10] * 50
    plain = plan_shards(lengths, Geometry(50, 100))
    assert plan_shards(lengths, Geometry(50, 100, seed=7)) != plain
    assert plan_shards(lengths, Geometry(50, 100, seed=7)) != plan_shards(lengths, Geometry(50, 100, seed=8))


def test_long_samples_come_first_and_short_ones_fill_up():
    assert plan_batches(range(4), [10, 60, 30, 95], 100) == [(3,), (1, 2, 0)]


@pytest.mark.parametrize("length", [0, 101])
def test_sample_that_fits_no_batch_is_refused_by_number(length):
    with pytest.raises(ConfigError, match=f"sample 1 has {length} tokens") as caught:
        plan_shards([5, length], Geometry(100, 1000))
    assert caught.value.code == "sample_too_long"


def test_shard_budget_is_at_least_one_token():
    assert shard_tokens_for(1_000_000, 4608) == 217
    assert shard_tokens_for(10, 4608) == 1


WITH_CHUNKS = st.integers(1, 80).flatmap(
    lambda max_tokens: st.builds(
        Geometry,
        max_tokens=st.just(max_tokens),
        shard_tokens=st.integers(1, 2000),
        seed=st.none() | st.integers(0, 9),
        chunk_tokens=st.integers(1, max_tokens),
    )
)


@given(st.integers(1, 400), WITH_CHUNKS)
def test_chunks_are_the_sample_in_order_and_none_is_over_its_budget(length, geometry):
    edges = chunk_edges(length, geometry)
    assert [token for begin, end in edges for token in range(begin, end)] == list(range(length))
    assert all(begin < end for begin, end in edges)
    if length <= geometry.max_tokens:
        assert edges == ((0, length),)
    else:
        # All full but the last: nothing else but length and geometry has a say.
        assert [end - begin for begin, end in edges[:-1]] == [geometry.chunk_tokens] * (len(edges) - 1)
        assert edges[-1][1] - edges[-1][0] <= geometry.chunk_tokens


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), WITH_CHUNKS)
def test_a_sample_longer_than_a_batch_is_a_batch_of_its_own(lengths, geometry):
    shards = plan_shards(lengths, geometry)
    assert sorted(sample for shard in shards for sample in shard.samples) == list(range(len(lengths)))
    for batch in (batch for shard in shards for batch in shard.batches):
        tokens = sum(lengths[sample] for sample in batch)
        assert tokens <= geometry.max_tokens or len(batch) == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), WITH_CHUNKS, st.integers(1, 80))
def test_chunks_have_no_say_in_shards_and_batches(lengths, geometry, other):
    changed = msgspec.structs.replace(geometry, chunk_tokens=min(other, geometry.max_tokens))
    assert plan_shards(lengths, geometry) == plan_shards(lengths, changed)


def test_the_last_chunk_may_be_one_token():
    assert chunk_edges(9, Geometry(6, 100, chunk_tokens=4)) == ((0, 4), (4, 8), (8, 9))
    assert chunk_edges(8, Geometry(6, 100, chunk_tokens=4)) == ((0, 4), (4, 8))
    assert chunk_edges(6, Geometry(6, 100, chunk_tokens=4)) == ((0, 6),)


def test_without_chunks_a_sample_has_no_edges_beyond_a_batch():
    with pytest.raises(BugError, match="9 tokens, a budget of 6, and no chunks"):
        chunk_edges(9, Geometry(6, 100))


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_a_chunk_is_no_larger_than_a_batch(chunk_tokens):
    with pytest.raises(ValueError, match=f"chunk_tokens = {chunk_tokens}: expected 1 to max_tokens = 6"):
        Geometry(6, 100, chunk_tokens=chunk_tokens)
    written = b'{"max_tokens":6,"shard_tokens":100,"seed":null,"chunk_tokens":%d}' % chunk_tokens
    with pytest.raises(msgspec.ValidationError, match="chunk_tokens"):
        msgspec.json.decode(written, type=Geometry)


def test_a_geometry_without_chunks_is_written_as_it_was_before_there_were_any():
    written = b'{"max_tokens":6,"shard_tokens":100,"seed":null}'
    assert msgspec.json.encode(Geometry(6, 100)) == written
    assert msgspec.json.decode(written, type=Geometry) == Geometry(6, 100)
    chunked = Geometry(6, 100, chunk_tokens=4)
    assert msgspec.json.decode(msgspec.json.encode(chunked), type=Geometry) == chunked
