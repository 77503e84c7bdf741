"""Planted faults where two real ranks compute one model on the CPU: each ends both, and is named."""

import psutil
import pytest

from extractor.errors import EngineError
from extractor.supervisor.launcher import LocalLauncher

pytestmark = pytest.mark.slow


class Launcher(LocalLauncher):
    """Remembers its processes."""

    def __init__(self):
        super().__init__(module="tests.support.faulty_worker")
        self.pids = []

    def start(self, spec, **options):
        process = super().start(spec, **options)
        self.pids.append(process.pid)
        return process


@pytest.fixture
def refuse(extract, small_model, talks, tmp_path, monkeypatch):
    """A function that runs the product with a fault on all ranks or one, and returns what it ends with."""

    def run(fault, rank=None):
        monkeypatch.setenv("TAPDECK_TEST_FAULT", fault)
        if rank is not None:
            monkeypatch.setenv("TAPDECK_TEST_RANK", str(rank))
        tree = {
            "model": {"path": str(small_model("qwen3")), "device": "cpu", "tp": 2},
            "data": {"files": [str(talks([100] * 24))], "max_len": 256},
            "taps": {"layers": [1, 3]},
            "output": {"dir": str(tmp_path / "out"), "shard_bytes": 700_000},
            "batch": {"max_tokens": 400},
        }
        launcher = Launcher()
        with pytest.raises(EngineError) as caught:
            extract(tree, launcher)
        assert len(launcher.pids) == 2
        assert not any(psutil.pid_exists(pid) for pid in launcher.pids)
        return caught.value

    return run


def test_a_partial_sum_is_refused_by_the_proof_and_named(refuse, tmp_path):
    error = refuse("partial_sum")
    assert error.code == "proof"
    assert "rank 0: rank 1's layer_001 is not rank 0's" in error.message
    assert error.message.endswith("an unreduced partial sum?")
    assert not (tmp_path / "out").exists()


def test_a_proof_that_fails_on_one_rank_ends_the_replica_with_its_words(refuse, tmp_path):
    error = refuse("rows_swapped_in_host_copy", rank=1)
    assert error.code == "proof"
    assert error.message.startswith("rank 1: layer_003: row 0 in the host buffer is not row 0 of the batch")
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_values_that_differ_after_the_proof_end_the_run_before_their_shard_is_there(refuse, tmp_path):
    error = refuse("another_value", rank=1)
    assert error.code == "ranks_disagree"
    assert "ranks disagree: the states of final on rank 1 are not those on rank 0" in error.message
    assert not list((tmp_path / "out" / "shards").glob("*"))
