"""Stops of every urgency in every state, what an end leaves behind, and what keeps a run from beginning."""

import asyncio
import os
import signal
import threading

import pytest
from played_run import PlayedRun

from extractor import protocol
from extractor.errors import DatasetError, EngineError, LeaseError
from extractor.processes import ProcessIdentity, RealMachine
from extractor.protocol.states import Depth, Reason, State
from extractor.store import lease
from extractor.supervisor import core, daemon, lease_keeper
from extractor.supervisor.core import Stop

pytestmark = pytest.mark.asyncio


async def preparing(run):
    run.tasks.may_prepare.clear()
    run.start()
    await run.until(lambda: run.tasks.now == ["prepare"], "preparation")


async def loading(run):
    run.launcher.may_load = False
    run.start()
    await run.until(lambda: run.launcher.ranks, "rank")
    await run.until(
        lambda: run.supervisor.engine is not None and run.supervisor.engine.stage == "load", "load"
    )


async def waiting_to_restart(run):
    run.launcher.on_start = lambda rank: rank.die()
    run.start()
    await run.until(lambda: run.supervisor.restarts and run.supervisor.engine is None, "death")


async def running(run):
    run.start()
    await run.shard_in_flight(0)


async def holding(run):
    await running(run)
    run.pause(Depth.HOLD)
    await run.until(lambda: protocol.Hold() in run.launcher.rank.heard, "hold at the rank")


async def held(run):
    await holding(run)
    run.launcher.allow(1)
    await run.to_state(State.HELD)


async def unloading(run):
    await running(run)
    run.pause(Depth.UNLOAD)
    await run.until(lambda: protocol.Drain() in run.launcher.rank.heard, "drain at the rank")


async def unloaded(run):
    run.pauses.add(Reason.OPERATOR, Depth.UNLOAD, by="ops1")
    run.start()
    await run.to_state(State.UNLOADED)


async def draining(run):
    await running(run)
    run.supervisor.request_stop(Stop.DRAIN, by="ops0")
    await run.until(lambda: protocol.Drain() in run.launcher.rank.heard, "drain at the rank")


MOMENTS = {
    State.PREPARING: preparing,
    State.LOADING: loading,
    State.RUNNING: running,
    State.HOLDING: holding,
    State.HELD: held,
    State.UNLOADING: unloading,
    State.UNLOADED: unloaded,
    State.DRAINING: draining,
}
NEVER_STOPPED_IN = {State.CREATED, State.PARKING, State.PARKED, State.STOPPED, State.FINISHED, State.FAILED}
COMMITTED = {
    # What is in hand is finished by a drain, unless it is held.
    (State.RUNNING, Stop.DRAIN): [0],
    (State.UNLOADING, Stop.DRAIN): [0],
    (State.DRAINING, Stop.DRAIN): [0],
}


async def test_every_state_in_which_a_run_can_be_stopped_is_tried():
    assert set(MOMENTS) | NEVER_STOPPED_IN == set(State)


@pytest.mark.parametrize("how", Stop)
@pytest.mark.parametrize("state", MOMENTS)
async def test_a_run_can_be_stopped_in_every_state(short_path, monkeypatch, state, how):
    monkeypatch.setattr(core, "BACKOFF_S", (1000.0,))
    async with PlayedRun(short_path) as run:
        await MOMENTS[state](run)
        assert run.state == state
        run.supervisor.request_stop(how, by="ops1")
        assert run.state == State.DRAINING
        if how != Stop.KILL and run.launcher.living and state != State.LOADING:
            asked = {Stop.DRAIN: protocol.Drain(), Stop.NOW: protocol.Stop()}[how]
            await run.until(lambda: asked in run.launcher.rank.heard, "the stop at the rank")
        if how != Stop.KILL:
            run.launcher.allow()
        await run.end()

    assert run.state == State.STOPPED
    assert run.launcher.committed == COMMITTED.get((state, how), [])
    assert run.events()[-1]["event"] == "stopped"
    assert run.supervisor.failure is None
    assert run.supervisor.stopped_by == ("ops0" if state == State.DRAINING else "ops1")
    was_killed = any(rank.kills for rank in run.launcher.ranks)
    has_rank = state not in {State.PREPARING, State.UNLOADED}
    assert was_killed == (has_rank and (how == Stop.KILL or state == State.LOADING))


