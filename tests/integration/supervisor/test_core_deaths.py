"""Ranks that die, say that they cannot go on, or say what nobody can understand."""

import pytest
from played_run import PlayedRun

from extractor import protocol
from extractor.protocol.states import Depth, Reason, State
from extractor.supervisor import core, replica, work
from extractor.supervisor.core import MAX_BLAMELESS_DEATHS
from extractor.supervisor.queue import MAX_ATTEMPTS

pytestmark = pytest.mark.asyncio


async def test_a_rank_that_dies_while_it_loads_is_started_again(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        run.launcher.rank.die()
        await run.until(lambda: len(run.launcher.ranks) == 2, "second rank")
        run.launcher.rank.load()
        await run.finish()

    assert run.state == State.FINISHED
    assert run.supervisor.restarts == 1
    assert [event["shard"] for event in run.events("rank_died")] == [None]
    assert run.events("shard_retry") == []


async def test_the_third_death_before_any_batch_ends_the_run(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.on_start = lambda rank: rank.die()
        run.start()
        await run.end()

    assert run.state == State.FAILED
    assert len(run.launcher.ranks) == MAX_BLAMELESS_DEATHS
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("worker_died", 7)
    assert run.supervisor.work.queue.failed == {}
    assert run.states() == ["created", "preparing", "loading", "draining", "failed"]


async def test_deaths_are_counted_anew_after_a_batch(short_path):
    async with PlayedRun(short_path, shards=1) as run:
        fates = iter([True, True, False, True, True, False])
        run.launcher.on_start = lambda rank: rank.die() if next(fates) else None
        run.start()
        await run.until(lambda: len(run.launcher.ranks) == 3, "third rank")
        run.launcher.allow(1)
        await run.until(lambda: run.supervisor.work and run.supervisor.work.tokens_done, "batch")
        run.launcher.rank.die()
        await run.finish()

    assert run.state == State.FINISHED
    assert len(run.launcher.ranks) == 6


async def test_a_rank_is_started_again_after_a_wait_that_grows(short_path, monkeypatch):
    monkeypatch.setattr(core, "BACKOFF_S", (100.0, 200.0, 400.0))
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        for number, wait_s in ((1, 100.0), (2, 200.0)):
            await run.until(lambda number=number: len(run.launcher.ranks) == number, f"rank {number}")
            run.launcher.rank.die()
            await run.until(lambda number=number: run.supervisor.restarts == number, f"death {number}")
            await run.until(lambda: run.supervisor.restart_in_s, "wait")
            assert wait_s - DEADLINE_S < run.supervisor.restart_in_s <= wait_s
            assert run.state == State.LOADING
            run.skip(wait_s - DEADLINE_S)
            assert len(run.launcher.ranks) == number
            run.skip(DEADLINE_S)
        await run.until(lambda: len(run.launcher.ranks) == 3, "third rank")
        run.launcher.rank.load()
        await run.finish()

    assert run.state == State.FINISHED


async def test_the_wait_grows_from_shard_to_shard_until_one_is_done(short_path, monkeypatch):
    monkeypatch.setattr(core, "BACKOFF_S", (100.0, 200.0, 400.0))
    waits = []

    async def die(run):
        await run.until(
            lambda: run.supervisor.engine and run.supervisor.engine.started_shard is not None, "shard"
        )
        rank = run.launcher.rank
        rank.die()
        await run.until(lambda: run.supervisor.restart_in_s, "wait")
        waits.append(run.supervisor.restart_in_s)
        run.skip(waits[-1])
        await run.until(lambda: run.launcher.rank is not rank, "next rank")

    async with PlayedRun(short_path) as run:
        run.start()
        await die(run)
        await die(run)
        run.launcher.allow(run.launcher.batches)
        await run.until(lambda: run.events("shard_done"), "done shard")
        await die(run)
        await run.finish()

    assert [round(wait_s, -2) for wait_s in waits] == [100, 200, 100]
    assert run.state == State.FINISHED


DEADLINE_S = 20.0


async def test_a_run_that_waits_for_a_restart_is_paused_and_stopped_at_once(short_path, monkeypatch):
    monkeypatch.setattr(core, "BACKOFF_S", (1000.0,))
    async with PlayedRun(short_path) as run:
        run.launcher.on_start = lambda rank: rank.die()
        run.start()
        await run.until(lambda: run.supervisor.restarts, "death")
        await run.until(lambda: run.supervisor.engine is None, "end of the rank")
        run.pause(Depth.HOLD)
        assert run.state == State.UNLOADED
        run.supervisor.request_stop(core.Stop.DRAIN, by="ops1")
        await run.end()

    assert run.state == State.STOPPED
    assert len(run.launcher.ranks) == 1


async def test_a_death_in_a_shard_costs_that_shard_an_attempt_and_the_other_one_none(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        assert run.supervisor.work.queue.leased == (0, 1)
        run.launcher.rank.die()
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert run.state == State.FINISHED
    assert [event["shard"] for event in run.events("shard_retry")] == [0]
    assert run.events("rank_died")[0]["shard"] == 0
    assert sorted(run.launcher.committed) == [0, 1, 2, 3]
    assert run.supervisor.work.tokens_done == sum(run.job.shard_tokens)
    assert "loading" in run.states()[run.states().index("running") :]


async def test_a_shard_that_kills_three_ranks_is_given_up_and_the_others_are_done(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.closed_to.add(0)
        run.launcher.allow()
        run.start()
        for number in range(1, MAX_ATTEMPTS + 1):
            await run.until(lambda number=number: len(run.launcher.ranks) == number, f"rank {number}")
            await run.shard_in_flight(0)
            run.launcher.rank.die()
            await run.until(lambda number=number: run.supervisor.restarts == number, f"death {number}")
        await run.end()

    assert run.state == State.FAILED
    assert run.cells == "xddd"
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("shards_failed", 7)
    assert "the first is shard 0" in run.supervisor.failure.message
    assert len(run.events("shard_retry")) == MAX_ATTEMPTS - 1
    assert len(run.events("shard_failed")) == 1
    assert run.tasks.conclusions == 1
    # The others were never to blame.
    assert run.supervisor.work.queue._attempts == {0: MAX_ATTEMPTS}


async def test_a_shard_that_cannot_be_written_three_times_is_given_up_without_a_restart(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.shard_errors[1].extend([("OSError: bad", "EIO")] * MAX_ATTEMPTS)
        run.start()
        await run.finish()

    assert run.state == State.FAILED
    assert run.cells == "dxdd"
    assert len(run.launcher.ranks) == 1
    assert run.supervisor.failure.exit_code == 7


async def test_a_rank_that_dies_while_it_is_held_is_not_started_before_the_resume(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD)
        await run.until(lambda: protocol.Hold() in run.launcher.rank.heard, "hold at the rank")
        run.launcher.allow(1)
        await run.to_state(State.HELD)
        run.launcher.rank.die()
        await run.to_state(State.UNLOADED)
        assert len(run.launcher.ranks) == 1
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED
    assert sorted(run.launcher.committed) == [0, 1, 2, 3]


async def test_a_crash_that_is_reported_after_the_load_is_a_death(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.launcher.rank.fail("crash", "RuntimeError: CUDA error")
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert run.state == State.FINISHED
    assert "CUDA error" in run.events("rank_died")[0]["error"]
    assert [event["shard"] for event in run.events("shard_retry")] == [0]


async def test_a_crash_after_a_load_that_was_to_be_broken_off_is_a_death(short_path, monkeypatch):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        # The kill comes late: the rank gets ready and crashes before.
        monkeypatch.setattr(run.launcher.rank, "kill", lambda **_: None)
        run.pause(Depth.UNLOAD)
        await run.to_state(State.UNLOADING)
        run.launcher.rank.load()
        await run.until(lambda: run.events("ready"), "ready")
        run.launcher.rank.fail("crash", "RuntimeError: CUDA error")
        await run.to_state(State.UNLOADED)
        assert "CUDA error" in run.events("rank_died")[0]["error"]
        run.launcher.may_load = True
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED


@pytest.mark.parametrize(
    ("code", "exit_code", "is_loaded"),
    [("crash", 7, False), ("proof", 7, False), ("capture", 7, True), ("access", 5, True)],
)
async def test_what_is_the_same_for_every_shard_ends_the_run_at_once(short_path, code, exit_code, is_loaded):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = is_loaded
        run.start()
        if is_loaded:
            await run.shard_in_flight(0)
        else:
            await run.until(lambda: run.launcher.ranks, "rank")
        run.launcher.rank.fail(code, "it broke", exit_code)
        await run.end()

    assert run.state == State.FAILED
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == (code, exit_code)
    assert len(run.launcher.ranks) == 1
    assert run.events("rank_died") == []


async def test_a_rank_that_leaves_without_being_told_to_has_died(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.launcher.rank._do(lambda: run.launcher.rank._leave(0))
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert "without being told" in run.events("rank_died")[0]["error"]
    assert run.state == State.FINISHED


async def test_a_rank_that_speaks_another_protocol_is_ended_and_named(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.launcher.rank.say(protocol.Hello(99, 1, 0.0))
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert "protocol 99" in run.events("rank_died")[0]["error"]
    assert run.launcher.ranks[0].kills == 1


async def test_a_rank_that_says_what_is_no_report_has_died_and_why_is_told(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.launcher.rank.say_raw(b"\xc1 no report")
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert "cannot be understood" in run.events("rank_died")[0]["error"]
    assert run.state == State.FINISHED


async def test_what_is_said_of_a_shard_that_is_not_in_hand_changes_nothing(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        rank = run.launcher.rank
        rank.say(
            protocol.ShardDone(3, 1, 30, 30, 3000, 0),
            protocol.ShardFailed(3, "stale", None),
            protocol.ShardStarted(0),
            protocol.BatchDone(3, 0, 7),
        )
        await run.until(lambda: run.supervisor.engine.batch == (3, 0), "reports")
        assert run.supervisor.work.tokens_done == 0
        assert run.cells == "r..."
        await run.finish()

    assert run.state == State.FINISHED
    assert run.events("rank_died", "shard_retry") == []
    assert run.launcher.committed == [0, 1, 2, 3]


async def test_an_error_of_ours_in_a_report_ends_the_run_and_is_named(short_path, monkeypatch, capsys):
    async with PlayedRun(short_path) as run:

        def broken(_, report):
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(work.Work, "complete", broken)
        run.start()
        await run.finish()

    assert run.state == State.FAILED
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("bug", 1)
    assert "ZeroDivisionError: ours" in run.supervisor.failure.message
    assert "Traceback" in capsys.readouterr().err


async def test_a_rank_that_cannot_be_started_ends_the_run(short_path, monkeypatch):
    def refuse():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replica, "make_socket_folder", refuse)
    async with PlayedRun(short_path) as run:
        run.start()
        await run.end()

    assert run.state == State.FAILED
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("not_started", 7)


async def test_a_shard_is_not_blamed_for_a_death_before_it_begins_anew(short_path):
    async with PlayedRun(short_path, shards=1) as run:
        run.launcher.shard_errors[0].append(("OSError: full", "ENOSPC"))
        run.launcher.allow(3)
        run.start()
        await run.to_held()
        rank = run.launcher.rank
        # Held before it begins the shard that it is given once more.
        rank._do(lambda: setattr(rank, "_owes_held", False))
        rank._do(lambda: setattr(rank, "_step", lambda: False))
        run.resume(Reason.DISK)
        await run.until(lambda: rank.heard.count(protocol.WorkShard(0)) == 2, "shard once more")
        rank.die()
        await run.until(lambda: run.events("rank_died"), "death")
        await run.finish()

    assert run.events("shard_retry", "shard_failed") == []
    assert run.state == State.FINISHED


async def test_a_wait_for_a_restart_that_ends_between_two_looks_is_noticed(short_path, monkeypatch):
    monkeypatch.setattr(core, "BACKOFF_S", (1000.0,))
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        run.launcher.rank.die()
        await run.until(lambda: run.supervisor.restarts and run.supervisor.engine is None, "death")
        await run.until(lambda: not run.supervisor._wake.is_set(), "look")
        due = run.supervisor._not_before
        times = iter([due - 0.001])
        monkeypatch.setattr(run.supervisor, "_clock", lambda: next(times, due))
        run.supervisor.changed()
        await run.until(lambda: len(run.launcher.ranks) == 2, "second rank")
        run.launcher.rank.load()
        await run.finish()

    assert run.state == State.FINISHED
