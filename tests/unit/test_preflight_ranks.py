"""Over how many ranks a model may be split, before anything of it is loaded."""

import pytest

from extractor import checkpoint, config, preflight
from extractor.checkpoint import Checkpoint
from extractor.errors import ConfigError, PreflightError

MODEL = Checkpoint(
    folder=None,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    num_layers=6,
    hidden_size=128,
    vocab_size=512,
    max_position_embeddings=None,
    dtype="float32",
    config_hash="",
    weights_hash="",
    weight_bytes=1,
    revision=None,
    has_tied_embeddings=False,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=256,
)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A function that checks [model] against the facts of a model."""
    data = tmp_path / "talks.jsonl"
    data.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(model=MODEL, **section):
        monkeypatch.setattr(checkpoint, "resolve", lambda *_: tmp_path)
        monkeypatch.setattr(checkpoint, "read", lambda _: model)
        tree = {
            "model": {"path": "x", "device": "cpu"} | section,
            "data": {"files": [str(data)]},
            "taps": {"layers": [1]},
            "output": {"dir": str(tmp_path / "out")},
        }
        return preflight.check(config.build(tree, source="test"))

    return run


def changed(**facts):
    import msgspec

    return msgspec.structs.replace(MODEL, **facts)


# With fewer heads of the KV cache than ranks SGLang repeats them.
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_model_that_can_be_divided_is_accepted(check, tp):
    check(tp=tp)


@pytest.mark.parametrize(
    ("facts", "tp", "cause"),
    [
        ({}, 3, r"8 query heads \(num_attention_heads\) cannot be split into 3"),
        ({}, 16, r"8 query heads \(num_attention_heads\) cannot be split into 16"),
        ({"num_key_value_heads": 6, "num_attention_heads": 12}, 4, r"6 heads of the KV cache .* into 4"),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 12},
            4,
            r"4 ranks over the heads of the KV cache .* into 3",
        ),
        ({"intermediate_size": 255}, 2, r"255 units of the MLP \(intermediate_size\) cannot be split into 2"),
        ({"moe_intermediate_size": 63}, 2, r"63 units of an expert \(moe_intermediate_size\) .* into 2"),
    ],
)
def test_what_cannot_be_divided_is_named_with_what_can(check, facts, tp, cause):
    with pytest.raises(PreflightError, match=rf"model\.tp = {tp}: {cause} equal parts") as caught:
        check(changed(**facts), tp=tp)
    assert caught.value.code == "unsupported_parallel"
    assert caught.value.remedy.startswith("set model.tp to one of 1")


def test_experts_may_be_kept_whole_and_spread_over_the_ranks(check):
    model = changed(moe_intermediate_size=63, num_experts=8)
    check(model, tp=2, sglang={"ep_size": 2})
    with pytest.raises(PreflightError, match="7 experts, by model.sglang.ep_size, cannot be split into 2"):
        check(changed(num_experts=7), tp=2, sglang={"ep_size": 2})
    with pytest.raises(PreflightError, match="2 ranks by model.sglang.ep_size cannot be split into 4"):
        check(changed(num_experts=8), tp=2, sglang={"ep_size": 4})


def test_several_copies_of_the_model_are_refused(check):
    with pytest.raises(PreflightError, match="model.dp = 2"):
        check(dp=2)


@pytest.mark.parametrize("gpus", [[0], [0, 1, 2], [3, 3]])
def test_there_must_be_a_gpu_for_each_rank(check, gpus):
    with pytest.raises(PreflightError, match="2 different GPUs are needed"):
        check(tp=2, gpus=gpus, device="cuda")
    check(tp=2, gpus=[4, 5], device="cuda")
    # Without GPUs the key says nothing.
    check(tp=2, gpus=gpus)


def test_gpus_that_may_not_be_seen_do_not_count(check, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(PreflightError, match="model.tp = 2: 1 GPUs are visible"):
        check(tp=2, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    check(tp=2, device="cuda")


@pytest.mark.parametrize("gpus", [[], [-1], "0,1"])
def test_gpus_are_a_list_of_numbers(check, gpus):
    with pytest.raises(ConfigError, match="model.gpus"):
        check(gpus=gpus)
