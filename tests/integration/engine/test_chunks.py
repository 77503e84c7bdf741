"""Samples computed in chunks by real SGLang: the states of the whole, or a refusal that says what is wrong."""

import pytest

BOUND = 1e-5


@pytest.fixture(params=["on_llama", "on_qwen3", "on_qwen3_moe"])
def chunked(request):
    return request.getfixturevalue(request.param)


def test_a_sample_has_the_same_states_in_chunks_of_any_size_as_a_whole(chunked):
    # 299 leaves one and two tokens for the last chunk, 100 leaves none and one.
    assert {
        "300 in chunks of 100",
        "301 in chunks of 100",
        "300 in chunks of 299",
        "40 in chunks of 1",
    } <= chunked["chunks"].keys()
    assert max(chunked["chunks"].values()) <= BOUND, chunked["chunks"]


def test_a_sample_longer_than_a_batch_has_the_states_of_transformers(chunked):
    assert chunked["chunks_against_transformers"] <= BOUND


def test_the_proof_covers_chunks_where_there_are_any(chunked):
    assert set(chunked["chunk_proof_lines"]) == {
        f"{tap}: a sample in chunks has the same rows" for tap in ("layer_001", "layer_003", "final")
    }
    assert max(chunked["chunk_proof_lines"].values()) <= BOUND


def test_neither_sees_what_the_other_left_in_the_cache(results):
    assert results["short_samples_around_a_long_one"] == {"short": 0.0, "long": 0.0}


def test_states_of_a_chunk_leave_the_device_before_the_next_but_one_is_computed(results):
    assert results["device_holds_one_chunk_beside_the_next"] == [0, 1, 1, 1, 1]


def test_host_memory_never_exceeds_the_batches_and_the_largest_sample(results):
    found = results["queue_of_a_long_record"]
    assert found["stored"] == [200] * 9 + [1024]
    assert found["limit"] < found["peak"] <= found["limit"] + found["largest"]


def test_a_prefix_of_another_length_than_planned_is_refused(results):
    assert results["prefix_is_too_short"]["code"] == "batch_tokens"
    assert "cached prefixes of [99]; sent were [100] after [100]" in results["prefix_is_too_short"]["message"]


def test_a_cached_prefix_of_a_whole_sample_is_refused(results):
    assert results["prefix_of_a_packed_sample"]["code"] == "batch_tokens"
    assert "cached prefixes of [0, 8, 0]" in results["prefix_of_a_packed_sample"]["message"]


def test_positions_that_start_again_in_the_second_chunk_are_refused(results):
    assert results["positions_restarted"]["code"] == "chunk_prefix"
    assert "chunk from token 100" in results["positions_restarted"]["message"]
    assert "positions that do not go on" in results["positions_restarted"]["message"]


def test_keys_and_values_of_another_sample_are_refused(results):
    assert results["cache_of_another_sample"]["code"] == "chunk_prefix"
    assert "not those of the chunks before" in results["cache_of_another_sample"]["message"]


@pytest.mark.parametrize("fault", ["positions_restarted_unseen", "cache_of_another_sample_unseen"])
def test_what_the_comparison_does_not_see_is_found_by_the_proof(results, fault):
    assert results[fault]["error"] == "ProofError"
    assert "has other states in chunks of 150 than as a whole" in results[fault]["message"]


def test_chunks_joined_in_another_order_are_named_by_the_proof(results):
    assert results["chunks_in_another_order"]["error"] == "ProofError"
    assert "chunk 1 stands in the place of chunk 0" in results["chunks_in_another_order"]["message"]


def test_nothing_is_run_between_the_chunks_of_a_sample(results):
    assert results["batch_between_chunks"]["code"] == "bug"
    assert "while a long sample was open" in results["batch_between_chunks"]["message"]
    assert "while another one was open" in results["batch_between_chunks"]["second"]


def test_a_sample_whose_end_was_not_computed_is_not_handed_on(results):
    assert "200 tokens of a sample of 300 were computed" in results["sample_without_its_end"]["message"]


def test_host_memory_is_given_back_after_every_fault(results):
    assert results["blocks_after_faults"] == 0
