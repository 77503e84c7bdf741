"""What is stored against plain transformers: every tap, in float32 and bfloat16.

The stored dtype is the computed one, so nothing is rounded between SGLang and the comparison.
"""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from extractor import folders
from extractor.commands import verify
from extractor.commands.demo_data import ensure_model
from extractor.commands.demo_text import build_conversations
from extractor.commands.output import Output

pytestmark = pytest.mark.slow

# Read at import, before the tests get folders of their own: the model is fetched once per machine.
USER_CACHE = folders.cache_folder()
SAMPLES = 16


def compare(output: Path, samples: int = SAMPLES):
    outcome = verify.verify(output, sample=samples, against="transformers", seed=3, out=Output(as_json=True))
    assert outcome.store.is_complete
    return outcome.compared


@pytest.fixture(scope="session")
def smollm2():
    return ensure_model(USER_CACHE, lambda _: None)


def real_run(smollm2, tmp_path, dtype):
    conversations = tmp_path / "conversations.jsonl"
    build_conversations(conversations, num_samples=SAMPLES, seed=5)
    return {
        "model": {"path": str(smollm2), "device": "cpu", "dtype": dtype},
        "data": {"files": [str(conversations)], "max_len": 384},
        "taps": {"layers": [0, 2, 14, 26, 28], "embed": True, "final": True, "normed": True},
        "output": {"dir": str(tmp_path / "out"), "shard_bytes": 20_000_000},
        "batch": {"max_tokens": 1024},
    }


def small_run(model, talks, tmp_path, dtype):
    """Short samples in packed batches, and among them, in the same shards, some longer than a batch."""
    rng = random.Random(1)
    lengths = [rng.randrange(60, 300) for _ in range(18)] + [rng.randrange(520, 1000) for _ in range(6)]
    rng.shuffle(lengths)
    return {
        "model": {"path": str(model), "device": "cpu", "dtype": dtype},
        "data": {"files": [str(talks(lengths))], "max_len": 900},
        "taps": {"layers": [0, 1, 2, 3, 4], "embed": True, "final": True, "normed": True},
        "output": {"dir": str(tmp_path / "out"), "shard_bytes": 10_000_000},
        "batch": {"max_tokens": 512, "chunk_tokens": 200},
    }


def test_real_model_in_float32_is_what_transformers_computes(extract, smollm2, tmp_path):
    result, _ = extract(real_run(smollm2, tmp_path, "float32"))
    compared = compare(Path(result.output))
    assert compared.num_samples == SAMPLES
    assert {tap.name for tap in compared.taps} >= {"embed", "layer_000", "layer_014", "final", "normed"}
    for tap in compared.taps:
        assert tap.max_rel_err <= 1e-5, tap


@pytest.mark.soak
def test_real_model_in_bfloat16_errs_no_more_than_transformers_does(extract, smollm2, tmp_path):
    result, _ = extract(real_run(smollm2, tmp_path, "bfloat16"))
    for tap in compare(Path(result.output)).taps:
        assert tap.ok, tap


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("llama", marks=pytest.mark.soak),
        pytest.param("qwen2", marks=pytest.mark.soak),
        "qwen3",
        "qwen3-moe",
    ],
)
def test_small_model_in_float32_is_what_transformers_computes(kind, extract, small_model, talks, tmp_path):
    result, _ = extract(small_run(small_model(kind), talks, tmp_path, "float32"))
    compared = compare(Path(result.output), samples=24)
    for tap in compared.taps:
        assert tap.max_rel_err <= 1e-5, tap
    table = pq.read_table(result.output + "/samples.parquet").to_pydict()
    long = {shard for shard, tokens in zip(table["shard"], table["tokens"], strict=True) if tokens > 512}
    short = {shard for shard, tokens in zip(table["shard"], table["tokens"], strict=True) if tokens <= 512}
    assert compared.num_samples == len(table["shard"]) == 24
    assert long & short


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.soak), "qwen3"])
def test_small_model_in_bfloat16_errs_no_more_than_transformers_does(
    kind, extract, small_model, talks, tmp_path
):
    result, _ = extract(small_run(small_model(kind, "bfloat16"), talks, tmp_path, "bfloat16"))
    for tap in compare(Path(result.output)).taps:
        assert tap.ok, tap


def test_float32_states_stored_in_bfloat16_are_off_by_its_rounding_alone(
    extract, small_model, talks, tmp_path
):
    tree = small_run(small_model("qwen3"), talks, tmp_path, "float32")
    tree["output"]["dtype"] = "bfloat16"
    result, _ = extract(tree)
    for tap in compare(Path(result.output)).taps:
        assert 0 < tap.max_rel_err <= 0.004, tap
