"""Properties of masks over random conversations and several templates."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_bench import Bench, answer, span_texts, talk, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extractor.dataset.masks import LossMasker, MaskOptions
from extractor.dataset.rejects import RecordRejectedError
from extractor.dataset.tokens import TextTokenizer, byte_extents, merge_spans, token_mask

# Characters of special tokens and of reasoning tags are in the mix on purpose; so are two newlines and two
# blanks, which the tokenizer merges, combining characters, and characters of two to four bytes.
SNIPPETS = st.sampled_from(
    ["a", "Hi", " ", "  ", "\n", "\n\n", "\t", "\u00e9", "e\u0301", "\u65e5\u672c", "\U0001f642", "\u2028",
     "<think>", "</think>", "<", "|", "<|im_end|>", "assistant", "user", ".", "\u00a0", "\u200d"]
)  # fmt: skip
TEXTS = st.lists(SNIPPETS, max_size=8).map("".join)
EXCHANGES = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)
KEEPING = ["chatml", "system_moved", "no_end", "two_ends", "marked"]
ALL = [*KEEPING, "think_rewrite", "trim_alternate", "split_keep"]
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def turns_of(exchanges):
    return [turn for question, reply in exchanges for turn in (user(question), answer(reply))]


@pytest.mark.parametrize("name", KEEPING)
@FAST
@given(exchanges=EXCHANGES)
def test_spans_of_templates_that_keep_content_are_exactly_the_answers(bench: Bench, name, exchanges):
    expected = [reply for _, reply in exchanges if reply]

    masked = bench.masker(name, end_of_turn=False).mask(talk(*turns_of(exchanges)))

    # Answers that touch are one run of characters; that cannot happen where a header stands between.
    assert span_texts(masked) == expected


@pytest.mark.parametrize("name", ALL)
@FAST
@given(exchanges=EXCHANGES)
def test_ids_are_those_of_the_whole_text_and_mask_fits_them(bench: Bench, name, exchanges):
    try:
        masked = bench.masker(name).mask(talk(*turns_of(exchanges)))
    except RecordRejectedError as rejected:
        assert rejected.reason in ("mask_uncertain", "no_supervised_tokens")  # noqa: PT017
        return

    assert masked.input_ids.tolist() == bench.tokenizer.encode(masked.text, add_special_tokens=False)
    assert len(masked.loss_mask) == len(masked.input_ids)
    assert set(np.unique(masked.loss_mask)) <= {0, 1}


@pytest.mark.parametrize("name", ALL)
@FAST
@given(exchanges=EXCHANGES, data=st.data())
def test_no_character_of_a_question_is_supervised(bench: Bench, name, exchanges, data):
    # Questions get letters that occur nowhere else.
    marked = [(f"\u4e00{question}\u4e01", reply) for question, reply in exchanges]

    try:
        masked = bench.masker(name, inserted_reasoning=data.draw(st.booleans())).mask(talk(*turns_of(marked)))
    except RecordRejectedError:
        return

    inside = [text for text in span_texts(masked) if "\u4e00" in text or "\u4e01" in text]
    assert inside == []
    assert not any("\u4e00" in run or "\u4e01" in run for run in bench.runs(masked))


@pytest.mark.parametrize("name", ALL)
@FAST
@given(exchanges=EXCHANGES)
def test_spans_are_ordered_disjoint_and_own_text(bench: Bench, name, exchanges):
    replies = [reply for _, reply in exchanges]
    try:
        masked = bench.masker(name, end_of_turn=False).mask(talk(*turns_of(exchanges)))
    except RecordRejectedError:
        return

    assert merge_spans(masked.spans) == list(masked.spans)
    found = ["".join(text.split()) for text in span_texts(masked)]
    own = ["".join(reply.split()) for reply in replies]
    at = 0
    for text in found:
        while at < len(own) and text not in own[at]:
            at += 1
        assert at < len(own), (found, own)
        at += 1


@pytest.mark.parametrize("name", ALL)
@FAST
@given(exchanges=EXCHANGES)
def test_offsets_and_byte_lengths_give_the_same_mask(bench: Bench, name, exchanges):
    class WithoutOffsets(TextTokenizer):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.has_offsets = False

    blind = LossMasker(bench.template(name), WithoutOffsets(bench.tokenizer), MaskOptions())
    conversation = talk(*turns_of(exchanges))
    try:
        masked = bench.masker(name).mask(conversation)
    except RecordRejectedError as rejected:
        with pytest.raises(RecordRejectedError, match=rejected.reason):
            blind.mask(conversation)
        return

    other = blind.mask(conversation)

    assert other.input_ids.tolist() == masked.input_ids.tolist()
    assert other.loss_mask.tolist() == masked.loss_mask.tolist()


@FAST
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), min_size=2, max_size=6))
def test_a_token_is_supervised_only_if_all_its_bytes_are(bench: Bench, text, cuts):
    raw = text.encode()
    borders = sorted({min(cut, len(text)) for cut in cuts})
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    ids, starts, ends = bench.text_tokenizer.encode(text)

    mask = token_mask(starts, ends, spans)

    first, last = byte_extents(bench.text_tokenizer.pieces(ids.tolist()), text)
    merged = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in merge_spans(spans)]
    expected = [
        int(any(a <= first[i] and last[i] <= b for a, b in merged) and last[i] > first[i])
        for i in range(len(ids))
    ]
    assert mask.tolist() == expected
    assert sum(len(raw[a:b]) for a, b in zip(first, last, strict=True)) == len(raw)
