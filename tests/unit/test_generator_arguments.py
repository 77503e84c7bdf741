"""What is refused before anything is loaded, and what the arguments mean. No engine is started here."""

import inspect
import json
import subprocess
import sys

import pytest
import torch

import extractor
from extractor import HiddenStatesGenerator, generator
from extractor.engine.states_server import fullest_batch
from extractor.errors import ArgumentError, GeneratorError, ModelNotFoundError, TapdeckError
from tests.support import small_models


class Started(Exception):  # noqa: N818 -- no error: the arguments were accepted
    """Carries the spec with which an engine would have been started."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return small_models.make(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=8)


@pytest.fixture
def spec(model, monkeypatch):
    """A function: arguments -> the spec of the engine that they ask for."""

    def start(spec, dtype, nccl):
        raise Started(spec)

    monkeypatch.setattr(generator, "_start", start)

    def make(*args, **kwargs):
        with pytest.raises(Started) as caught:
            HiddenStatesGenerator(str(model), *args, **kwargs)
        return caught.value.args[0]

    return make


def refusal(model, *args, error=ArgumentError, **kwargs):
    with pytest.raises(error) as caught:
        HiddenStatesGenerator(str(model), *args, **kwargs)
    return caught.value


def changed(model, tmp_path, **keys):
    """A copy of the model whose config.json says something else."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_the_public_names_are_there_and_documented():
    for name in extractor.__all__:
        assert inspect.getdoc(getattr(extractor, name))
        assert name in dir(extractor)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        extractor.Nonsense  # noqa: B018 -- asking is the test


def test_parameters_and_defaults_are_those_of_the_older_class():
    signature = inspect.signature(HiddenStatesGenerator)
    by_position = [
        (p.name, p.default) for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    assert by_position == [
        ("model_path", inspect.Parameter.empty),
        ("layer_ids", None),
        ("max_model_len", 2048),
        ("gpu_memory_utilization", 0.8),
        ("tensor_parallel_size", 1),
        ("max_num_batched_tokens", None),
    ]
    assert list(inspect.signature(HiddenStatesGenerator.generate).parameters) == ["self", "token_ids"]


def test_the_class_comes_without_sglang_and_transformers():
    program = (
        "import sys, extractor; extractor.HiddenStatesGenerator; "
        "print([name for name in ('sglang', 'textual', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(32, ["layer_002", "layer_016", "layer_029", "final"]), (4, ["layer_001", "layer_002", "final"])],
)
def test_default_layers_are_the_older_ones_and_ascend(num_layers, expected):
    ids = generator.default_layer_ids(num_layers)

    assert list(generator.select_taps(ids, num_layers).names) == expected


def test_layers_ascend_whatever_the_order_and_equal_ones_count_once():
    taps = generator.select_taps([7, 1, 4, 1], 8)

    assert taps.names == ("layer_001", "layer_004", "final")
    assert taps.boundaries == (2, 5, 8)


def test_a_selection_without_the_last_layer_warns():
    with pytest.warns(UserWarning, match="ends with 5, the model's last layer is 7"):
        generator.select_taps([1, 5], 8)


@pytest.mark.parametrize("layer_ids", [[8], [-1], [2, 100]])
def test_a_layer_that_does_not_exist_is_a_value_error_with_the_older_words(model, layer_ids):
    error = refusal(model, layer_ids, error=ValueError)

    assert isinstance(error, TapdeckError)
    assert "out of bounds [0, 7]" in str(error)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"layer_ids": []}, "layer_ids is empty"),
        ({"max_model_len": 1}, "max_model_len = 1"),
        ({"max_model_len": 4096}, "positions for 2048 tokens"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization = 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization = 1.5"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens = -1"),
        ({"dtype": "int4"}, "dtype = int4"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"nccl_preset": "fast"}, "nccl_preset = fast"),
        ({"nccl_env": {"PATH": "/"}}, "PATH is no NCCL variable"),
        ({"sglang": {"pp_size": 2}}, "pp_size"),
    ],
)
def test_a_wrong_argument_is_named(model, arguments, word):
    assert word in str(refusal(model, **arguments, error=ValueError))


def test_a_class_that_nobody_has_checked_is_refused(model, tmp_path):
    error = refusal(changed(model, tmp_path, architectures=["FalconForCausalLM"]))

    assert error.code == "unsupported_model"
    assert "FalconForCausalLM" in str(error)


@pytest.mark.parametrize("path", ["/nowhere/model", "nobody/nothing"])
def test_a_model_that_is_not_there_is_what_the_older_class_raised_as_well(path):
    error = refusal(path, error=OSError)

    assert isinstance(error, ModelNotFoundError | ValueError)
    assert path in str(error)


def test_a_model_without_default_layers_is_refused_as_there(tmp_path):
    model = small_models.make(tmp_path, "llama", num_hidden_layers=2)

    assert "Layer index -1 out of bounds [0, 1]" in str(refusal(model))


def test_arguments_reach_the_engine(spec):
    made = spec([7, 3], 1024, 0.5, dtype=torch.bfloat16, device="cpu", attention_backend="torch_native")

    assert (made.taps.names, made.mem_fraction, made.dtype) == (("layer_003", "final"), 0.5, "bfloat16")
    assert (made.device, made.attention_backend, made.store_dtype) == ("cpu", "torch_native", "bfloat16")


def test_auto_is_the_dtype_that_the_model_declares(spec):
    assert spec().dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [({}, 8192), ({"max_num_batched_tokens": 0}, 8192), ({"max_num_batched_tokens": 100}, 2048)],
)
def test_a_batch_holds_8192_tokens_or_the_longest_input(spec, arguments, budget):
    assert spec(**arguments).geometry.max_tokens == budget


@pytest.mark.parametrize(("max_model_len", "lengths"), [(2048, [2047] * 4), (2, [1] * 64)])
def test_the_fullest_batch_keeps_both_bounds_of_the_engine(spec, max_model_len, lengths):
    made = spec(None, max_model_len)

    assert fullest_batch(made) == lengths
    assert made.max_batch_samples == 64


def test_the_engine_does_not_see_that_its_caller_is_one_of_several_processes(model, monkeypatch):
    started = {}

    def start(make_spec, *, environment, shared_bytes):
        started.update(environment)
        raise Started

    monkeypatch.setattr(generator, "StatesClient", start)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    with pytest.raises(Started):
        HiddenStatesGenerator(str(model), nccl_preset="pcie-blackwell", nccl_env={"NCCL_ALGO": "Tree"})

    assert not [name for name in started if "RANK" in name or "TORCHELASTIC" in name or "MASTER" in name]
    assert (started["NCCL_PROTO"], started["NCCL_ALGO"]) == ("LL", "Tree")
    assert started["HF_HUB_OFFLINE"] == "1"


def test_a_setting_that_sglang_does_not_have_is_a_value_error_too(model, monkeypatch):
    closed = []

    class Client:
        def __init__(self, make_spec, **_):
            pass

        def wait_until_ready(self):
            raise GeneratorError("SGLang has no such argument", code="sglang_setting", exit_code=2)

        def close(self):
            closed.append(True)

    monkeypatch.setattr(generator, "StatesClient", Client)

    assert refusal(model, sglang={"nonsense": 1}).code == "sglang_setting"
    assert closed == [True]


def test_errors_of_a_generator_are_runtime_errors():
    assert issubclass(GeneratorError, RuntimeError)
