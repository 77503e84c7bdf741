"""What an output folder belongs to: which resumes are refused, and what a lost or edited dataset.json costs."""

import json
import shutil
from pathlib import Path

import pytest

from extractor.errors import LeaseError
from extractor.store.verify import check
from tests.support import small_models


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory, small_model):
    """A run in which every batch holds a single sample, and its settings."""
    folder = tmp_path_factory.mktemp("finished")
    model = shutil.copytree(small_model("qwen3"), folder / "model")
    return {
        "model": {"path": str(model), "device": "cpu"},
        "data": {
            "files": [str(small_models.conversations(folder / "talks.jsonl", [100] * 4))],
            "max_len": 256,
        },
        "taps": {"layers": [1, 3]},
        "output": {"dir": str(folder / "out"), "shard_bytes": 1},
        "batch": {"max_tokens": 256},
    }


@pytest.fixture
def copy(finished, extract, tmp_path):
    """Settings of a copy of the finished run, free to be spoiled."""
    if not Path(finished["output"]["dir"]).exists():
        result, _ = extract(finished)
        assert (result.shards, result.samples) == (4, 4)
    shutil.copytree(finished["output"]["dir"], tmp_path / "out")
    return finished | {"output": finished["output"] | {"dir": str(tmp_path / "out")}}


def dataset_json(tree) -> Path:
    return Path(tree["output"]["dir"]) / "dataset.json"


def test_batches_of_one_sample_each_pass_the_proof(copy):
    assert check(Path(copy["output"]["dir"])).is_complete


def test_lost_manifest_of_a_complete_data_set_is_written_anew(copy, extract):
    before = json.loads(dataset_json(copy).read_text())
    dataset_json(copy).unlink()
    result, _ = extract(copy)
    assert result.complete
    assert result.shards_computed == 0
    after = json.loads(dataset_json(copy).read_text())
    assert after["fingerprint"] == before["fingerprint"]
    assert check(Path(copy["output"]["dir"])).is_complete


def test_shards_of_another_data_set_are_not_replaced_where_the_manifest_is_lost(copy, extract):
    dataset_json(copy).unlink()
    shards = sorted(Path(copy["output"]["dir"]).glob("shards/*/*"))
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in shards]
    other = copy | {"data": copy["data"] | {"max_len": 90}}
    with pytest.raises(LeaseError, match="no dataset.json, and 4 of its shards belong to another data set"):
        extract(other)
    assert [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in shards] == before


def test_refused_resume_names_the_option_with_both_values(copy, extract):
    with pytest.raises(LeaseError) as caught:
        extract(copy | {"data": copy["data"] | {"limit": 3}})
    assert "data.limit: (none) -> 3" in str(caught.value)


def test_totals_are_the_plans_word_whatever_the_file_says(copy, extract):
    stated = json.loads(dataset_json(copy).read_text())
    stated["totals"]["samples"] = 3
    dataset_json(copy).write_text(json.dumps(stated))
    extract(copy)
    assert json.loads(dataset_json(copy).read_text())["totals"]["samples"] == 4
