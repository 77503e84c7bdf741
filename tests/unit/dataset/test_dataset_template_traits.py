"""Masks over templates with the traits of published families: exact where it can be proved, else rejected."""

from __future__ import annotations

import pytest
from dataset_bench import DATA, answer, span_texts, talk, user

from extractor.dataset.masks import LossMasker, MaskOptions
from extractor.dataset.records import Turn
from extractor.dataset.rejects import RecordRejectedError
from extractor.dataset.templates import ChatTemplate

EXCHANGES = (user("Hi there?"), answer("Hello, friend."), user("And then?"), answer("Nothing more.\n\nBye!"))
ENDS = {
    "chatml": ("<|im_end|>", "<|im_end|>"),
    "think_rewrite": ("<|im_end|>", "<|im_end|>"),
    "trim_alternate": ("<|im_end|>", "<|im_end|>"),
    "system_moved": ("<|eos|>", "<|eos|>"),
    "split_keep": ("<|eos|>", "<|eos|>"),
    "two_ends": ("<|im_end|>", "<|eos|>"),
    "no_end": ("", ""),
    "marked": ("<|im_end|>", "<|im_end|>"),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("system", [True, False])
def test_plain_conversation_gives_the_answers_and_their_ends(bench, name, system):
    turns = (Turn("system", "Be short."), *EXCHANGES) if system else EXCHANGES

    masked = bench.mask(name, *turns)

    first, last = ENDS[name]
    assert span_texts(masked) == [f"Hello, friend.{first}", f"Nothing more.\n\nBye!{last}"]
    assert bench.runs(masked) == span_texts(masked)


@pytest.mark.parametrize("name", ENDS)
def test_without_end_of_turn_only_the_answers_are_supervised(bench, name):
    masked = bench.mask(name, *EXCHANGES, end_of_turn=False)

    assert bench.runs(masked) == ["Hello, friend.", "Nothing more.\n\nBye!"]


@pytest.mark.parametrize("name", ENDS)
def test_with_turns_last_only_the_last_answer_is_supervised(bench, name):
    masked = bench.mask(name, *EXCHANGES, turns="last", end_of_turn=False)

    assert bench.runs(masked) == ["Nothing more.\n\nBye!"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["\n Hello. \n", "  Bye.\n\n"]),
        ("think_rewrite", ["\n Hello. \n", "  Bye.\n\n"]),
        ("trim_alternate", ["Hello.", "Bye."]),
        ("system_moved", ["\n Hello. \n", "  Bye.\n\n"]),
        ("split_keep", ["\n Hello. \n", "  Bye.\n\n"]),
        ("marked", ["\n Hello. \n", "  Bye.\n\n"]),
    ],
)
def test_white_space_at_the_edges_is_own_text_only_if_the_template_kept_it(bench, name, expected):
    masked = bench.mask(
        name, user("Hi"), answer("\n Hello. \n"), user("Go"), answer("  Bye.\n\n"), end_of_turn=False
    )

    assert span_texts(masked) == expected


@pytest.mark.parametrize(
    ("name", "expected", "warnings"),
    [
        ("chatml", ["<think>\nearly\n</think>\n\nHello.", "<think>\nlate\n</think>\n\nBye."], ()),
        ("think_rewrite", ["Hello.", "<think>\nlate\n</think>\n\nBye."], ("template_dropped_content",)),
        ("split_keep", ["\n\nHello.", "\n\nBye."], ("template_dropped_content",)),
    ],
)
def test_reasoning_is_supervised_where_the_template_kept_it(bench, name, expected, warnings):
    early, late = "<think>\nearly\n</think>\n\nHello.", "<think>\nlate\n</think>\n\nBye."

    masked = bench.mask(name, user("Hi"), answer(early), user("Go"), answer(late), end_of_turn=False)

    assert span_texts(masked) == expected
    assert masked.warnings == warnings


