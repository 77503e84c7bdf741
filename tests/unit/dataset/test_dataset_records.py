"""What a raw record becomes, and why it is rejected."""

from __future__ import annotations

import pytest

from extractor.dataset.records import SampleIds, parse_record
from extractor.dataset.rejects import REASONS, RecordRejectedError

ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


def parse(raw, style="auto"):
    return parse_record(raw, sample_id="s", source_file="f.jsonl", source_line=3, style=style)


def reason(raw, style="auto"):
    with pytest.raises(RecordRejectedError) as caught:
        parse(raw, style)
    assert caught.value.reason.partition(":")[0] in REASONS
    assert caught.value.detail
    return caught.value.reason


def test_all_turns_are_kept_in_order():
    parsed = parse({"messages": [ASK, REPLY] * 3})

    assert [turn.role for turn in parsed.turns] == ["user", "assistant"] * 3
    assert (parsed.source_file, parsed.source_line) == ("f.jsonl", 3)


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("system", "system"),
        ("tool", "tool"),
        ("function", "tool"),
        ("observation", "tool"),
    ],
)
def test_sharegpt_roles_are_mapped_by_name(source, role):
    parsed = parse({"conversations": [{"from": source, "value": "x"}]})

    assert [(turn.role, turn.content) for turn in parsed.turns] == [(role, "x")]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([ASK, REPLY], "record_type"),
        ("text", "record_type"),
        (7, "record_type"),
        ({}, "unknown_format"),
        ({"messages": "x"}, "unknown_format"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": [ASK], "conversations": [{"from": "gpt", "value": "x"}]}, "ambiguous_format"),
        ({"messages": ["x"]}, "turn_type"),
        ({"messages": [{"content": "x"}]}, "turn_type"),
        ({"messages": [{"role": 1, "content": "x"}]}, "turn_type"),
        ({"messages": [{"from": "gpt", "value": "x", "content": "y"}]}, "turn_type"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role:narrator"),
        ({"messages": [{"role": "user"}]}, "content_type"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content_type"),
        ({"messages": [{"role": "user", "content": []}]}, "content_type"),
        ({"messages": [{"role": "user", "content": ["a", "b"]}]}, "content_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content_type"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "content_type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_part"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "audio_part"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video_part"),
        ({"messages": [ASK, REPLY], "images": ["a.png"]}, "image_part"),
        ({"messages": [ASK, {**REPLY, "weight": 0.5}]}, "turn_weight"),
        ({"messages": [ASK, {**REPLY, "loss": "no"}]}, "turn_weight"),
        ({"messages": [ASK, {**REPLY, "weight": 1, "train": False}]}, "turn_weight"),
        ({"messages": [ASK, {**REPLY, "tool_calls": "x"}]}, "turn_type"),
        ({"messages": [ASK, {**REPLY, "tool_calls": [{"function": {"arguments": "3"}}]}]}, "tool_arguments"),
        ({"messages": [ASK, {**REPLY, "tool_calls": [{"function": {"arguments": [1]}}]}]}, "tool_arguments"),
        ({"messages": [ASK, REPLY], "tools": "{"}, "tools"),
        ({"messages": [ASK, REPLY], "tools": [1]}, "tools"),
        ({"system": 3, "messages": [ASK, REPLY]}, "content_type"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, ASK]}, "ambiguous_format"),
    ],
)
def test_what_does_not_fit_is_rejected_with_its_reason(raw, expected):
    assert reason(raw) == expected


def test_the_format_setting_decides_between_two_styles():
    raw = {"messages": [ASK, REPLY], "conversations": [{"from": "gpt", "value": "other"}]}

    assert parse(raw, "messages").turns[1].content == "Hello"
    assert parse(raw, "sharegpt").turns[0].content == "other"
    assert reason({"messages": [ASK]}, "sharegpt") == "unknown_format"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    assert parse({"messages": [{"role": "user", "content": parts}]}).turns[0].content == "one two"


@pytest.mark.parametrize("flag", ["weight", "loss", "train", "trainable"])
@pytest.mark.parametrize(
    ("value", "train"),
    [(0, False), (0.0, False), (False, False), (1, True), (1.0, True), (True, True), (None, True)],
)
def test_training_flags_become_train_and_are_not_passed_on(flag, value, train):
    turn = parse({"messages": [ASK, {**REPLY, flag: value}]}).turns[1]

    assert turn.train is train
    assert turn.extra == {}


def test_further_fields_are_passed_on_without_nulls():
    turn = parse(
        {"messages": [{**REPLY, "name": "bot", "reasoning_content": "why", "tool_calls": None}]}
    ).turns[0]

    assert turn.extra == {"name": "bot", "reasoning_content": "why"}


def test_an_assistant_turn_that_only_calls_tools_has_empty_text():
    calls = [{"function": {"name": "f", "arguments": "{}"}}]

    assert (
        parse({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}).turns[0].content
        == ""
    )


def test_tool_schemas_may_be_json_text():
    assert parse({"messages": [ASK], "tools": '[{"name": "f"}]'}).tools == ({"name": "f"},)


def test_ids_are_own_ids_or_places_and_stay_unique():
    ids = SampleIds()
    raws = [
        {"id": "a"},
        {"id": 7},
        {"id": "a"},
        {"id": ""},
        {"id": True},
        {"id": "a#2"},
        {"id": "a"},
        {},
        [],
        {"id": "7"},
    ]

    given = [ids.assign(raw, "f.jsonl", line) for line, raw in enumerate(raws, start=1)]

    assert given == [
        "a",
        "7",
        "a#2",
        "f.jsonl:4",
        "f.jsonl:5",
        "a#2#2",
        "a#3",
        "f.jsonl:8",
        "f.jsonl:9",
        "7#2",
    ]
    assert len(set(given)) == len(given)
