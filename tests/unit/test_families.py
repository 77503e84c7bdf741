"""The table of model classes: complete for the installed SGLang, and true of what was run."""

import ast
import importlib.util
from pathlib import Path

import msgspec
import pytest

from extractor.errors import PreflightError
from extractor.families import CHECKED, FAMILIES, REFUSED, check_served, family_of, unverified_note
from tests.support.small_models import KINDS
from tests.support.stand_in_models import STAND_INS

SETTERS = {f"set_{name}_layers_to_capture" for name in ("eagle3", "dflash", "dspark")}


def sglang_classes():
    """Model classes of the installed SGLang that have a setter of captured layers, by reading its source."""
    spec = importlib.util.find_spec("sglang")
    models = Path(spec.submodule_search_locations[0], "srt", "models")
    classes, entries = {}, set()
    for file in models.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                classes[node.name] = (bases, methods)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass":
                entries |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}

    def has_setter(name):
        bases, methods = classes.get(name, ([], set()))
        return bool(methods & SETTERS) or any(has_setter(base) for base in bases)

    return entries, {name for name in entries if has_setter(name)}


def test_every_class_of_sglang_that_can_capture_is_decided_on():
    _, capable = sglang_classes()
    assert len(capable) > 80
    assert sorted(capable - FAMILIES.keys() - REFUSED.keys()) == []


def test_every_class_that_is_taken_or_refused_is_one_of_sglang():
    entries, _ = sglang_classes()
    assert sorted((FAMILIES.keys() | REFUSED.keys()) - entries) == []


def test_no_class_is_both_taken_and_refused():
    assert not FAMILIES.keys() & REFUSED.keys()


def test_classes_that_sglang_can_be_told_to_capture_are_those_with_a_setter():
    _, capable = sglang_classes()
    assert {name for name, family in FAMILIES.items() if family.has_setter} == capable & FAMILIES.keys()


def test_every_way_of_capturing_was_run_on_a_live_model_or_a_stand_in():
    def way(name):
        return msgspec.structs.replace(FAMILIES[name], wrapper="", inner="model", has_setter=True)

    run = {way(name) for name in CHECKED} | {way(name) for name in STAND_INS}
    assert sorted(name for name in FAMILIES if way(name) not in run) == []


def test_what_is_said_to_be_checked_on_the_cpu_is_what_the_parity_tests_run():
    on_cpu = {name for name, checks in CHECKED.items() if any(check.device == "cpu" for check in checks)}
    # Kimi-K2.5 is no class of transformers, and has a maker and a test of its own.
    elsewhere = {"KimiK25ForConditionalGeneration"}
    assert on_cpu == {kind.architecture for kind in KINDS.values() if kind.runs_on == "cpu"} | elsewhere


def test_class_that_nobody_looked_at_is_refused_with_where_to_look():
    with pytest.raises(PreflightError, match="OtherForCausalLM is not supported: nobody has shown") as caught:
        family_of("OtherForCausalLM")
    assert "docs/models.md" in str(caught.value)
    assert "Qwen3MoeForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LlamaForCausalLMEagle3", "it is a draft model"),
        ("EmbeddingGemmaModel", "it is an embedding model"),
        ("WhisperForConditionalGeneration", "it has an encoder"),
        ("DeepseekV4ForCausalLM", "several residual streams"),
        ("KimiK3ForConditionalGeneration", "banked rows"),
        ("NanbeigeForCausalLM", "its layers run several times"),
    ],
)
def test_class_that_cannot_be_captured_is_refused_with_the_reason(name, why):
    with pytest.raises(PreflightError, match=why) as caught:
        family_of(name)
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize(
    ("name", "device", "why"),
    [
        ("Gemma3ForCausalLM", "cuda", "hands over a tensor that the layer then writes into"),
        ("Glm4ForCausalLM", "cpu", "does not serve hidden states"),
    ],
)
def test_as_served_is_refused_where_it_cannot_be_had(name, device, why):
    with pytest.raises(PreflightError, match=why):
        check_served(name, device)


@pytest.mark.parametrize(("name", "device"), [("Gemma3ForCausalLM", "cpu"), ("LlamaForCausalLM", "cuda")])
def test_as_served_is_accepted_elsewhere(name, device):
    check_served(name, device)


def test_release_is_silent_on_its_own_device_and_warned_of_on_the_other():
    assert unverified_note("0.5.23", "cpu") is None
    assert unverified_note("0.5.17", "cuda") is None
    assert "verified on cpu only; this run uses cuda" in unverified_note("0.5.23", "cuda")
    assert "never verified" in unverified_note("0.6.0", "cpu")