@pytest.mark.parametrize("how", Stop)
async def test_a_run_that_waits_for_a_restart_can_be_stopped(short_path, monkeypatch, how):
    monkeypatch.setattr(core, "BACKOFF_S", (1000.0,))
    async with PlayedRun(short_path) as run:
        await waiting_to_restart(run)
        run.supervisor.request_stop(how, by="ops1")
        await run.end()

    assert run.state == State.STOPPED


async def test_a_stop_in_the_middle_of_the_preparation_ends_it_and_removes_the_new_output(short_path):
    async with PlayedRun(short_path) as run:
        await preparing(run)
        assert run.output.exists()
        run.supervisor.request_stop(Stop.DRAIN, by="ops1")
        await run.end()

    assert run.tasks.now == []
    assert not run.output.exists()


async def test_a_stop_becomes_more_urgent_and_never_less(short_path):
    async with PlayedRun(short_path) as run:
        await running(run)
        for how in (Stop.DRAIN, Stop.NOW, Stop.DRAIN):
            run.supervisor.request_stop(how, by="ops1")
        await run.until(lambda: protocol.Stop() in run.launcher.rank.heard, "stop at the rank")
        assert run.supervisor.stop == Stop.NOW
        run.supervisor.request_stop(Stop.KILL, by="ops2")
        await run.end()

    assert run.launcher.rank.heard[-1] == protocol.Stop()
    assert run.launcher.rank.kills == 1
    assert run.supervisor.stopped_by == "ops1"


async def test_a_signal_to_the_daemon_is_written_down_by_name_and_a_second_one_does_not_wait(short_path):
    async with PlayedRun(short_path) as run:
        await running(run)
        with daemon._Signals(run.supervisor, None, is_foreground=False):
            os.kill(os.getpid(), signal.SIGTERM)
            await run.until(lambda: run.supervisor.stop == Stop.NOW, "stop")
            assert [event["text"] for event in run.events("stopping")] == ["SIGTERM received"]
            os.kill(os.getpid(), signal.SIGTERM)
            await run.until(lambda: run.supervisor.stop == Stop.KILL, "kill")
            await run.end()

    assert [event["text"] for event in run.events("stopping")][1:] == ["SIGTERM received again"]
    assert run.supervisor.stopped_by == "SIGTERM"


async def test_a_stop_leaves_the_pauses_in_force(short_path):
    async with PlayedRun(short_path) as run:
        await held(run)
        run.supervisor.request_stop(Stop.NOW, by="ops1")
        await run.end()
        assert run.pauses.depth == Depth.HOLD


async def test_a_run_that_has_done_everything_when_it_is_stopped_has_finished(short_path):
    async with PlayedRun(short_path, shards=1) as run:
        await running(run)
        run.supervisor.request_stop(Stop.DRAIN, by="ops1")
        await run.finish()

    assert run.state == State.FINISHED
    assert run.states()[-2:] == ["draining", "finished"]


async def test_a_kill_while_the_output_is_given_up_changes_nothing_any_more(short_path, monkeypatch):
    async with PlayedRun(short_path, shards=1) as run:
        is_released, may_go_on = threading.Event(), threading.Event()
        release = lease.Lease.release

        def slowly(self, **options):
            is_released.set()
            assert may_go_on.wait(10)
            release(self, **options)

        monkeypatch.setattr(lease.Lease, "release", slowly)
        await running(run)
        run.supervisor.request_stop(Stop.DRAIN, by="ops1")
        run.launcher.allow()
        await run.until(is_released.is_set, "release")
        run.supervisor.request_stop(Stop.KILL, by="ops2")
        assert run.state == State.DRAINING
        may_go_on.set()
        await run.end()
        assert run.state == State.FINISHED
        run.supervisor.request_stop(Stop.KILL, by="ops3")
        assert run.state == State.FINISHED

    assert run.supervisor.stop == Stop.KILL


