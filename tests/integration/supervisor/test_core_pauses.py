"""Runs from their beginning to their end, and pauses at every moment."""

import asyncio

import pytest
from played_run import PlayedRun

from extractor import protocol
from extractor.protocol.states import Depth, Reason, State
from extractor.supervisor.core import AHEAD

pytestmark = pytest.mark.asyncio


async def test_an_undisturbed_run_goes_through_its_states_and_does_every_shard_in_order(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.allow()
        run.start()
        await run.end()

    assert run.states() == ["created", "preparing", "loading", "running", "finished"]
    kinds = [event["event"] for event in run.events() if event["event"] != "state"]
    assert kinds == ["note", "prepared", "started", "ready", *["shard_done"] * 4, "finished"]
    assert run.launcher.committed == [0, 1, 2, 3]
    assert run.cells == "dddd"
    assert len(run.launcher.ranks) == 1
    assert run.launcher.rank.heard[-1] == protocol.Finish()
    assert run.supervisor.work.tokens_done == sum(run.job.shard_tokens)
    assert run.supervisor.work.done_bytes == run.supervisor.work.started_bytes == 4 * 3000
    assert run.supervisor.peak_rss_bytes == 12345
    assert run.sampler.ranks == {"GPU-1": None}
    assert (run.output / "dataset.json").exists()


async def test_a_run_with_nothing_to_do_finishes_without_a_rank(short_path):
    async with PlayedRun(short_path, shards=2, done=(0, 1)) as run:
        run.start()
        await run.end()

    assert run.states() == ["created", "preparing", "running", "finished"]
    assert run.launcher.ranks == []
    assert run.tasks.conclusions == 1


async def test_only_the_shards_that_are_missing_are_computed(short_path):
    async with PlayedRun(short_path, shards=5, done=(0, 3)) as run:
        run.start()
        await run.finish()

    assert run.launcher.committed == [1, 2, 4]
    assert run.cells == "ddddd"
    assert run.supervisor.work.tokens_done == sum(run.job.shard_tokens)


async def test_a_rank_never_has_more_shards_than_it_needs_to_go_on(short_path):
    async with PlayedRun(short_path, shards=8) as run:
        run.start()
        await run.shard_in_flight(0)
        asked = [r for r in run.launcher.rank.heard if isinstance(r, protocol.WorkShard)]
        assert len(asked) == AHEAD
        await run.finish()


async def test_the_data_set_is_described_before_the_first_shard_is_handed_out(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        assert not (run.output / "dataset.json").exists()
        run.launcher.rank.load()
        await run.shard_in_flight(0)
        assert (run.output / "dataset.json").exists()
        await run.finish()


async def test_a_hold_takes_effect_after_the_batch_in_flight(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD)
        assert run.state == State.HOLDING
        await run.until(lambda: protocol.Hold() in run.launcher.rank.heard, "hold at the rank")
        run.launcher.allow()
        await run.to_state(State.HELD)
        assert run.supervisor.engine.batch == (0, 0)
        assert run.supervisor.work.tokens_done == run.launcher.batch_tokens
        assert run.supervisor.engine.stage == "held"
        run.resume()
        assert run.state == State.RUNNING
        await run.end()

    assert run.states() == [
        "created",
        "preparing",
        "loading",
        "running",
        "holding",
        "held",
        "running",
        "finished",
    ]
    assert len(run.launcher.ranks) == 1


async def test_a_run_that_is_held_while_it_loads_is_loaded_and_computes_nothing(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.launcher.allow()
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        run.pause(Depth.HOLD)
        assert run.state == State.HOLDING
        run.launcher.rank.load()
        await run.to_state(State.HELD)
        assert run.launcher.rank.heard == [protocol.Hold()]
        assert run.launcher.rank.kills == 0
        run.resume()
        await run.end()

    assert run.state == State.FINISHED


async def test_a_resume_before_the_rank_is_held_goes_on_without_being_held(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD)
        await run.until(lambda: protocol.Hold() in run.launcher.rank.heard, "hold at the rank")
        run.resume()
        assert run.state == State.RUNNING
        await run.until(lambda: protocol.Resume() in run.launcher.rank.heard, "resume at the rank")
        await run.finish()

    assert run.states() == ["created", "preparing", "loading", "running", "holding", "running", "finished"]


async def test_an_answer_to_an_earlier_hold_is_not_taken_for_the_rank_being_held(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD)
        await run.until(lambda: protocol.Hold(0) in run.launcher.rank.heard, "hold at the rank")
        run.resume()
        await run.until(lambda: protocol.Resume() in run.launcher.rank.heard, "resume at the rank")
        run.pause(Depth.HOLD)
        await run.until(lambda: protocol.Hold(1) in run.launcher.rank.heard, "second hold at the rank")
        # The answer to the first was on its way all the time; a report after it shows that it was read.
        run.launcher.rank.say(protocol.Held(0, number=0))
        run.launcher.rank.say(protocol.BatchDone(0, 7, 0))
        await run.until(lambda: run.supervisor.engine.batch == (0, 7), "the reports")
        assert run.state == State.HOLDING
        run.launcher.allow(1)
        await run.to_state(State.HELD)
        run.resume()
        await run.finish()


async def test_a_pause_and_a_resume_that_nobody_heard_of_change_nothing(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.UNLOAD)
        run.resume()
        run.pause(Depth.HOLD)
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED
    assert {type(r) for r in run.launcher.rank.heard} == {protocol.WorkShard, protocol.Finish}


async def test_an_unload_finishes_the_shard_in_hand_and_a_resume_loads_again(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.UNLOAD)
        assert run.state == State.UNLOADING
        await run.until(lambda: protocol.Drain() in run.launcher.rank.heard, "drain at the rank")
        run.launcher.allow()
        await run.to_state(State.UNLOADED)
        assert run.launcher.living == []
        assert run.launcher.committed == [0]
        assert run.cells == "d..."
        assert run.supervisor.engine is None
        run.resume()
        assert run.state == State.LOADING
        await run.end()

    assert run.launcher.committed == [0, 1, 2, 3]
    assert [rank.kills for rank in run.launcher.ranks] == [0, 0]
    assert run.supervisor.restarts == 0


async def test_an_unload_of_a_held_run_drops_the_shard_in_hand(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD)
        await run.until(lambda: protocol.Hold() in run.launcher.rank.heard, "hold at the rank")
        run.launcher.allow(1)
        await run.to_state(State.HELD)
        run.pause(Depth.UNLOAD)
        assert run.state == State.UNLOADING
        await run.to_state(State.UNLOADED)
        assert run.launcher.committed == []
        assert run.supervisor.work.tokens_done == 0
        assert run.cells == "...."
        run.resume()
        await run.finish()

    assert run.supervisor.work.queue.failed == {}
    assert run.state == State.FINISHED


async def test_an_unload_while_the_model_loads_kills_the_rank_and_nothing_else(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.may_load = False
        run.start()
        await run.until(lambda: run.launcher.ranks, "rank")
        run.pause(Depth.UNLOAD)
        await run.to_state(State.UNLOADED)
        assert [rank.kills for rank in run.launcher.ranks] == [1]
        assert run.supervisor.restarts == 0
        assert run.events("rank_died") == []
        run.launcher.may_load = True
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED


async def test_a_resume_while_the_processes_leave_loads_again(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.UNLOAD)
        await run.until(lambda: protocol.Drain() in run.launcher.rank.heard, "drain at the rank")
        run.resume()
        assert not run.state.is_paused
        await run.finish()

    assert len(run.launcher.ranks) == 2
    assert run.launcher.committed == [0, 1, 2, 3]
    assert "unloaded" not in run.states()


async def test_a_pause_while_the_run_is_prepared_keeps_it_from_loading(short_path):
    async with PlayedRun(short_path) as run:
        run.tasks.may_prepare.clear()
        run.start()
        await run.until(lambda: run.tasks.now == ["prepare"], "preparation")
        run.pause(Depth.HOLD)
        assert run.state == State.PREPARING
        run.tasks.may_prepare.set()
        await run.to_state(State.UNLOADED)
        assert run.launcher.ranks == []
        run.resume()
        await run.finish()

    assert run.states() == ["created", "preparing", "unloaded", "loading", "running", "finished"]


async def test_a_pause_that_was_in_force_before_the_start_still_is(short_path):
    async with PlayedRun(short_path) as run:
        run.pauses.add(Reason.OPERATOR, Depth.HOLD, by="ops1")
        run.start()
        await run.to_state(State.UNLOADED)
        assert run.launcher.ranks == []
        run.resume()
        await run.finish()

    assert run.state == State.FINISHED


async def test_a_hold_that_is_deepened_unloads_and_a_shallower_one_that_stays_does_not_load(short_path):
    async with PlayedRun(short_path) as run:
        run.start()
        await run.shard_in_flight(0)
        run.pause(Depth.HOLD, Reason.TENANT)
        run.pause(Depth.UNLOAD)
        await run.until(lambda: protocol.Drain() in run.launcher.rank.heard, "drain at the rank")
        run.launcher.allow(3)
        await run.to_state(State.UNLOADED)
        run.resume()
        assert run.state == State.UNLOADED
        await asyncio.sleep(0)
        assert run.launcher.living == []
        run.resume(Reason.TENANT)
        await run.finish()

    assert run.state == State.FINISHED


async def test_no_shard_is_handed_out_when_a_pause_comes_while_the_data_set_is_described(
    short_path, monkeypatch
):
    async with PlayedRun(short_path) as run:
        write = run.supervisor._write_manifest

        async def write_and_be_paused(ready, work):
            await write(ready, work)
            run.pause(Depth.UNLOAD)

        monkeypatch.setattr(run.supervisor, "_write_manifest", write_and_be_paused)
        run.launcher.allow()
        run.start()
        await run.to_state(State.UNLOADED)
        assert run.launcher.committed == []
        monkeypatch.setattr(run.supervisor, "_write_manifest", write)
        run.resume()
        await run.end()

    assert run.state == State.FINISHED
