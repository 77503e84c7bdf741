import shutil

import msgspec
import numpy as np
import pytest
from store_support import TAPS, Dataset, tree

from extractor.plan import Geometry
from extractor.store import names
from extractor.store.listing import clean_parts
from extractor.store.record import encode_record, read_record
from extractor.store.scan import committed, scan

DATASET = Dataset([8, 8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))


def do_scan(output, **options):
    return scan(output, DATASET.shards, DATASET.fingerprint, **options)


def test_an_output_that_does_not_exist_has_everything_to_do(tmp_path):
    found = do_scan(tmp_path / "none")
    assert found.to_do == found.missing == (0, 1)
    assert (found.done, found.bad, found.parts, found.unplanned) == ({}, {}, (), ())


def test_complete_shards_are_done(tmp_path):
    commits = DATASET.write(tmp_path).commits
    found = do_scan(tmp_path, checksums=True)
    assert found.done == {record.index: record for record in commits}
    assert found.to_do == ()


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path):
    path.write_bytes(b"")


def cut_header(path):
    path.write_bytes(path.read_bytes()[:100])


def other_version(path):
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 2'))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = [
    ("final.safetensors", cut, "data_truncated"),
    ("final.safetensors", grow, "trailing_bytes"),
    ("layer_003.safetensors", empty, "empty_file"),
    ("layer_003.safetensors", cut_header, "header_truncated"),
    ("layer_003.safetensors", lambda path: path.unlink(), "file_missing"),
    ("tokens.safetensors", cut, "data_truncated"),
    ("tokens.safetensors", lambda path: path.unlink(), "file_missing"),
    ("shard.json", lambda path: path.unlink(), "file_missing"),
    ("shard.json", empty, "record_invalid"),
    ("shard.json", cut_header, "record_invalid"),
    ("shard.json", other_version, "record_version"),
]


@pytest.mark.parametrize(("name", "harm", "kind"), DAMAGES)
def test_a_damaged_shard_is_bad_with_its_file_and_reason_and_is_redone(tmp_path, name, harm, kind):
    DATASET.write(tmp_path)
    whole = tree(tmp_path)
    harm(names.shard_folder(tmp_path, 1) / name)
    found = do_scan(tmp_path)
    assert list(found.done) == [0]
    (damage,) = found.bad[1]
    assert (damage.kind, found.to_do) == (kind, (1,))
    assert damage.path.endswith(f"000001/{name}")
    assert name in damage.reason
    times = {path: path.stat().st_mtime_ns for path in names.shard_folder(tmp_path, 0).iterdir()}
    DATASET.write(tmp_path, only=found.to_do)
    assert do_scan(tmp_path, checksums=True).to_do == ()
    assert tree(tmp_path) == whole
    assert {path: path.stat().st_mtime_ns for path in names.shard_folder(tmp_path, 0).iterdir()} == times


def test_a_flipped_bit_is_found_only_when_checksums_are_asked_for(tmp_path):
    DATASET.write(tmp_path)
    flip(names.shard_folder(tmp_path, 0) / "final.safetensors")
    assert do_scan(tmp_path).to_do == ()
    assert do_scan(tmp_path, checksums=True).bad[0][0].kind == "checksum"


def test_a_shard_of_another_data_set_is_bad(tmp_path):
    DATASET.write(tmp_path)
    found = scan(tmp_path, DATASET.shards, "another")
    assert {damage.kind for damages in found.bad.values() for damage in damages} == {"wrong_fingerprint"}
    assert found.done == {}


def test_a_shard_under_another_number_is_bad(tmp_path):
    DATASET.write(tmp_path)
    shutil.rmtree(names.shard_folder(tmp_path, 1))
    shutil.copytree(names.shard_folder(tmp_path, 0), names.shard_folder(tmp_path, 1))
    assert [damage.kind for damage in do_scan(tmp_path).bad[1]] == ["wrong_shard"]


def test_a_shard_with_other_samples_than_planned_is_bad(tmp_path):
    other = Dataset([8, 8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16, seed=3))
    other.fingerprint = DATASET.fingerprint
    assert other.shards[0].samples != DATASET.shards[0].samples
    other.write(tmp_path, with_manifest=False)
    assert do_scan(tmp_path).bad[0][0].kind == "wrong_samples"


def other_content(index, **changes):
    """Prepared samples of which one is not what was stored."""
    return lambda i: msgspec.structs.replace(DATASET.samples[i], **(changes if i == index else {}))


def test_samples_as_prepared_are_done(tmp_path):
    DATASET.write(tmp_path, reasons={1: "non_finite"})
    assert do_scan(tmp_path, sample=DATASET.samples.__getitem__).to_do == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": np.zeros(7, np.int32)}, "sample 2 has 8 tokens; 7 were prepared"),
        ({"input_ids": np.zeros(8, np.int32)}, "sample 2 has other tokens than were prepared"),
        ({"loss_mask": np.full(8, 2, np.uint8)}, "sample 2 has another loss mask than was prepared"),
    ],
)
def test_a_shard_with_other_tokens_or_masks_than_prepared_is_bad(tmp_path, changes, reason):
    DATASET.write(tmp_path)
    found = do_scan(tmp_path, sample=other_content(2, **changes))
    ((damage,),) = found.bad.values()
    assert damage.kind == "wrong_tokens"
    assert damage.reason.endswith(reason)


