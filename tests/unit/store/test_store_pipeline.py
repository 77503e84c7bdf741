import errno
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from store_support import HIDDEN, TAPS, Dataset, FakeBlock, Outcome, make_states, tree

from extractor.errors import BugError
from extractor.plan import Geometry, Shard
from extractor.store import names
from extractor.store.faults import FaultyFileSystem, fail_on, full_after, no_fault
from extractor.store.pipeline import WriterPool
from extractor.store.record import ShardRecord
from extractor.store.scan import scan

LENGTHS = [5, 9, 3, 7, 7, 2, 11, 4]


def expected_states(dataset: Dataset, tap: str, shard: Shard, without=()) -> torch.Tensor:
    rows = [make_states(tap, dataset.samples[i], dataset.dtype) for i in shard.samples if i not in without]
    data = np.concatenate([np.empty((0, HIDDEN * 2), np.uint8), *rows])
    return torch.from_numpy(data).view(torch.bfloat16).reshape(-1, HIDDEN)


def test_a_committed_shard_holds_every_row_in_planned_order(tmp_path):
    dataset = Dataset(LENGTHS)
    outcome = dataset.write(tmp_path)
    assert outcome.errors == []
    assert sorted(record.index for record in outcome.commits) == [shard.index for shard in dataset.shards]
    outcome.assert_released_once()
    for shard in dataset.shards:
        folder = names.shard_folder(tmp_path, shard.index)
        for tap in TAPS.names:
            stored = load_file(folder / names.tap_file(tap))["states"]
            assert torch.equal(
                stored.view(torch.int16), expected_states(dataset, tap, shard).view(torch.int16)
            )
        tokens = load_file(folder / names.TOKENS)
        assert tokens["sample_index"].tolist() == list(shard.samples)
        assert tokens["input_ids"].tolist() == [
            t for i in shard.samples for t in dataset.samples[i].input_ids.tolist()
        ]
        assert tokens["loss_mask"].tolist() == [
            t for i in shard.samples for t in dataset.samples[i].loss_mask.tolist()
        ]
        assert tokens["cu_seqlens"].tolist() == np.cumsum([0] + [LENGTHS[i] for i in shard.samples]).tolist()
        assert {name: tokens[name].dtype for name in tokens} == {
            "input_ids": torch.int32,
            "loss_mask": torch.uint8,
            "cu_seqlens": torch.int64,
            "sample_index": torch.int64,
        }


def test_threads_and_interleaving_leave_no_trace(tmp_path):
    dataset = Dataset([7] * 40, geometry=Geometry(max_tokens=16, shard_tokens=60))
    for threads in (1, 2, 9):
        dataset.write(tmp_path / str(threads), threads=threads)
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "9")


