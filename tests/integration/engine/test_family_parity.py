"""Every family that SGLang can run on the CPU, against plain transformers: all boundaries, token by token.

A process imports SGLang once and forks one for each model. Classes that need CUDA kernels are in docs/models.md.
"""

import pytest
from safetensors.torch import load_file

from extractor.reference import Reference, token_errors
from extractor.taps import select
from tests.support import small_models
from tests.support.engine_host import mixed_sequences, run_checks, run_many
from tests.support.small_models import KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # The shared expert that "qwen2-moe" is made without.
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]

ON_CPU = [kind for kind, what in KINDS.items() if what.runs_on == "cpu"]
# A class that captures by a list, by flags, by hooks.
DEEP = {"qwen3": 12, "qwen3-moe": 12}
SELECTIONS = ((2, 5), (5, 9), (9,))
ORACLE = ("llama", "qwen3-moe")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Kind -> (folder of its model, results), or the end of its log where the process failed."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ON_CPU}
    jobs = {
        kind: (small_models.make(folder, kind), "float32", ("every_boundary",))
        for kind, folder in folders.items()
    }
    return {kind: (folders[kind], results) for kind, results in run_many(jobs)}


@pytest.mark.parametrize("kind", ON_CPU)
def test_every_boundary_of_every_token_is_what_transformers_computes(kind, families):
    folder, results = families[kind]
    assert isinstance(results, dict), results
    reference = Reference(folder)
    n = reference.num_layers
    taps = select(num_layers=n, layers=range(n), embed=True, final=True, normed=True, convention="after").taps
    stored = load_file(folder / "states.safetensors")
    assert set(stored) == {tap.name for tap in taps}
    start = 0
    for ids in mixed_sequences():
        for name, expected in reference.states(ids, taps).items():
            assert float(token_errors(stored[name][start : start + len(ids)], expected).max()) <= 1e-5, name
        start += len(ids)


@pytest.mark.parametrize("kind", ON_CPU)
def test_a_sample_alone_and_in_a_batch_has_the_same_states(kind, families):
    _, results = families[kind]
    assert results["every_boundary"]["alone"] <= 1e-5


@pytest.mark.parametrize("kind", ON_CPU)
def test_start_up_proof_is_exact(kind, families):
    folder, results = families[kind]
    proof = results["every_boundary"]["proof"]
    n = Reference(folder).num_layers
    assert {f"layer_{v:03d}: enters layer {v + 1}" for v in range(n - 1)} <= set(proof)
    assert {"embed: enters layer 0", "final: its norm is normed", "normed: gives the logits"} <= set(proof)
    assert max(proof.values()) <= 1e-5


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """Kind -> what is stored before and after each change of taps in one engine, and by engines begun with them."""
    jobs = {}
    for kind, layers in DEEP.items():
        model = small_models.make(tmp_path_factory.mktemp(f"deep-{kind}"), kind, num_hidden_layers=layers)
        jobs[kind] = (model, "float32", ("layers=2,5", "taps_in_turn"))
        for number, selection in enumerate(SELECTIONS):
            first = "layers=" + ",".join(map(str, selection))
            # Each process has a folder of its own for its results.
            folder = tmp_path_factory.mktemp(f"deep-{kind}-{number}")
            for file in model.iterdir():
                (folder / file.name).symlink_to(file)
            jobs[f"{kind} {number}"] = (folder, "float32", (first, "stored_bytes"))
    return dict(run_many(jobs))


@pytest.mark.parametrize("kind", DEEP)
def test_taps_changed_in_a_live_engine_store_what_engines_begun_with_them_store(kind, changes):
    in_turn = changes[kind]["taps_in_turn"]
    assert [list(stored) for stored in in_turn] == [
        ["layer_002", "layer_005", "final"],
        ["layer_005", "layer_009", "final"],
        ["layer_009"],
    ]
    for number, stored in enumerate(in_turn):
        begun = changes[f"{kind} {number}"]["stored_bytes"]
        assert stored == {name: begun[name] for name in stored}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Kind -> folder with what SGLang serves of every boundary it can name, and what we take."""
    folders = {kind: tmp_path_factory.mktemp(f"stock-{kind}") for kind in ORACLE}
    for kind, folder in folders.items():
        small_models.make(folder, kind)
    for check in ("stock_capture", "every_boundary"):
        for _, results in run_many({kind: (folder, "float32", (check,)) for kind, folder in folders.items()}):
            assert isinstance(results, dict), results
    return folders


@pytest.mark.parametrize("kind", ORACLE)
def test_what_sglang_serves_by_its_own_option_is_what_we_take(kind, stock):
    served = load_file(stock[kind] / "stock.safetensors")
    taken = load_file(stock[kind] / "states.safetensors")
    assert list(served) == [f"layer_{v:03d}" for v in range(small_models.LAYERS - 1)]
    for name, states in served.items():
        assert bool((states == taken[name]).all()), name


@pytest.fixture(scope="module")
def on_gemma3(tmp_path_factory):
    """A class whose boundaries come from hooks, since what SGLang captures lacks the residual."""
    model = small_models.make(tmp_path_factory.mktemp("gemma3-faults"), "gemma3")
    return run_checks(
        model,
        "float32",
        "as_served",
        "input_norm_hook_removed",
        "norm_hook_removed",
        "final_norm_passed_by",
        "taps_that_cannot_be_proven",
        "one_layer_early",
        "one_tap_missing",
        "selections",
    )


def test_as_served_is_told_from_the_boundary_where_they_differ(on_gemma3):
    served = on_gemma3["as_served"]
    assert "layer_001: as served, not B(2); with the residual it enters layer 2" in served["proof"]
    assert served["from boundary"]["layer_001"] > 0.05
    assert served["from boundary"]["final"] == 0
    assert set(served["switched back"].values()) == {0}


def test_removed_hook_on_an_input_norm_is_named(on_gemma3):
    assert on_gemma3["input_norm_hook_removed"]["code"] == "capture_flags"
    assert "no capture flag on layer [2]" in on_gemma3["input_norm_hook_removed"]["message"]


def test_faults_are_named_where_hooks_capture(on_gemma3):
    assert on_gemma3["norm_hook_removed"]["code"] == "final_norm_calls"
    assert on_gemma3["final_norm_passed_by"]["code"] == "final_norm_calls"
    assert "captured one layer early" in on_gemma3["one_layer_early"]["message"]
    assert on_gemma3["one_tap_missing"]["code"] == "capture_count"
    assert on_gemma3["taps_that_cannot_be_proven"]["is_as_before"]
    assert set(on_gemma3["selections"].values()) == {"passed"}
