"""The INT4 test weights mean to compressed-tensors what they mean to the reference, bit by bit."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor import checkpoint
from extractor.reference import Reference
from extractor.taps import Tap
from tests.support import int4_weights, kimi_model


def theirs(packed):
    """The weight as compressed-tensors unpacks it."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape = torch.Size(packed["weight_shape"].tolist())
    values = unpack_from_int32(packed["weight_packed"], 4, shape)
    scale = packed["weight_scale"].repeat_interleave(int4_weights.GROUP, dim=1)
    return values.to(scale.dtype) * scale


@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), groups=st.integers(1, 4), size=st.floats(1e-4, 100))
@settings(max_examples=40, deadline=None)
def test_packed_weights_mean_the_same_to_compressed_tensors(seed, rows, groups, size):
    generator = torch.Generator().manual_seed(seed)
    weight = (size * torch.randn(rows, groups * int4_weights.GROUP, generator=generator)).to(torch.bfloat16)

    packed = int4_weights.quantize(weight)

    assert torch.equal(int4_weights.dequantize(packed), theirs(packed))


def test_each_value_is_within_half_a_step_of_its_weight():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    packed = int4_weights.quantize(weight)

    step = packed["weight_scale"].float().repeat_interleave(int4_weights.GROUP, dim=1)
    off = (int4_weights.dequantize(packed).float() - weight.float()).abs() / step
    # The largest positive value of a group has 7 steps of the 7.5 that it would need; scale and product are rounded.
    assert off.max() <= 0.5 + 2**-4
    assert off.mean() > 0.1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("kimi")
    kimi_model.make(base / "served", base / "plain")
    return base


def test_the_small_model_declares_what_the_real_one_does(folders):
    facts = checkpoint.read(folders / "served")

    assert (facts.architecture, facts.quantization) == (
        "KimiK25ForConditionalGeneration",
        "compressed-tensors",
    )
    assert (facts.num_layers, facts.hidden_size, facts.dtype) == (3, 128, "bfloat16")
    index = json.loads((folders / "served" / "model.safetensors.index.json").read_text())["weight_map"]
    packed = [name for name in index if name.endswith("weight_packed")]
    assert len(packed) == 2 * 16 * 3
    assert all(".mlp.experts." in name for name in packed)


def test_the_plain_folder_is_a_whole_model_of_transformers(folders):
    _, info = transformers.DeepseekV3ForCausalLM.from_pretrained(folders / "plain", output_loading_info=True)
    reference = Reference(folders / "plain")

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    states = reference.states(torch.arange(40).numpy(), [Tap(1, False, "layer_000"), Tap(3, False, "final")])
    assert states["final"].shape == (40, 128)
    assert 0.3 < states["final"].std() < 10
    margins = reference.routing_margins(torch.arange(40).numpy())
    assert margins is not None
    assert margins.shape == (40,)
    assert margins.min() > 0
