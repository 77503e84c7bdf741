"""The bytes of format version 1. A change here needs a new version and a new fixture beside the old one."""

import msgspec
import numpy as np
import xxhash
from store_support import CASES, FakeBlock, Outcome, Sample

from extractor.plan import Geometry, Shard
from extractor.store import names
from extractor.store.pipeline import ShardSpec, WriterPool
from extractor.store.record import decode_record, encode_record, read_record
from extractor.taps import select

GOLDEN = CASES / "store-format-1"
LENGTHS = (3, 2, 4)
TAPS = select(num_layers=4, layers=(1,), embed=False, final=True, normed=False, convention="after")


class PlainBlock(FakeBlock):
    """Row r of sample i holds bfloat16 of 16 i + r in all columns: no random numbers, exact in bfloat16."""

    def rows(self, tap: str) -> memoryview:
        rows = [
            np.full(4, 16 * sample.index + row, np.float32)
            for sample in self.samples
            for row in range(sample.input_ids.size)
        ]
        words = (np.concatenate(rows).view(np.uint32) >> 16).astype(np.uint16)
        return memoryview(words.view(np.uint8))


def write_golden(output) -> Outcome:
    samples = [
        Sample(
            i, f"id-{i}", np.arange(10 * i, 10 * i + n, dtype=np.int32), (np.arange(n) % 2).astype(np.uint8)
        )
        for i, n in enumerate(LENGTHS)
    ]
    shard = Shard(0, ((0, 1), (2,)), sum(LENGTHS))
    outcome = Outcome()
    pool = WriterPool(2, outcome.commit, outcome.error)
    writer = pool.open_shard(
        ShardSpec(
            output=output,
            index=0,
            samples=shard.samples,
            num_tokens=shard.num_tokens,
            geometry=Geometry(max_tokens=5, shard_tokens=9, seed=None),
            taps=TAPS.taps,
            dtype="bfloat16",
            hidden_size=4,
            fingerprint="0123456789abcdef0123456789abcdef",
        )
    )
    for batch in shard.batches:
        block = PlainBlock([samples[i] for i in batch], TAPS.names, {1: "all_zero"})
        writer.submit(block, block.samples)
    writer.finish()
    pool.close()
    return outcome


def test_a_small_shard_is_written_byte_for_byte_as_released(tmp_path):
    assert write_golden(tmp_path).errors == []
    folder = names.shard_folder(tmp_path, 0)
    assert {path.name for path in folder.iterdir()} == {path.name for path in GOLDEN.iterdir()}
    for path in sorted(GOLDEN.iterdir()):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_checksums_in_a_record_are_those_of_the_files():
    record = read_record(GOLDEN)
    for name, file in record.files.items():
        data = (GOLDEN / name).read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file.bytes, file.xxh3_128)


def test_a_record_survives_encoding():
    record = read_record(GOLDEN)
    assert decode_record(encode_record(record), "here") == record


def test_a_record_names_neither_time_nor_host():
    text = (GOLDEN / names.RECORD).read_text()
    words = set(msgspec.json.decode(text))
    assert not words & {"time", "date", "host", "created", "hostname", "user"}
