"""A shard that several ranks write together: the same bytes as from one, or nothing of it."""

import errno
import threading
from pathlib import Path

import msgspec
import pytest
from store_support import TAPS, Dataset, FakeBlock, Outcome, tree

from extractor.errors import BugError, RanksDisagreeError
from extractor.plan import Geometry
from extractor.store import names
from extractor.store.faults import FaultyFileSystem, Killed, fail_on, full_after, kill_at, no_fault
from extractor.store.pipeline import WriterPool
from extractor.store.scan import scan
from extractor.store.shares import Share

WAIT_S = 30
RANKS = 2


class Ranks:
    """The pools of the ranks of a replica; shares go from one to the other as over the wire."""

    def __init__(self, dataset, output, *, num_ranks=RANKS, files=None, hold_back=False):
        self.dataset = dataset
        self.output = output
        self.num_ranks = num_ranks
        self.outcomes = [Outcome() for _ in range(num_ranks)]
        self.shares = []
        self.shared = threading.Condition()
        self.hold_back = hold_back
        self.files = files or [None] * num_ranks
        self.pools = [
            WriterPool(
                2, outcome.commit, outcome.error, on_share=self.hand_over if rank else None, files=files
            )
            for rank, (outcome, files) in enumerate(zip(self.outcomes, self.files, strict=True))
        ]

    def hand_over(self, share):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=Share)
        with self.shared:
            self.shares.append(sent)
            self.shared.notify_all()
        if not self.hold_back:
            self.pools[0].take_share(sent)

    def wait_shares(self, number=1):
        with self.shared:
            assert self.shared.wait_for(lambda: len(self.shares) >= number, WAIT_S)
        return self.shares

    def open(self, rank, shard, **changes):
        """The writer of one rank, with all its batches submitted."""
        spec = self.dataset.spec(self.output, shard, rank=rank, num_ranks=self.num_ranks)
        writer = self.pools[rank].open_shard(spec)
        for batch in shard.batches:
            samples = [self.dataset.samples[index] for index in batch]
            block = FakeBlock(samples, tuple(tap.name for tap in spec.own_taps), **changes)
            self.outcomes[rank].blocks.append(block)
            writer.submit(block, block.samples)
        return writer

    def write(self, shard, **changes_of_rank_1):
        for rank in range(self.num_ranks):
            self.open(rank, shard, **(changes_of_rank_1 if rank == 1 else {})).finish()

    def close(self):
        # Followers first, as the leader waits for what they hand over.
        for pool in reversed(self.pools):
            pool.close()
        for outcome in self.outcomes:
            outcome.assert_released_once()

    @property
    def commits(self):
        return self.outcomes[0].commits

    @property
    def errors(self):
        return [error for _, error in self.outcomes[0].errors]


@pytest.fixture
def dataset():
    return Dataset([5, 9, 3, 7, 7, 2], geometry=Geometry(max_tokens=16, shard_tokens=100))


@pytest.fixture
def shard(dataset):
    (shard,) = dataset.shards
    assert len(shard.batches) > 1
    return shard


