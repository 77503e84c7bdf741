import os
import signal

import msgspec
import numpy as np
import pytest
from store_support import HIDDEN, NUM_LAYERS, Dataset, FakeBlock, make_manifest

from extractor.plan import Geometry
from extractor.store import damage, manifest, names
from extractor.store.manifest import Totals
from extractor.store.record import encode_record, read_record
from extractor.store.tensors import arrays_bytes
from extractor.store.verify import check
from extractor.taps import Tap, select

DATASET = Dataset([8, 6, 8, 5, 3], geometry=Geometry(max_tokens=8, shard_tokens=16))


def kinds(report) -> list[str]:
    return [found.kind for found in report.damages]


def test_a_sound_data_set_is_complete_and_adds_up(tmp_path):
    commits = DATASET.write(tmp_path).commits
    report = check(tmp_path)
    assert report.is_ok
    assert report.is_complete
    assert (report.shards, report.samples, report.tokens, report.planned) == (len(DATASET.shards), 5, 30, 5)
    assert report.supervised_tokens == sum(int(s.loss_mask.sum()) for s in DATASET.samples)
    assert report.bytes == sum(record.num_bytes for record in commits)
    assert (report.quarantined, report.rejected, report.missing_shards) == (0, 0, ())


def test_quarantined_samples_count_as_dealt_with(tmp_path):
    DATASET.write(tmp_path, reasons={1: "non_finite", 3: "all_zero"})
    report = check(tmp_path)
    assert report.is_complete
    assert (report.samples, report.quarantined) == (3, 2)


def test_an_unfinished_data_set_is_sound_but_not_complete(tmp_path):
    DATASET.write(tmp_path, only={0})
    report = check(tmp_path)
    assert report.is_ok
    assert not report.is_complete
    assert report.missing_shards == tuple(shard.index for shard in DATASET.shards[1:])


@pytest.mark.parametrize(
    "name", ["final.safetensors", "layer_001.safetensors", "tokens.safetensors", "shard.json"]
)
@pytest.mark.parametrize("part", ["half", "none", "last byte"])
def test_every_cut_file_is_named(tmp_path, name, part):
    DATASET.write(tmp_path)
    path = names.shard_folder(tmp_path, 1) / name
    data = path.read_bytes()
    path.write_bytes({"half": data[: len(data) // 2], "none": b"", "last byte": data[:-2]}[part])
    for quick in (False, True):
        report = check(tmp_path, quick=quick)
        assert [found.path for found in report.damages] == [str(path)]
        assert str(path) in report.damages[0].reason
        assert report.shards == len(DATASET.shards) - 1


@pytest.mark.parametrize("offset", [0, 20, 3000, 4096, -1])
def test_a_flipped_bit_anywhere_in_a_file_is_found(tmp_path, offset):
    DATASET.write(tmp_path)
    path = names.shard_folder(tmp_path, 0) / "layer_005.safetensors"
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    report = check(tmp_path)
    assert [found.path for found in report.damages] == [str(path)]


class NanBlock(FakeBlock):
    """Holds a NaN that nobody judged."""

    def rows(self, tap: str) -> memoryview:
        data = np.frombuffer(super().rows(tap), dtype=np.uint16).copy()
        if tap == "final":
            data[2 * HIDDEN + 1] = 0x7FC0
        return memoryview(data.view(np.uint8))


def test_a_stored_nan_is_found_with_its_row(tmp_path):
    dataset = Dataset([8])
    dataset.blocks = lambda shard, reasons=None: [  # noqa: ARG005
        NanBlock([dataset.samples[i] for i in batch], dataset.taps.names) for batch in shard.batches
    ]
    dataset.write(tmp_path)
    report = check(tmp_path)
    assert kinds(report) == ["non_finite"]
    assert "row 2 " in report.damages[0].reason
    assert check(tmp_path, quick=True).is_ok


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_are_sound_too(tmp_path, dtype):
    Dataset([8, 5], dtype=dtype).write(tmp_path)
    assert check(tmp_path).is_complete


def rewrite_tokens(folder, **changes) -> None:
    """Replaces arrays of the tokens and mends size and checksum, as a faulty writer would have it."""
    tokens = damage.read_tokens(folder)
    arrays = {
        name: changes.get(name, getattr(tokens, name))
        for name in ("cu_seqlens", "sample_index", "input_ids", "loss_mask")
    }
    data = arrays_bytes(arrays)
    (folder / names.TOKENS).write_bytes(data)
    record = read_record(folder)
    import xxhash

    from extractor.store.record import FileRecord

    files = record.files | {names.TOKENS: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))}
    (folder / names.RECORD).write_bytes(encode_record(msgspec.structs.replace(record, files=files)))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"loss_mask": np.full(14, 2, np.uint8)}, "tokens_invalid", "other than 0 and 1"),
        ({"cu_seqlens": np.array([0, 14, 14])}, "tokens_invalid", "empty sample"),
        ({"cu_seqlens": np.array([0, 15, 14])}, "tokens_invalid", "goes back"),
        ({"cu_seqlens": np.array([1, 8, 14])}, "tokens_invalid", "does not run from 0"),
        ({"cu_seqlens": np.array([0, 8, 13])}, "tokens_invalid", "does not run from 0 to 14"),
        ({"cu_seqlens": np.array([0, 14])}, "tokens_invalid", "over 2 samples"),
        ({"sample_index": np.array([0, 0])}, "tokens_invalid", "stored twice"),
        ({"loss_mask": np.zeros(13, np.uint8)}, "tokens_invalid", "13 values of loss_mask"),
        ({"loss_mask": np.zeros(14, np.uint8)}, "wrong_counts", "shard.json says"),
        ({"sample_index": np.array([0, 99])}, "wrong_samples", "sample 99 is not in the plan"),
        ({"sample_index": np.array([0, 2])}, "wrong_samples", "sample 2 is also in shard"),
    ],
)
def test_tokens_that_contradict_themselves_are_found(tmp_path, changes, kind, words):
    DATASET.write(tmp_path)
    rewrite_tokens(names.shard_folder(tmp_path, 0), **changes)
    report = check(tmp_path)
    assert kind in kinds(report)
    assert any(words in found.reason for found in report.damages)


