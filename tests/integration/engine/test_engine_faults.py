"""Planted faults against real SGLang: each ends the run before or at the first batch, and is named."""

import pytest


def test_sound_engine_passes_the_proof_exactly(results):
    assert set(results["proof_lines"]) == {
        "layer_001: enters layer 2",
        "layer_003: enters layer 4",
        "final: its norm is normed",
        "normed: gives the logits",
        *(f"{tap}: a sample alone has the same rows" for tap in ("layer_001", "layer_003", "final")),
    }
    assert max(results["proof_lines"].values()) <= 1e-5


def test_capture_one_layer_early_is_named(results):
    assert results["one_layer_early"]["error"] == "ProofError"
    assert "it is what enters layer 1: captured one layer early" in results["one_layer_early"]["message"]


def test_missing_tap_is_named_by_counts(results):
    assert results["one_tap_missing"]["code"] == "capture_count"
    assert "returned 1 captured tensors, 2 taps were asked for" in results["one_tap_missing"]["message"]


def test_stale_flag_is_named_with_its_layer(on_qwen3_moe):
    assert on_qwen3_moe["stale_flag"]["code"] == "capture_flags"
    assert "stale capture flag on layer [5]" in on_qwen3_moe["stale_flag"]["message"]


def test_stale_flag_that_nobody_saw_is_found_by_the_count(on_qwen3_moe):
    assert on_qwen3_moe["stale_flag_unseen"]["code"] == "capture_count"


def test_captures_nobody_asked_for_are_refused(on_qwen3_moe):
    assert on_qwen3_moe["stale_flag_with_final_alone"]["code"] == "capture_count"
    assert "none was asked for" in on_qwen3_moe["stale_flag_with_final_alone"]["message"]


def test_final_and_normed_swapped_is_named(results):
    assert results["norms_swapped"]["error"] == "ProofError"
    assert "the two are swapped: `final` has the norm applied" in results["norms_swapped"]["message"]


def test_rows_of_two_samples_swapped_in_a_tap_are_named(results):
    assert results["rows_swapped_in_capture"]["error"] == "ProofError"
    assert "rows swapped" in results["rows_swapped_in_capture"]["message"]


def test_rows_of_two_samples_swapped_in_final_are_named(results):
    assert results["rows_swapped_in_final"]["error"] == "ProofError"
    assert "the final norm of `final` is not `normed`" in results["rows_swapped_in_final"]["message"]


def test_final_that_has_seen_the_norm_is_named(results):
    assert "`final` has the norm applied" in results["final_has_the_norm"]["message"]


@pytest.mark.parametrize("fault", ["final_is_another_layer", "two_rows_of_final_swapped", "normed_is_final"])
def test_what_is_stored_as_final_or_normed_must_be_it_at_every_row(results, fault):
    assert results[fault]["error"] == "ProofError"
    assert "the final norm of `final` is not `normed`" in results[fault]["message"]


def test_setting_that_sglang_does_not_have_is_refused_with_the_nearest_one(results):
    assert "has no such argument; did you mean quantization" in results["refused_settings"]["unknown"]


def test_settings_we_refuse_are_settings_of_this_release(results):
    assert results["refused_settings"]["not in this release"] == ""


def test_rows_swapped_on_the_way_to_the_host_are_named(results):
    assert results["rows_swapped_in_host_copy"]["error"] == "ProofError"
    assert (
        "layer_001: row 0 in the host buffer is not row 0" in results["rows_swapped_in_host_copy"]["message"]
    )


def test_samples_in_another_order_than_sent_are_refused(results):
    assert results["samples_swapped_on_the_way_in"]["code"] == "batch_tokens"


def test_padded_rows_are_refused(results):
    assert results["padded_rows"]["code"] == "capture_shape"
    assert "(92, 128), expected (89, 128)" in results["padded_rows"]["message"]


def test_final_norm_that_ran_twice_is_refused(results):
    assert results["norm_runs_twice"]["code"] == "final_norm_calls"


def test_removed_hook_on_the_final_norm_is_named(results):
    assert results["norm_hook_removed"]["code"] == "final_norm_calls"
    assert "ran 0 times" in results["norm_hook_removed"]["message"]


def test_path_that_passes_by_the_final_norm_is_named(results):
    assert results["final_norm_passed_by"]["code"] == "final_norm_calls"
    assert "a fused path passes it by" in results["final_norm_passed_by"]["message"]


def test_switch_left_off_is_named(results):
    assert results["switch_left_off"]["code"] == "capture_switch"
    assert "is off while some boundaries are captured" in results["switch_left_off"]["message"]


def test_cached_prefix_is_refused(results):
    assert results["cached_prefix"]["code"] == "batch_tokens"
    assert "after cached prefixes of [4, 0, 0]" in results["cached_prefix"]["message"]


def test_taps_that_cannot_be_proven_leave_the_earlier_ones_in_force(results):
    assert results["taps_that_cannot_be_proven"]["error"] == "ProofError"
    assert "captured one layer early" in results["taps_that_cannot_be_proven"]["message"]
    assert results["taps_that_cannot_be_proven"]["is_as_before"]


def test_as_served_is_the_boundary_and_said_so(results):
    served = results["as_served"]
    assert "layer_001: as served, and that is B(2): enters layer 2" in served["proof"]
    assert set(served["from boundary"].values()) == set(served["switched back"].values()) == {0}


def test_other_dtype_than_declared_is_refused(results):
    assert results["wrong_dtype"]["code"] == "capture_dtype"


def test_token_outside_the_vocabulary_is_refused_before_it_reaches_the_device(results):
    assert results["foreign_token"]["code"] == "token_out_of_vocabulary"


def test_any_selection_is_captured_and_proven_in_a_live_process(results):
    assert set(results["selections"].values()) == {"passed"}


def test_taps_are_the_same_tensors_after_a_change_of_selection(results):
    assert results["taps_changed_between_batches"] == {"layer_003": True, "final": True}


def test_values_that_may_not_be_stored_are_found_per_sample(results):
    assert results["verdicts"] == [None, "non_finite", "all_zero"]
