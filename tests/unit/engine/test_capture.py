"""Adapters on stand-ins for SGLang's models: they set, clear and read back; and the checks of a batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extractor.engine.adapters import SWITCH, HookAdapter, adapter_for
from extractor.engine.anatomy import Anatomy, entering_tensor
from extractor.engine.capture import Capture
from extractor.errors import CaptureError, PreflightError
from extractor.families import FAMILIES
from extractor.taps import select
from tests.support import stand_in_models
from tests.support.stand_in_models import LAYERS, STAND_INS, Norm

TOKENS, HIDDEN = 5, 8


def choose(layers, **flags):
    chosen = {"embed": True, "final": True, "normed": True} | flags
    return select(num_layers=LAYERS, layers=layers, convention="after", **chosen)


def captured(model, capture, taps):
    capture.set_taps(taps)
    capture.begin_batch()
    model(torch.zeros(TOKENS, HIDDEN))
    return {name: set(state.flatten().tolist()) for name, state in capture.collect(TOKENS).items()}


def expected(layers):
    """The stand-ins' stream entering layer k is k at every element; the norm doubles."""
    values = {"embed": 0, **{f"layer_{v:03d}": v + 1 for v in layers}, "final": LAYERS, "normed": 2 * LAYERS}
    return {name: {float(value)} for name, value in values.items()}


def new_capture(model):
    return Capture(Anatomy(model), hidden_size=HIDDEN, dtype=torch.float32)


@pytest.mark.parametrize("build", STAND_INS.values(), ids=STAND_INS)
def test_every_selection_in_turn_is_what_enters_the_layers(build):
    model = build()
    capture = new_capture(model)
    for layers in ([1, 4], [4], [], [0, 1, 2, 3, 4], [2]):
        assert captured(model, capture, choose(layers)) == expected(layers)


@pytest.mark.parametrize("build", STAND_INS.values(), ids=STAND_INS)
def test_what_is_watched_for_the_proof_is_the_norm_of_the_boundary(build):
    model = build()
    anatomy = Anatomy(model)
    seen = {}
    for index in range(LAYERS):
        module, entry = anatomy.entry(index)
        module.register_forward_pre_hook(
            lambda _, args, kwargs, index=index, entry=entry: seen.update(
                {index: float(entering_tensor(entry, args, kwargs)[0, 0])}
            ),
            with_kwargs=True,
        )
    model(torch.zeros(TOKENS, HIDDEN))
    assert seen == {k: 2.0 * k for k in range(LAYERS)}
    assert all(isinstance(anatomy.input_norm(k), Norm) for k in range(LAYERS))


@pytest.mark.parametrize("build", STAND_INS.values(), ids=STAND_INS)
@given(selections=st.lists(st.sets(st.integers(1, LAYERS - 1)).map(sorted), min_size=1, max_size=5))
def test_adapter_reads_back_what_it_set_last(build, selections):
    adapter = adapter_for(Anatomy(build()))
    for boundaries in selections:
        adapter.set(boundaries)
        assert adapter.active() == tuple(boundaries)
        adapter.check_switch(is_on=bool(boundaries))


@pytest.mark.parametrize(
    "build",
    [
        build
        for name, build in STAND_INS.items()
        if FAMILIES[name].mechanism != "hook" and name != "Lfm2ForCausalLM"
    ],
)
@pytest.mark.parametrize("boundaries", [[2], []])
def test_switch_that_does_not_fit_is_refused(build, boundaries):
    anatomy = Anatomy(build())
    adapter = adapter_for(anatomy)
    adapter.set(boundaries)
    setattr(anatomy.wrapper, SWITCH, not boundaries)
    with pytest.raises(CaptureError, match=f"{SWITCH} of .* is {'off' if boundaries else 'on'} while"):
        adapter.check_switch(is_on=bool(boundaries))


def test_inner_switch_left_on_is_refused():
    anatomy = Anatomy(stand_in_models.bailing_v3())
    adapter = adapter_for(anatomy)
    adapter.set([2])
    setattr(anatomy.inner, SWITCH, False)
    with pytest.raises(CaptureError, match="is off while some boundaries"):
        adapter.check_switch(is_on=True)


