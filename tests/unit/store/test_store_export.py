import io
import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from store_support import (
    CASES,
    HIDDEN,
    NUM_LAYERS,
    Dataset,
    FakeBlock,
    Outcome,
    Sample,
    iter_samples,
    make_states,
    tree,
)

from extractor.commands import export as command
from extractor.commands.output import Output
from extractor.errors import AccessError, ConfigError, PreflightError, StoreError
from extractor.plan import Geometry
from extractor.store import manifest, names
from extractor.store.layouts import speculators_v1
from extractor.taps import select

GEOMETRY = Geometry(max_tokens=16, shard_tokens=24, seed=5)


def choose(layers, *, embed=False, final=True, normed=False):
    return select(
        num_layers=NUM_LAYERS, layers=layers, embed=embed, final=final, normed=normed, convention="after"
    )


def do_export(output, target, **options):
    notes = []
    result = speculators_v1.export(output, target, note=notes.append, **options)
    return result, notes


def load(target, rank):
    return torch.load(target / f"data_{rank}.pt", mmap=True, weights_only=True)


def test_each_sample_is_a_file_as_the_trainer_reads_it(tmp_path):
    dataset = Dataset([5, 9, 3, 7, 7, 2, 11, 4], geometry=GEOMETRY)
    dataset.write(tmp_path / "out")
    result, notes = do_export(tmp_path / "out", tmp_path / "v1")
    assert (result.samples, result.written, result.tokens, notes) == (8, 8, 48, [])
    for rank, sample in enumerate(dataset.samples):
        item = load(tmp_path / "v1", rank)
        assert set(item) == {"input_ids", "loss_mask", "hidden_states"}
        assert item["input_ids"].dtype == item["loss_mask"].dtype == torch.int64
        assert item["input_ids"].tolist() == sample.input_ids.tolist()
        assert item["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert isinstance(item["hidden_states"], list)
        for tap, states in zip(
            ("layer_001", "layer_003", "layer_005", "final"), item["hidden_states"], strict=True
        ):
            assert states.shape == (sample.input_ids.size, HIDDEN)
            assert states.dtype == torch.bfloat16
            assert states.is_contiguous()
            expected = make_states(tap, sample).reshape(-1)
            assert np.array_equal(states.reshape(-1).view(torch.uint8).numpy(), expected)
        storages = {states.untyped_storage().data_ptr() for states in item["hidden_states"]}
        assert len(storages) == 4


def test_the_rank_is_dense_and_in_the_order_of_the_data_set(tmp_path):
    dataset = Dataset([4] * 10, geometry=Geometry(max_tokens=8, shard_tokens=12, seed=3))
    dataset.write(tmp_path / "out", reasons={3: "non_finite", 7: "non_finite", 9: "all_zero"})
    do_export(tmp_path / "out", tmp_path / "v1")
    stored = [0, 1, 2, 4, 5, 6, 8]
    assert sorted(path.name for path in (tmp_path / "v1").glob("*pt")) == [f"data_{i}.pt" for i in range(7)]
    for rank, index in enumerate(stored):
        assert load(tmp_path / "v1", rank)["input_ids"].tolist() == dataset.samples[index].input_ids.tolist()


def test_lengths_are_exact_and_nothing_else_ends_in_pt(tmp_path):
    lengths = [1, 255, 256, 300, 4000]
    Dataset(lengths, geometry=Geometry(max_tokens=4000, shard_tokens=600)).write(tmp_path / "out")
    do_export(tmp_path / "out", tmp_path / "v1")
    assert json.loads((tmp_path / "v1" / "sample_lengths.json").read_text()) == {
        str(i): length for i, length in enumerate(lengths)
    }
    assert {path.name for path in (tmp_path / "v1").iterdir() if path.name.endswith("pt")} == {
        f"data_{i}.pt" for i in range(5)
    }


@pytest.mark.parametrize("stop_after", [0, 1, 4, 9])
@pytest.mark.parametrize("harm", ["nothing", "lengths damaged", "lengths lost", "half a file left"])
def test_an_export_that_was_stopped_is_completed(tmp_path, monkeypatch, stop_after, harm):
    Dataset([4, 5, 6, 3, 2, 7, 8, 1, 4, 5], geometry=GEOMETRY).write(tmp_path / "out")
    do_export(tmp_path / "out", tmp_path / "whole")
    target = tmp_path / "v1"
    saved = []
    real = torch.save

    def stop(item, sink):
        if len(saved) == stop_after:
            sink.write(b"half")
            raise KeyboardInterrupt
        saved.append(item)
        real(item, sink)

    with monkeypatch.context() as patch:
        patch.setattr(speculators_v1.torch, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            do_export(tmp_path / "out", target)
    assert len(list(target.glob("*pt"))) == stop_after
    assert len(json.loads((target / "sample_lengths.json").read_text())) == 10
    if harm == "lengths damaged":
        shutil.copy(CASES / "store-lengths-lost" / "sample_lengths.json", target)
    elif harm == "lengths lost":
        (target / "sample_lengths.json").unlink()
    elif harm == "half a file left":
        (target / "data_3.pt").write_bytes(b"half")
    result, notes = do_export(tmp_path / "out", target)
    assert result.written >= 10 - len(saved)
    assert tree(target) == tree(tmp_path / "whole")
    assert any("rebuilt from the shards" in note for note in notes) == (harm == "lengths damaged")


def test_a_second_export_writes_nothing(tmp_path):
    Dataset([4, 5, 6]).write(tmp_path / "out")
    do_export(tmp_path / "out", tmp_path / "v1")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "v1").iterdir()}
    result, _ = do_export(tmp_path / "out", tmp_path / "v1")
    assert (result.samples, result.written) == (3, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "v1").iterdir()} == times