def test_what_is_quarantined_is_not_compared(tmp_path):
    DATASET.write(tmp_path, reasons={2: "non_finite"})
    assert do_scan(tmp_path, sample=other_content(2, input_ids=np.zeros(7, np.int32))).to_do == ()


def test_a_record_that_contradicts_its_files_is_bad(tmp_path):
    DATASET.write(tmp_path)
    folder = names.shard_folder(tmp_path, 0)
    record = encode_record(read_record(folder))
    changes = [
        (b'"num_tokens": 16', b'"num_tokens": 15', "wrong_shape"),
        (b'"num_samples": 2', b'"num_samples": 3', "wrong_counts"),
        (b'"name": "final"', b'"name": "normed"', "record_invalid"),
        (b'"bytes": 4352', b'"bytes": 4353', "wrong_size"),
    ]
    for old, new, kind in changes:
        assert old in record
        (folder / names.RECORD).write_bytes(record.replace(old, new))
        assert do_scan(tmp_path).bad[0][0].kind == kind


def test_a_shard_without_a_tap_that_is_needed_is_bad(tmp_path):
    DATASET.write(tmp_path)
    assert do_scan(tmp_path, taps=TAPS.names).to_do == ()
    found = do_scan(tmp_path, taps=[*TAPS.names, "normed"])
    assert [damage.kind for damage in found.bad[0]] == ["tap_missing"]


def test_files_that_the_record_does_not_list_are_ignored(tmp_path):
    DATASET.write(tmp_path)
    (names.shard_folder(tmp_path, 0) / "layer_004.safetensors.part").write_bytes(b"half")
    assert do_scan(tmp_path, checksums=True).to_do == ()


def test_leftovers_are_listed_and_removed_and_nothing_else(tmp_path):
    DATASET.write(tmp_path)
    shards = tmp_path / names.SHARDS
    for name in ("000001.part-0", "000007.part-r1.2", "000001.part-0.replaced"):
        (shards / name).mkdir()
        (shards / name / "x").write_bytes(b"half")
    (shards / "notes").mkdir()
    (shards / "000001.partial").write_bytes(b"a file of somebody")
    (shards / "000009").mkdir()
    found = do_scan(tmp_path)
    assert [part.name for part in found.parts] == [
        "000001.part-0",
        "000001.part-0.replaced",
        "000007.part-r1.2",
    ]
    assert found.unplanned == (9,)
    assert clean_parts(tmp_path) == list(found.parts)
    assert {path.name for path in shards.iterdir()} == {
        "000000",
        "000001",
        "000009",
        "notes",
        "000001.partial",
    }


def test_a_leftover_link_is_not_followed(tmp_path):
    DATASET.write(tmp_path / "out")
    (tmp_path / "precious").mkdir()
    (tmp_path / "out" / names.SHARDS / "000001.part-0").symlink_to(tmp_path / "precious")
    assert clean_parts(tmp_path / "out") == []
    assert (tmp_path / "precious").is_dir()


def test_committed_shards_come_in_order(tmp_path):
    DATASET.write(tmp_path)
    assert [record.index for _, record in committed(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("000012", 12),
        ("1000000", 1000000),
        ("0000012", None),
        ("12", None),
        ("000012.part-0", None),
        ("x", None),
    ],
)
def test_only_exact_names_stand_for_shards(name, index):
    assert names.shard_index(name) == index


def test_names_are_as_the_format_says(tmp_path):
    assert names.shard_folder(tmp_path, 12) == tmp_path / "shards" / "000012"
    assert names.part_folder(tmp_path, 12, 3).name == "000012.part-3"
    assert names.part_folder(tmp_path, 12, 3, 1).name == "000012.part-3.1"
    assert names.is_part("000012.part-3.1")
    assert names.part_folder(tmp_path, 12, "0-1f2e3d4c").name == "000012.part-0-1f2e3d4c"
    assert names.is_part("000012.part-0-1f2e3d4c")
    assert names.tap_file("layer_002") == "layer_002.safetensors"
    assert not names.temporary(tmp_path / "data_5.pt").name.endswith("pt")


def test_the_parts_of_one_replica_are_removed_and_those_of_others_stay(tmp_path):
    shards = tmp_path / "shards"
    for name in (
        "000001.part-0-aa-0",
        "000002.part-0-aa-0.1",
        "000003.part-0-aa-0.replaced",
        "000004.part-0-aa-1",
        "000005",
    ):
        (shards / name).mkdir(parents=True)

    clean_parts(tmp_path, replica="0-aa-0")

    assert sorted(entry.name for entry in shards.iterdir()) == ["000004.part-0-aa-1", "000005"]
