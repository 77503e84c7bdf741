"""Whatever happens to a run, in whatever order: every shard is done once, and no process is left."""

import asyncio
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_run import PlayedRun

from extractor import protocol
from extractor.protocol.states import Action, Depth, Reason, State, refusal

SHARDS = 4
STEPS = st.one_of(
    st.tuples(st.just("allow"), st.integers(1, 4)),
    st.tuples(st.just("pause"), st.sampled_from([Depth.HOLD, Depth.UNLOAD])),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("die"), st.sampled_from([-9, -11, 1])),
    st.tuples(st.just("crash"), st.none()),
    st.tuples(
        st.just("fail_shard"), st.tuples(st.integers(0, SHARDS - 1), st.sampled_from([None, "EIO", "ENOSPC"]))
    ),
    st.tuples(st.just("stale_held"), st.none()),
    st.tuples(st.just("time"), st.sampled_from([1.0, 40.0])),
    # How far rank and supervisor get before the next step.
    st.tuples(st.just("turns"), st.integers(0, 30)),
)


async def step(run, what, value):
    match what:
        case "allow":
            run.launcher.allow(value)
        case "pause" if refusal(Action.PAUSE, run.state, run.pauses.pauses) is None:
            run.pause(value)
        case "resume":
            run.resume()
        case "fail_shard":
            run.launcher.shard_errors[value[0]].append(("OSError: it broke", value[1]))
        case "time":
            run.skip(value)
        case "turns":
            for _ in range(value):
                await asyncio.sleep(0.0005)
        case _ if run.launcher.living:
            step_of_rank(run.launcher.living[-1], what, value)


def step_of_rank(rank, what, value):
    match what:
        case "die":
            rank.die(value)
        case "crash" if rank._is_ready:
            rank.fail("crash")
        case "stale_held":
            rank.say(protocol.Held(None))


async def go_on(run):
    """Nothing more happens but that it is resumed whenever it pauses for the disk."""
    run.resume()
    run.launcher.allow()
    end = time.monotonic() + 20
    while not run.task.done():
        assert time.monotonic() < end, f"the run stands still; {run.describe()}"
        if run.pauses.has(Reason.DISK):
            run.skip(60)
        await asyncio.sleep(0.001)


async def live(steps):
    with tempfile.TemporaryDirectory(prefix="t") as name:
        async with PlayedRun(Path(name), shards=SHARDS, batches=2) as run:
            run.start()
            for what, value in steps:
                await step(run, what, value)
            await go_on(run)
            await run.end()

        failure = run.supervisor.failure
        if failure is not None and failure.code == "worker_died":
            # Three deaths in a row without a batch: the run has rightly given up.
            return
        queue = run.supervisor.work.queue
        done = [event["shard"] for event in run.events("shard_done")]
        given_up = [event["shard"] for event in run.events("shard_failed")]
        assert sorted(done + given_up) == list(range(SHARDS))
        assert (queue.done, set(queue.failed)) == (set(done), set(given_up))
        assert run.state == (State.FAILED if given_up else State.FINISHED)
        assert failure is None or failure.code == "shards_failed"
        assert run.cells == "".join("x" if shard in given_up else "d" for shard in range(SHARDS))
        assert run.supervisor.work.tokens_done == sum(run.job.shard_tokens[shard] for shard in done)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(STEPS, max_size=25))
def test_every_shard_is_done_once_whatever_happens(steps):
    asyncio.run(live(steps))
