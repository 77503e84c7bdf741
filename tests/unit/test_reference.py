"""The reference pass on small random models, against transformers' own `output_hidden_states`."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from extractor.errors import PreflightError
from extractor.reference import Reference, summarize, token_errors
from extractor.taps import Tap, make_tap

NUM_LAYERS = 4
HIDDEN = 32
VOCAB = 97
NORMED = Tap(NUM_LAYERS, True, "normed")


def small_model(kind: str) -> transformers.PreTrainedModel:
    shape = {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=8))
    with torch.no_grad():
        # A norm of ones would hide a norm that is applied twice, or not at all.
        model.model.norm.weight.uniform_(0.5, 2.0)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    small_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def input_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, 50).astype(np.int32)


def all_taps() -> list[Tap]:
    return [make_tap(k, NUM_LAYERS) for k in range(NUM_LAYERS + 1)] + [NORMED]


def test_every_boundary_is_what_transformers_returns_itself(model_folder, input_ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()
    with torch.no_grad():
        expected = model(
            torch.tensor(input_ids.astype(np.int64))[None], output_hidden_states=True
        ).hidden_states

    states = Reference(model_folder).states(input_ids, all_taps())

    for k in range(NUM_LAYERS):
        assert torch.equal(states[make_tap(k, NUM_LAYERS).name], expected[k][0])
    # transformers' last entry has the norm applied in these classes, so it is `normed`, not B(n).
    assert torch.equal(states["normed"], expected[NUM_LAYERS][0])


def test_final_is_the_last_boundary_before_the_norm(model_folder, input_ids):
    reference = Reference(model_folder)

    states = reference.states(input_ids, all_taps())

    assert torch.equal(reference.normalized(states["final"]), states["normed"])
    assert not torch.allclose(states["final"], states["normed"], rtol=0.1)


def test_only_what_was_asked_for_is_returned_and_hooks_are_gone_afterwards(model_folder, input_ids):
    reference = Reference(model_folder)

    assert set(reference.states(input_ids, [make_tap(2, NUM_LAYERS)])) == {"layer_001"}
    assert set(reference.states(input_ids, [NORMED])) == {"normed"}


def test_shapes_are_tokens_by_hidden_size_in_float32(model_folder, input_ids):
    states = Reference(model_folder, dtype="bfloat16").states(input_ids, all_taps())

    assert {(tuple(state.shape), state.dtype) for state in states.values()} == {((50, HIDDEN), torch.float32)}


def test_bfloat16_is_near_float32_but_not_equal(model_folder, input_ids):
    taps = [make_tap(NUM_LAYERS, NUM_LAYERS)]
    exact = Reference(model_folder).states(input_ids, taps)["final"]

    coarse = Reference(model_folder, dtype="bfloat16").states(input_ids, taps)["final"]

    assert 1e-4 < token_errors(coarse, exact).max() < 0.1


def test_the_precision_of_float32_products_is_restored(model_folder, input_ids):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        Reference(model_folder).states(input_ids, [NORMED])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_folder_that_transformers_cannot_load_is_refused(tmp_path):
    with pytest.raises(PreflightError, match="transformers cannot load"):
        Reference(tmp_path)


def test_a_class_without_a_known_stack_is_refused(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    with pytest.raises(PreflightError, match="GPT2LMHeadModel cannot serve as reference"):
        Reference(tmp_path)


def test_errors_are_per_token_not_per_sample():
    exact = torch.tensor([[1000.0, 0.0], [1.0, 0.0]])
    other = torch.tensor([[1000.0, 0.0], [0.0, 0.0]])

    assert token_errors(other, exact).tolist() == [0.0, 1.0]


def test_what_is_not_finite_is_an_infinite_error():
    exact = torch.ones(3, 2)
    broken = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 1.0]])

    assert token_errors(broken, exact).tolist() == [float("inf"), float("inf"), 0.0]


def test_zeros_equal_zeros():
    assert token_errors(torch.zeros(1, 2), torch.zeros(1, 2)).tolist() == [0.0]
    assert token_errors(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [float("inf")]


def test_states_of_other_shape_are_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        token_errors(torch.ones(3, 2), torch.ones(2, 2))


def test_the_summary_keeps_the_percentile_apart_from_the_maximum():
    summary = summarize(torch.cat([torch.full((99,), 0.5), torch.tensor([float("inf")])]))

    assert (summary.maximum, summary.p99, summary.num_tokens) == (float("inf"), 0.5, 100)


def test_no_token_has_no_summary():
    with pytest.raises(ValueError, match="no token"):
        summarize(torch.empty(0))


def test_a_dense_model_has_no_routing_margins(model_folder, input_ids):
    assert Reference(model_folder).routing_margins(input_ids) is None


def test_routing_margins_are_the_smallest_over_all_routers(tmp_path, input_ids):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        initializer_range=0.2,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        ids = torch.tensor(input_ids.astype(np.int64))[None]
        logits = torch.stack(model(ids, output_router_logits=True).router_logits)
    top = logits.sort(dim=-1, descending=True).values
    expected = ((top[..., 1] - top[..., 2]) / (top[..., 1].abs() + top[..., 2].abs())).amin(dim=0)

    margins = Reference(tmp_path).routing_margins(input_ids)

    assert margins is not None
    assert torch.allclose(margins, expected, rtol=1e-3)


def test_experts_chosen_by_groups_with_a_bias_change_only_below_their_margin(tmp_path, input_ids):
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        vocab_size=VOCAB,
        initializer_range=0.3,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    margins = Reference(tmp_path).routing_margins(input_ids)
    seen = []
    router.register_forward_hook(lambda _m, args, output: seen.append((args[0].flatten(0, -2), output)))
    with torch.no_grad():
        model(torch.tensor(input_ids.astype(np.int64))[None])
        states, (logits, _, chosen) = seen[0]

        moved = torch.zeros(len(input_ids), dtype=torch.bool)
        change = 0.05
        # A router of unit weights over logits lets the class itself choose from logits that were moved.
        router.hidden_dim, router.weight.data = 16, torch.eye(16)
        for seed in range(40):
            noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            again = router(logits * (1 + change * noise))[2]
            moved |= (again.sort(-1).values != chosen.sort(-1).values).any(-1)

    assert margins is not None
    assert states.shape[0] == len(margins)
    assert 0.02 < moved.float().mean() < 0.9
    assert margins[moved].max() <= 1.2 * change
    assert margins[~moved].median() > margins[moved].median()
