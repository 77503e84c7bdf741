from pathlib import Path

import pytest

from extractor import folders
from extractor.errors import AccessError, NoRunError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    outputs = [tmp_path / "data" / name for name in ("qwen", "qwen-2", "kimi")]
    return {output.name: folders.RunFolder(folders.run_folder(output)) for output in outputs}


def test_a_run_is_found_by_name_beginning_folder_and_output(runs, tmp_path):
    kimi = runs["kimi"]
    (tmp_path / "data" / "kimi").mkdir(parents=True)

    for name in (kimi.name, "kim", str(kimi.path), str(tmp_path / "data" / "kimi")):
        assert folders.find_run(name) == kimi


def test_a_beginning_that_several_runs_share_is_refused_with_their_names(runs):
    with pytest.raises(NoRunError, match="several runs begin so") as refused:
        folders.find_run("qwen")

    assert runs["qwen"].name in refused.value.remedy
    assert runs["qwen-2"].name in refused.value.remedy
    assert runs["kimi"].name not in refused.value.remedy


def test_a_whole_name_wins_over_a_longer_one_that_begins_so(runs):
    (runs["qwen"].path.parent / f"{runs['qwen'].name}-again").mkdir()

    assert folders.find_run(runs["qwen"].name) == runs["qwen"]


def test_an_unknown_run_ends_with_3_and_says_which_there_are(runs):
    with pytest.raises(NoRunError, match="no such run") as refused:
        folders.find_run("llama")

    assert refused.value.exit_code == 3
    assert runs["kimi"].name in refused.value.remedy


def test_without_any_run_it_says_how_to_begin_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    with pytest.raises(NoRunError) as refused:
        folders.find_run("llama")

    assert "tapdeck start" in refused.value.remedy


def test_two_outputs_of_one_name_have_two_run_folders(tmp_path):
    first, second = (folders.run_folder_of(tmp_path / place / "data") for place in "ab")

    assert first != second
    assert first.parent == second.parent


def test_the_logs_of_a_run_are_named_without_their_ending(tmp_path):
    for name in ("supervisor.log", "replica-0.log", "events.jsonl"):
        (tmp_path / name).touch()

    assert folders.RunFolder(Path(tmp_path)).logs() == ["replica-0", "supervisor"]


def test_a_state_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

    with pytest.raises(AccessError, match="cannot be made") as refused:
        folders.run_folder(tmp_path / "out")

    assert refused.value.exit_code == 5
    assert "XDG_STATE_HOME" in refused.value.remedy
    assert folders.all_runs() == []


def test_names_that_are_too_long_for_a_path_are_no_paths(runs, tmp_path):
    assert len(folders.run_folder_of(tmp_path / ("x" * 250)).name) < 100
    with pytest.raises(NoRunError):
        folders.find_run("x" * 5000)
