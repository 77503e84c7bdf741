import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.errors import ConfigError
from extractor.plan import Geometry, plan_batches, plan_shards, shard_tokens_for

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