def test_flags_of_an_earlier_selection_are_cleared():
    model = stand_in_models.qwen3_moe()
    adapter = adapter_for(Anatomy(model))
    adapter.set([1, 3])
    adapter.set([2])
    assert [layer._is_layer_to_capture for layer in model.model.layers] == [k == 2 for k in range(LAYERS)]


def test_last_boundary_left_in_the_list_of_a_flag_class_is_read_back():
    model = stand_in_models.lfm2()
    adapter = adapter_for(Anatomy(model))
    adapter.set([1])
    model.model.layers_to_capture = [1, LAYERS]
    assert adapter.active() == (1, LAYERS)


def test_container_keeps_its_type():
    model = stand_in_models.nemotron_h()
    adapter_for(Anatomy(model)).set([1, 3])
    assert model.model.layers_to_capture == {1, 3}


def test_switched_off_after_layer_capture_is_none():
    model = stand_in_models.kimi_linear()
    adapter = adapter_for(Anatomy(model))
    adapter.set([2, 4])
    assert model.model.dspark_layers_to_capture == [1, 3]
    adapter.set([])
    assert model.model.dspark_layers_to_capture is None


def test_hooks_of_an_earlier_selection_are_removed():
    model = stand_in_models.gemma4_mm()
    adapter = adapter_for(Anatomy(model))
    assert isinstance(adapter, HookAdapter)
    adapter.set([1, 3])
    adapter.set([2])
    counts = [len(layer.input_layernorm._forward_hooks) for layer in model.language_model.layers]
    assert counts == [int(k == 2) for k in range(LAYERS)]


def test_hook_that_somebody_removed_is_noticed_before_the_batch():
    model = stand_in_models.gemma4_mm()
    capture = new_capture(model)
    capture.set_taps(choose([0, 2]))
    model.language_model.layers[3].input_layernorm._forward_hooks.clear()
    with pytest.raises(CaptureError, match=r"no capture flag on layer \[3\]"):
        capture.begin_batch()


def test_stock_capture_beside_the_hooks_is_refused():
    model = stand_in_models.gemma4_mm()
    capture = new_capture(model)
    capture.set_taps(choose([0, 2]))
    model.language_model.layers_to_capture = [2]
    with pytest.raises(CaptureError, match=r"stale capture flag on layer \[2\]"):
        capture.begin_batch()


def test_batch_without_the_hook_on_the_final_norm_is_refused():
    model = stand_in_models.llama()
    capture = new_capture(model)
    model.model.norm._forward_hooks.clear()
    with pytest.raises(CaptureError, match="ran 0 times .*a fused path passes it by, or its hook is gone"):
        captured(model, capture, choose([1]))


def test_final_norm_with_other_results_than_recorded_is_refused():
    model = stand_in_models.llama()
    capture = new_capture(model)
    model.model.norm.forward = lambda hidden, residual: (hidden + residual) * 2
    capture.set_taps(choose([]))
    capture.begin_batch()
    with pytest.raises(CaptureError, match="the final norm returned 1 tensors, expected 2"):
        model.model(torch.zeros(TOKENS, HIDDEN))


def test_class_that_is_not_listed_is_refused():
    with pytest.raises(PreflightError, match="OtherForCausalLM is not supported"):
        Anatomy(type("OtherForCausalLM", (), {})())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("", "lm_head"),
        ("", "logits_processor"),
        ("model", "norm"),
        ("model", "layers"),
        ("model.layers.3", "self_attn"),
    ],
)
def test_listed_class_without_a_part_is_refused_by_its_name(owner, name):
    model = stand_in_models.llama()
    delattr(model.get_submodule(owner), name)
    with pytest.raises(CaptureError, match=f"has no {name}"):
        Anatomy(model)


def test_listed_class_without_the_mechanism_is_refused_by_attribute():
    model = stand_in_models.llama()
    del model.model.layers_to_capture
    with pytest.raises(CaptureError, match="has no layers_to_capture"):
        adapter_for(Anatomy(model))


def test_model_of_another_depth_than_its_config_is_refused():
    capture = new_capture(stand_in_models.llama())
    with pytest.raises(CaptureError, match="the model has 6 layers, its config.json says 7"):
        capture.set_taps(
            select(num_layers=7, layers=[1], embed=False, final=True, normed=False, convention="after")
        )