@pytest.mark.parametrize("harm", ["cut", "flip", "other sample", "empty"])
def test_a_file_that_holds_something_else_is_written_again(tmp_path, harm):
    Dataset([4, 5, 6]).write(tmp_path / "out")
    do_export(tmp_path / "out", tmp_path / "v1")
    expected = tree(tmp_path / "v1")
    path = tmp_path / "v1" / "data_1.pt"
    data = bytearray(path.read_bytes())
    if harm == "flip":
        states = load(tmp_path / "v1", 1)["hidden_states"][2]
        at = bytes(data).index(states.reshape(-1).view(torch.uint8).numpy().tobytes())
        data[at] ^= 1
    changed = {"cut": data[:-40], "flip": data, "other sample": expected["data_0.pt"], "empty": b""}[harm]
    path.write_bytes(changed)
    result, _ = do_export(tmp_path / "out", tmp_path / "v1")
    assert result.written == 1
    assert tree(tmp_path / "v1") == expected


def test_an_export_of_an_unfinished_run_says_so_and_grows(tmp_path):
    dataset = Dataset([8, 8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=8, seed=1))
    dataset.write(tmp_path / "out", only={0, 2})
    with pytest.raises(PreflightError, match="2 of 4 shards are there") as caught:
        do_export(tmp_path / "out", tmp_path / "v1")
    assert caught.value.exit_code == 2
    assert "--allow-incomplete" in (caught.value.remedy or "")
    assert not (tmp_path / "v1").exists()
    result, notes = do_export(tmp_path / "out", tmp_path / "v1", allow_incomplete=True)
    assert result.samples == 2
    assert any("2 of 4 shards are there" in note for note in notes)
    dataset.write(tmp_path / "out", only={1, 3})
    do_export(tmp_path / "out", tmp_path / "v1")
    do_export(tmp_path / "out", tmp_path / "fresh")
    assert tree(tmp_path / "v1") == tree(tmp_path / "fresh")


def test_another_export_in_the_target_is_refused(tmp_path):
    Dataset([4]).write(tmp_path / "a")
    Dataset([4], taps=choose((2, 3, 4))).write(tmp_path / "b")
    do_export(tmp_path / "a", tmp_path / "v1")
    before = tree(tmp_path / "v1")
    with pytest.raises(PreflightError, match="holds another export"):
        do_export(tmp_path / "b", tmp_path / "v1")
    assert tree(tmp_path / "v1") == before


@pytest.mark.parametrize("name", ["token_freq.pt", "sub/model.ckpt", "x.tmp.pt", "data_01.pt", "data_9.pt"])
def test_a_foreign_file_that_the_trainer_would_read_is_refused(tmp_path, name):
    Dataset([4]).write(tmp_path / "out")
    path = tmp_path / "v1" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something")
    with pytest.raises(PreflightError, match="takes every file that ends in pt"):
        do_export(tmp_path / "out", tmp_path / "v1")
    assert [p for p in (tmp_path / "v1").rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("place", [".", "v1", "shards", "shards/v1", "shards/000000"])
def test_the_data_set_is_no_target_and_neither_is_a_place_in_it(tmp_path, place):
    Dataset([4]).write(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = tree(tmp_path / "out")
    for target in (tmp_path / "out" / place, tmp_path / "link" / place):
        with pytest.raises(PreflightError, match="the data set") as caught:
            do_export(tmp_path / "out", target)
        assert caught.value.exit_code == 2
        assert caught.value.remedy
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": "mine"},
        {"sub/notes.txt": "mine"},
        {"data_config.json": '{"format": "something"}'},
        {"data_config.json": "no JSON"},
        {"data_0.pt": "mine"},
    ],
)
def test_a_folder_with_something_else_in_it_is_refused(tmp_path, content):
    Dataset([4]).write(tmp_path / "out")
    for name, text in content.items():
        path = tmp_path / "v1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = tree(tmp_path / "v1")
    with pytest.raises(PreflightError, match="is not empty and holds no export of tapdeck") as caught:
        do_export(tmp_path / "out", tmp_path / "v1")
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    assert tree(tmp_path / "v1") == before


