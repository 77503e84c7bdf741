from extractor.estimate import DiskVerdict, eta_s, size


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
    assert estimate.largest_sample_bytes == 8192 * 57_344


def test_disk_verdict_counts_the_reserve():
    assert DiskVerdict(needed_bytes=90, free_bytes=100, reserve_bytes=10).missing_bytes == 0
    assert DiskVerdict(needed_bytes=91, free_bytes=100, reserve_bytes=10).missing_bytes == 1


def test_eta_is_unknown_before_the_first_token():
    assert eta_s(tokens_left=10, tokens_done=0, elapsed_s=3) is None
    assert eta_s(tokens_left=10, tokens_done=5, elapsed_s=3) == 6
