"""One record of the largest length among short ones: what is announced, what is stored, what a resume makes of it."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from extractor import config as configs
from extractor.commands import job as jobs
from extractor.commands import verify
from extractor.commands.output import Output
from extractor.estimate import block_bytes
from extractor.quantities import bytes_words
from tests.support import outputs

MAX_LEN = 2048
"""The model's positions."""


@pytest.fixture
def run_tree(small_model, talks, tmp_path):
    """Nine records of some 200 tokens and one that is cut to the largest length."""
    return {
        "model": {"path": str(small_model("qwen3")), "device": "cpu"},
        "data": {"files": [str(talks([200] * 4 + [3000] + [200] * 5))], "max_len": MAX_LEN},
        "taps": {"layers": [1, 3]},
        "output": {"dir": str(tmp_path / "out"), "shard_bytes": 4_000_000},
        "batch": {"max_tokens": 450, "chunk_tokens": 300},
        "writer": {"buffers": 2},
    }


def test_a_record_of_the_largest_length_is_announced_stored_whole_and_resumed(extract, run_tree, tmp_path):
    config = configs.build(run_tree, source="test")
    job = jobs.make(config, out=Output(as_json=True))
    shape = {"hidden_size": 128, "num_taps": 3, "dtype": "float32"}
    batch, largest = block_bytes(450, **shape), block_bytes(MAX_LEN, **shape)
    assert job.num_chunked == 1
    assert job.size.largest_sample_tokens == MAX_LEN
    assert job.host_buffer_bytes == batch + largest

    result, text = extract(run_tree)

    output = Path(result.output)
    assert result.complete
    # All host memory that the queue of the writers can ever use was allocated before the first batch.
    assert f"host buffers {bytes_words(job.host_buffer_bytes)}" in text
    assert job.host_buffer_bytes <= config.writer.buffers * batch + largest
    table = pq.read_table(output / "samples.parquet").to_pydict()
    assert sorted(table["tokens"])[-1] == MAX_LEN
    assert len(table["tokens"]) == 10
    assert (output / "quarantine.jsonl").read_text() == ""

    shards = outputs.contents(output / "shards")
    states_bytes = sum(len(content) for name, content in shards.items() if not name.endswith(".json"))
    # Headers are a part of what so small a data set takes, so totals are compared, and rows by their size.
    assert abs(job.size.total_bytes / states_bytes - 1) <= 0.02
    long_shard = f"{table['shard'][table['tokens'].index(MAX_LEN)]:06d}"
    rows = sum(
        tokens
        for tokens, shard in zip(table["tokens"], table["shard"], strict=True)
        if shard == int(long_shard)
    )
    row_bytes = sum(
        len(content) - 4096
        for name, content in shards.items()
        if name.startswith(long_shard) and ".safe" in name
    )
    assert abs(job.size.bytes_per_token * rows / row_bytes - 1) <= 0.02
    assert job.size.largest_sample_bytes == MAX_LEN * 128 * 4 * 3

    shutil.rmtree(output / "shards" / long_shard)
    resumed, _ = extract(run_tree)

    assert (resumed.complete, resumed.shards_computed) == (True, 1)
    assert outputs.contents(output / "shards") == shards


@pytest.mark.slow
def test_two_ranks_compute_the_record_in_the_same_chunks_and_each_stores_its_taps(
    extract, run_tree, tmp_path
):
    run_tree["model"]["tp"] = 2
    job = jobs.make(configs.build(run_tree, source="test"), out=Output(as_json=True))

    result, text = extract(run_tree)

    # On all taps, the other rank's among them: enters its layer, alone, in chunks; the norm, the logits, the ranks.
    assert "(11 checks" in text
    assert f"host buffers {bytes_words(job.host_buffer_bytes)}" in text
    assert set(pq.read_table(result.output + "/samples.parquet")["tokens"].to_pylist()) >= {MAX_LEN}
    outcome = verify.verify(
        Path(result.output), sample=10, against="transformers", seed=1, out=Output(as_json=True)
    )
    assert outcome.store.is_complete
    assert outcome.compared.num_samples == 10
    assert [tap.name for tap in outcome.compared.taps] == ["layer_001", "layer_003", "final"]
    assert max(tap.max_rel_err for tap in outcome.compared.taps) <= 1e-5
