import msgspec
import pyarrow.parquet as pq
import pytest
from store_support import Dataset

from extractor.errors import StoreError
from extractor.plan import Geometry
from extractor.store import index, names
from extractor.store.scan import committed, scan

DATASET = Dataset([8, 6, 8, 5, 3], geometry=Geometry(max_tokens=8, shard_tokens=16))


def origin(sample_index: int):
    return DATASET.samples[sample_index]


def rebuild(output, rejected=None):
    return index.rebuild(output, [record for _, record in committed(output)], origin, rejected)


def test_every_stored_sample_is_listed_with_its_place(tmp_path):
    DATASET.write(tmp_path)
    assert rebuild(tmp_path) == index.IndexTotals(5, 0)
    table = pq.read_table(tmp_path / names.SAMPLES).to_pylist()
    expected = []
    for shard in DATASET.shards:
        row = 0
        for number in shard.samples:
            sample = DATASET.samples[number]
            expected.append(
                {
                    "sample_index": number,
                    "sample_id": sample.sample_id,
                    "source_file": "data.jsonl",
                    "source_line": number + 1,
                    "shard": shard.index,
                    "row": row,
                    "tokens": sample.input_ids.size,
                    "supervised_tokens": int(sample.loss_mask.sum()),
                }
            )
            row += sample.input_ids.size
    assert table == expected


def test_quarantined_samples_are_listed_with_their_reason(tmp_path):
    DATASET.write(tmp_path, reasons={1: "non_finite", 3: "all_zero"})
    assert rebuild(tmp_path) == index.IndexTotals(3, 2)
    lines = [msgspec.json.decode(line) for line in (tmp_path / names.QUARANTINE).read_bytes().splitlines()]
    assert sorted((line["sample_id"], line["reason"], line["source_line"]) for line in lines) == [
        ("id-1", "non_finite", 2),
        ("id-3", "all_zero", 4),
    ]


def test_rebuilding_gives_the_same_bytes_and_leaves_nothing_beside_them(tmp_path):
    rejects = tmp_path / "rejects"
    rejects.write_bytes(b'{"code": "json"}\n')
    for output in (tmp_path / "a", tmp_path / "b"):
        DATASET.write(output, reasons={1: "non_finite"})
        rebuild(output, rejects)
    rebuild(tmp_path / "a", rejects)
    for name in (names.SAMPLES, names.QUARANTINE, names.REJECTED):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        names.SHARDS,
        names.DATASET,
        names.SAMPLES,
        names.QUARANTINE,
        names.REJECTED,
    }
    assert (tmp_path / "a" / names.REJECTED).read_bytes() == rejects.read_bytes()


def test_a_damaged_shard_leaves_the_old_lists(tmp_path):
    DATASET.write(tmp_path)
    rebuild(tmp_path)
    before = (tmp_path / names.SAMPLES).read_bytes()
    (names.shard_folder(tmp_path, 1) / names.TOKENS).write_bytes(b"")
    with pytest.raises(StoreError, match="the file is empty"):
        rebuild(tmp_path)
    assert (tmp_path / names.SAMPLES).read_bytes() == before
    assert not (tmp_path / (names.SAMPLES + ".part")).exists()


def test_a_damaged_shard_that_is_not_asked_for_is_not_listed(tmp_path):
    DATASET.write(tmp_path)
    (names.shard_folder(tmp_path, 1) / names.TOKENS).write_bytes(b"")
    done = scan(tmp_path, DATASET.shards, DATASET.fingerprint).done
    index.rebuild(tmp_path, list(done.values()), origin)
    assert set(done) == {0}
    assert set(pq.read_table(tmp_path / names.SAMPLES)["shard"].to_pylist()) == {0}


def test_no_stored_sample_gives_an_empty_list(tmp_path):
    Dataset([3]).write(tmp_path, reasons={0: "all_zero"})
    assert rebuild(tmp_path) == index.IndexTotals(0, 1)
    assert pq.read_table(tmp_path / names.SAMPLES).num_rows == 0
