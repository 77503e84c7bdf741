"""A small model of Kimi-K2.5's form, unquantized, through SGLang on the CPU: all boundaries, token by token."""

import pytest
from safetensors.torch import load_file

from extractor.reference import Reference, token_errors
from extractor.taps import select
from tests.support import kimi_model
from tests.support.engine_host import mixed_sequences, run_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    base = tmp_path_factory.mktemp("kimi")
    kimi_model.make(base / "served", base / "plain", num_layers=4, quantized=False, dtype="float32")
    return base, run_checks(base / "served", "float32", "every_boundary")


def test_every_boundary_of_every_token_is_what_transformers_computes(kimi):
    base, _ = kimi
    reference = Reference(base / "plain")
    n = reference.num_layers
    taps = select(num_layers=n, layers=range(n), embed=True, final=True, normed=True, convention="after").taps
    stored = load_file(base / "served" / "states.safetensors")
    assert set(stored) == {tap.name for tap in taps}
    start = 0
    for ids in mixed_sequences():
        for name, expected in reference.states(ids, taps).items():
            assert float(token_errors(stored[name][start : start + len(ids)], expected).max()) <= 1e-5, name
        start += len(ids)


def test_start_up_proof_is_exact(kimi):
    proof = kimi[1]["every_boundary"]["proof"]
    assert {"layer_000: enters layer 1", "layer_002: enters layer 3", "final: its norm is normed"} <= set(
        proof
    )
    assert max(proof.values()) <= 1e-5
