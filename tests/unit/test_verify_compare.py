"""What `verify --against transformers` says about states that are right, rounded, or wrong in a known way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from extractor.commands.recompute import compare_with_transformers
from extractor.errors import DatasetError
from extractor.reference import Reference, token_errors
from extractor.store.reader import StoredSample
from extractor.taps import Tap, TapSelection, make_tap, select

NUM_LAYERS = 6
VOCAB = 101
TAPS = select(num_layers=NUM_LAYERS, layers=[1, 3], embed=True, final=True, normed=True, convention="after")
EVERY_TAP = [make_tap(k, NUM_LAYERS) for k in range(NUM_LAYERS + 1)] + [Tap(NUM_LAYERS, True, "normed")]

States = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        # Large enough that a layer changes the stream: with the usual 0.02 neighbours would be alike.
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def every_state(model_folder: Path) -> list[tuple[np.ndarray, States]]:
    """Three samples with all boundaries and `normed`, float32."""
    reference = Reference(model_folder)
    rng = np.random.default_rng(1)
    samples = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (40, 17, 64)]
    return [(ids, reference.states(ids, EVERY_TAP)) for ids in samples]


def sample(ids: np.ndarray, states: States) -> StoredSample:
    return StoredSample(0, torch.tensor(ids), torch.ones(len(ids), dtype=torch.uint8), states)


def stored(every_state, change: Callable[[States], States] = lambda states: states) -> list[StoredSample]:
    """Samples as a store would hold them: `change` says what each tap holds."""
    samples = []
    for ids, states in every_state:
        kept = {name: states[name] for name in TAPS.names} | change(states)
        samples.append(sample(ids, {name: kept[name] for name in TAPS.names}))
    return samples


def compare(
    samples, model_folder, stored_dtype="float32", compute_dtype="float32", taps: TapSelection = TAPS
):
    return compare_with_transformers(
        samples, model_folder=model_folder, taps=taps, stored_dtype=stored_dtype, compute_dtype=compute_dtype
    )


def looks_like(report) -> dict[str, str | None]:
    return {tap.name: tap.looks_like for tap in report.taps if not tap.ok}


def test_right_states_pass_with_every_tap_reported(every_state, model_folder):
    report = compare(stored(every_state), model_folder)

    assert report.ok
    assert [tap.name for tap in report.taps] == list(TAPS.names)
    assert all(tap.max_rel_err <= 1e-6 and tap.bound == 1e-5 for tap in report.taps)
    assert (report.num_samples, report.num_tokens) == (3, 121)


def test_one_token_that_is_off_fails_its_tap_alone(every_state, model_folder):
    def nudge(states):
        changed = states["layer_003"].clone()
        changed[5] *= 1.0001
        return {"layer_003": changed}

    report = compare(stored(every_state, nudge), model_folder)

    assert looks_like(report) == {"layer_003": None}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_a_narrow_store_is_allowed_for_but_no_more(every_state, model_folder, dtype):
    narrow = getattr(torch, dtype)

    def rounded(states):
        return {name: states[name].to(narrow) for name in TAPS.names}

    def off(states):
        return {name: (states[name] * 1.02).to(narrow) for name in TAPS.names}

    assert compare(stored(every_state, rounded), model_folder, stored_dtype=dtype).ok
    assert not compare(stored(every_state, rounded), model_folder, stored_dtype="float32").ok
    assert not compare(stored(every_state, off), model_folder, stored_dtype=dtype).ok


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [
        ("layer_002", "layer_003 looks like layer_002: one layer early"),
        ("layer_004", "layer_003 looks like layer_004: one layer late"),
    ],
)
def test_a_tap_that_is_one_layer_off_is_named(every_state, model_folder, planted, verdict):
    report = compare(stored(every_state, lambda states: {"layer_003": states[planted]}), model_folder)

    assert looks_like(report) == {"layer_003": verdict}


def test_a_final_that_is_one_layer_early_is_named(every_state, model_folder):
    report = compare(stored(every_state, lambda states: {"final": states["layer_004"]}), model_folder)

    assert looks_like(report) == {"final": "final looks like layer_004: one layer early"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "pair",
    [
        ("layer_001", "layer_003"),
        ("embed", "layer_003"),
        ("layer_001", "final"),
        ("layer_001", "normed"),
        ("embed", "normed"),
    ],
)
def test_swapped_taps_are_both_named(every_state, model_folder, pair, dtype):
    one, two = pair
    report = compare(
        stored(every_state, lambda states: {one: states[two], two: states[one]}),
        model_folder,
        "float32",
        dtype,
    )

    assert looks_like(report) == {one: f"{one} looks like {two}", two: f"{two} looks like {one}"}


def test_normed_swapped_with_the_layer_below_final_is_named(every_state, model_folder):
    taps = select(num_layers=NUM_LAYERS, layers=[4], embed=False, final=True, normed=True, convention="after")
    samples = [
        sample(ids, states | {"layer_004": states["normed"], "normed": states["layer_004"]})
        for ids, states in every_state
    ]

    assert looks_like(compare(samples, model_folder, taps=taps)) == {
        "layer_004": "layer_004 looks like normed",
        "normed": "normed looks like layer_004",
    }


def test_swapped_final_and_normed_are_named_by_the_norm(every_state, model_folder):
    swapped = stored(every_state, lambda s: {"final": s["normed"], "normed": s["final"]})

    assert looks_like(compare(swapped, model_folder)) == {
        "final": "final has the norm applied",
        "normed": "normed is final: the norm is not applied",
    }


def test_norm_variants_are_named(every_state, model_folder):
    reference = Reference(model_folder)
    once = compare(stored(every_state, lambda states: {"final": states["normed"]}), model_folder)
    twice = compare(
        stored(every_state, lambda states: {"normed": reference.normalized(states["normed"])}), model_folder
    )
    never = compare(stored(every_state, lambda states: {"normed": states["final"]}), model_folder)

    assert looks_like(once) == {"final": "final has the norm applied"}
    assert looks_like(twice) == {"normed": "normed has the norm applied twice"}
    assert looks_like(never) == {"normed": "normed is final: the norm is not applied"}


@pytest.mark.parametrize(("shift", "word"), [(1, "late"), (-1, "early")])
def test_rows_that_are_one_token_off_are_named(every_state, model_folder, shift, word):
    report = compare(
        stored(every_state, lambda states: {"layer_001": states["layer_001"].roll(shift, 0)}), model_folder
    )

    assert looks_like(report) == {"layer_001": f"layer_001 has its rows one token {word}"}


def test_a_state_that_is_not_finite_fails(every_state, model_folder):
    def break_one(states):
        changed = states["final"].clone()
        changed[3, 7] = float("nan")
        return {"final": changed}

    report = compare(stored(every_state, break_one), model_folder)

    assert looks_like(report) == {"final": None}
    assert report.taps[-2].max_rel_err == float("inf")


def test_a_bfloat16_run_is_measured_by_transformers_own_bfloat16_error(every_state, model_folder):
    peer = Reference(model_folder, "bfloat16")
    samples = [
        sample(ids, {name: state.bfloat16() for name, state in peer.states(ids, TAPS.taps).items()})
        for ids, _ in every_state
    ]

    report = compare(samples, model_folder, stored_dtype="bfloat16", compute_dtype="bfloat16")

    assert report.ok
    final = report.taps[TAPS.names.index("final")]
    assert final.bound == pytest.approx(1.5 * final.max_rel_err, rel=0.01)
    assert final.p99_bound == pytest.approx(1.5 * final.p99, rel=0.01)


def test_a_bfloat16_run_that_is_one_layer_off_fails_and_is_named(every_state, model_folder):
    peer = Reference(model_folder, "bfloat16")
    samples = []
    for ids, _ in every_state:
        states = peer.states(ids, EVERY_TAP)
        samples.append(sample(ids, {**states, "layer_003": states["layer_002"]}))

    report = compare(samples, model_folder, stored_dtype="bfloat16", compute_dtype="bfloat16")

    assert looks_like(report) == {"layer_003": "layer_003 looks like layer_002: one layer early"}


@pytest.mark.parametrize(("dtype", "num_excluded"), [("bfloat16", 6), ("float32", 0)])
def test_tokens_routed_on_a_near_tie_are_excluded_in_bfloat16_up_to_a_share(
    every_state, model_folder, monkeypatch, dtype, num_excluded
):
    """Every token is a near tie here, so 5 % of 121 are left out: those with the smallest margins."""
    monkeypatch.setattr(
        Reference, "routing_margins", lambda _, ids: torch.linspace(0.0, 1e-3, len(ids)), raising=True
    )

    report = compare(stored(every_state), model_folder, "float32", dtype)

    assert report.num_excluded_tokens == num_excluded
    assert report.ok


def test_a_clear_choice_of_experts_is_judged(every_state, model_folder, monkeypatch):
    monkeypatch.setattr(Reference, "routing_margins", lambda _, ids: torch.full((len(ids),), 0.1))

    assert compare(stored(every_state), model_folder, "float32", "bfloat16").num_excluded_tokens == 0


def test_a_sample_of_one_token_can_be_judged(every_state, model_folder):
    first_id = every_state[0][0][:1]
    states = Reference(model_folder).states(first_id, EVERY_TAP)
    wrong = sample(first_id, {**states, "final": states["normed"]})

    assert looks_like(compare([wrong], model_folder)) == {"final": "final has the norm applied"}


def test_no_sample_is_no_proof(model_folder):
    with pytest.raises(DatasetError, match="no stored sample"):
        compare([], model_folder)


def test_a_tap_that_a_sample_lacks_is_named(every_state, model_folder):
    samples = stored(every_state)
    del samples[1].states["layer_003"]
    with pytest.raises(DatasetError, match="not stored in all samples.*layer_003"):
        compare(samples, model_folder)


def test_token_that_rounding_can_carry_as_far_is_not_called_wrong(every_state, model_folder):
    peer = Reference(model_folder, "bfloat16")
    ids, exact = max(every_state, key=lambda pair: len(pair[0]))
    final = [make_tap(NUM_LAYERS, NUM_LAYERS)]

    def worst(seed: int | None) -> float:
        states = peer.states(ids, final, jitter_seed=seed)["final"]
        return float(token_errors(states, exact["final"]).max())

    # Farther off than one run of transformers excuses, and nearer than the worst of several does.
    first = max(float(token_errors(peer.states(i, final)["final"], e["final"]).max()) for i, e in every_state)
    several = max(worst(seed) for seed in range(8))
    assert several > 1.02 * first
    error = 1.5 * (first + several) / 2

    many = [pair for pair in every_state for _ in range(3)]
    samples = stored([(i, peer.states(i, TAPS.taps)) for i, _ in many])
    moved = samples[next(k for k, (other, _) in enumerate(many) if len(other) == len(ids))]
    moved.states["final"][5] = exact["final"][5] * (1 + error)
    report = compare(samples, model_folder, "float32", "bfloat16")
    judged = next(tap for tap in report.taps if tap.name == "final")
    assert judged.max_rel_err == pytest.approx(error, rel=1e-3)
    assert judged.ok
    assert judged.yardstick_runs > 1


def test_single_wrong_token_stays_wrong_after_every_appeal(every_state, model_folder):
    def spoil(states: States) -> States:
        final = states["final"].clone()
        final[7] = final[8]
        return {"final": final}

    ids, _ = max(every_state, key=lambda pair: len(pair[0]))
    # Many tokens beside it, so that the 99th percentile does not see the one.
    many = [pair for pair in every_state for _ in range(3)]
    samples = stored(many)
    index = next(i for i, (other, _) in enumerate(many) if len(other) == len(ids))
    samples[index] = stored([many[index]], spoil)[0]
    report = compare(samples, model_folder, "bfloat16", "bfloat16")
    final = next(tap for tap in report.taps if tap.name == "final")
    assert final.p99 <= final.p99_bound
    assert not final.ok
    assert final.yardstick_runs == 9