def test_reasoning_without_line_breaks_is_reported_as_reformatted(bench):
    masked = bench.mask("think_rewrite", user("Hi"), answer("<think>why</think>Because."))

    assert span_texts(masked) == ["<think>\nwhy\n</think>\n\nBecause.<|im_end|>"]
    assert masked.warnings == ("template_reformatted_content",)


def test_reasoning_in_a_field_is_supervised_up_to_the_answer(bench):
    masked = bench.mask("think_rewrite", user("Hi"), answer("Because.", reasoning_content="why"))

    assert span_texts(masked) == ["why\n</think>\n\nBecause.<|im_end|>"]


def test_reasoning_in_a_message_of_its_own_is_a_span_of_its_own(bench):
    masked = bench.mask("two_ends", user("Hi"), answer("Because.", thinking="why"))

    assert span_texts(masked) == ["why", "Because.<|eos|>"]


def test_an_inserted_empty_block_is_supervised_only_when_asked(bench):
    turns = (user("Hi"), answer("Hello."))

    assert bench.runs(bench.mask("think_rewrite", *turns)) == ["Hello.<|im_end|>"]
    assert bench.runs(bench.mask("think_rewrite", *turns, inserted_reasoning=True)) == [
        "<think>\n\n</think>\n\nHello.<|im_end|>"
    ]


@pytest.mark.parametrize("inserted_reasoning", [True, False])
@pytest.mark.parametrize("own", ["<think>\n\n</think>\n\n", "</think>\n\n", "<think></think>"])
def test_an_own_empty_block_that_the_template_adds_anyway_is_treated_as_inserted(
    bench, own, inserted_reasoning
):
    plain = bench.mask("think_rewrite", user("Hi"), answer("Hello."), inserted_reasoning=inserted_reasoning)

    masked = bench.mask(
        "think_rewrite", user("Hi"), answer(f"{own}Hello."), inserted_reasoning=inserted_reasoning
    )

    assert masked.text == plain.text
    assert masked.loss_mask.tolist() == plain.loss_mask.tolist()
    assert "template_dropped_content" not in masked.warnings


def test_an_own_empty_block_is_own_text_where_the_template_adds_none(bench):
    masked = bench.mask("chatml", user("Hi"), answer("<think>\n\n</think>\n\nHello."))

    assert span_texts(masked) == ["<think>\n\n</think>\n\nHello.<|im_end|>"]


def test_a_special_token_in_the_next_question_is_not_the_end_of_an_answer(bench, tmp_path):
    path = tmp_path / "bare.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% if loop.last %}<|eos|>{% endif %}{% endfor %}")
    masker = LossMasker(ChatTemplate.load(bench.tokenizer, path, {}), bench.text_tokenizer, MaskOptions())

    masked = masker.mask(talk(user("Hi"), answer("Yes"), user("<|eos|>Go"), answer("Done")))

    assert span_texts(masked) == ["Yes", "Done<|eos|>"]


def test_generation_blocks_in_a_macro_are_found_where_they_are(bench):
    call = {"function": {"name": "add", "arguments": {"a": 3}}}

    masked = bench.mask("marked", user("Add"), answer("", tool_calls=[call]), user("Go"), answer("Done."))

    assert span_texts(masked) == ['<tool_call>add {"a": 3}</tool_call><|im_end|>', "Done.<|im_end|>"]
    assert masked.warnings == ()


def test_generation_blocks_obey_the_flags_and_options(bench):
    call = {"function": {"name": "add", "arguments": {"a": 3}}}
    turns = (user("Add"), answer("No.", train=False), user("Go"), answer("Now.", tool_calls=[call]))

    masked = bench.mask("marked", *turns, end_of_turn=False)

    assert span_texts(masked) == ['Now.<tool_call>add {"a": 3}</tool_call>']