async def test_a_kill_does_not_wait_for_a_rank_that_hangs_after_its_last_word(short_path):
    async with PlayedRun(short_path) as run:
        run.launcher.hangs_at_exit = True
        await running(run)
        run.supervisor.request_stop(Stop.NOW, by="ops1")
        run.launcher.allow()
        await run.until(
            lambda: run.supervisor.engine is not None and run.supervisor.engine.has_ended, "last word"
        )
        assert run.launcher.living != []
        run.supervisor.request_stop(Stop.KILL, by="ops1, deadline")
        await run.end()

    assert run.launcher.rank.kills == 1


async def test_a_kill_does_not_wait_for_the_lists_of_the_data_set_and_a_stop_does(short_path):
    async with PlayedRun(short_path) as run:
        run.tasks.may_conclude.clear()
        run.start()
        run.launcher.allow()
        await run.until(lambda: run.tasks.now == ["conclude"], "lists")
        assert run.state == State.RUNNING
        run.supervisor.request_stop(Stop.NOW, by="ops1")
        assert run.state == State.DRAINING
        await asyncio.sleep(0.02)
        assert run.tasks.now == ["conclude"]
        run.supervisor.request_stop(Stop.KILL, by="ops1")
        await run.end()

    assert run.state == State.STOPPED
    assert run.tasks.now == []


async def test_a_run_whose_supervisor_is_cancelled_is_stopped_and_leaves_no_process(short_path):
    async with PlayedRun(short_path) as run:
        await running(run)
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.task

    assert run.state == State.STOPPED


async def test_a_refused_preparation_ends_the_run_with_its_exit_code_and_leaves_no_output(short_path):
    async with PlayedRun(short_path) as run:
        run.refuse(DatasetError("no sample is left", remedy="look at it", exit_code=5))
        run.start()
        await run.end()

    assert run.state == State.FAILED
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("dataset", 5)
    assert run.states() == ["created", "preparing", "draining", "failed"]
    assert not run.output.exists()
    assert run.tasks.conclusions == 0


async def test_a_refused_preparation_leaves_an_output_that_was_there(short_path):
    (short_path / "output").mkdir()
    async with PlayedRun(short_path) as run:
        run.refuse(EngineError("no"))
        run.start()
        await run.end()

    assert run.output.exists()


async def test_lists_that_cannot_be_written_end_a_finished_run_as_failed(short_path):
    async with PlayedRun(short_path) as run:
        run.tasks.conclude_error = DatasetError("no room for the lists", exit_code=1)
        run.start()
        await run.finish()

    assert run.state == State.FAILED
    assert run.supervisor.failure.message == "no room for the lists"


@pytest.mark.parametrize(("deaths", "state"), [(1, State.FINISHED), (2, State.FAILED)])
async def test_lists_whose_process_was_killed_are_written_in_a_second_one_and_in_no_third(
    short_path, deaths, state
):
    async with PlayedRun(short_path) as run:
        run.tasks.conclude_deaths = deaths
        run.start()
        await run.finish()

    assert run.state == state
    assert run.tasks.conclude_deaths == 0
    assert run.tasks.conclusions == (1 if state == State.FINISHED else 0)
    assert "conclude was ended by SIGKILL" in [event["text"] for event in run.events("note")]


async def test_a_run_that_lost_samples_has_not_finished(short_path):
    async with PlayedRun(short_path) as run:
        run.tasks.lost = 2
        run.start()
        await run.finish()

    assert run.state == State.FAILED
    assert run.supervisor.failure.exit_code != 0
    assert run.supervisor.failure.code == "samples_missing"


@pytest.mark.parametrize("where", ["prepare_error", "conclude_error"])
async def test_an_error_of_ours_ends_the_run_as_failed_and_gives_the_output_up(short_path, capsys, where):
    async with PlayedRun(short_path) as run:
        setattr(run.tasks, where, ZeroDivisionError("ours"))
        run.start()
        await run.finish()

    assert run.state == State.FAILED
    assert run.supervisor.failure.code == "bug"
    assert run.events()[-1]["event"] == "failed"
    assert "ZeroDivisionError" in capsys.readouterr().err


# -- the lease -------------------------------------------------------------------------------------------------


