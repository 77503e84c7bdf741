"""The preparation as a whole: limits, refusals, progress, and no network."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from dataset_bench import DATA, rejects_of

from extractor.config import DataSection
from extractor.dataset.prepare import prepare
from extractor.dataset.rejects import REASONS
from extractor.errors import ConfigError, DatasetError, PreflightError


def talk(sample_id: str, reply: str, **extra) -> dict:
    turns = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": reply, **extra}]
    return {"id": sample_id, "messages": turns}


def test_only_the_first_accepted_samples_are_taken(prepare_lines):
    prepared = prepare_lines(
        [b"broken", talk("a", "x"), talk("b", "y"), b"broken"], limit=1, reject_limit=0.5
    )

    assert prepared.meta.counts.records == 2
    assert [prepared.sample(i).sample_id for i in range(len(prepared))] == ["a"]


def test_samples_with_too_few_supervised_tokens_are_rejected(prepare_lines):
    prepared = prepare_lines(
        [talk("short", "x"), talk("long", "x" * 30)], min_supervised=10, reject_limit=1.0
    )

    assert [(one.sample_id, one.code) for one in rejects_of(prepared)] == [("short", "min_supervised")]


def test_a_mask_of_ones_is_stored_only_if_nobody_else_speaks(prepare_lines, tmp_path):
    only = tmp_path / "only.jinja"
    only.write_text("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    alone = {"id": "alone", "messages": [{"role": "assistant", "content": "Monologue."}]}

    prepared = prepare_lines([talk("both", "Hello"), alone], template=only, reject_limit=1.0)

    assert [prepared.sample(i).sample_id for i in range(len(prepared))] == ["alone"]
    assert [(one.sample_id, one.code) for one in rejects_of(prepared)] == [("both", "mask_uncertain")]


def test_no_sample_left_is_refused_even_without_a_reject_limit(prepare_lines):
    with pytest.raises(DatasetError, match="no sample is left of 1 records"):
        prepare_lines([b"broken"], reject_limit=1.0)


def test_an_empty_file_is_refused(prepare_lines):
    with pytest.raises(DatasetError, match="no sample is left of 0 records"):
        prepare_lines([b""])


def test_every_record_is_accepted_or_rejected_with_a_known_reason(prepare_lines):
    lines = [talk("a", "x"), b"{", b"[]", b"7", {"id": 1}, talk("a", "again"), talk("w", "x", weight=2)]

    prepared = prepare_lines(lines, reject_limit=1.0)

    counts = prepared.meta.counts
    assert counts.records == counts.accepted + sum(counts.rejected.values()) == len(lines)
    assert {code.partition(":")[0] for code in counts.rejected} <= set(REASONS)
    assert [prepared.sample(i).sample_id for i in range(len(prepared))] == ["a", "a#2"]


def test_tool_schemas_reach_the_template(prepare_lines, tmp_path, tokenizer):
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")

    prepared = prepare_lines([{**talk("a", "x"), "tools": [{"name": "add"}]}], template=template)

    assert '[{"name": "add"}]' in tokenizer.decode(prepared.sample(0).input_ids.tolist())


def test_template_arguments_reach_the_template(prepare_lines, tmp_path, tokenizer):
    template = tmp_path / "args.jinja"
    template.write_text("{{ mood }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")

    prepared = prepare_lines([talk("a", "x")], template=template, template_args={"mood": "calm"})

    assert tokenizer.decode(prepared.sample(0).input_ids.tolist()).startswith("calm")
    with pytest.raises(ConfigError, match="messages is set by tapdeck"):
        prepare_lines([talk("a", "x")], template_args={"messages": []})


def test_bos_is_not_added_twice(tmp_path, cases, tokenizer):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(talk("a", "x")))
    data = DataSection(files=(str(path),), template=str(DATA / "templates" / "trim_alternate.jinja"))

    prepared = prepare(data, cases / "_common" / "tok_bos", trust_remote_code=False, cache_dir=tmp_path / "c")

    assert prepared.sample(0).input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_progress_ends_at_all_bytes_and_all_records(tmp_path, model_folder):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(talk(str(n), "x")) + "\n" for n in range(200)))
    data = DataSection(files=(str(path),), template=str(DATA / "templates" / "chatml.jinja"))
    reports = []

    prepare(data, model_folder, trust_remote_code=False, cache_dir=tmp_path / "c", on_progress=reports.append)

    assert {report.phase for report in reports} == {"hash", "tokenize"}
    last = reports[-1]
    assert (last.records, last.accepted, last.rejected) == (200, 200, 0)
    assert last.bytes_done == last.bytes_total == path.stat().st_size
    assert last.tokens > 0


def section(tmp_path: Path, template: str | None) -> DataSection:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(talk("a", "Hello")))
    return DataSection(files=(str(path),), template=template)


def test_a_missing_template_is_refused_with_the_key_to_set(tmp_path, model_folder):
    with pytest.raises(PreflightError, match=r"data\.template"):
        prepare(section(tmp_path, None), model_folder, trust_remote_code=False, cache_dir=tmp_path / "c")
    with pytest.raises(PreflightError, match=r"absent\.jinja"):
        prepare(
            section(tmp_path, str(tmp_path / "absent.jinja")),
            model_folder,
            trust_remote_code=False,
            cache_dir=tmp_path / "c",
        )


def test_a_template_with_a_syntax_error_is_refused_with_its_line(tmp_path, model_folder):
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")

    with pytest.raises(PreflightError, match=r"broken\.jinja\), line 2"):
        prepare(
            section(tmp_path, str(broken)), model_folder, trust_remote_code=False, cache_dir=tmp_path / "c"
        )


def test_the_template_of_the_tokenizer_is_used_without_a_network(tmp_path, model_folder, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    shutil.copy(DATA / "templates" / "chatml.jinja", folder / "chat_template.jinja")
    calls = []

    def no_socket(*args, **_kwargs):
        calls.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "socket", no_socket)
    monkeypatch.setattr(socket, "create_connection", no_socket)
    monkeypatch.setattr(socket, "getaddrinfo", no_socket)

    prepared = prepare(section(tmp_path, None), folder, trust_remote_code=False, cache_dir=tmp_path / "c")

    assert calls == []
    assert prepared.meta.template_source == "tokenizer"
    assert len(prepared) == 1


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(PreflightError, match=folder.name):
            prepare(section(tmp_path, None), folder, trust_remote_code=False, cache_dir=tmp_path / "c")


def test_code_in_the_model_folder_runs_only_when_it_is_trusted(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "tokenization_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(tmp_path / 'ran.txt')!r}).write_text('x')\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    pass\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    config["tokenizer_class"] = "OwnTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    data = section(tmp_path, str(DATA / "templates" / "chatml.jinja"))

    with pytest.raises(PreflightError, match=r"model\.trust_remote_code = true"):
        prepare(data, folder, trust_remote_code=False, cache_dir=tmp_path / "c")
    assert not (tmp_path / "ran.txt").exists()