def test_an_export_that_was_stopped_at_its_first_file_is_completed(tmp_path):
    Dataset([4]).write(tmp_path / "out")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "data_config.json.part").write_text("{")
    assert do_export(tmp_path / "out", tmp_path / "v1")[0].written == 1
    assert "data_config.json.part" not in tree(tmp_path / "v1")


@pytest.mark.parametrize("place", ["file", "file/v1", "dangling"])
def test_a_target_that_is_no_folder_is_refused(tmp_path, place):
    Dataset([4]).write(tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AccessError, match="is no folder") as caught:
        do_export(tmp_path / "out", tmp_path / place)
    assert caught.value.remedy
    assert (tmp_path / "file").read_text() == "mine"


def test_a_data_set_that_lacks_a_planned_sample_is_not_complete(tmp_path):
    dataset = Dataset([4, 5], geometry=Geometry(max_tokens=8, shard_tokens=16))
    dataset.write(tmp_path / "out", with_manifest=False)
    totals = msgspec.structs.replace(dataset.manifest.totals, samples=3)
    manifest.write(tmp_path / "out", msgspec.structs.replace(dataset.manifest, totals=totals))
    with pytest.raises(PreflightError, match="2 of 3 samples are there"):
        do_export(tmp_path / "out", tmp_path / "v1")


