"""What is refused before weights are read, and which samples may be longer than a batch."""

import json
import struct

import pytest

from extractor import config as configs
from extractor import preflight
from extractor.errors import ConfigError, PreflightError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "sliding_window": None,
    "use_sliding_window": False,
}


@pytest.fixture
def check(tmp_path):
    """A function that checks a run: changes of config.json, tables of run.toml -> facts."""

    def run(changes, **tables):
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIG | changes))
        header = json.dumps(
            {"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        ).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
        data = tmp_path / "talks.jsonl"
        data.write_text("{}\n")
        tree = {
            "model": {"path": str(model), "device": "cpu"} | tables.get("model", {}),
            "data": {"files": [str(data)], "max_len": 2048},
            "output": {"dir": str(tmp_path / "out")},
            "batch": {"max_tokens": 512} | tables.get("batch", {}),
        }
        return preflight.check(configs.build(tree, source="test"))

    return run


def test_a_class_that_was_tested_in_chunks_may_have_samples_longer_than_a_batch(check):
    assert check({}).model.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "tables", "why"),
    [
        ({"sliding_window": 1024, "use_sliding_window": True}, {}, "sliding_window = 1024"),
        ({"layer_types": ["sliding_attention"] * 8}, {}, "layer_types has sliding_attention"),
        ({"mamba_d_state": 128}, {}, "mamba_d_state is set"),
        ({"architectures": ["Lfm2ForCausalLM"]}, {}, "layers of Lfm2ForCausalLM carry a state"),
        ({"architectures": ["MistralForCausalLM"]}, {}, "not tested with the model class MistralForCausalLM"),
        (
            {},
            {"model": {"sglang": {"kv_cache_dtype": "fp8_e4m3"}}},
            "model.sglang.kv_cache_dtype = 'fp8_e4m3'",
        ),
    ],
)
def test_chunks_are_refused_where_they_were_not_tested_and_whole_samples_are_not(check, changes, tables, why):
    with pytest.raises(PreflightError, match=r"samples longer than batch.max_tokens = 512") as refused:
        check(changes, **tables)
    assert why in refused.value.message
    assert refused.value.code == "chunks_untested"
    assert refused.value.remedy == "raise batch.max_tokens to 2048, or lower data.max_len to 512"
    check(changes, **(tables | {"batch": {"max_tokens": 2048}}))


def test_no_sample_is_longer_than_the_model_has_positions_for(check):
    with pytest.raises(ConfigError, match="the model has positions for 1024 tokens"):
        check({"max_position_embeddings": 1024})