@settings(max_examples=25, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_the_split_into_batches_leaves_no_trace_in_a_shard(tmp_path_factory, data, lengths):
    folder = tmp_path_factory.mktemp("batches")
    dataset = Dataset(lengths, geometry=Geometry(max_tokens=9, shard_tokens=1000))
    order = tuple(range(len(lengths)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {len(lengths)})
    reasons = dict.fromkeys(data.draw(st.sets(st.sampled_from(order), max_size=2)), "non_finite")
    for name, edges in (("whole", [0, len(lengths)]), ("split", [0, *cuts])):
        batches = tuple(order[a:b] for a, b in itertools.pairwise(edges) if a < b)
        dataset.shards = [Shard(0, batches, sum(lengths))]
        outcome = dataset.write(folder / name, reasons=reasons)
        assert outcome.errors == []
        outcome.assert_released_once()
    assert tree(folder / "whole") == tree(folder / "split")


def test_the_record_says_what_the_shard_holds(tmp_path):
    dataset = Dataset([3, 2])
    (record,) = dataset.write(tmp_path).commits
    assert isinstance(record, ShardRecord)
    assert (record.num_samples, record.num_tokens, record.num_finite_tokens) == (2, 5, 5)
    assert record.num_supervised_tokens == sum(int(s.loss_mask.sum()) for s in dataset.samples)
    assert record.fingerprint == dataset.fingerprint
    assert record.geometry == dataset.geometry
    assert [tap.name for tap in record.taps] == ["layer_001", "layer_003", "layer_005", "final"]
    folder = names.shard_folder(tmp_path, 0)
    assert {p.name for p in folder.iterdir()} == {*record.files, names.RECORD}
    assert record.num_bytes == sum((folder / name).stat().st_size for name in record.files)


def test_samples_with_a_verdict_lose_their_rows_and_are_listed(tmp_path):
    dataset = Dataset([4] * 10, geometry=Geometry(max_tokens=16, shard_tokens=40))
    reasons = {3: "non_finite", 7: "non_finite", 9: "all_zero"}
    outcome = dataset.write(tmp_path, reasons=reasons)
    (record,) = outcome.commits
    assert [(q.sample_index, q.sample_id, q.reason) for q in record.quarantined] == [
        (3, "id-3", "non_finite"),
        (7, "id-7", "non_finite"),
        (9, "id-9", "all_zero"),
    ]
    (shard,) = dataset.shards
    folder = names.shard_folder(tmp_path, 0)
    for tap in TAPS.names:
        stored = load_file(folder / names.tap_file(tap))["states"]
        assert torch.equal(
            stored.view(torch.int16), expected_states(dataset, tap, shard, reasons).view(torch.int16)
        )
    assert load_file(folder / names.TOKENS)["sample_index"].tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert scan(tmp_path, dataset.shards, dataset.fingerprint, checksums=True).to_do == ()


def test_a_shard_of_quarantined_samples_alone_is_committed_with_no_rows(tmp_path):
    dataset = Dataset([4, 5])
    outcome = dataset.write(tmp_path, reasons={0: "all_zero", 1: "non_finite"})
    (record,) = outcome.commits
    assert (record.num_samples, record.num_tokens, len(record.quarantined)) == (0, 0, 2)
    assert load_file(names.shard_folder(tmp_path, 0) / "final.safetensors")["states"].shape == (0, HIDDEN)
    assert scan(tmp_path, dataset.shards, dataset.fingerprint, checksums=True).to_do == ()


class TickBlock(FakeBlock):
    """Its rows tell when they were asked for."""

    def rows(self, tap: str) -> memoryview:
        with ORDER_LOCK:
            ORDER.append((tap, self.samples[0].index))
        return super().rows(tap)


ORDER: list[tuple[str, int]] = []
ORDER_LOCK = threading.Lock()


def test_lanes_keep_their_order_under_many_threads(tmp_path):
    ORDER.clear()
    dataset = Dataset([8] * 60, geometry=Geometry(max_tokens=8, shard_tokens=480))
    (shard,) = dataset.shards
    outcome = Outcome()
    pool = WriterPool(12, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, shard))
    for batch in shard.batches:
        block = TickBlock([dataset.samples[i] for i in batch], TAPS.names)
        outcome.blocks.append(block)
        writer.submit(block, block.samples)
    writer.finish()
    pool.close()
    assert len(outcome.commits) == 1
    for tap in TAPS.names:
        assert [first for name, first in ORDER if name == tap] == list(shard.samples)
    outcome.assert_released_once()


def test_a_shard_is_committed_while_an_earlier_one_is_still_open(tmp_path):
    dataset = Dataset([8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    outcome = Outcome()
    done = threading.Event()

    def commit(record):
        outcome.commit(record)
        done.set()

    pool = WriterPool(2, commit, outcome.error)
    first = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    outcome.blocks = dataset.blocks(dataset.shards[0])
    first.submit(outcome.blocks[0], outcome.blocks[0].samples)
    dataset.write_shard(pool, outcome, tmp_path, dataset.shards[1])
    assert done.wait(30)
    assert [record.index for record in outcome.commits] == [1]
    first.submit(outcome.blocks[1], outcome.blocks[1].samples)
    first.finish()
    pool.close()
    assert [record.index for record in outcome.commits] == [1, 0]
    outcome.assert_released_once()


def test_submit_and_finish_do_not_wait_for_the_copy(tmp_path):
    dataset = Dataset([8])
    outcome = Outcome()
    pool = WriterPool(1, outcome.commit, outcome.error)
    (block,) = outcome.blocks = dataset.blocks(dataset.shards[0])
    block.gate = threading.Event()
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    writer.submit(block, block.samples)
    writer.finish()
    assert (outcome.commits, block.releases) == ([], 0)
    block.gate.set()
    pool.close()
    assert len(outcome.commits) == 1


@pytest.mark.parametrize(
    ("method", "contains"),
    [
        ("make_folder", ""),
        ("create", "layer_003"),
        ("allocate", "final"),
        ("write_at", "layer_005"),
        ("sync", "layer_001"),
        ("close", "final"),
        ("create", "tokens"),
        ("write_at", "tokens"),
        ("sync", "tokens"),
        ("create", "shard.json"),
        ("write_at", "shard.json"),
        ("sync", "shard.json"),
        ("sync_folder", ".part-"),
        ("rename", ".part-"),
        ("sync_folder", "shards"),
    ],
)
def test_an_error_at_any_call_discards_the_shard_and_is_reported_once(tmp_path, method, contains):
    dataset = Dataset([8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=24))
    files = FaultyFileSystem(fail_on(method, contains, times=1))
    outcome = dataset.write(tmp_path, files=files)
    assert outcome.commits == []
    ((index, error),) = outcome.errors
    assert index == 0
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert error.filename is not None
    outcome.assert_released_once()
    found = scan(tmp_path, dataset.shards, dataset.fingerprint)
    assert (found.missing, found.parts, found.bad) == ((0,), (), {})


def test_a_disk_that_is_full_at_any_byte_never_leaves_a_shard(tmp_path):
    dataset = Dataset([8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    probe = FaultyFileSystem(no_fault)
    dataset.write(tmp_path / "probe", files=probe)
    total = sum(call.num_bytes for call in probe.calls if call.name == "write_at")
    for capacity in (*range(0, total, 1009), total - 1):
        output = tmp_path / str(capacity)
        outcome = dataset.write(output, files=FaultyFileSystem(full_after(capacity)), with_manifest=False)
        assert outcome.commits == []
        assert [error.errno for _, error in outcome.errors] == [errno.ENOSPC]
        assert list((output / "shards").iterdir()) == []
        outcome.assert_released_once()
    assert len(dataset.write(tmp_path / "fits", files=FaultyFileSystem(full_after(total))).commits) == 1


def test_only_the_shard_that_failed_is_missing(tmp_path):
    dataset = Dataset([8] * 10, geometry=Geometry(max_tokens=8, shard_tokens=8))
    outcome = dataset.write(tmp_path, files=FaultyFileSystem(fail_on("write_at", "000003.part")))
    assert [index for index, _ in outcome.errors] == [3]
    assert sorted(record.index for record in outcome.commits) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert scan(tmp_path, dataset.shards, dataset.fingerprint).to_do == (3,)
    outcome.assert_released_once()


def test_a_shard_that_failed_once_is_written_by_a_second_try_from_on_error(tmp_path):
    dataset = Dataset([8] * 10, geometry=Geometry(max_tokens=8, shard_tokens=8))
    outcome = Outcome()
    retried = threading.Event()

    def retry(index, error):
        outcome.error(index, error)
        dataset.write_shard(pool, outcome, tmp_path, dataset.shards[index])
        retried.set()

    files = FaultyFileSystem(fail_on("sync", "000003.part", times=1))
    pool = WriterPool(4, outcome.commit, retry, files=files)
    for shard in dataset.shards:
        dataset.write_shard(pool, outcome, tmp_path, shard)
    assert retried.wait(30)
    pool.close()
    assert [index for index, _ in outcome.errors] == [3]
    assert scan(tmp_path, dataset.shards, dataset.fingerprint, checksums=True).to_do == ()
    outcome.assert_released_once()


def test_a_part_folder_that_cannot_be_removed_is_still_reported_and_left_for_the_scan(tmp_path):
    dataset = Dataset([8])
    rules = (fail_on("sync"), fail_on("remove_tree", code=errno.EROFS))
    armed = threading.Event()

    def rule(call):
        rules[0](call)
        if armed.is_set():
            rules[1](call)
        if call.name == "create":
            armed.set()

    files = FaultyFileSystem(rule)
    outcome = dataset.write(tmp_path, files=files)
    assert [error.errno for _, error in outcome.errors] == [errno.EIO]
    found = scan(tmp_path, dataset.shards, dataset.fingerprint)
    assert found.missing == (0,)
    assert [part.name for part in found.parts] == ["000000.part-0"]
    files.close_all()


def test_batches_after_a_failure_are_dropped_and_released(tmp_path):
    dataset = Dataset([8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=24))
    outcome = Outcome()
    failed = threading.Event()

    def report(index, error):
        outcome.error(index, error)
        failed.set()

    pool = WriterPool(2, outcome.commit, report, files=FaultyFileSystem(fail_on("create")))
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    outcome.blocks = dataset.blocks(dataset.shards[0])
    writer.submit(outcome.blocks[0], outcome.blocks[0].samples)
    assert failed.wait(30)
    for block in outcome.blocks[1:]:
        writer.submit(block, block.samples)
    writer.finish()
    pool.close()
    assert len(outcome.errors) == 1
    assert outcome.commits == []
    outcome.assert_released_once()
    assert all(block.waits == 1 for block in outcome.blocks)


def test_a_copy_that_fails_fails_the_shard_and_not_the_thread(tmp_path):
    dataset = Dataset([8, 8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    outcome = Outcome()
    pool = WriterPool(1, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    for number, block in enumerate(dataset.blocks(dataset.shards[0])):
        block.wait_error = RuntimeError("device lost") if number == 0 else None
        outcome.blocks.append(block)
        writer.submit(block, block.samples)
    writer.finish()
    dataset.write_shard(pool, outcome, tmp_path, dataset.shards[1])
    pool.close()
    assert [(index, str(error)) for index, error in outcome.errors] == [(0, "device lost")]
    assert [record.index for record in outcome.commits] == [1]
    outcome.assert_released_once()


class LyingBlock(FakeBlock):
    """Has one row fewer than it says."""

    def rows(self, tap: str) -> memoryview:
        return super().rows(tap)[: -HIDDEN * 2]


class MuteBlock(FakeBlock):
    """Has no verdicts."""

    def verdicts(self) -> list[str | None]:
        return []


@pytest.mark.parametrize(
    ("kind", "words"), [(LyingBlock, "for 8 rows of 16 bytes"), (MuteBlock, "0 verdicts")]
)
def test_a_block_that_does_not_fit_its_samples_fails_the_shard(tmp_path, kind, words):
    dataset = Dataset([8])
    outcome = Outcome()
    pool = WriterPool(2, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    block = kind([dataset.samples[0]], TAPS.names)
    writer.submit(block, block.samples)
    writer.finish()
    pool.close()
    ((_, error),) = outcome.errors
    assert words in str(error)
    assert block.releases == 1


def test_samples_other_than_planned_are_never_committed(tmp_path):
    dataset = Dataset([8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    outcome = Outcome()
    pool = WriterPool(2, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    block = dataset.blocks(dataset.shards[0])[0]
    writer.submit(block, block.samples)
    writer.finish()
    pool.close()
    ((_, error),) = outcome.errors
    assert "1 samples came, not the 2 planned ones" in str(error)
    assert list(tmp_path.glob("shards/*")) == []


def test_a_batch_of_the_wrong_size_or_type_is_not_taken(tmp_path):
    dataset = Dataset([8, 4])
    outcome = Outcome()
    pool = WriterPool(1, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    block = FakeBlock([dataset.samples[0]], TAPS.names)
    with pytest.raises(BugError, match="8 rows for samples of 4 tokens"):
        writer.submit(block, [dataset.samples[1]])
    wide = FakeBlock([dataset.samples[0]], TAPS.names)
    wide.samples[0] = type(wide.samples[0])(0, "x", np.zeros(8, np.int64), np.zeros(8, np.uint8))
    with pytest.raises(BugError, match="expected int32"):
        writer.submit(wide, wide.samples)
    pool.close()
    assert block.releases == 0


def test_an_abandoned_shard_leaves_nothing_and_reports_nothing(tmp_path):
    dataset = Dataset([8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    outcome = Outcome()
    pool = WriterPool(2, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    block = dataset.blocks(dataset.shards[0])[0]
    writer.submit(block, block.samples)
    writer.abandon()
    again = dataset.blocks(dataset.shards[0])
    outcome.blocks = [block, *again]
    second = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    for other in again:
        second.submit(other, other.samples)
    second.finish()
    pool.close()
    assert outcome.errors == []
    assert [record.index for record in outcome.commits] == [0]
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["000000"]
    outcome.assert_released_once()


def test_close_abandons_a_shard_that_was_never_finished(tmp_path):
    dataset = Dataset([8, 8], geometry=Geometry(max_tokens=8, shard_tokens=16))
    outcome = Outcome()
    pool = WriterPool(2, outcome.commit, outcome.error)
    writer = pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))
    outcome.blocks = dataset.blocks(dataset.shards[0])
    writer.submit(outcome.blocks[0], outcome.blocks[0].samples)
    outcome.blocks.pop()
    pool.close()
    outcome.assert_released_once()
    assert list(tmp_path.glob("shards/*")) == []
    with pytest.raises(BugError, match="after close"):
        pool.open_shard(dataset.spec(tmp_path, dataset.shards[0]))


def test_a_callback_that_raises_is_reported_and_does_not_stop_the_pool(tmp_path):
    dataset = Dataset([8, 8], geometry=Geometry(max_tokens=8, shard_tokens=8))
    outcome = Outcome()

    def commit(record):
        outcome.commit(record)
        if record.index == 0:
            raise ValueError("the channel is closed")

    pool = WriterPool(1, commit, outcome.error)
    for shard in dataset.shards:
        dataset.write_shard(pool, outcome, tmp_path, shard)
    pool.close()
    assert [record.index for record in outcome.commits] == [0, 1]
    assert [(index, str(error)) for index, error in outcome.errors] == [(0, "the channel is closed")]


def test_nothing_is_renamed_across_folders_or_written_outside_the_output(tmp_path):
    files = FaultyFileSystem(no_fault)
    Dataset([8]).write(tmp_path / "out", files=files)
    assert all(call.path.startswith(str(tmp_path / "out")) for call in files.calls)
    assert [call.path for call in files.calls if call.name == "rename"] == [
        str(tmp_path / "out" / "shards" / "000000.part-0")
    ]


def test_every_file_is_synced_before_the_folder_is_renamed(tmp_path):
    files = FaultyFileSystem(no_fault)
    Dataset([8]).write(tmp_path, files=files)
    calls = [(call.name, call.path.rpartition("/")[2]) for call in files.calls]
    rename = calls.index(("rename", "000000.part-0"))
    synced = {name for kind, name in calls[:rename] if kind == "sync"}
    assert synced == {*(names.tap_file(tap) for tap in TAPS.names), names.TOKENS, names.RECORD}
    assert calls[rename - 1][0] == "exists"
    assert calls[rename - 2] == ("sync_folder", "000000.part-0")
    assert calls[rename + 1] == ("sync_folder", "shards")
