import pytest

from extractor import sglang_args
from extractor.errors import ConfigError

ON = {"pp_size": 2, "nnodes": 2, "attn_dp_size": 2, "attn_cp_size": 2, "dcp_size": 2, "moe_dp_size": 2}


@pytest.mark.parametrize("key", sglang_args.REFUSED)
def test_setting_that_breaks_capture_is_refused_by_name_with_the_reason(key):
    texts = {"lora_paths": ["adapter"], "json_model_override_args": '{"rope_theta": 1}'}
    value = ON.get(key, texts.get(key, True))
    with pytest.raises(ConfigError, match=rf"model\.sglang\.{key} = .* is refused: ") as caught:
        sglang_args.check({key: value})
    assert sglang_args.REFUSED[key] in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("key", sglang_args.REFUSED)
def test_setting_that_is_switched_off_is_accepted(key):
    sglang_args.check({key: 1 if key in ON else False})
    sglang_args.check({key: None})


@pytest.mark.parametrize("key", sglang_args.OWNED)
@pytest.mark.parametrize("value", [True, 1, "x"])
def test_setting_that_has_a_key_of_its_own_is_refused_with_that_key(key, value):
    with pytest.raises(ConfigError, match="is refused: ") as caught:
        sglang_args.check({key: value})
    assert sglang_args.OWNED[key] in str(caught.value)


@pytest.mark.parametrize(("key", "value"), sglang_args.FIXED.items())
def test_fixed_setting_may_be_repeated_and_not_changed(key, value):
    sglang_args.check({key: value})
    with pytest.raises(ConfigError, match=f"fixed to {value!r}"):
        sglang_args.check({key: not value if isinstance(value, bool) else "other"})


@pytest.mark.parametrize(
    "key", ["speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"]
)
def test_draft_models_are_refused_whatever_the_setting_is_called(key):
    with pytest.raises(ConfigError, match="draft model"):
        sglang_args.check({key: "EAGLE3"})


def test_other_implementations_of_a_model_are_refused():
    with pytest.raises(ConfigError, match="only SGLang's own model classes"):
        sglang_args.check({"model_impl": "transformers"})
    sglang_args.check({"model_impl": "auto"})


def test_everything_else_is_the_users():
    sglang_args.check({"load_format": "dummy", "quantization": "fp8", "page_size": 16})
