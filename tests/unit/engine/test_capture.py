"""The adapters on stand-ins for SGLang's models: they set, clear and read back; and the checks of a batch."""

from types import SimpleNamespace

import pytest
import torch

from extractor.engine.capture import Capture, FlagAdapter, ListAdapter, adapter_for
from extractor.errors import CaptureError, PreflightError
from extractor.families import MECHANISMS
from extractor.taps import select


def flag_model(num_layers=4):
    layers = [SimpleNamespace() for _ in range(num_layers)]
    return SimpleNamespace(
        model=SimpleNamespace(layers=layers, layers_to_capture=[]), capture_aux_hidden_states=False
    )


def list_model():
    return SimpleNamespace(model=SimpleNamespace(layers_to_capture=[]), capture_aux_hidden_states=False)


@pytest.mark.parametrize(("adapter", "model"), [(ListAdapter, list_model), (FlagAdapter, flag_model)])
def test_adapter_sets_and_clears_what_it_reads_back(adapter, model):
    model = model()
    adapter = adapter(model)
    for boundaries in ([1, 3], [2], [], [1, 2, 3]):
        adapter.set(boundaries)
        assert adapter.active() == tuple(boundaries)
        assert model.capture_aux_hidden_states is bool(boundaries)


def test_flags_of_an_earlier_selection_are_cleared():
    model = flag_model()
    adapter = FlagAdapter(model)
    adapter.set([1, 3])
    adapter.set([2])
    assert [layer._is_layer_to_capture for layer in model.model.layers] == [False, False, True, False]


def test_every_listed_class_has_an_adapter():
    for name, mechanism in MECHANISMS.items():
        model = type(name, (), {})()
        model.capture_aux_hidden_states = False
        model.lm_head = None
        model.model = SimpleNamespace(layers=[], norm=None, layers_to_capture=[])
        assert adapter_for(model).mechanism == mechanism


def test_class_that_is_not_listed_is_refused():
    with pytest.raises(PreflightError, match="OtherForCausalLM is not supported"):
        adapter_for(type("OtherForCausalLM", (), {})())


def test_listed_class_without_the_mechanism_is_refused_by_attribute():
    model = type("LlamaForCausalLM", (), {})()
    model.capture_aux_hidden_states, model.lm_head = False, None
    model.model = SimpleNamespace(layers=[], norm=None)
    with pytest.raises(CaptureError, match="has no model.layers_to_capture"):
        adapter_for(model)


class Layer(torch.nn.Module):
    def forward(self, positions, hidden_states, forward_batch):
        return hidden_states + 1


class Norm(torch.nn.Module):
    def forward(self, hidden_states):
        return hidden_states * 2


class Inner(torch.nn.Module):
    """Captures as SGLang's classes do, as a list or as one packed tensor."""

    def __init__(self, *, packed):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.norm = Norm()
        self.layers_to_capture = []
        self.packed = packed

    def forward(self, hidden_states):
        captured = []
        for index, layer in enumerate(self.layers):
            if index in self.layers_to_capture:
                captured.append(hidden_states)
            hidden_states = layer(None, hidden_states, None)
        if not captured:
            return self.norm(hidden_states)
        return self.norm(hidden_states), torch.cat(captured, dim=-1) if self.packed else captured


def captured_taps(*, packed, layers):
    model = type("LlamaForCausalLM", (), {})()
    model.capture_aux_hidden_states, model.lm_head = False, None
    model.model = Inner(packed=packed)
    capture = Capture(model, hidden_size=8, dtype=torch.float32)
    capture.set_taps(
        select(num_layers=4, layers=layers, embed=True, final=True, normed=True, convention="after")
    )
    capture.begin_batch()
    model.model(torch.zeros(5, 8))
    return capture.collect(5)


@pytest.mark.parametrize("packed", [False, True], ids=["list", "packed"])
@pytest.mark.parametrize("layers", [[], [1], [0, 2]])
def test_packed_and_listed_captures_give_the_same_boundaries(packed, layers):
    states = captured_taps(packed=packed, layers=layers)
    # The stand-in's residual stream entering layer k is k everywhere, its last boundary 4, normed 8.
    values = {name: float(state[0, 0]) for name, state in states.items()}
    assert values == {"embed": 0, **{f"layer_{v:03d}": v + 1 for v in layers}, "final": 4, "normed": 8}


def test_model_of_another_depth_than_its_config_is_refused():
    model = type("LlamaForCausalLM", (), {})()
    model.capture_aux_hidden_states, model.lm_head = False, None
    model.model = Inner(packed=False)
    capture = Capture(model, hidden_size=8, dtype=torch.float32)
    with pytest.raises(CaptureError, match="the model has 4 layers, its config.json says 6"):
        capture.set_taps(
            select(num_layers=6, layers=[1], embed=False, final=True, normed=False, convention="after")
        )