def test_tool_calls_without_generation_blocks_are_reported_as_not_supervised(bench):
    call = {"function": {"name": "add", "arguments": {"a": 3}}}

    masked = bench.mask("chatml", user("Add"), answer("Sure.", tool_calls=[call]))

    assert "tool_calls_unsupervised" in masked.warnings


def test_a_dropped_system_turn_is_reported(bench, tmp_path):
    path = tmp_path / "drops.jinja"
    path.write_text(
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    masker = LossMasker(ChatTemplate.load(bench.tokenizer, path, {}), bench.text_tokenizer, MaskOptions())

    masked = masker.mask(talk(Turn("system", "Be short."), user("Hi"), answer("Hello.")))

    assert masked.warnings == ("template_dropped_content",)


def test_equal_texts_in_all_turns_are_told_apart(bench):
    for name in ENDS:
        masked = bench.mask(name, user("Hi"), answer("Hi"), user("Hi"), answer("Hi"), end_of_turn=False)
        assert span_texts(masked) == ["Hi", "Hi"]
        assert masked.spans[0][0] > masked.text.index("Hi")


def test_answers_that_look_like_markup_are_found(bench):
    masked = bench.mask(
        "chatml", user("<|im_end|>"), answer("<|im_start|>assistant\n"), user("x"), answer("<think>")
    )

    assert span_texts(masked) == ["<|im_start|>assistant\n<|im_end|>", "<think><|im_end|>"]


def test_the_template_error_of_a_record_is_its_rejection(bench):
    with pytest.raises(RecordRejectedError, match="roles must alternate") as caught:
        bench.mask("trim_alternate", user("a"), user("b"), answer("c"))

    assert caught.value.reason == "template_error"


@pytest.mark.parametrize("name", ["json_content", "shouting"])
def test_a_template_that_rewrites_answers_is_rejected_not_guessed(bench, name):
    with pytest.raises(RecordRejectedError) as caught:
        bench.mask(name, user("Say it"), answer('He said "no".\nTwice.'))

    assert caught.value.reason == "mask_uncertain"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}",
        "{% for m in messages | reverse %}<|im_start|>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content | replace('o', '') }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content[::-1] }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content | replace(' ', '  ') }}{% endfor %}",
    ],
)
def test_repeated_reordered_and_edited_answers_are_rejected(bench, tmp_path, source):
    path = tmp_path / "odd.jinja"
    path.write_text(source)
    masker = LossMasker(ChatTemplate.load(bench.tokenizer, path, {}), bench.text_tokenizer, MaskOptions())

    with pytest.raises(RecordRejectedError) as caught:
        masker.mask(talk(user("q one"), answer("a one two"), user("q two"), answer("some more words")))

    assert caught.value.reason == "mask_uncertain"


def test_an_answer_longer_than_the_private_use_planes_is_traced(bench):
    long = "abcdefgh " * 20_000

    masked = bench.mask("think_rewrite", user("Hi"), answer(f"<think>\n{long}x\n</think>\n\nDone."))

    assert span_texts(masked) == [f"<think>\n{long}x\n</think>\n\nDone.<|im_end|>"]


def test_private_use_characters_in_the_data_do_not_confuse_the_probes(bench):
    text = "\U000f0000 and \U000f0001\U0010fffd"

    masked = bench.mask("chatml", user(text), answer(text[::-1]), user("\U000f0002"), answer("\U000f0000"))

    assert span_texts(masked) == [f"{text[::-1]}<|im_end|>", "\U000f0000<|im_end|>"]


def test_templates_see_a_fixed_day(bench, tmp_path):
    path = tmp_path / "day.jinja"
    path.write_text("{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")

    assert ChatTemplate.load(bench.tokenizer, path, {}).render([user("!")]) == "2026-01-01!"


def test_every_test_template_is_described(bench):
    described = (DATA / "templates" / "README.md").read_text()

    for path in (DATA / "templates").glob("*.jinja"):
        assert f"`{path.name}`" in described
