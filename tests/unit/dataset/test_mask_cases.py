"""Cases of the area "mask": supervised text, exactly, as the case files expect it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dataset_bench import decode_runs, rejects_of, without_marker

CASES = [
    "mask-no-generation-markers",
    "mask-span-at-zero",
    "mask-think-stripped",
    "mask-empty-think",
    "mask-orphan-think",
    "mask-length-mismatch-drop",
    "mask-trainable-flag",
]


def samples_of(prepared):
    return {sample.sample_id: sample for sample in map(prepared.sample, range(len(prepared)))}


@pytest.mark.parametrize("end_of_turn", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_supervised_text_is_exactly_that_of_the_case(prepare_case, cases, tokenizer, case, end_of_turn):
    expected = json.loads((cases / case / "expected.json").read_text())

    prepared = prepare_case(case, mask={"end_of_turn": end_of_turn})

    found = samples_of(prepared)
    assert sorted(found) == sorted(one["id"] for one in expected if one["accepted"])
    for one in (one for one in expected if one["accepted"]):
        sample = found[one["id"]]
        assert sample.input_ids.tolist() == tokenizer.encode(one["rendered"], add_special_tokens=False)
        assert len(sample.input_ids) == len(sample.loss_mask) == one["n_tokens"]
        runs = decode_runs(tokenizer, sample.input_ids, sample.loss_mask)
        assert [without_marker(run, one["end_markers"]) for run in runs] == one["supervised"]
        if not end_of_turn:
            assert runs == one["supervised"]


@pytest.mark.parametrize("case", ["mask-no-generation-markers", "mask-length-mismatch-drop"])
def test_the_token_that_ends_a_turn_is_supervised_when_asked(prepare_case, tokenizer, case):
    for sample in samples_of(prepare_case(case)).values():
        runs = decode_runs(tokenizer, sample.input_ids, sample.loss_mask)
        assert all(run.endswith("<|im_end|>") for run in runs)


def test_a_header_that_follows_an_answer_is_no_end_of_turn(prepare_case, tokenizer):
    (sample,) = samples_of(prepare_case("mask-span-at-zero")).values()

    assert decode_runs(tokenizer, sample.input_ids, sample.loss_mask) == ["A", "B"]


def test_a_cut_answer_keeps_the_mask_of_what_is_left(prepare_case, cases, tokenizer):
    limits = json.loads((cases / "mask-truncated-span" / "limits.json").read_text())

    (sample,) = samples_of(prepare_case("mask-truncated-span", max_len=limits["cut_in_answer"])).values()

    runs = decode_runs(tokenizer, sample.input_ids, sample.loss_mask)
    assert len(sample.input_ids) == limits["cut_in_answer"]
    assert [without_marker(run, ["<|im_end|>"]) for run in runs] == ["Mars.", limits["kept_of_second_answer"]]
    assert sample.loss_mask[-1] == 1


def test_a_record_cut_before_its_answer_is_rejected_and_counted(prepare_lines, cases):
    case = cases / "mask-truncated-span"
    limits = json.loads((case / "limits.json").read_text())
    short = {"id": "b", "messages": [{"role": "assistant", "content": "Hello there"}]}

    prepared = prepare_lines(
        [json.loads((case / "data.jsonl").read_text()), short],
        template=case / "template.jinja",
        max_len=limits["cut_in_user"],
        reject_limit=1.0,
        mask={"end_of_turn": False},
    )

    assert prepared.meta.counts.rejected["no_supervised_tokens"] >= 1
    assert "a" not in samples_of(prepared)


def test_nothing_is_cut_at_the_exact_length(prepare_case, cases):
    limits = json.loads((cases / "mask-truncated-span" / "limits.json").read_text())

    cut = prepare_case("mask-truncated-span", max_len=limits["exact"])
    whole = prepare_case("mask-truncated-span", max_len=10_000)

    assert np.array_equal(cut.sample(0).input_ids, whole.sample(0).input_ids)
    assert np.array_equal(cut.sample(0).loss_mask, whole.sample(0).loss_mask)
    assert cut.lengths[0] == limits["exact"]


def test_dropped_reasoning_is_counted_and_no_question_is_supervised(prepare_case, tokenizer):
    prepared = prepare_case("mask-think-stripped")

    assert prepared.meta.counts.warnings == {"template_dropped_content": 1}
    sample = prepared.sample(0)
    assert "How" not in "".join(decode_runs(tokenizer, sample.input_ids, sample.loss_mask))


def test_the_inserted_reasoning_block_is_supervised_in_every_turn_when_asked(prepare_case, tokenizer):
    prepared = prepare_case("mask-empty-think", mask={"inserted_reasoning": True})

    sample = prepared.sample(0)
    block = "<think>\n\n</think>\n\n"
    assert decode_runs(tokenizer, sample.input_ids, sample.loss_mask) == [
        f"{block}Paris.<|im_end|>",
        f"{block}Seine.<|im_end|>",
    ]
    assert prepared.meta.mask.inserted_reasoning is True


def test_an_answer_with_only_the_closing_tag_is_reported(prepare_case):
    prepared = prepare_case("mask-orphan-think")

    assert prepared.meta.counts.warnings == {"reasoning_markup_unbalanced": 1}


def test_flags_that_are_no_flags_and_records_without_trained_turns_are_rejected(prepare_case):
    prepared = prepare_case("mask-trainable-flag")

    assert [(one.sample_id, one.code) for one in rejects_of(prepared)] == [
        ("bad", "turn_weight"),
        ("all-off", "no_supervised_tokens"),
    ]


def test_a_token_shared_with_the_header_is_left_out_and_the_rule_is_recorded(prepare_case, cases, tokenizer):
    (expected,) = json.loads((cases / "mask-merge-across-header" / "expected.json").read_text())

    prepared = prepare_case("mask-merge-across-header")

    sample = prepared.sample(0)
    (run,) = decode_runs(tokenizer, sample.input_ids, sample.loss_mask)
    assert len(sample.loss_mask) == len(sample.input_ids) == expected["n_tokens"]
    assert "assistant" not in run
    assert without_marker(run, ["<|im_end|>"]) == expected["supervised"][0].lstrip("\n")
    assert prepared.meta.border_rule.startswith("inside")
