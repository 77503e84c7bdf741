from pathlib import Path

import pytest

from extractor import config
from extractor.errors import ConfigError

MINIMAL = """
[model]
path = "model"

[data]
files = ["a.jsonl"]

[output]
dir = "out"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_relative_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "model").mkdir()
    loaded = config.load(write(tmp_path, MINIMAL))
    assert loaded.model.path == str(tmp_path / "model")
    assert loaded.data.files == (str(tmp_path / "a.jsonl"),)
    assert loaded.output.dir == str(tmp_path / "out")


def test_model_path_that_is_no_folder_stays_a_hub_id(tmp_path):
    assert config.load(write(tmp_path, MINIMAL.replace('"model"', '"owner/name"'))).model.path == "owner/name"


def test_unknown_key_names_file_line_key_and_nearest_key(tmp_path):
    path = write(tmp_path, MINIMAL + "\n[taps]\nlayer = [1]\n")
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert f"{path}:12: unknown key taps.layer; did you mean taps.layers?" in str(caught.value)


def test_unknown_section_names_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match="unknown key tapz; did you mean taps"):
        config.load(write(tmp_path, MINIMAL + "\n[tapz]\nfinal = true\n"))


def test_wrong_type_names_line_key_and_value(tmp_path):
    path = write(tmp_path, MINIMAL + '\n[batch]\nmax_tokens = "many"\n')
    with pytest.raises(ConfigError, match=r"run.toml:12: batch.max_tokens = 'many'"):
        config.load(path)


def test_all_faults_are_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, "[model]\npth = 'x'\n[data]\nfiles = []\n"))
    text = str(caught.value)
    assert "model.path is missing" in text
    assert "unknown key model.pth" in text
    assert "data.files" in text
    assert "output is missing" in text


def test_samples_longer_than_a_batch_are_computed_in_chunks(tmp_path):
    text = MINIMAL + "\n[batch]\nmax_tokens = 1024\n"
    assert config.load(write(tmp_path, text)).chunk_tokens == 1024
    assert config.load(write(tmp_path, text + "chunk_tokens = 512\n")).chunk_tokens == 512


def test_where_every_sample_fits_a_batch_there_are_no_chunks(tmp_path):
    assert config.load(write(tmp_path, MINIMAL)).chunk_tokens is None
    assert config.load(write(tmp_path, MINIMAL), ["batch.chunk_tokens=512"]).chunk_tokens is None


def test_a_chunk_larger_than_a_batch_is_refused(tmp_path):
    text = MINIMAL + "\n[batch]\nmax_tokens = 1024\nchunk_tokens = 1025\n"
    with pytest.raises(ConfigError, match=r"chunk_tokens = 1025 is larger than batch.max_tokens = 1024"):
        config.load(write(tmp_path, text))


def test_batch_grows_with_max_len_where_it_was_not_given(tmp_path):
    loaded = config.load(write(tmp_path, MINIMAL), ["data.max_len=20000"])
    assert loaded.max_tokens == 20000
    assert config.load(write(tmp_path, MINIMAL)).max_tokens == 8192


def test_override_is_toml_or_else_text(tmp_path):
    loaded = config.load(
        write(tmp_path, MINIMAL), ["taps.layers=[3, 5]", "model.revision=main", "data.seed=4"]
    )
    assert loaded.taps.layers == (3, 5)
    assert loaded.model.revision == "main"
    assert loaded.data.seed == 4


def test_override_wins_over_flag_and_flag_over_file(tmp_path):
    path = write(tmp_path, MINIMAL + "\n[batch]\nmax_tokens = 3000\n")
    assert config.load(path, [], {"batch.max_tokens": 4000}).max_tokens == 4000
    assert config.load(path, ["batch.max_tokens=5000"], {"batch.max_tokens": 4000}).max_tokens == 5000


@pytest.mark.parametrize("override", ["batch.max_tokens", "=3"])
def test_override_without_key_or_value_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match="expected key=value"):
        config.load(write(tmp_path, MINIMAL), [override])


def test_flags_alone_make_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(None, [], {"model.path": "m", "data.files": ["x.jsonl"], "output.dir": "o"})
    assert loaded.output.dir == str(tmp_path / "o")


def test_broken_toml_names_the_line(tmp_path):
    with pytest.raises(ConfigError, match="not valid TOML.*line 2"):
        config.load(write(tmp_path, "[model]\npath = \n"))


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        config.load(tmp_path / "no.toml")


def test_only_nccl_variables_are_taken(tmp_path):
    with pytest.raises(ConfigError, match="CUDA_X is no NCCL variable"):
        config.load(write(tmp_path, MINIMAL + '\n[nccl.env]\nCUDA_X = "1"\n'))


def test_configuration_is_immutable(tmp_path):
    loaded = config.load(write(tmp_path, MINIMAL))
    with pytest.raises(Exception, match="frozen"):
        loaded.data.max_len = 3


def test_layout_that_only_export_writes_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"tapdeck export DIR OUT --layout speculators-v1"):
        config.load(write(tmp_path, MINIMAL), ["output.layout=speculators-v1"])


@pytest.mark.parametrize("key", ["output.dir", "model.path"])
@pytest.mark.parametrize("value", ['""', '"a\\u0000b"'])
def test_path_that_can_be_none_is_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=key):
        config.load(write(tmp_path, MINIMAL), [f"{key}={value}"])