def left(output):
    """Names below `shards`, the final one apart."""
    folder = output / names.SHARDS
    return (
        sorted(entry.name for entry in folder.iterdir() if names.is_part(entry.name))
        if folder.exists()
        else []
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("reasons", [{}, {1: "non_finite", 5: "all_zero"}])
def test_the_bytes_are_those_of_one_rank(tmp_path, dataset, shard, num_ranks, reasons):
    dataset.write(tmp_path / "one", reasons=reasons)
    ranks = Ranks(dataset, tmp_path / "many", num_ranks=num_ranks)
    for rank in range(num_ranks):
        ranks.open(rank, shard, reasons=reasons).finish()
    ranks.close()
    assert ranks.errors == []
    assert len(ranks.commits) == 1
    assert tree(tmp_path / "many" / "shards") == tree(tmp_path / "one" / "shards")
    assert left(tmp_path / "many") == []
    assert scan(tmp_path / "many", dataset.shards, dataset.fingerprint, checksums=True).to_do == ()


def test_each_rank_writes_every_other_tap(tmp_path, dataset, shard):
    files = [FaultyFileSystem(no_fault) for _ in range(RANKS)]
    ranks = Ranks(dataset, tmp_path, files=files)
    ranks.write(shard)
    ranks.close()
    created = [
        {call.path.rpartition("/")[2] for call in own.calls if call.name == "create"}
        - {names.TOKENS, names.RECORD}
        for own in files
    ]
    files_of = [names.tap_file(tap) for tap in TAPS.names]
    assert created == [set(files_of[0::2]), set(files_of[1::2])]


def test_a_shard_is_published_when_the_last_share_has_come(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path, hold_back=True)
    ranks.write(shard)
    (share,) = ranks.wait_shares()
    assert ranks.commits == []
    assert not names.shard_folder(tmp_path, 0).exists()
    ranks.pools[0].take_share(share)
    ranks.close()
    assert len(ranks.commits) == 1


def test_closing_waits_for_the_share_of_a_finished_shard(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path, hold_back=True)
    ranks.write(shard)
    (share,) = ranks.wait_shares()
    closing = threading.Thread(target=ranks.pools[0].close, daemon=True)
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive()
    ranks.pools[0].take_share(share)
    closing.join(timeout=WAIT_S)
    assert len(ranks.commits) == 1
    ranks.close()


def test_a_share_may_come_before_the_own_files_are_complete(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path)
    own = ranks.open(0, shard)
    ranks.open(1, shard).finish()
    ranks.wait_shares()
    assert ranks.commits == []
    own.finish()
    ranks.close()
    assert len(ranks.commits) == 1


def test_a_difference_in_values_names_tap_and_rank_and_keeps_nothing(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path)
    ranks.write(shard, off_in="final")
    ranks.close()
    (error,) = ranks.errors
    assert isinstance(error, RanksDisagreeError)
    assert "ranks disagree: the states of final on rank 1 are not those on rank 0" in error.message
    assert tree(tmp_path) == {}
    assert left(tmp_path) == []


def test_a_difference_in_verdicts_names_the_samples(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path)
    ranks.write(shard, reasons={3: "non_finite"})
    ranks.close()
    (error,) = ranks.errors
    assert isinstance(error, RanksDisagreeError)
    assert "rank 1 leaves out the samples [3], rank 0 []" in error.message
    assert left(tmp_path) == []


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    "method", ["remove_tree", "make_folder", "create", "allocate", "write_at", "sync", "close"]
)
def test_an_error_of_the_disk_on_any_rank_fails_the_shard_and_another_try_succeeds(
    tmp_path, dataset, shard, rank, method
):
    files = [None] * RANKS
    files[rank] = FaultyFileSystem(fail_on(method, ".part-", code=errno.EIO, times=1))
    ranks = Ranks(dataset, tmp_path, files=files)
    ranks.write(shard)
    for pool in ranks.pools[1:]:
        pool.close()
    ranks.pools[0].close()
    (error,) = ranks.errors
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert ".part-0" in str(error.filename)
    assert ("(rank 1)" in str(error)) == (rank == 1)
    assert ranks.commits == []
    assert left(tmp_path) == []

    again = Ranks(dataset, tmp_path)
    again.write(shard)
    again.close()
    assert len(again.commits) == 1


def test_a_retry_in_the_same_processes_has_folders_of_its_own(tmp_path, dataset, shard):
    files = [None, FaultyFileSystem(fail_on("write_at", code=errno.ENOSPC, times=1))]
    ranks = Ranks(dataset, tmp_path, files=files)
    ranks.write(shard)
    ranks.wait_shares()
    ranks.write(shard)
    ranks.close()
    assert [error.errno for error in ranks.errors] == [errno.ENOSPC]
    assert [share.attempt for share in ranks.shares] == [0, 1]
    assert len(ranks.commits) == 1
    assert left(tmp_path) == []


