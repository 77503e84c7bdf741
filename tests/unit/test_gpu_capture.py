"""The table of `gpu_capture.py`: which tap it names, and that nothing which failed looks well."""

import psutil
import pytest

from extractor.commands.recompute import CompareReport, TapReport
from tests.benchmarks import gpu_capture
from tests.benchmarks.gpu_capture import Result, line, parse


def report(*taps, excluded=0):
    return CompareReport(tuple(taps), 16, 1000, excluded)


def test_the_tap_nearest_to_its_bound_is_named_whatever_its_error():
    near = TapReport("layer_002", 0.019, 0.02, 0.001, 0.01)
    large = TapReport("final", 0.1, 0.4, 0.009, 0.01)

    told = line(Result("llama", "triton", 31.4, 0.0034, report(near, large, excluded=31)))

    assert told == (
        "| llama, triton | 3.4e-03 | layer_002 1.9e-02 (2.0e-02) | final 9.0e-03 (1.0e-02) | "
        "31 of 1,000 (3.1%) | ok | 31 |"
    )


def test_a_tap_beyond_its_bound_is_told_with_what_it_looks_like():
    wrong = TapReport("layer_002", 0.5, 0.02, 0.4, 0.01, "layer_002 looks like layer_003: one layer late")

    result = Result("llama", "triton", 1, 0.0, report(wrong))

    assert not result.ok
    assert "WRONG: layer_002 (layer_002 looks like layer_003: one layer late)" in line(result)


def test_an_error_where_none_is_allowed_is_the_worst():
    exact = TapReport("embed", 1e-9, 0.0, 0.0, 0.0)
    close = TapReport("final", 0.019, 0.02, 0.001, 0.01)

    assert "embed 1.0e-09 (0.0e+00)" in line(Result("llama", "triton", 1, None, report(close, exact)))


def test_a_row_that_came_to_no_verdict_failed_and_stays_one_row():
    result = Result("kimi", "triton", 480, error="exit 1: a | b")

    assert not result.ok
    assert line(result) == "| kimi, triton | - | exit 1: a / b | - | - | FAILED | 480 |"


def test_rows_are_chosen_by_name_and_all_is_what_needs_no_other_kernels():
    assert parse(["w", "llama", "memory"]).names == ["llama", "memory"]
    assert parse(["w"]).names[0] == "kimi"
    assert "qwen3-fa3" not in parse(["w"]).names
    with pytest.raises(SystemExit):
        parse(["w", "no-such-row"])


def test_the_last_error_of_a_log_is_what_is_told():
    said = "loading\nRuntimeError: out of memory\nerror: the worker ended\nlog: x\n"

    assert gpu_capture._last_words(said) == "error: the worker ended"
    assert gpu_capture._last_words("loading\n") == "loading"
    assert gpu_capture._last_words("") == "no output"


def test_a_run_that_passes_its_limit_is_ended_with_its_children(tmp_path, monkeypatch):
    bench = gpu_capture.Bench(tmp_path, "cuda", tiny=True)
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "print('start-up proof passed (5 checks, largest error 1.2e-03)', flush=True)\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(gpu_capture, "COMMAND", ("-u", str(script)))

    said, error = bench.extract("hang", {"data": {"files": []}}, limit_s=3)

    assert error.startswith("no end after 3 s")
    assert gpu_capture.PROOF.search(said)[2] == "1.2e-03"
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
