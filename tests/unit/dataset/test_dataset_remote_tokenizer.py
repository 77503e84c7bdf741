"""A tokenizer of the model folder's own code, without offsets: ids and masks by hand, and who may run it."""

from __future__ import annotations

import json

import pytest
from dataset_bench import answer, talk, user

from extractor.config import DataSection
from extractor.dataset.masks import LossMasker, MaskOptions
from extractor.dataset.prepare import prepare
from extractor.dataset.templates import ChatTemplate, load_tokenizer
from extractor.dataset.tokens import TextTokenizer
from extractor.errors import PreflightError
from tests.support.tiktoken_model import FIRST_SPECIAL, SPECIALS, add_tiktoken_tokenizer

END, USER, ASSISTANT, SYSTEM, MIDDLE = (FIRST_SPECIAL + number for number in range(2, 7))
A, B, AB, TWO_BLANKS, TWO_LINES, PART_OF_NI, NI = range(256, 263)
TAGS = list(b"<think></think>")


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(add_tiktoken_tokenizer(tmp_path / "model"), trust_remote_code=True)


def mask(tokenizer, *turns, tools=None, **options):
    template = ChatTemplate.load(tokenizer, None, {})
    conversation = talk(*turns)
    if tools:
        conversation = type(conversation)("t", "talk.jsonl", 1, turns, tools)
    return LossMasker(template, TextTokenizer(tokenizer), MaskOptions(**options)).mask(conversation)


def test_ids_and_masks_are_those_worked_out_by_hand(tokenizer):
    masked = mask(tokenizer, user("x a"), answer("ab b"), user("y"), answer("\u4f60\n\n"))

    supervised = [AB, B, END], [NI, TWO_LINES, END]
    expected = [
        ([USER, *b"user", MIDDLE, ord("x"), A, END, ASSISTANT, *b"assistant", MIDDLE, *TAGS], 0),
        (supervised[0], 1),
        ([USER, *b"user", MIDDLE, ord("y"), END, ASSISTANT, *b"assistant", MIDDLE, *TAGS], 0),
        (supervised[1], 1),
    ]
    assert masked.input_ids.tolist() == [token for ids, _ in expected for token in ids]
    assert masked.loss_mask.tolist() == [value for ids, value in expected for _ in ids]


def test_a_character_of_several_tokens_is_supervised_whole(tokenizer):
    # U+4F61 shares two of its three bytes with a merge; U+1F642 has four bytes and no merge.
    masked = mask(tokenizer, user("x"), answer("\u4f61\U0001f642"))

    own = [PART_OF_NI, "\u4f61".encode()[2], *"\U0001f642".encode(), END]
    assert masked.input_ids.tolist()[-len(own) :] == own
    assert masked.loss_mask.tolist()[-len(own) - 1 :] == [0] + [1] * len(own)


def test_a_special_token_in_an_answer_is_one_id_and_supervised(tokenizer):
    masked = mask(tokenizer, user("x"), answer("a<|im_user|>b"))

    own = [ord("a"), USER, ord("b"), END]
    assert masked.input_ids.tolist()[-4:] == own
    assert masked.loss_mask.tolist()[-5:] == [0, 1, 1, 1, 1]


def test_a_reserved_token_without_a_name_of_its_own_has_its_place(tokenizer):
    reserved = FIRST_SPECIAL + len(SPECIALS)
    masked = mask(tokenizer, user("x"), answer(f"a<|reserved_token_{reserved}|>b"))

    assert masked.input_ids.tolist()[-4:] == [ord("a"), reserved, ord("b"), END]
    assert masked.loss_mask.tolist()[-5:] == [0, 1, 1, 1, 1]


def test_tools_are_declared_as_the_tokenizer_declares_them(tokenizer, capsys):
    tools = ({"type": "function", "function": {"name": "ab"}},)

    masked = mask(tokenizer, user("x"), answer("b"), tools=tools)

    # " ab" is " a" and "b": the merge of the lower rank goes first.
    declared = [SYSTEM, *b"tool_declare", MIDDLE, *b"function", A, ord("b"), END]
    assert masked.input_ids.tolist()[: len(declared)] == declared
    assert masked.loss_mask.tolist()[-3:] == [0, 1, 1]
    assert capsys.readouterr().out == ""


def test_such_code_runs_only_when_it_is_trusted(tmp_path):
    ran = tmp_path / "ran.txt"
    folder = add_tiktoken_tokenizer(tmp_path / "model", ran=ran)
    talks = tmp_path / "talks.jsonl"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}]
    talks.write_text(json.dumps({"messages": messages}) + "\n")
    data = DataSection(files=[str(talks)])

    with pytest.raises(PreflightError) as refused:
        prepare(data, folder, trust_remote_code=False, cache_dir=tmp_path / "c")
    assert (
        refused.value.remedy
        == "read tokenization_small.py; if you trust it, set model.trust_remote_code = true"
    )
    assert not ran.exists()

    prepared = prepare(data, folder, trust_remote_code=True, cache_dir=tmp_path / "c")
    assert ran.exists()
    assert prepared.meta.end_markers == ("<|im_end|>",)
    assert prepared.sample(0).input_ids.tolist()[-2:] == [AB, END]


def test_code_that_fails_is_refused_with_its_error(tmp_path):
    folder = add_tiktoken_tokenizer(tmp_path / "model")
    (folder / "tiktoken.model").write_text("no ranks\n")

    with pytest.raises(PreflightError, match="cannot be loaded"):
        load_tokenizer(folder, trust_remote_code=True)
