"""Writers that die by a real SIGKILL."""

import multiprocessing
import random
import signal

import pytest
from store_children import write_until_killed
from store_support import kill_dataset, tree

from extractor.store import names
from extractor.store.faults import FaultyFileSystem, no_fault
from extractor.store.listing import clean_parts
from extractor.store.scan import scan
from extractor.store.verify import check

NUM_KILLS = 50


@pytest.fixture(scope="module")
def forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["store_children", "store_support"])
    return context


def test_fifty_kills_at_random_points_leave_no_damaged_file_under_a_final_name(tmp_path, forkserver):
    dataset = kill_dataset()
    probe = FaultyFileSystem(no_fault)
    dataset.write(tmp_path / "whole", files=probe)
    shuffled = random.Random(11)
    seen = set()
    for attempt in range(NUM_KILLS):
        output = tmp_path / str(attempt)
        number = shuffled.randrange(len(probe.calls))
        child = forkserver.Process(
            target=write_until_killed, args=(str(output), number, shuffled.randrange(10**6))
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        found = scan(output, dataset.shards, dataset.fingerprint, checksums=True)
        assert found.bad == {}
        seen.add(len(found.done))
        for index in found.done:
            assert tree(names.shard_folder(output, index)) == tree(
                names.shard_folder(tmp_path / "whole", index)
            )
        clean_parts(output)
        dataset.write(output, only=found.to_do)
        assert tree(output) == tree(tmp_path / "whole")
    assert len(seen) > 2, f"all kills left the same number of shards: {seen}"


def test_one_output_survives_many_kills_with_the_bytes_of_an_undisturbed_run(tmp_path, forkserver):
    dataset = kill_dataset()
    dataset.write(tmp_path / "whole")
    output = tmp_path / "out"
    for number in range(5, 200, 13):
        child = forkserver.Process(target=write_until_killed, args=(str(output), number, number))
        child.start()
        child.join(60)
        found = scan(output, dataset.shards, dataset.fingerprint, checksums=True)
        assert found.bad == {}
    clean_parts(output)
    dataset.write(output, only=scan(output, dataset.shards, dataset.fingerprint).to_do)
    assert tree(output) == tree(tmp_path / "whole")
    assert check(output).is_complete
