"""`tapdeck prepare`: what is printed."""

from __future__ import annotations

import io
import json

import pytest
from dataset_bench import DATA

from extractor.commands.output import Output
from extractor.commands.prepare import ProgressNotes, printable, run
from extractor.config import build
from extractor.dataset.prepare import PrepareProgress
from extractor.errors import DatasetError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def prepare_command(tmp_path, model_folder):
    def call(lines, *, show=None, as_json=False, stdout=None, **data):
        path = tmp_path / "talks.jsonl"
        path.write_bytes(
            b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        )
        config = build(
            {
                "model": {"path": str(model_folder)},
                "data": {"files": [str(path)], "template": str(DATA / "templates" / "chatml.jinja")} | data,
                "output": {"dir": str(tmp_path / "out")},
            },
            source="test",
        )
        out = Output(as_json=as_json, stdout=stdout or io.StringIO(), stderr=io.StringIO())
        code = run(config, show=show, cache_dir=tmp_path / "cache", out=out)
        return code, out.stdout.getvalue(), out.stderr.getvalue()

    return call


def talk(sample_id, question, reply):
    return {
        "id": sample_id,
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}],
    }


def test_counts_and_the_first_places_of_each_reason_are_printed(prepare_command):
    code, text, _ = prepare_command([talk("a", "Hi", "Hello")] + [b"broken"] * 4, reject_limit=1.0)

    assert code == 0
    assert "5 records: 1 accepted, 4 rejected" in text
    assert "rejected json: 4 (3 of 4 shown): talks.jsonl:2 " in text
    assert "talks.jsonl:4 " in text
    assert "talks.jsonl:5 " not in text
    assert "supervised (" in text
    assert "longest sample " in text


def test_an_end_of_turn_setting_without_effect_is_said(prepare_command):
    template = str(DATA / "templates" / "no_end.jinja")

    _, text, _ = prepare_command([talk("a", "Hi", "Hello")], template=template)

    assert "no token could be confirmed as the end of an answer" in text


def test_show_puts_supervised_tokens_in_brackets(prepare_command):
    _, text, _ = prepare_command([talk("a", "Hi", "Yo"), talk("b", "x", "y")], show=1)

    assert "sample 0 a (talks.jsonl:1)" in text
    assert "[[Y|o|<|im_end|>]]" in text
    assert "\x1b" not in text
    assert "1 of 2 samples shown" in text


def test_show_colours_on_a_terminal(prepare_command, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    _, text, _ = prepare_command([talk("a", "Hi", "Yo")], show=1, stdout=Terminal())

    assert "\x1b[1;32m[[" in text


def test_texts_of_the_data_are_never_markup_or_control(prepare_command):
    _, text, _ = prepare_command(
        [talk("[/bold]", "[red]x[/]", "\x1b[2J[bold]\u202e!")], show=1, stdout=Terminal()
    )

    shown = "".join(text.split("|"))
    assert "[/bold]" in text
    assert "\x1b[2J" not in text
    assert "\\x1b" in shown
    assert "\u202e" not in text


def test_json_is_one_object_on_stdout(prepare_command):
    _, text, notes = prepare_command([talk("a", "Hi", "Hello"), b"x"], show=1, as_json=True, reject_limit=1.0)

    result = json.loads(text)
    assert (result["records"], result["samples"], result["rejected"]) == (2, 1, {"json": 1})
    assert 0 < result["supervised_tokens"] < result["tokens"]
    assert "sample 0 a" in notes


def test_too_many_rejects_end_the_command_with_the_reason(prepare_command):
    with pytest.raises(DatasetError, match="1 of 2 records rejected"):
        prepare_command([talk("a", "Hi", "Hello"), b"x"])


def test_progress_has_rate_and_remaining_time_but_not_too_often():
    now = [0.0]
    out = Output(as_json=False, stdout=io.StringIO(), stderr=io.StringIO())
    notes = ProgressNotes(out, clock=lambda: now[0])

    for second in range(21):
        now[0] = float(second)
        notes(
            PrepareProgress(
                "tokenize", second * 1_000_000, 100_000_000, second * 10, second * 10, 0, second * 500
            )
        )

    lines = out.stderr.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "tokenize: 20.0 of 100.0 MB, 200 records, 0 rejected, 500 tokens/s, 80 s left"


def test_a_short_phase_after_a_long_start_prints_nothing():
    now = [0.0]
    out = Output(as_json=False, stdout=io.StringIO(), stderr=io.StringIO())
    notes = ProgressNotes(out, clock=lambda: now[0])

    for moment in (60.0, 60.1):
        now[0] = moment
        notes(PrepareProgress("hash", 100_000, 100_000))

    assert out.stderr.getvalue() == ""


def test_progress_of_hashing_counts_no_records():
    now = [0.0]
    out = Output(as_json=False, stdout=io.StringIO(), stderr=io.StringIO())
    notes = ProgressNotes(out, clock=lambda: now[0])

    for second in (0.0, 5.0):
        now[0] = second
        notes(PrepareProgress("hash", int(second) * 1_000_000, 10_000_000))

    assert out.stderr.getvalue() == "hash: 5.0 of 10.0 MB, 5 s left\n"


def test_line_breaks_are_shown_and_kept():
    assert printable("a\nb\x07\u200b") == "a\\n\nb\\x07\\u200b"
