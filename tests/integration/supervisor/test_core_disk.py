"""A disk that is full, or nearly: the run is held, nothing is blamed, and it goes on by itself when there is room."""

import errno

import pytest
from played_run import BYTES_PER_TOKEN, PLENTY, RESERVE_BYTES, PlayedRun

from extractor import protocol
from extractor.errors import DiskSpaceError
from extractor.protocol.states import Depth, Reason, State
from extractor.store import lease, manifest
from extractor.supervisor import core, lease_keeper, pauses
from extractor.supervisor.disk_policy import DISK_ERRORS, DISK_RETRY_S

pytestmark = pytest.mark.asyncio
SHARD_BYTES = 30 * BYTES_PER_TOKEN


def full(*_, **__):
    """What the store raises when the operating system says ENOSPC."""
    error = DiskSpaceError("dataset.json: cannot be written: No space left on device")
    raise error from OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", sorted(DISK_ERRORS))
async def test_a_shard_that_meets_a_full_disk_is_put_back_without_blame_and_the_run_is_held(short_path, name):
    async with PlayedRun(short_path) as run:
        run.launcher.shard_errors[0].append(("OSError: No space left on device", name))
        run.launcher.allow(3)
        run.start()
        await run.to_held()
        assert [(p.reason, p.depth, p.by) for p in run.pauses.pauses] == [(Reason.DISK, Depth.HOLD, "auto")]
        assert "No space left" in run.pauses.pauses[0].note
        assert run.cells[0] == "."
        assert run.supervisor.work.queue.next_pending == 0
        run.launcher.allow()
        run.skip(DISK_RETRY_S - 5)
        assert run.state == State.HELD
        run.skip(10)
        await run.end()

    assert run.state == State.FINISHED
    assert run.supervisor.work.queue._attempts == {}
    assert run.events("shard_retry", "rank_died") == []
    assert [event["reason"] for event in run.events("resumed")] == [Reason.DISK]
    assert run.supervisor.work.tokens_done == sum(run.job.shard_tokens)