def test_a_list_that_does_not_end_in_final_is_refused_unless_forced(tmp_path):
    Dataset([4], taps=choose((1, 3, 5), final=False)).write(tmp_path / "out")
    with pytest.raises(PreflightError, match="the last tap is layer_005, not final"):
        do_export(tmp_path / "out", tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    result, notes = do_export(tmp_path / "out", tmp_path / "v1", force=True)
    assert result.taps == ("layer_001", "layer_003", "layer_005")
    assert any("not final" in note for note in notes)


@pytest.mark.parametrize("tap", ["embed", "normed"])
def test_embed_and_normed_never_get_into_the_list(tmp_path, tap):
    Dataset([4], taps=choose((1, 3, 5), embed=True, normed=True)).write(tmp_path / "out")
    with pytest.raises(PreflightError, match=f"not {tap}"):
        do_export(tmp_path / "out", tmp_path / "v1", taps=["layer_001", tap, "final"])
    result, _ = do_export(tmp_path / "out", tmp_path / "v1")
    assert result.taps == ("layer_001", "layer_003", "layer_005", "final")


def test_taps_are_ascending_whatever_order_was_asked_for(tmp_path):
    Dataset([4], taps=choose((1, 3, 5, 6))).write(tmp_path / "out")
    result, notes = do_export(tmp_path / "out", tmp_path / "v1", taps=["final", "layer_005", "layer_001"])
    assert result.taps == ("layer_001", "layer_005", "final")
    config = json.loads((tmp_path / "v1" / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [1, 5, 7]
    assert config["hidden_states"]["last_state"] == "pre_norm"
    assert any("2 auxiliary layers" in note for note in notes)


def test_shards_with_different_taps_are_refused_and_common_taps_accepted(tmp_path):
    geometry = Geometry(max_tokens=8, shard_tokens=8)
    Dataset([8, 8], geometry).write(tmp_path / "out", only={0})
    Dataset([8, 8], geometry, choose((1, 2, 5))).write(tmp_path / "out", only={1})
    with pytest.raises(StoreError, match="shards hold different taps") as caught:
        do_export(tmp_path / "out", tmp_path / "v1")
    assert caught.value.code == "taps_differ"
    with pytest.raises(StoreError, match="not stored in all shards: layer_003"):
        do_export(tmp_path / "out", tmp_path / "v1", taps=["layer_003", "final"])
    result, _ = do_export(tmp_path / "out", tmp_path / "v1", taps=["layer_001", "layer_005", "final"])
    assert result.samples == 2


def test_a_damaged_shard_is_refused(tmp_path):
    Dataset([4]).write(tmp_path / "out")
    path = names.shard_folder(tmp_path / "out", 0) / "final.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"final\.safetensors"):
        do_export(tmp_path / "out", tmp_path / "v1")
    assert list((tmp_path / "v1").glob("*pt")) == []


@pytest.mark.parametrize("name", ["layer_003.safetensors", "final.safetensors", "tokens.safetensors"])
@pytest.mark.parametrize("offset", [-1, -10])
def test_a_shard_with_one_wrong_byte_is_refused_by_name_and_nothing_of_it_is_written(tmp_path, name, offset):
    dataset = Dataset([8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=8))
    dataset.write(tmp_path / "out")
    path = names.shard_folder(tmp_path / "out", 1) / name
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x01
    path.write_bytes(data)
    with pytest.raises(StoreError, match="checksum") as caught:
        do_export(tmp_path / "out", tmp_path / "v1")
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 1
    assert caught.value.remedy
    hurt = set(dataset.shards[1].samples)
    assert not any((tmp_path / "v1" / f"data_{rank}.pt").exists() for rank in hurt)


class CountingBlock(FakeBlock):
    """Row i of every tap is filled with the value i."""

    def rows(self, tap: str) -> memoryview:
        rows = np.repeat(np.arange(self.num_tokens, dtype=np.float32), HIDDEN)
        return memoryview((rows.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))


def test_ids_mask_and_states_are_stored_unshifted_in_shards_and_export(tmp_path):
    mask = [0, 0, 0, 1, 1, 1, 0, 1]
    dataset = Dataset([8])
    sample = Sample(0, "id-0", np.arange(10, 18, dtype=np.int32), np.array(mask, np.uint8))
    dataset.samples = [sample]
    outcome = Outcome()
    dataset.blocks = lambda shard, reasons=None: [CountingBlock([sample], dataset.taps.names)]  # noqa: ARG005
    dataset.write(tmp_path / "out")
    do_export(tmp_path / "out", tmp_path / "v1")
    (stored,) = iter_samples(tmp_path / "out")
    item = load(tmp_path / "v1", 0)
    for ids, loss_mask, states in (
        (stored.input_ids, stored.loss_mask, list(stored.states.values())),
        (item["input_ids"], item["loss_mask"], item["hidden_states"]),
    ):
        assert ids.tolist() == list(range(10, 18))
        assert loss_mask.tolist() == mask
        assert len(states) == 4
        assert all(rows[:, 0].tolist() == list(range(8)) for rows in states)
    # What speculators' shift_batch does: states lose their last row, ids and targets their first.
    auxiliary, last = item["hidden_states"][0][:-1], item["hidden_states"][-1][1:]
    for j in range(7):
        assert auxiliary[j, 0] == j
        assert item["input_ids"][1:][j] == 10 + j + 1
        assert last[j, 0] == j + 1
    assert outcome.errors == []


def run_command(output, target, *, as_json, **options):
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(as_json=as_json, stdout=stdout, stderr=stderr)
    code = command.run(
        output, layout=options.pop("layout", "speculators-v1"), target=target, out=out, **options
    )
    return code, stdout.getvalue(), stderr.getvalue()


def test_the_command_reports_one_json_object(tmp_path):
    Dataset([4, 5]).write(tmp_path / "out")
    code, stdout, _ = run_command(tmp_path / "out", tmp_path / "v1", as_json=True)
    assert code == 0
    result = json.loads(stdout)
    assert (result["samples"], result["written"], result["tokens"]) == (2, 2, 9)
    assert result["taps"] == ["layer_001", "layer_003", "layer_005", "final"]


def test_the_command_tells_people_what_it_did(tmp_path):
    Dataset([4, 5], taps=choose((1, 5))).write(tmp_path / "out")
    code, stdout, stderr = run_command(tmp_path / "out", tmp_path / "v1", as_json=False)
    assert code == 0
    assert "2 samples, 9 tokens" in stdout
    assert "2 auxiliary layers" in stderr


def test_an_unknown_layout_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(ConfigError, match="choose one of: speculators-v1"):
        run_command(tmp_path / "out", tmp_path / "v1", as_json=False, layout="specforge")


def test_an_output_without_shards_is_refused(tmp_path):
    Dataset([4]).write(tmp_path / "out", only=set())
    with pytest.raises(StoreError, match="no shard is stored yet"):
        do_export(tmp_path / "out", tmp_path / "v1")
