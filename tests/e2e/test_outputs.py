"""What a finished run leaves and what the other verbs say about it, compared with the files themselves."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy

from tests.support import outputs
from tests.support.job import HIDDEN_SIZE, NUM_SAMPLES, TAPS, Reference
from tests.support.product import Finished, Tapdeck

VERBS = ("demo", "extract", "prepare", "estimate", "verify", "export")
RESULT_KEYS = {
    "run", "output", "samples", "tokens", "supervised_tokens", "rejected", "quarantined", "shards", "bytes",
    "load_s", "seconds", "tokens_per_s", "peak_rss_bytes",
}  # fmt: skip


def tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def stored_tokens(output: Path) -> list[dict[str, np.ndarray]]:
    """`tokens.safetensors` of every shard, in order."""
    return [tensors(folder / "tokens.safetensors") for folder in outputs.final_shards(output).values()]


def test_extract_prints_one_json_object_with_the_documented_keys(reference):
    assert reference.finished.json.keys() >= RESULT_KEYS


def test_the_figures_of_extract_are_those_of_the_files(reference):
    said = reference.finished.json
    shards = outputs.final_shards(reference.output)
    tokens = stored_tokens(reference.output)
    files = [path for folder in shards.values() for path in folder.glob("*.safetensors")]

    assert said["output"] == str(reference.output)
    assert said["shards"] == said["shards_computed"] == len(shards)
    assert said["shards"] >= 8
    assert said["samples"] == sum(len(shard["sample_index"]) for shard in tokens) == NUM_SAMPLES
    assert said["tokens"] == said["tokens_computed"] == sum(len(shard["input_ids"]) for shard in tokens)
    assert said["supervised_tokens"] == sum(int(shard["loss_mask"].sum()) for shard in tokens)
    assert said["bytes"] == sum(path.stat().st_size for path in files)
    assert said["rejected"] == said["quarantined"] == 0
    assert said["complete"] is True


def test_the_times_of_extract_add_up(reference):
    said = reference.finished.json

    assert said["seconds"] > 0
    assert said["load_s"] + said["seconds"] < reference.finished.seconds
    assert said["tokens_per_s"] == pytest.approx(said["tokens"] / said["seconds"], rel=0.01)
    # SGLang alone takes more than this; a unit that is wrong by 1024 would not.
    assert 300e6 < said["peak_rss_bytes"] < 30e9


def test_every_shard_holds_every_tap_with_one_finite_row_per_token(reference):
    for folder, tokens in zip(
        outputs.final_shards(reference.output).values(), stored_tokens(reference.output), strict=True
    ):
        for tap in TAPS:
            states = tensors(folder / f"{tap}.safetensors")["states"]
            assert states.shape == (len(tokens["input_ids"]), HIDDEN_SIZE)
            assert states.dtype == np.float32
            assert np.isfinite(states).all()


def test_the_list_of_samples_leads_to_every_sample(reference, inputs):
    rows = pyarrow.parquet.read_table(reference.output / "samples.parquet").to_pylist()
    shards = stored_tokens(reference.output)

    assert sorted(row["sample_id"] for row in rows) == sorted(f"c{n}" for n in range(NUM_SAMPLES))
    for row in rows:
        shard = shards[row["shard"]]
        place = shard["sample_index"].tolist().index(row["sample_index"])
        first, last = shard["cu_seqlens"][place : place + 2]
        assert (row["row"], row["tokens"]) == (first, last - first)
        assert row["supervised_tokens"] == shard["loss_mask"][first:last].sum()
        assert row["source_file"] == inputs.conversations.name
        assert row["sample_id"] == f"c{row['source_line'] - 1}"


def test_piped_progress_is_plain_lines_with_a_rate(reference):
    said = reference.finished.stderr

    assert "\x1b" not in said
    assert "\r" not in said
    last = f"{reference.num_shards}/{reference.num_shards} shards"
    assert re.search(rf"^{last}, [\d,]+ of [\d,]+ tokens, [\d,]+ tokens/s", said, re.MULTILINE)


def test_what_was_run_is_in_the_run_folder(reference, tapdeck):
    events = [event["event"] for event in tapdeck.events(reference.output)]

    assert events == ["started", "ready", *["shard_done"] * reference.num_shards, "finished"]
    (log,) = Path(reference.finished.json["run"]).glob("replica-0.log")
    assert log.is_file()


def test_an_estimate_is_within_two_percent_of_what_was_written(tapdeck, inputs, reference, tmp_path):
    config = inputs.config(tmp_path / "run.toml", tmp_path / "never-made")

    said = tapdeck.run("estimate", config, "--json").require(0).json

    written = sum(
        stamp.size
        for name, stamp in outputs.stamps(reference.output / "shards").items()
        if not name.endswith(".json")
    )
    assert said["total_bytes"] == pytest.approx(written, rel=0.02)
    assert said["samples"] == NUM_SAMPLES
    assert said["tokens"] == reference.finished.json["tokens"]
    assert said["fits"] is True
    assert not (tmp_path / "never-made").exists()


def test_an_estimate_of_a_finished_run_needs_nothing_more(tapdeck, reference):
    said = tapdeck.run("estimate", reference.config, "--json").require(0).json

    assert said["shards_done"] == reference.num_shards
    assert said["needed_bytes"] == 0


@pytest.mark.parametrize("flag", [(), ("--quick",)], ids=["full", "quick"])
def test_verify_finds_an_undisturbed_run_whole(tapdeck, reference, flag):
    before = outputs.stamps(reference.output)

    finished = tapdeck.run("verify", reference.output, *flag).require(0)

    assert f"{reference.num_shards} shards, {NUM_SAMPLES} samples" in finished.stdout
    assert finished.stdout.endswith("\nok\n")
    assert outputs.stamps(reference.output) == before


def test_recomputing_with_transformers_agrees_at_every_tap(tapdeck, reference):
    said = (
        tapdeck.run("verify", reference.output, "--against", "transformers", "--sample", "4", "--json")
        .require(0)
        .json
    )

    assert said["ok"] is True
    assert said["damaged"] == []
    assert said["compared_samples"] == 4
    assert said["failed_taps"] == {}
    assert set(said["max_rel_err"]) == set(TAPS)
    # The bound of docs/architecture.md for float32, not whatever the product says it is.
    assert max(said["max_rel_err"].values()) < 1e-5


def test_verify_of_a_folder_that_is_no_data_set_fails_and_names_it(tapdeck, tmp_path):
    finished = tapdeck.run("verify", tmp_path).require(1)

    assert str(tmp_path / "dataset.json") in finished.stdout
    assert "NOT OK" in finished.stdout


@pytest.fixture(scope="module")
def exported(
    tapdeck: Tapdeck, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Finished]:
    target = tmp_path_factory.mktemp("exported") / "train"
    args = ("export", reference.output, target, "--layout", "speculators-v1", "--json")
    return target, tapdeck.run(*args).require(0)


def test_an_export_holds_every_sample_as_the_shards_do(exported, reference):
    import torch

    target, finished = exported
    stored = {
        int(index): (folder, shard, place)
        for folder, shard in zip(
            outputs.final_shards(reference.output).values(), stored_tokens(reference.output), strict=True
        )
        for place, index in enumerate(shard["sample_index"])
    }

    assert finished.json["samples"] == finished.json["written"] == NUM_SAMPLES
    assert sorted(path.name for path in target.glob("*pt")) == sorted(
        f"data_{index}.pt" for index in range(NUM_SAMPLES)
    )
    lengths = json.loads((target / "sample_lengths.json").read_text())
    for rank, index in enumerate(sorted(stored)):
        folder, shard, place = stored[index]
        first, last = map(int, shard["cu_seqlens"][place : place + 2])
        # As the trainer reads it.
        sample = torch.load(target / f"data_{rank}.pt", mmap=True, weights_only=True)
        assert np.array_equal(sample["input_ids"].numpy(), shard["input_ids"][first:last])
        assert np.array_equal(sample["loss_mask"].numpy(), shard["loss_mask"][first:last])
        assert len(sample["hidden_states"]) == len(TAPS)
        for tap, states in zip(TAPS, sample["hidden_states"], strict=True):
            whole = tensors(folder / f"{tap}.safetensors")["states"]
            assert np.array_equal(states.numpy(), whole[first:last])
        assert lengths[str(rank)] == last - first


def test_an_export_that_is_there_is_kept(exported, reference, tapdeck):
    target, _ = exported
    before = {name: stamp for name, stamp in outputs.stamps(target).items() if name.endswith(".pt")}

    again = tapdeck.run("export", reference.output, target, "--layout", "speculators-v1", "--json")

    assert again.require(0).json["written"] == 0
    after = {name: stamp for name, stamp in outputs.stamps(target).items() if name.endswith(".pt")}
    assert after == before


def test_an_unknown_layout_is_refused_with_those_that_exist(reference, tapdeck, tmp_path):
    finished = tapdeck.run("export", reference.output, tmp_path / "out", "--layout", "specforge").require(2)

    assert "speculators-v1" in finished.stderr
    assert not (tmp_path / "out").exists()


def test_prepare_shows_as_many_samples_as_asked_with_their_supervised_spans(tapdeck, reference, inputs):
    said = tapdeck.run("prepare", reference.config, "--show", "2").require(0).stdout
    records = [json.loads(line) for line in inputs.conversations.read_text().splitlines()[:2]]

    assert f"{NUM_SAMPLES} records: {NUM_SAMPLES} accepted, 0 rejected" in said
    assert f"2 of {NUM_SAMPLES} samples shown" in said
    assert "\x1b" not in said
    # A bar stands between two tokens; the texts themselves have none.
    spans = [span.replace("|im_end|", "!").replace("|", "") for span in re.findall(r"\[\[(.*?)\]\]", said)]
    assert spans == [record["messages"][1]["content"] + "<!>" for record in records]


def test_the_help_names_every_verb(tapdeck):
    said = tapdeck.run("--help").require(0).stdout

    for verb in VERBS:
        assert verb in said


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_help_that_names_its_flags(tapdeck, verb):
    said = tapdeck.run(verb, "--help").require(0).stdout

    assert "Usage:" in said
    assert "--json" in said


def test_the_entry_point_is_installed(tapdeck):
    done = subprocess.run(
        [Path(sys.executable).with_name("tapdeck"), "--version"],
        capture_output=True,
        text=True,
        env=tapdeck.environment,
        check=True,
    )

    assert re.fullmatch(r"tapdeck \d+\.\d+\.\d+\n", done.stdout)