class FormerRank:
    """The worker of a supervisor that is gone: it has the lock of the output."""

    def __init__(self, output):
        self.held = lease.acquire(output, "former")
        machine = RealMachine()
        record = lease.LeaseRecord(
            token="t",
            run="former",
            host=machine.host(),
            boot_id=machine.boot_id(),
            holder=ProcessIdentity(os.getpid(), 1),
            heartbeat_utc=machine.now_utc(),
        )
        lease._write_record(output, record)

    def leave(self):
        os.close(self.held.lock_fd)


async def test_a_run_waits_for_the_ranks_of_a_former_supervisor(short_path):
    async with PlayedRun(short_path) as run:
        former = FormerRank(run.output)
        run.start()
        await run.until(lambda: run.events("note"), "note")
        assert "former supervisor" in run.supervisor.note
        assert run.state == State.PREPARING
        former.leave()
        await run.finish()

    assert run.state == State.FINISHED


async def test_a_run_does_not_wait_for_ever_for_the_ranks_of_a_former_supervisor(short_path):
    async with PlayedRun(short_path) as run:
        former = FormerRank(run.output)
        run.start()
        await run.until(lambda: run.events("note"), "note")
        run.skip(lease_keeper.LEASE_WAIT_S + 1)
        await run.end()
        former.leave()
        (run.output / "lease.json").unlink()

    assert run.state == State.FAILED
    assert run.supervisor.failure.exit_code == 75


@pytest.mark.parametrize("how", Stop)
async def test_a_stop_ends_the_wait_for_the_ranks_of_a_former_supervisor(short_path, how):
    async with PlayedRun(short_path) as run:
        former = FormerRank(run.output)
        run.start()
        await run.until(lambda: run.events("note"), "note")
        run.supervisor.request_stop(how, by="ops1")
        await run.end()
        # Nobody of ours is left who could still take it.
        assert [t.name for t in threading.enumerate() if "acquire" in t.name] == []
        former.leave()
        assert lease.read_lease(run.output).run == "former"
        (run.output / "lease.json").unlink()

    assert run.state == State.STOPPED


async def test_an_output_of_another_run_is_refused_before_anything_begins(short_path):
    async with PlayedRun(short_path) as run:
        other = lease.acquire(run.output, "other")
        with pytest.raises(LeaseError, match="belongs to run other"):
            run.start()
        assert run.events() == []
        other.release()


@pytest.mark.parametrize("moment", [preparing, running, held, unloaded])
async def test_a_heartbeat_is_written_at_every_moment(short_path, monkeypatch, moment):
    monkeypatch.setattr(lease_keeper, "HEARTBEAT_S", 0.005)
    async with PlayedRun(short_path) as run:
        await moment(run)
        before = lease.read_lease(run.output).heartbeat_utc
        await run.until(lambda: lease.read_lease(run.output).heartbeat_utc > before, "heartbeat")
        run.tasks.may_prepare.set()
        run.supervisor.request_stop(Stop.KILL, by="ops1")
        await run.end()


@pytest.mark.parametrize("moment", [preparing, running, unloaded])
async def test_a_run_whose_output_was_taken_over_ends_at_once_and_writes_nothing_more(
    short_path, monkeypatch, moment
):
    monkeypatch.setattr(lease_keeper, "HEARTBEAT_S", 0.005)
    async with PlayedRun(short_path) as run:
        await moment(run)
        path = run.output / "lease.json"
        theirs = path.read_bytes().replace(run.supervisor.lease.held.record.token.encode(), b"theirs")
        # Between two heartbeats, not in the middle of one.
        async with run.supervisor.lease._lock:
            path.write_bytes(theirs)
        await run.end()
        assert path.read_bytes() == theirs
        path.unlink()

    assert run.state == State.FAILED
    assert (run.supervisor.failure.code, run.supervisor.failure.exit_code) == ("lease_lost", 6)
    assert run.tasks.conclusions == 0
    assert run.tasks.now == []


async def test_a_plan_of_very_many_shards_is_taken_in_without_a_halt(short_path):
    many = 40_000
    async with PlayedRun(short_path, shards=many, done=tuple(range(many - 2))) as run:
        run.start()
        await run.finish()

    assert run.launcher.committed == [many - 2, many - 1]
