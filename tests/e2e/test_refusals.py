"""What cannot work is refused before weights are read: with cause, remedy, exit code, and nothing changed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.job import Inputs, Reference
from tests.support.outputs import contents, stamps
from tests.support.product import Finished, Tapdeck


@dataclass(frozen=True)
class Refused:
    """A refusal and where it was to write."""

    finished: Finished
    config: Path
    output: Path


@pytest.fixture
def refused(fresh_tapdeck: Tapdeck, inputs: Inputs, tmp_path: Path) -> Callable[..., Refused]:
    """Runs `extract` and checks what every refusal has in common."""

    def run(
        *flags: str, code: int, model: Path | str | None = None, more: str = "", output: Path | None = None
    ) -> Refused:
        output = output or tmp_path / "out"
        before = stamps(output) if output.is_dir() else None
        config = inputs.config(tmp_path / "run.toml", output, model=model, more=more)
        finished = fresh_tapdeck.run("extract", config, "--json", *flags).require(code)
        assert finished.stdout == ""
        assert "Traceback" not in finished.stderr
        assert (stamps(output) if output.is_dir() else None) == before
        assert list(fresh_tapdeck.state.rglob("replica-*")) == []
        assert fresh_tapdeck.processes() == []
        return Refused(finished, config, output)

    return run


def altered_model(source: Path, folder: Path, **config: object) -> Path:
    """The model under another name: the same files by link, some keys of its config.json replaced."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    changed = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def test_a_layer_that_does_not_exist_is_named_with_the_ids_that_do(refused):
    said = refused("--set", "taps.layers=[1, 99]", code=2).finished.stderr

    assert "layer 99 does not exist; the model has 12 layers" in said
    assert "What to do: choose ids from 0 to 11" in said


def test_a_model_folder_that_is_not_there_is_named(refused, tmp_path):
    said = refused(code=2, model=tmp_path / "no-model").finished.stderr

    assert f"model {tmp_path / 'no-model'}: no such folder" in said
    assert "What to do: give the folder that holds config.json" in said


def test_a_hub_id_that_is_not_in_the_cache_is_not_downloaded(refused):
    said = refused(code=2, model="some-owner/some-model").finished.stderr

    assert "some-owner/some-model (revision main): not in local cache" in said
    assert "hf download some-owner/some-model" in said


def test_a_model_without_a_chat_template_is_refused_with_the_key_that_gives_one(refused, inputs, tmp_path):
    model = altered_model(inputs.model, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if key != "chat_template"})
    )

    said = refused(code=2, model=model).finished.stderr

    assert "no chat template" in said
    assert "data.template" in said


def test_an_output_that_is_a_file_is_refused_and_the_file_stays(refused, tmp_path):
    (tmp_path / "out").write_text("mine")

    said = refused(code=5).finished.stderr

    assert f"{tmp_path / 'out'} is a file, not a folder" in said
    assert "What to do: choose another output.dir" in said
    assert (tmp_path / "out").read_text() == "mine"


def test_an_output_that_may_not_be_written_is_refused(fresh_tapdeck, inputs, tmp_path, unwritable):
    config = inputs.config(tmp_path / "run.toml", unwritable.folder / "out")

    finished = fresh_tapdeck.run("extract", config, prefix=unwritable.prefix).require(5)

    assert f"{unwritable.folder} {unwritable.reason}" in finished.stderr
    assert "What to do: choose another output.dir" in finished.stderr
    assert list(fresh_tapdeck.state.rglob("replica-*")) == []


def test_an_unknown_key_is_named_with_file_line_and_the_nearest_key(refused):
    run = refused(code=2, more="max_token = 3\n")

    line = run.config.read_text().splitlines().index("max_token = 3") + 1
    assert f"{run.config}:{line}: unknown key batch.max_token" in run.finished.stderr
    assert "did you mean batch.max_tokens?" in run.finished.stderr


def test_a_disk_that_is_too_small_is_refused_with_the_figures(refused):
    said = refused("--set", "output.reserve_bytes=1000000000000000000", code=1).finished.stderr

    assert "must leave 1,000,000,000.00 GB free" in said
    assert "GB too little" in said
    assert "What to do: free space" in said


def test_a_model_class_that_nobody_has_checked_is_refused_by_name(refused, inputs, tmp_path):
    model = altered_model(inputs.model, tmp_path / "model", architectures=["FalconForCausalLM"])

    said = refused(code=2, model=model).finished.stderr

    assert "FalconForCausalLM" in said
    assert "Qwen3ForCausalLM" in said
    assert "What to do" in said


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file", id="pointer"),
        pytest.param(None, "the file is cut off or damaged", id="cut-off"),
    ],
)
def test_weights_with_a_damaged_header_are_refused(refused, inputs, tmp_path, content, cause):
    model = altered_model(inputs.model, tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[: len(whole) // 2] if content is None else content)

    said = refused(code=2, model=model).finished.stderr

    assert f"{weights}: " in said
    assert cause in said
    assert "What to do: download it again" in said


def test_a_model_that_cannot_be_split_over_the_ranks_is_refused_with_the_setting_that_works(refused):
    said = refused("--tp-size", "3", code=2).finished.stderr

    assert "model.tp = 3: 4 query heads (num_attention_heads) cannot be split into 3 equal parts" in said
    assert "What to do: set model.tp to one of 1, 2, 4" in said


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("batch.max_tokens", "expected key=value"),
        ("batch.max_tokens=many", "batch.max_tokens = 'many'"),
        ("output.dir.name=x", "output.dir"),
    ],
)
def test_a_bad_override_is_refused_and_quoted(refused, override, cause):
    said = refused("--set", override, code=2).finished.stderr

    assert cause in said


def test_a_flag_that_does_not_exist_is_a_usage_error(refused):
    said = refused("--layer-id", "3", code=2).finished.stderr

    assert "No such option: --layer-id" in said


def test_a_call_without_a_model_names_the_keys_that_are_missing(fresh_tapdeck):
    finished = fresh_tapdeck.run("extract").require(2)

    for key in ("model", "data", "output"):
        assert f"the command line: {key} is missing" in finished.stderr


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("batch.max_tokens=700", "plan.max_tokens: 640 -> 700"),
        ("data.mask.turns=last", 'mask.turns: "all" -> "last"'),
        ("model.dtype=bfloat16", 'compute_dtype: "float32" -> "bfloat16"'),
        ("taps.layers=[2, 9]", "holds the taps layer_001, layer_009, final; this run asks for layer_002"),
    ],
)
def test_the_output_of_other_settings_is_refused_with_the_differences(
    fresh_tapdeck, reference: Reference, override, difference
):
    before = stamps(reference.output)

    finished = fresh_tapdeck.run("extract", reference.config, "--set", override).require(6)

    assert difference in finished.stderr
    assert "What to do: choose another output.dir" in finished.stderr
    assert stamps(reference.output) == before
    assert list(fresh_tapdeck.state.rglob("replica-*")) == []


def test_a_data_set_that_was_edited_by_one_letter_is_another_data_set(
    fresh_tapdeck, reference: Reference, inputs: Inputs, tmp_path
):
    copy = tmp_path / "conversations.jsonl"
    first, *others = inputs.conversations.read_text().splitlines()
    record = json.loads(first)
    record["messages"][1]["content"] += "!"
    copy.write_text("\n".join([json.dumps(record), *others]) + "\n")
    before = contents(reference.output)

    finished = fresh_tapdeck.run("extract", reference.config, "--set", f'data.files=["{copy}"]').require(6)

    assert "data_hash: " in finished.stderr
    assert contents(reference.output) == before