def test_sums_that_do_not_come_out_are_found(tmp_path):
    DATASET.write(tmp_path, with_manifest=False)
    totals = Totals(samples=6, tokens=31, supervised_tokens=0, shards=len(DATASET.shards), rejected=0)
    manifest.write(tmp_path, make_manifest(DATASET, totals=totals))
    report = check(tmp_path)
    assert kinds(report) == ["wrong_totals"]
    assert "6 samples were planned; 5 are stored" in report.damages[0].reason


def test_a_folder_that_is_no_data_set_is_said_to_be_none(tmp_path):
    report = check(tmp_path)
    assert kinds(report) == ["file_missing"]
    assert not report.is_complete


def test_an_edited_manifest_is_found(tmp_path):
    DATASET.write(tmp_path)
    path = tmp_path / names.DATASET
    path.write_bytes(path.read_bytes().replace(b'"t0"', b'"t1"'))
    assert "edited" in kinds(check(tmp_path))


def restate(output, **changes) -> None:
    """Writes a manifest with other stated taps; the fingerprint does not cover them."""
    old = manifest.read(output)
    taps = msgspec.structs.replace(old.taps, **changes)
    (output / names.DATASET).write_bytes(manifest.encode(msgspec.structs.replace(old, taps=taps)))


TAPS = DATASET.taps.taps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids_after": (1, 3, 6, 7)}, "ids_after is [1, 3, 6, 7]"),
        ({"ids_before": (1, 3, 5, 7)}, "ids_before is [1, 3, 5, 7]"),
        ({"draft_config": {"sglang": (1, 3, 5), "vllm": (1, 3, 5)}}, "draft_config is"),
        ({"draft_config": {"sglang": (1, 3, 5)}}, "draft_config is"),
        ({"taps": TAPS[1:]}, "ids_after is"),
        ({"taps": (TAPS[1], TAPS[0], *TAPS[2:])}, "out of order"),
        ({"taps": (Tap(3, False, "layer_001"), *TAPS[1:])}, "does not have: layer_001, boundary 3"),
        ({"taps": (*TAPS[:3], Tap(99, False, "layer_098"))}, "does not have: layer_098"),
        ({"taps": ()}, "states no tap"),
    ],
)
@pytest.mark.parametrize("only", [None, set()])
def test_taps_and_ids_that_contradict_each_other_are_found(tmp_path, changes, words, only):
    DATASET.write(tmp_path, only=only)
    restate(tmp_path, **changes)
    report = check(tmp_path)
    assert "wrong_taps" in kinds(report)
    assert {found.path for found in report.damages} == {str(tmp_path / names.DATASET)}
    assert any(words in found.reason for found in report.damages)


@pytest.mark.parametrize("layers", [(1, 3), (1, 3, 4), (1, 2, 3, 5)])
def test_taps_that_the_shards_do_not_hold_are_found(tmp_path, layers):
    DATASET.write(tmp_path)
    other = select(
        num_layers=NUM_LAYERS, layers=layers, embed=False, final=True, normed=False, convention="after"
    )
    restate(tmp_path, **msgspec.structs.asdict(manifest.TapsRecord.of(other)))
    for quick in (False, True):
        report = check(tmp_path, quick=quick)
        assert [(found.kind, found.path) for found in report.damages] == [
            ("differs_from_shards", str(tmp_path / names.DATASET))
        ]
        assert f"but {len(DATASET.shards)} shards (the first is 0) say layer_001 = B(2)" in (
            report.damages[0].reason
        )


def test_a_shard_range_that_states_other_taps_is_found(tmp_path):
    DATASET.write(tmp_path)
    last = len(DATASET.shards) - 1
    ranges = (manifest.ShardRange(first=0, last=last, taps=("layer_001", "final")),)
    changed = msgspec.structs.replace(manifest.read(tmp_path), shards=ranges)
    (tmp_path / names.DATASET).write_bytes(manifest.encode(changed))
    report = check(tmp_path)
    assert kinds(report) == ["differs_from_shards"]
    assert "stated to hold layer_001, final" in report.damages[0].reason


def test_a_file_that_is_cut_while_it_is_read_is_a_finding_and_no_signal(tmp_path, monkeypatch):
    # 12 MiB of states are three chunks; the file loses its end after the first one was read.
    dataset = Dataset([8], hidden=3 << 18, taps=Dataset([1]).taps)
    dataset.write(tmp_path)
    path = names.shard_folder(tmp_path, 0) / "final.safetensors"
    whole = damage.chunks

    def cut_after_first(where):
        for number, piece in enumerate(whole(where)):
            yield piece
            if number == 0 and where == path:
                os.truncate(path, (5 << 20) + 1)

    monkeypatch.setattr(damage, "chunks", cut_after_first)
    before = signal.getsignal(signal.SIGBUS)
    report = check(tmp_path)
    assert [(found.kind, found.path) for found in report.damages] == [("data_truncated", str(path))]
    assert signal.getsignal(signal.SIGBUS) == before