async def test_a_held_run_does_not_go_on_while_there_is_no_room(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.shard_errors[0].append(("OSError: full", "ENOSPC"))
        run.launcher.allow(3)
        run.start()
        await run.to_held()
        run.sampler.free_bytes = 0
        run.skip(10 * DISK_RETRY_S)
        await run.until(lambda: not run.supervisor._wake.is_set(), "look")
        assert run.state == State.HELD
        run.sampler.free_bytes = PLENTY
        run.supervisor.changed()
        await run.finish()

    assert run.state == State.FINISHED


async def test_a_disk_that_stays_full_is_tried_again_and_again_without_blame(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.shard_errors[0].extend([("OSError: full", "EDQUOT")] * 5)
        run.launcher.allow()
        run.start()
        for number in range(1, 6):
            await run.until(lambda number=number: len(run.events("paused")) == number, f"pause {number}")
            run.skip(DISK_RETRY_S)
        await run.end()

    assert run.state == State.FINISHED
    assert sorted(run.launcher.committed) == [0, 1, 2, 3]


async def test_the_pause_of_an_operator_is_not_lifted_when_there_is_room_again(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.shard_errors[0].append(("OSError: full", "ENOSPC"))
        run.launcher.allow(3)
        run.start()
        await run.to_held()
        run.pause(Depth.HOLD)
        run.skip(DISK_RETRY_S)
        await run.until(lambda: not run.pauses.has(Reason.DISK), "end of the disk's pause")
        assert [p.reason for p in run.pauses.pauses] == [Reason.OPERATOR]
        assert run.state == State.HELD
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED


async def test_the_run_is_held_before_a_shard_is_handed_out_that_would_touch_the_reserve(short_path):
    async with PlayedRun(short_path) as run:
        run.sampler.free_bytes = RESERVE_BYTES + SHARD_BYTES
        run.start()
        await run.shard_in_flight(0)
        # The second would not fit beside the first.
        assert run.launcher.rank.heard == [protocol.WorkShard(0)]
        run.sampler.free_bytes = RESERVE_BYTES + SHARD_BYTES - 1
        run.launcher.allow()
        await run.to_state(State.HELD)
        assert run.launcher.committed == [0]
        assert run.launcher.rank.heard == [protocol.WorkShard(0), protocol.Hold()]
        assert "output.reserve_bytes" in run.pauses.pauses[0].note
        run.sampler.free_bytes = PLENTY
        run.skip(DISK_RETRY_S)
        await run.end()

    assert run.state == State.FINISHED


async def test_nothing_is_loaded_when_there_is_no_room_from_the_start(short_path):
    async with PlayedRun(short_path) as run:
        run.sampler.free_bytes = RESERVE_BYTES
        run.start()
        await run.to_state(State.UNLOADED)
        assert run.launcher.ranks == []
        run.sampler.free_bytes = None
        run.skip(DISK_RETRY_S)
        await run.finish()

    assert run.state == State.FINISHED


async def test_an_operator_may_resume_at_once_after_making_room(short_path):
    async with PlayedRun(short_path) as run:
        run.sampler.free_bytes = RESERVE_BYTES
        run.start()
        await run.to_state(State.UNLOADED)
        run.sampler.free_bytes = PLENTY
        run.resume(Reason.DISK)
        await run.finish()

    assert run.state == State.FINISHED


async def test_a_full_disk_keeps_the_description_from_being_written_and_holds_the_run(
    short_path, monkeypatch
):
    write = manifest.write
    monkeypatch.setattr(manifest, "write", full)
    async with PlayedRun(short_path) as run:
        run.launcher.allow()
        run.start()
        await run.to_state(State.HELD)
        assert run.launcher.rank.heard == [protocol.Hold()]
        assert run.pauses.has(Reason.DISK)
        monkeypatch.setattr(manifest, "write", write)
        run.skip(DISK_RETRY_S)
        await run.end()

    assert run.state == State.FINISHED
    assert (run.output / "dataset.json").exists()


@pytest.mark.parametrize("method", ["heartbeat", "add_worker"])
async def test_a_lease_that_cannot_be_written_on_a_full_disk_does_not_end_the_run(
    short_path, monkeypatch, method
):
    monkeypatch.setattr(lease_keeper, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(lease.Lease, method, full)
    async with PlayedRun(short_path) as run:
        run.start()
        await run.until(lambda: any("No space left" in str(e) for e in run.events("note")), "note")
        await run.finish()

    assert run.state == State.FINISHED
    # Not a line for every heartbeat.
    assert len([e for e in run.events("note") if "No space left" in e["text"]]) == 1


async def test_no_shard_is_handed_out_while_the_pause_itself_cannot_be_written(short_path, monkeypatch):
    replace = pauses.atomic.replace_file

    def refuse(path, data, **options):
        if path == run.folder.pauses:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, data, **options)

    async with PlayedRun(short_path) as run:
        monkeypatch.setattr(pauses.atomic, "replace_file", refuse)
        run.launcher.shard_errors[0].append(("OSError: full", "ENOSPC"))
        run.launcher.closed_to.add(1)
        run.launcher.allow()
        run.start()
        await run.until(lambda: "could not be recorded" in str(run.events("note")), "note")
        await run.shard_in_flight(1)
        assert run.launcher.rank.heard == [protocol.WorkShard(0), protocol.WorkShard(1)]
        assert "full" in run.supervisor.disk.unrecorded
        monkeypatch.setattr(pauses.atomic, "replace_file", replace)
        run.supervisor.changed()
        await run.until(lambda: run.pauses.has(Reason.DISK), "pause")
        run.launcher.closed_to.clear()
        run.launcher.allow()
        monkeypatch.setattr(pauses.atomic, "replace_file", refuse)
        run.skip(DISK_RETRY_S)
        await run.to_state(State.HELD)
        monkeypatch.setattr(pauses.atomic, "replace_file", replace)
        run.supervisor.changed()
        await run.end()

    assert run.state == State.FINISHED
    assert run.events("rank_died") == []


async def test_parts_that_cannot_be_removed_do_not_end_the_run(short_path, monkeypatch):
    monkeypatch.setattr(core.listing, "clean_parts", full)
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.launcher.rank.die()
        await run.until(lambda: run.supervisor.restarts, "death")
        await run.finish()

    assert run.state == State.FINISHED