@pytest.mark.parametrize("capacity", [0, 4096, 5000, 9000])
def test_a_full_disk_on_a_follower_keeps_nothing(tmp_path, dataset, shard, capacity):
    ranks = Ranks(dataset, tmp_path, files=[None, FaultyFileSystem(full_after(capacity))])
    ranks.write(shard)
    ranks.close()
    (error,) = ranks.errors
    assert error.errno == errno.ENOSPC
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("contains", ["layer_003", "final"])
def test_a_follower_s_file_that_cannot_be_taken_over_fails_the_shard(tmp_path, dataset, shard, contains):
    ranks = Ranks(dataset, tmp_path, files=[FaultyFileSystem(fail_on("rename", contains)), None])
    ranks.write(shard)
    ranks.close()
    assert [error.errno for error in ranks.errors] == [errno.EIO]
    assert left(tmp_path) == []
    assert tree(tmp_path) == {}


def test_what_is_no_error_of_the_disk_says_what_it_was(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path)
    ranks.write(shard, wait_error=RuntimeError("the device is gone"))
    ranks.close()
    (error,) = ranks.errors
    assert "rank 1: RuntimeError: the device is gone" in str(error)
    assert left(tmp_path) == []


@pytest.mark.parametrize("who", ["both", "leader", "follower"])
def test_an_abandoned_shard_leaves_nothing(tmp_path, dataset, shard, who):
    ranks = Ranks(dataset, tmp_path)
    writers = [ranks.open(rank, shard) for rank in range(RANKS)]
    if who == "leader":
        writers[1].finish()
        ranks.wait_shares()
    for rank, writer in enumerate(writers):
        if who in {"both", ("leader", "follower")[rank]}:
            writer.abandon()
    if who == "follower":
        writers[0].abandon()
    ranks.close()
    assert ranks.errors == []
    assert ranks.commits == []
    assert left(tmp_path) == []


def test_a_share_for_a_shard_that_has_failed_is_removed(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path, hold_back=True, files=[FaultyFileSystem(fail_on("create")), None])
    ranks.write(shard)
    (share,) = ranks.wait_shares()
    ranks.pools[0].close()
    assert [error.errno for error in ranks.errors] == [errno.EIO]
    assert left(tmp_path) == [Path(share.folder).name]
    ranks.pools[0].take_share(share)
    assert left(tmp_path) == []
    ranks.close()


def test_a_second_share_of_a_rank_is_a_bug(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path, hold_back=True)
    own = ranks.open(0, shard)
    ranks.open(1, shard).finish()
    (share,) = ranks.wait_shares()
    ranks.pools[0].take_share(share)
    with pytest.raises(BugError, match="rank 1 came"):
        ranks.pools[0].take_share(share)
    own.finish()
    ranks.close()
    assert len(ranks.commits) == 1


def test_a_rank_without_taps_writes_nothing(tmp_path, dataset, shard):
    ranks = Ranks(dataset, tmp_path, num_ranks=5)
    with pytest.raises(BugError, match="no taps for rank 4"):
        ranks.pools[4].open_shard(dataset.spec(tmp_path, shard, rank=4, num_ranks=5))
    ranks.close()


def count_calls(dataset, shard, folder):
    files = [FaultyFileSystem(no_fault) for _ in range(RANKS)]
    ranks = Ranks(dataset, folder, files=files)
    ranks.write(shard)
    ranks.close()
    return [len(own.calls) for own in files]


def test_a_rank_that_is_killed_at_any_step_leaves_a_whole_shard_or_none(tmp_path, dataset, shard):
    counts = count_calls(dataset, shard, tmp_path / "count")
    for rank, count in enumerate(counts):
        for step in range(count):
            output = tmp_path / f"{rank}-{step}"
            files = [None] * RANKS
            files[rank] = FaultyFileSystem(kill_at(step))
            ranks = Ranks(dataset, output, files=files)
            ranks.write(shard)
            ranks.pools[1].close()
            ranks.pools[0].close()
            files[rank].close_all()
            done = (
                scan(output, dataset.shards, dataset.fingerprint, checksums=True) if output.exists() else None
            )
            is_there = names.shard_folder(output, 0).exists()
            assert is_there == (done is not None and done.to_do == ())
            for error in ranks.errors:
                assert isinstance(error, Killed) or "Killed" in str(error)
