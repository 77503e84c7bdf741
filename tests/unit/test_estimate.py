import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.estimate import (
    DiskForecast,
    DiskVerdict,
    Eta,
    block_bytes,
    disk_forecast,
    eta,
    host_buffer_bytes,
    size,
)


def test_kimi_k25_needs_57_kilobytes_per_token():
    # Three taps and final of 7168 in bfloat16.
    estimate = size(
        hidden_size=7168,
        num_taps=4,
        dtype="bfloat16",
        num_tokens=30_000_000,
        num_samples=15_000,
        num_shards=900,
        longest=8192,
    )
    assert estimate.bytes_per_token == 57_349
    assert round(estimate.total_bytes / 1e12, 2) == 1.72
    assert estimate.largest_sample_tokens == 8192
    assert estimate.largest_sample_bytes == 8192 * 57_344


KIMI = {"hidden_size": 7168, "num_taps": 4, "dtype": "bfloat16"}


def test_a_sample_of_32768_tokens_needs_its_own_size_once_in_host_memory():
    sample, batch = block_bytes(32_768, **KIMI), block_bytes(8192, **KIMI)
    states = 32_768 * 7168 * 4 * 2
    assert round(states / 1e9, 2) == 1.88
    # Beside the states lie 16 bytes of magnitudes per token: 0.03 %.
    assert states < sample < states * 1.0003
    pool = host_buffer_bytes(buffers=4, max_tokens=8192, longest=32_768, **KIMI)
    assert pool == sample + batch
    assert round(pool / 1e9, 2) == 2.35
    # Two chunks on the device at most: the one that is copied and the one that is computed.
    assert states >= 2 * 8192 * 7168 * 4 * 2


SHAPES = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 300),
        "num_taps": st.integers(1, 5),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
    }
)


@given(st.integers(2, 8), st.integers(1, 500), st.integers(1, 5000), SHAPES)
def test_host_memory_holds_the_batches_and_the_longest_sample_and_no_more(
    buffers, max_tokens, longest, shape
):
    batch, sample = block_bytes(max_tokens, **shape), block_bytes(longest, **shape)
    pool = host_buffer_bytes(buffers=buffers, max_tokens=max_tokens, longest=longest, **shape)
    assert pool >= buffers * batch
    assert pool >= sample + batch
    assert pool <= buffers * batch + sample
    if longest <= max_tokens:
        assert pool == buffers * batch


def test_disk_verdict_counts_the_reserve():
    assert DiskVerdict(needed_bytes=90, free_bytes=100, reserve_bytes=10).missing_bytes == 0
    assert DiskVerdict(needed_bytes=91, free_bytes=100, reserve_bytes=10).missing_bytes == 1


def test_without_recent_rates_the_mean_so_far_gives_the_eta():
    assert eta(tokens_left=10, tokens_done=0, running_s=3) is None
    assert eta(tokens_left=10, tokens_done=5, running_s=3).mean_s == 6


def steady(rate, num_intervals, **changes):
    values = {
        "tokens_left": 100_000,
        "tokens_done": round(rate * num_intervals * 5),
        "running_s": num_intervals * 5.0,
        "recent": [rate] * num_intervals,
        "interval_s": 5.0,
    }
    return eta(**(values | changes))


def test_a_steady_rate_gives_its_eta_and_a_band_that_narrows():
    early, late = steady(1000, 4), steady(1000, 60)
    assert early.mean_s == late.mean_s == pytest.approx(100)
    assert early.low_s < late.low_s < 100 < late.high_s < early.high_s
    assert late.high_s == pytest.approx(107, abs=1)


def test_there_is_no_eta_before_the_first_token_or_while_all_is_stalled():
    assert steady(1000, 10, tokens_done=0) is None
    assert steady(1000, 10, recent=[0.0] * 10) is None
    assert steady(1000, 10, tokens_left=0) == Eta(0.0, 0.0, 0.0)


def test_long_and_short_shards_in_turn_leave_the_eta_near_the_truth():
    # Shards of 45 s at 1,500 and at 500 tokens/s: 1,000 on average, wherever one looks.
    rates = ([1500.0] * 9 + [500.0] * 9) * 20
    for end in range(120, 360, 7):
        done = 5 * sum(rates[:end])
        found = eta(
            tokens_left=1_000_000,
            tokens_done=round(done),
            running_s=end * 5.0,
            recent=rates[end - 60 : end],
            interval_s=5.0,
        )
        assert found.mean_s == pytest.approx(1000, rel=0.12)
        assert found.low_s < 1000 < found.high_s


def test_after_a_lasting_change_the_band_holds_the_new_truth():
    # Two hours at 1,000 tokens/s, then five minutes at 600.
    found = eta(
        tokens_left=600_000,
        tokens_done=7_200_000 + 180_000,
        running_s=7500.0,
        recent=[600.0] * 60,
        interval_s=5.0,
    )
    assert found.low_s < found.mean_s < 1000 < found.high_s


SOME_S = st.just(0.0) | st.floats(1e-6, 1e7)
RATES = st.lists(st.just(0.0) | st.floats(1e-3, 1e6), max_size=60)


@given(left=st.integers(0, 10**12), done=st.integers(0, 10**12), running_s=SOME_S, recent=RATES)
def test_a_band_holds_its_mean_and_is_finite(left, done, running_s, recent):
    found = eta(tokens_left=left, tokens_done=done, running_s=running_s, recent=recent, interval_s=5.0)
    if found is not None:
        assert 0 <= found.low_s <= found.mean_s <= found.high_s < math.inf


def forecast(**changes):
    values = {
        "free_bytes": 2_310_000_000_000,
        "reserve_bytes": 1_000_000_000,
        "needed_bytes": 1_009_000_000_000,
        "write_bytes_per_s": 286e6,
        "eta_s": 3600.0,
    }
    return disk_forecast(**(values | changes))


def test_a_run_that_fits_says_what_is_to_spare():
    assert forecast() == DiskForecast(True, None, "enough: 1.30 TB to spare")
    assert forecast(needed_bytes=2_309_000_000_000).is_enough
    assert not forecast(needed_bytes=2_309_000_000_001).is_enough


def test_a_run_that_does_not_fit_says_when_it_holds():
    found = forecast(free_bytes=11_000_000_000, needed_bytes=22_300_000_000, write_bytes_per_s=1_243_000.0)
    assert found.verdict == "12.3 GB too little: holds at the reserve of 1.00 GB in 2h14m"
    assert found.full_in_s == pytest.approx(8045, abs=1)
    assert not found.is_enough


def test_without_a_write_rate_the_eta_says_when_and_without_both_nothing_does():
    short = {"free_bytes": 11_000_000_000, "needed_bytes": 20_000_000_000, "write_bytes_per_s": None}
    assert forecast(**short).full_in_s == pytest.approx(1800)
    unknown = forecast(**short, eta_s=None)
    assert (unknown.full_in_s, unknown.verdict) == (
        None,
        "10.0 GB too little: holds at the reserve of 1.00 GB",
    )


def test_at_the_reserve_there_is_no_time_left():
    found = forecast(free_bytes=900_000_000, needed_bytes=5_000_000_000)
    assert (found.is_enough, found.full_in_s) == (False, 0.0)
    assert found.verdict == "5.10 GB too little: no space above the reserve of 1.00 GB"


def test_a_finished_run_needs_no_space_however_full_the_disk_is():
    assert forecast(free_bytes=0, needed_bytes=0).is_enough
