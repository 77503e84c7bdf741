"""Real engines, each started once for all checks on it."""

import pytest

from tests.support import small_models
from tests.support.engine_host import CHECKS, run_checks

FLAG_ONLY = {"stale_flag", "stale_flag_unseen", "stale_flag_with_final_alone"}
# Of other tests: what needs more layers, or hooks instead of SGLang's own capture.
ELSEWHERE = {"taps_in_turn", "stored_bytes", "every_boundary", "input_norm_hook_removed"}
FLAG_CHECKS = [name for name in CHECKS if name not in ELSEWHERE]
LIST_CHECKS = [name for name in FLAG_CHECKS if name not in FLAG_ONLY]


@pytest.fixture(scope="session")
def on_qwen3(tmp_path_factory):
    """Results of all checks on a class that captures by a list."""
    model = small_models.make(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return run_checks(model, "float32", *LIST_CHECKS)


@pytest.fixture(scope="session")
def on_qwen3_moe(tmp_path_factory):
    """Results of all checks on a class that captures by a flag on each layer."""
    model = small_models.make(tmp_path_factory.mktemp("qwen3-moe"), "qwen3-moe")
    return run_checks(model, "float32", *FLAG_CHECKS)


@pytest.fixture(scope="session")
def on_llama(tmp_path_factory):
    """Results of the checks of chunks on a class without norms of queries and keys."""
    model = small_models.make(tmp_path_factory.mktemp("llama"), "llama")
    return run_checks(model, "float32", "chunks", "chunks_against_transformers", "chunk_proof_lines")


@pytest.fixture(params=["on_qwen3", "on_qwen3_moe"])
def results(request):
    """Results of all checks, on each of the two."""
    return request.getfixturevalue(request.param)
