"""Cases of the area "dataset": what is read, what is rejected, and that nothing is lost on the way."""

from __future__ import annotations

import json

import pytest
from dataset_bench import decode_runs, rejects_of, without_marker

from extractor.config import DataSection
from extractor.dataset.prepare import prepare
from extractor.errors import DatasetError


def ids_of(prepared):
    return {prepared.sample(i).sample_id: prepared.sample(i).input_ids.tolist() for i in range(len(prepared))}


def test_only_records_whose_content_is_text_are_accepted(prepare_case):
    prepared = prepare_case("dataset-mixed-types", "records.jsonl", None)

    assert list(ids_of(prepared)) == ["ok-1", "ok-2"]
    assert [(one.sample_id, one.code, one.source_line) for one in rejects_of(prepared)] == [
        ("num-1", "content_type", 2),
        ("null-1", "content_type", 3),
        ("obj-1", "content_type", 5),
        ("list-1", "content_type", 6),
        ("bool-1", "content_type", 7),
    ]


def test_reversing_the_lines_changes_no_token(prepare_case, prepare_lines, cases):
    lines = (cases / "dataset-mixed-types" / "records.jsonl").read_bytes().splitlines()
    forward = prepare_case("dataset-mixed-types", "records.jsonl", None)

    backward = prepare_lines(lines[::-1], reject_limit=1.0)

    assert ids_of(backward) == ids_of(forward)


def test_line_separator_characters_do_not_cut_a_record(prepare_case, tokenizer):
    prepared = prepare_case("dataset-unicode-separators", "separators.jsonl", None)

    assert prepared.meta.counts.accepted == 3
    assert prepared.meta.counts.rejected == {}
    for index, (sample_id, separator) in enumerate([("ls", "\u2028"), ("ps", "\u2029"), ("nel", "\x85")]):
        sample = prepared.sample(index)
        assert sample.sample_id == sample_id
        assert sample.source_line == index + 1
        assert separator in "".join(decode_runs(tokenizer, sample.input_ids, sample.loss_mask))


def test_every_turn_is_kept_and_roles_come_from_the_record(prepare_case, tokenizer):
    prepared = prepare_case("dataset-turn-loss", "sharegpt.jsonl", None)

    three = prepared.sample(0)
    runs = decode_runs(tokenizer, three.input_ids, three.loss_mask)
    assert [without_marker(run, ["<|im_end|>"]) for run in runs] == ["One.", "Two.", "Three."]
    assert ids_of(prepared)["sys-field"] == ids_of(prepared)["sys-turn"]
    (rejected,) = rejects_of(prepared)
    assert (rejected.sample_id, rejected.code) == ("unknown-role", "unknown_role:narrator")


def test_damaged_lines_are_reported_with_their_line_in_the_file(prepare_case):
    prepared = prepare_case("dataset-bad-lines", "damaged.jsonl", None, reject_limit=0.6)

    assert list(ids_of(prepared)) == ["g-1", "g-4", "g-6"]
    assert [(one.source_file, one.source_line, one.code) for one in rejects_of(prepared)] == [
        ("damaged.jsonl", 3, "json"),
        ("damaged.jsonl", 5, "json"),
        ("damaged.jsonl", 7, "json"),
    ]
    assert prepared.meta.counts.records == 6


def test_too_large_a_share_of_rejects_refuses_with_the_numbers_and_the_list(prepare_case, tmp_path):
    with pytest.raises(DatasetError, match=r"3 of 6 records rejected \(limit 10 %\): json 3") as caught:
        prepare_case("dataset-bad-lines", "damaged.jsonl", None, reject_limit=0.1)

    (kept,) = (tmp_path / "cache").glob("*/rejected.jsonl")
    assert str(kept) in str(caught.value)
    assert len(kept.read_bytes().splitlines()) == 3


def test_the_reject_limit_also_holds_for_a_cached_data_set(prepare_case):
    prepare_case("dataset-bad-lines", "damaged.jsonl", None, reject_limit=0.6)

    with pytest.raises(DatasetError, match="3 of 6"):
        prepare_case("dataset-bad-lines", "damaged.jsonl", None, reject_limit=0.1)


def test_a_template_that_changes_under_the_same_path_gives_other_tokens(tmp_path, cases, model_folder):
    case = cases / "dataset-stale-token-cache"
    template = tmp_path / "template.jinja"
    data = DataSection(files=(str(case / "data.jsonl"),), template=str(template))

    def run(cache: str):
        return prepare(data, model_folder, trust_remote_code=False, cache_dir=tmp_path / cache)

    template.write_bytes((case / "template_a.jinja").read_bytes())
    first = run("cache")
    template.write_bytes((case / "template_b.jinja").read_bytes())
    second = run("cache")

    assert ids_of(second) == ids_of(run("fresh"))
    assert ids_of(second) != ids_of(first)


def test_arguments_as_json_text_and_as_object_give_equal_tokens(prepare_case):
    prepared = prepare_case("dataset-tool-arguments", "calls.jsonl", "items.jinja")

    found = ids_of(prepared)
    assert found["as-string"] == found["as-object"]
    assert [(one.sample_id, one.code) for one in rejects_of(prepared)] == [
        ("not-object", "tool_arguments"),
        ("broken", "tool_arguments"),
    ]


TAKES_STRINGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
JOINS_STRINGS = TAKES_STRINGS.replace(
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
    "{{ 'call ' + c.function.arguments }}",
)


@pytest.mark.parametrize("source", [TAKES_STRINGS, JOINS_STRINGS])
def test_templates_that_want_text_get_the_arguments_unchanged(prepare_lines, tmp_path, tokenizer, source):
    arguments = '{"a":  3, "b": 18}'
    call = {"function": {"name": "add", "arguments": arguments}}
    record = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "21"},
            {"role": "assistant", "content": "It is 21."},
        ]
    }
    template = tmp_path / "strings.jinja"
    template.write_text(source)

    prepared = prepare_lines([record], template=template)

    text = tokenizer.decode(prepared.sample(0).input_ids.tolist())
    assert arguments in text
    assert json.dumps(arguments) not in text
