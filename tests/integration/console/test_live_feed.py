"""The live feed against a real socket: it follows, says when nobody answers, and comes back by itself."""

import asyncio
import os
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from console import feed as feeds
from console.feed import Ended, Heard, LiveFeed, Lost
from extractor.errors import ConflictError, NoRunError, UnreachableError
from extractor.folders import RunFolder
from extractor.processes import RealMachine, own_identity
from extractor.protocol import api
from extractor.protocol.states import Action, State
from tests.support import console_snapshots as snapshots

pytestmark = pytest.mark.asyncio


class SmallSupervisor:
    """Speaks as much of the control API as a feed needs; this process plays its process."""

    def __init__(self, folder, sockets) -> None:
        self.run = RunFolder(folder)
        self.socket = sockets / "s"
        self.actions: list[tuple[str, api.ActionRequest]] = []
        self.refusal: api.Refusal | None = None
        self.streams: list[web.WebSocketResponse] = []
        self.snapshot = snapshots.running()

    def write_record(self, *, start_ticks=None) -> None:
        machine = RealMachine()
        record = api.SupervisorRecord(
            pid=os.getpid(),
            start_ticks=own_identity(machine).start_ticks if start_ticks is None else start_ticks,
            boot_id=machine.boot_id(),
            host=machine.host(),
            socket=str(self.socket),
            readonly_socket=str(self.socket),
            started_utc=snapshots.NOW,
            tapdeck_version="0",
            api_version=api.API_VERSION,
        )
        self.run.supervisor.write_bytes(msgspec.json.encode(record))

    @asynccontextmanager
    async def listening(self):
        app = web.Application()
        app.router.add_get("/v1/stream", self._stream)
        app.router.add_get("/v1/logs", self._logs)
        app.router.add_post("/v1/actions/{name}", self._act)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(self.socket)).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _stream(self, request):
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        self.streams.append(stream)
        await stream.send_str(msgspec.json.encode(api.StreamSnapshot(0, self.snapshot)).decode())
        async for _ in stream:
            pass
        return stream

    async def say(self, snapshot) -> None:
        change = api.delta(self.snapshot, snapshot, seq=1)
        self.snapshot = snapshot
        await self.streams[-1].send_str(msgspec.json.encode(change).decode())

    async def _act(self, request):
        body = msgspec.json.decode(await request.read(), type=api.ActionRequest)
        self.actions.append((request.match_info["name"], body))
        if self.refusal is not None:
            return web.Response(status=409, body=msgspec.json.encode(self.refusal))
        answer = api.ActionResult(message="held", revision=42, state=State.HOLDING)
        return web.Response(body=msgspec.json.encode(answer))

    async def _logs(self, request):
        chunk = api.LogChunk("supervisor", ("supervisor",), ("from the socket",), 10)
        return web.Response(body=msgspec.json.encode(chunk))


@pytest.fixture
def supervisor(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(feeds, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(feeds, "LAST_RETRY_S", 0.05)
    # Socket paths are short by nature: not below a folder named after the test.
    return SmallSupervisor(tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("s"))


async def next_of(updates, kind):
    async with asyncio.timeout(30):
        async for update in updates:
            if isinstance(update, kind):
                return update
    raise AssertionError(f"no {kind.__name__} came")


async def test_it_follows_what_the_supervisor_says(supervisor):
    supervisor.write_record()
    async with supervisor.listening(), aclosing(LiveFeed(supervisor.run).updates()) as updates:
        assert (await anext(updates)) == Heard(supervisor.snapshot)
        await supervisor.say(snapshots.running(5))
        assert (await anext(updates)) == Heard(snapshots.running(5))


async def test_it_says_who_is_silent_and_comes_back(supervisor):
    supervisor.write_record()
    async with aclosing(LiveFeed(supervisor.run).updates()) as updates:
        async with supervisor.listening():
            await next_of(updates, Heard)
            closing = asyncio.create_task(supervisor.streams[-1].close(code=1011))
            lost = await next_of(updates, Lost)
            await closing
        assert (lost.pid, lost.is_alive) == (os.getpid(), True)
        async with supervisor.listening():
            assert isinstance(await next_of(updates, Heard), Heard)


async def test_a_supervisor_that_is_gone_is_told_apart_from_one_that_is_silent(supervisor):
    supervisor.write_record(start_ticks=1)
    supervisor.run.snapshot.write_bytes(msgspec.json.encode(snapshots.running()))
    async with aclosing(LiveFeed(supervisor.run).updates()) as updates:
        lost = await next_of(updates, Lost)
    assert lost.is_alive is False
    assert lost.snapshot == snapshots.running()


async def test_an_ended_run_is_read_from_its_folder(supervisor):
    supervisor.write_record(start_ticks=1)
    supervisor.run.snapshot.write_bytes(msgspec.json.encode(snapshots.finished()))
    async with aclosing(LiveFeed(supervisor.run).updates()) as updates:
        assert (await next_of(updates, Ended)) == Ended(snapshots.finished())


async def test_a_run_that_never_got_far_is_lost_without_a_snapshot(supervisor):
    async with aclosing(LiveFeed(supervisor.run).updates()) as updates:
        assert (await next_of(updates, Lost)) == Lost("it has no supervisor")


async def test_an_action_is_sent_once_with_the_revision_and_a_key(supervisor):
    supervisor.write_record()
    feed = LiveFeed(supervisor.run)
    async with supervisor.listening(), aclosing(feed.updates()) as updates:
        await next_of(updates, Heard)
        result = await feed.act(Action.RESUME, expected_revision=41)
        assert result.message == "held"
        [(name, request)] = supervisor.actions
        assert (name, request.expected_revision) == ("resume", 41)
        assert request.idempotency_key
        supervisor.refusal = api.Refusal(code="conflict", message="ops2 was faster", revision=42)
        with pytest.raises(ConflictError, match="ops2 was faster"):
            await feed.act(Action.STOP, expected_revision=41)


async def test_without_a_connection_nothing_is_sent(supervisor):
    with pytest.raises(UnreachableError, match="nothing was sent"):
        await LiveFeed(supervisor.run).act(Action.KILL, expected_revision=1)


async def test_logs_come_from_the_supervisor_and_without_one_from_the_folder(supervisor):
    supervisor.write_record()
    supervisor.run.log("supervisor").write_text("first\nsecond\n")
    feed = LiveFeed(supervisor.run)
    assert (await feed.log("supervisor")).lines == ("first", "second")
    assert (await feed.log("supervisor", offset=6)).lines == ("second",)
    assert (await feed.log("supervisor", offset=13)).lines == ()
    with pytest.raises(NoRunError):
        await feed.log("nothing")
    async with supervisor.listening(), aclosing(feed.updates()) as updates:
        await next_of(updates, Heard)
        assert (await feed.log("supervisor")).lines == ("from the socket",)
