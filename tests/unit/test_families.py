import pytest

from extractor.errors import PreflightError
from extractor.families import mechanism_of, unverified_note


def test_unsupported_class_is_refused_with_the_classes_that_are():
    with pytest.raises(PreflightError, match="GemmaForCausalLM is not supported.*") as caught:
        mechanism_of("GemmaForCausalLM")
    assert "Qwen3MoeForCausalLM" in str(caught.value)


def test_release_is_silent_on_its_own_device_and_warned_of_on_the_other():
    assert unverified_note("0.5.23", "cpu") is None
    assert unverified_note("0.5.17", "cuda") is None
    assert "verified on cpu only; this run uses cuda" in unverified_note("0.5.23", "cuda")
    assert "never verified" in unverified_note("0.6.0", "cpu")
