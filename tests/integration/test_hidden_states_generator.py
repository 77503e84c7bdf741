"""`HiddenStatesGenerator` with the real engine on the CPU, against plain transformers."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from extractor import HiddenStatesGenerator
from extractor.errors import ArgumentError, GeneratorError
from extractor.reference import Reference, token_errors
from extractor.taps import make_tap
from tests.support import small_models
from tests.support.product import ROOT, wait_until

LAYERS = 8
DEFAULT = [2, 4, 5, 7]
MAX_LEN = 200
BATCH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_models.make(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where generators keep their files."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        yield folder


def make(model, **arguments):
    """A generator whose batches are small, so that inputs need many."""
    return HiddenStatesGenerator(
        str(model), max_model_len=MAX_LEN + 1, max_num_batched_tokens=256, device="cpu", **arguments
    )


@pytest.fixture(scope="module")
def generator(model, folders):
    """The one engine of most tests; what it leaves behind is checked when they are done."""
    generator = make(model)
    engine = psutil.Process(generator._client.pid)
    kept = generator.generate([[1, 2, 3]])[0]["hidden_states"]
    copies = [state.clone() for state in kept]
    yield generator
    generator.close()
    generator.close()
    assert not is_running(engine)
    gc.collect()  # traces of tests that have failed calls hold parts of the shared memory
    assert "tapdeck-states" not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(state, copy) for state, copy in zip(kept, copies, strict=True))
    with pytest.raises(GeneratorError, match="it was closed"):
        generator.generate([[1]])


@pytest.fixture(scope="module")
def inputs():
    """Forty inputs, some longer than the model's longest, some of one token."""
    rng = random.Random(7)
    lengths = [1, 1, 2, 260, 255, *(rng.randrange(1, 230) for _ in range(35))]
    rng.shuffle(lengths)
    return [[rng.randrange(512) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(model, inputs):
    """Per input the states that transformers computes, ascending."""
    reference = Reference(model)
    taps = [make_tap(layer + 1, LAYERS) for layer in DEFAULT]
    found = [reference.states(np.array(ids[:MAX_LEN], dtype=np.int32), taps) for ids in inputs]
    return [[states[tap.name] for tap in taps] for states in found]


def is_running(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def in_calls(generator, inputs):
    """As the older script calls: so many samples at a time."""
    return [
        r for start in range(0, len(inputs), BATCH) for r in generator.generate(inputs[start : start + BATCH])
    ]


def require_states(results, inputs, expected):
    assert len(results) == len(inputs)
    for ids, result, states in zip(inputs, results, expected, strict=True):
        assert result["input_ids"].tolist() == ids[:MAX_LEN]
        assert len(result["hidden_states"]) == len(DEFAULT)
        for found, state in zip(result["hidden_states"], states, strict=True):
            assert float(token_errors(found, state).max()) <= 1e-5


def test_states_of_calls_of_sixteen_are_what_transformers_computes(generator, inputs, expected):
    require_states(in_calls(generator, inputs), inputs, expected)


def test_forty_inputs_at_once_come_back_in_their_order(generator, inputs, expected):
    require_states(generator.generate(inputs), inputs, expected)


def test_layer_v_is_one_after_the_embedding_in_what_transformers_lists(generator, model, inputs):
    from transformers import AutoModelForCausalLM

    ids = inputs[0][:MAX_LEN]
    with torch.no_grad():
        listed = AutoModelForCausalLM.from_pretrained(model)(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    states = generator.generate([ids])[0]["hidden_states"]

    assert generator.layer_ids == DEFAULT
    for layer, state in zip(DEFAULT[:-1], states[:-1], strict=True):
        assert float(token_errors(state, listed[layer + 1][0]).max()) <= 1e-5
    # There the last one has the final norm applied, and ours has not.
    assert float(token_errors(states[-1], listed[-1][0]).max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_tensor_means_the_same_as_lists(generator, dtype):
    rows = [[1, 2, 3, 4], [4, 3, 2, 1], [9, 9, 9, 9]]
    from_lists, from_tensor = generator.generate(rows), generator.generate(torch.tensor(rows, dtype=dtype))

    for one, two in zip(from_lists, from_tensor, strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])
        assert all(map(torch.equal, one["hidden_states"], two["hidden_states"]))


def test_the_same_call_gives_the_same_bits(generator, inputs):
    for one, two in zip(generator.generate(inputs), generator.generate(inputs), strict=True):
        assert all(map(torch.equal, one["hidden_states"], two["hidden_states"]))


def test_results_are_plain_tensors_with_memory_of_their_own(generator, tmp_path):
    first, second = generator.generate([[1, 2, 3, 4, 5], [6, 7]])

    assert set(first) == {"input_ids", "hidden_states", "loss_mask"}
    assert first["input_ids"].dtype == torch.int64
    assert first["loss_mask"] is None
    tensors = [*first["hidden_states"], *second["hidden_states"]]
    assert {tuple(t.shape) for t in tensors} == {(5, 128), (2, 128)}
    for state in tensors:
        assert (state.dtype, state.device.type, state.is_contiguous()) == (torch.float32, "cpu", True)
        assert state.untyped_storage().nbytes() == state.nbytes
    # As the older script saves it, and the trainer reads it.
    torch.save(first | {"loss_mask": torch.ones(5)}, tmp_path / "data_0.pt")
    read = torch.load(tmp_path / "data_0.pt", mmap=True, weights_only=True)
    assert all(map(torch.equal, read["hidden_states"], first["hidden_states"]))


@pytest.mark.parametrize("wrong", [[], [[1], []], [[512]], [[-1]]])
def test_wrong_input_is_refused_and_costs_nothing(generator, wrong):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- its class is the promise; the words are tested with it
        generator.generate(wrong)

    assert isinstance(caught.value, ArgumentError)
    assert len(generator.generate([[1, 2]])) == 1


def test_a_call_that_was_interrupted_leaves_nothing_to_the_next(generator, inputs, expected, monkeypatch):
    view, calls = generator._view, []

    def interrupted(num_tokens):
        calls.append(num_tokens)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return view(num_tokens)

    monkeypatch.setattr(generator, "_view", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator.generate(list(reversed(inputs)))
    monkeypatch.undo()

    require_states(generator.generate(inputs), inputs, expected)


def test_calls_of_several_threads_do_not_mix(generator, inputs, expected):
    results = {}
    threads = [
        threading.Thread(target=lambda part=part: results.update({part: generator.generate(inputs[part::4])}))
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for part in range(4):
        require_states(results[part], inputs[part::4], expected[part::4])


def test_states_that_are_not_finite_are_refused_with_their_inputs(generator, monkeypatch):
    real = generator._client.compute

    def poisoned(batches):
        for report in real(batches):
            yield type(report)(report.number, report.num_tokens, (None, "non_finite"))

    monkeypatch.setattr(generator._client, "compute", poisoned)
    with pytest.raises(GeneratorError, match=r"of 1 inputs cannot be used: 1 \(non_finite\)"):
        generator.generate([[1, 2, 3], [1, 2]])
    monkeypatch.setattr(generator, "_check_values", False)
    assert len(generator.generate([[1, 2, 3], [1, 2]])) == 2


def test_the_tokenizer_is_the_models(generator):
    assert generator.tokenizer.decode(generator.tokenizer.encode("ab")) == "ab"


def test_an_engine_that_is_killed_ends_the_call_and_the_generator(model, folders):
    generator = make(model, layer_ids=[7])
    engine = psutil.Process(generator._client.pid)
    folder = generator._client._folder
    kept = generator.generate([[1, 2, 3]])[0]["hidden_states"][0]
    before = kept.clone()
    # Stopped first, so that the call is surely under way when it is killed.
    engine.send_signal(signal.SIGSTOP)
    errors = []
    call = threading.Thread(target=lambda: errors.append(error_of(generator)))
    call.start()
    engine.kill()
    call.join(60.0)

    (error,) = errors
    assert isinstance(error, GeneratorError)
    assert error.code == "worker_died"
    assert "killed by SIGKILL" in str(error)
    with pytest.raises(GeneratorError, match=r"cannot be used any more: .*\n(.*\n)*.*make a new"):
        generator.generate([[1]])
    assert not is_running(engine)
    assert not folder.exists()
    assert torch.equal(kept, before)
    generator.close()


def error_of(generator):
    try:
        return generator.generate([[1, 2]] * 5)
    except GeneratorError as error:
        return error


def test_an_interrupt_is_survived_and_a_killed_caller_leaves_no_engine(model, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    Path(environment["TMPDIR"]).mkdir()
    with (tmp_path / "errors").open("wb") as errors:
        caller = subprocess.Popen(
            [sys.executable, "-m", "tests.support.generator_caller", str(model)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    started = [caller.pid]
    try:

        def told(word):
            line = caller.stdout.readline()
            assert line.startswith(word), f"{line}\n{(tmp_path / 'errors').read_text()[-4000:]}"
            return line.split()[-1]

        engine = psutil.Process(int(told("engine")))
        started.append(engine.pid)
        told("computing")
        # The session of the engine is its own: a Ctrl-C of a terminal does not reach it, and this one must not end it.
        engine.send_signal(signal.SIGINT)
        caller.send_signal(signal.SIGINT)
        told("interrupted")
        assert told("again") == "True"
        assert told("fork refused") == "True"
        fork = int(told("fork"))
        started.append(fork)

        caller.kill()
        caller.wait(30.0)
        wait_until(
            lambda: not is_running(engine), "the end of the engine", state=engine.status, deadline_s=30.0
        )

        assert is_running(psutil.Process(fork))
        wait_until(
            lambda: not list((tmp_path / "temporary").glob("tapdeck-*")),
            "removal of its files",
            state=lambda: list((tmp_path / "temporary").rglob("*")),
            deadline_s=10.0,
        )
    finally:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        caller.stdout.close()
        caller.wait()
