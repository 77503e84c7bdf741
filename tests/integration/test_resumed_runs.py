"""Finished data sets that are gone on with after something around them changed; the worker is real."""

import contextlib
import io
import json
import shutil
import threading
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from extractor import config as configs
from extractor import preflight
from extractor.commands import extract as extraction
from extractor.commands import job as jobs
from extractor.commands.output import Output
from extractor.errors import LeaseError
from extractor.store import manifest


@pytest.fixture
def run_tree(small_model, talks, tmp_path):
    """A run of three shards with a model of its own, which may be changed."""
    shutil.copytree(small_model("qwen3"), tmp_path / "model")
    return {
        "model": {"path": str(tmp_path / "model"), "device": "cpu"},
        "data": {"files": [str(talks([100] * 24))], "max_len": 256},
        "taps": {"layers": [1, 3]},
        "output": {"dir": str(tmp_path / "out"), "shard_bytes": 700_000},
        "batch": {"max_tokens": 400},
    }


def with_other_weights(model: Path) -> None:
    """Other weights in place: same configuration, names and sizes."""
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_weights_replaced_in_place_are_another_model(extract, run_tree):
    result, _ = extract(run_tree)
    output = Path(result.output)
    shutil.rmtree(output / "shards" / "000001")
    # `start` refuses before any process is started, and before the data is read.
    same = configs.build(run_tree, source="test")
    jobs.require_same_settings(same, preflight.check(same))
    for table, key, value, told in (
        ("taps", "layers", [2], "holds the taps layer_001, layer_003, final"),
        ("batch", "max_tokens", 500, "plan.max_tokens: 400 -> 500"),
        ("data", "limit", 7, "data.limit"),
    ):
        other = configs.build(run_tree | {table: run_tree[table] | {key: value}}, source="test")
        with pytest.raises(LeaseError, match=told):
            jobs.require_same_settings(other, preflight.check(other))
    with_other_weights(Path(run_tree["model"]["path"]))
    with pytest.raises(LeaseError, match="model.weights_hash"):
        jobs.require_same_settings(same, preflight.check(same))
    with pytest.raises(LeaseError, match="model.weights_hash") as refused:
        extract(run_tree)
    assert refused.value.code == "output_differs"
    assert not (output / "shards" / "000001").exists()


@pytest.mark.soak
def test_other_versions_on_resume_are_told_and_recorded_beside_the_first(extract, run_tree):
    result, _ = extract(run_tree)
    output = Path(result.output)
    first = manifest.read(output)
    older = msgspec.structs.replace(first, versions=first.versions | {"sglang": "0.0.1"})
    manifest.write(output, older)
    shutil.rmtree(output / "shards" / "000001")

    resumed, text = extract(run_tree)

    assert resumed.complete
    assert f'versions.sglang: "0.0.1" -> "{first.versions["sglang"]}"' in text
    now = manifest.read(output)
    assert now.versions == older.versions
    assert [later.versions for later in now.later] == [first.versions]


def replica_name(run: Path) -> str:
    """Of the start that was last."""
    return str(json.loads((run / "replica-0.json").read_bytes())["replica"])


class StoppedAtOnce(extraction.StopSignals):
    """A stop that was asked for before the model is loaded."""

    def after_the_batch(self):
        event = threading.Event()
        event.set()
        return contextlib.nullcontext(event)


@pytest.mark.soak
def test_a_resume_that_is_stopped_while_a_damaged_shard_waits_ends_with_a_result(extract, run_tree):
    result, _ = extract(run_tree)
    output = Path(result.output)
    first = replica_name(Path(result.run))
    (output / "shards" / "000001" / "tokens.safetensors").write_bytes(b"")
    text = io.StringIO()

    stopped = extraction.extract(
        configs.build(run_tree, source="test"),
        out=Output(as_json=False, stdout=text, stderr=text),
        stop=StoppedAtOnce(),
    )

    assert not stopped.complete
    assert stopped.shards == result.shards - 1
    assert 1 not in pq.read_table(output / "samples.parquet")["shard"].to_pylist()
    # The name of a part folder ends with the replica's: that of another start is never written into.
    assert replica_name(Path(stopped.run)) != first
    damaged = output / "shards" / "000001" / "tokens.safetensors"
    assert f"shard 1 is damaged and will be computed again: {damaged}: the file is empty\n" in text.getvalue()
