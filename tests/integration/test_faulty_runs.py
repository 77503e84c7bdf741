"""Whole runs with a planted fault in the worker: how they end, what they say, what is left on the disk."""

import json
from pathlib import Path

import pytest

from extractor.errors import EngineError
from extractor.store.verify import check
from extractor.supervisor.launcher import LocalLauncher

FAULTY = LocalLauncher(module="tests.support.faulty_worker")


@pytest.fixture
def run_tree(small_model, talks, tmp_path):
    def make(kind="qwen3"):
        return {
            "model": {"path": str(small_model(kind)), "device": "cpu"},
            "data": {"files": [str(talks([100] * 24))], "max_len": 256},
            "taps": {"layers": [1, 3]},
            "output": {"dir": str(tmp_path / "out"), "shard_bytes": 700_000},
            "batch": {"max_tokens": 400},
        }

    return make


@pytest.fixture
def faulty(extract, monkeypatch):
    def run(tree, fault, **settings):
        monkeypatch.setenv("TAPDECK_TEST_FAULT", fault)
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        return extract(tree, FAULTY)

    return run


def events(run: str) -> list[str]:
    return [json.loads(line)["event"] for line in (Path(run) / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_failed_proof_ends_the_run_before_anything_is_written(kind, faulty, run_tree, tmp_path):
    with pytest.raises(EngineError, match="captured one layer early") as caught:
        faulty(run_tree(kind), "one_layer_early")
    assert caught.value.code == "proof"
    assert caught.value.exit_code == 7
    assert not (tmp_path / "out").exists()


def test_full_disk_ends_the_run_with_whole_shards_only_and_it_resumes(faulty, extract, run_tree, tmp_path):
    with pytest.raises(EngineError, match="could not be written.*No space left") as caught:
        faulty(run_tree(), "disk_fills_up", TAPDECK_TEST_BYTES=1_500_000)
    assert caught.value.code == "write_failed"
    assert "run the same command again" in caught.value.remedy
    report = check(tmp_path / "out")
    assert report.is_ok
    assert report.shards > 0
    assert not list((tmp_path / "out" / "shards").glob("*.part*"))
    result, _ = extract(run_tree())
    assert result.complete
    assert result.shards_computed == result.shards - report.shards


@pytest.mark.soak
def test_write_error_that_passes_is_one_retry_event_and_the_run_completes(faulty, run_tree):
    result, text = faulty(run_tree(), "input_output_error_once")
    assert result.complete
    assert events(result.run).count("shard_retry") == 1
    assert "shard 1 failed" in text
    assert check(Path(result.output)).is_complete


@pytest.mark.soak
def test_shard_that_can_never_be_written_is_named_and_the_others_are_done(faulty, run_tree):
    result, text = faulty(run_tree(), "input_output_error_always")
    assert not result.complete
    assert events(result.run).count("shard_retry") == 2
    assert events(result.run).count("shard_failed") == 1
    assert "FAILED shard 1" in text
    assert "Input/output error" in text
    assert not (Path(result.output) / "shards" / "000001").exists()
    assert result.shards_computed == result.shards >= 3


def test_sample_with_nan_is_quarantined_and_the_rest_of_its_shard_is_kept(faulty, extract, run_tree):
    result, _ = faulty(run_tree(), "not_a_number")
    assert result.quarantined > 0
    assert result.samples + result.quarantined == 24
    assert result.complete
    lines = (Path(result.output) / "quarantine.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in lines} == {"non_finite"}
    assert check(Path(result.output)).is_complete
    again, text = extract(run_tree())
    assert again.shards_computed == 0
    assert "0 of" in text
