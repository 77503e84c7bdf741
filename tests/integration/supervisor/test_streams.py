"""What clients are told: snapshots, streams, events and logs; and that no client is in another one's way."""

import asyncio
import gc
import time

import aiohttp
import msgspec
import pytest
from served_run import ServedRun

from console import client as module
from extractor.errors import NoRunError, TapdeckError, UnreachableError
from extractor.protocol import api
from extractor.protocol.states import Action, Depth, State
from extractor.supervisor import server as server_module

pytestmark = pytest.mark.asyncio
SOON_S = 5.0
LONG_S = 60.0
decode = msgspec.json.Decoder(api.StreamMessage).decode


async def running(run):
    run.start()
    await run.shard_in_flight(0)


async def messages(run, *, interval_s=LONG_S, read_only=False):
    """What a stream says, undigested; ends with its close code."""
    async with run._sessions[read_only].ws_connect(f"/v1/stream?interval_s={interval_s}") as socket:
        async for message in socket:
            yield decode(message.data)
        yield socket.close_code


async def first(stream):
    async with asyncio.timeout(SOON_S):
        return await anext(stream)


async def watch(run, seen, **options):
    """A console: everything that its client says, to the end."""
    async with run.client(**options) as client, asyncio.timeout(2 * SOON_S):
        async for snapshot in client.stream(interval_s=LONG_S):
            seen.append(snapshot)


async def test_a_snapshot_is_what_the_supervisor_knows(short_path):
    async with ServedRun(short_path) as run:
        async with run.client() as client:
            created = await client.snapshot()
            assert (created.state.state, created.progress, created.shards) == (State.CREATED, None, None)
            await running(run)
            run.launcher.allow(1)
            await run.until(lambda: run.supervisor.work and run.supervisor.work.tokens_done, "batch")
            now = await client.snapshot()
        assert now.state.state == State.RUNNING
        assert now.revision == run.pauses.revision
        assert (now.progress.shards_total, now.progress.shards_running, now.progress.tokens_done) == (
            4,
            1,
            10,
        )
        assert now.shards.cells == "r..."
        assert (now.replicas[0].pid, now.replicas[0].shard, now.replicas[0].batch) == (
            run.launcher.rank.pid,
            0,
            0,
        )
        assert now.run.taps == run.job.spec.taps.names
        assert set(now.actions) == set(Action)
        assert now.events[-1].event == "state"
        await run.finish()


async def test_a_stream_is_a_snapshot_and_then_numbered_changes_and_ends_well_after_the_last_state(
    short_path,
):
    async with ServedRun(short_path) as run:
        await running(run)
        stream = messages(run, interval_s=0.2)
        whole = await first(stream)
        assert isinstance(whole, api.StreamSnapshot)
        assert whole.seq == 0
        run.launcher.allow()
        await run.end()
        ending = asyncio.create_task(run.server.finish())
        known, seq = whole.snapshot, 0
        async with asyncio.timeout(SOON_S):
            async for message in stream:
                if message == aiohttp.WSCloseCode.OK:
                    break
                assert isinstance(message, api.Delta)
                assert message.seq == seq + 1
                known, seq = api.apply(known, message), message.seq
            else:
                pytest.fail("the stream ended without a code")
        await ending
        assert known.state.state == State.FINISHED
        now = run.server.snapshots.make()
        assert msgspec.structs.replace(known, time_utc=0.0, clients=now.clients) == msgspec.structs.replace(
            now, time_utc=0.0
        )


async def test_the_client_of_a_run_that_ends_sees_its_last_state_and_then_the_end_of_the_stream(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        seen = []
        watcher = asyncio.create_task(watch(run, seen))
        await run.until(lambda: seen, "snapshot")
        await run.finish()
        await run.server.finish()
        await watcher
        assert seen[-1].state.state == State.FINISHED


async def test_a_change_of_state_arrives_at_once_whatever_the_interval(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        stream = messages(run, interval_s=LONG_S)
        await first(stream)
        begin = time.monotonic()
        for depth in (Depth.HOLD, Depth.UNLOAD):
            async with run.client() as client:
                await client.act(Action.PAUSE, depth=depth)
            message = await first(stream)
            assert message.state.state == run.state
            assert message.revision == run.pauses.revision
        assert time.monotonic() - begin < LONG_S / 4
        await stream.aclose()


async def test_an_action_that_changes_no_state_is_told_at_once_as_well(short_path):
    async with ServedRun(short_path) as run:
        run.pauses.add("operator", Depth.HOLD, by="ops1")
        run.start()
        await run.to_state(State.UNLOADED)
        stream = messages(run, interval_s=LONG_S)
        await first(stream)
        async with run.client() as client:
            await client.act(Action.PAUSE, depth=Depth.UNLOAD)
        message = await first(stream)
        assert message.revision == run.pauses.revision
        assert message.state.pauses[0].depth == Depth.UNLOAD
        await stream.aclose()


async def test_without_a_change_a_stream_says_that_it_is_alive(short_path):
    async with ServedRun(short_path) as run:
        run.pauses.add("operator", Depth.HOLD, by="ops1")
        run.start()
        await run.to_state(State.UNLOADED)
        stream = messages(run, interval_s=0.2)
        await first(stream)
        await first(stream)
        assert await first(stream) == api.Delta(seq=2, time_utc=pytest.approx(time.time(), abs=60))
        await stream.aclose()


@pytest.mark.parametrize("interval", ["0", "0.1", "61", "nan", "-1", "soon", "inf"])
async def test_an_interval_that_is_out_of_range_is_refused(short_path, interval):
    async with ServedRun(short_path) as run:
        status, answer = await run.ask("GET", f"/v1/stream?interval_s={interval}")
        assert (status, answer["code"]) == (400, "bad_request")
        assert interval in answer["message"]


async def test_what_a_client_says_on_a_stream_changes_nothing(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        async with run._sessions[False].ws_connect("/v1/stream?interval_s=0.2") as socket:
            await socket.send_str('{"action": "kill"}')
            await socket.send_bytes(b"\x00" * 1000)
            for _ in range(3):
                assert (await socket.receive(SOON_S)).type == aiohttp.WSMsgType.TEXT
        assert run.supervisor.stop is None
        assert run.audit() == []


async def test_consoles_are_counted_by_what_they_may_do_and_forgotten_when_they_leave(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        streams = [messages(run), messages(run, read_only=True), messages(run, read_only=True)]
        for stream in streams:
            await first(stream)
        assert run.server.clients() == api.Clients(1, 2)
        for stream in streams:
            await stream.aclose()
        await run.until(lambda: run.server.clients() == api.Clients(0, 0), "end of the streams")
        assert run.supervisor._watchers == set()


async def test_twenty_consoles_at_once_all_see_the_run_to_its_end(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        seen = [[] for _ in range(20)]
        watchers = [
            asyncio.create_task(watch(run, one, read_only=bool(number % 2)))
            for number, one in enumerate(seen)
        ]
        await run.until(lambda: all(seen), "snapshots")
        assert run.server.clients() == api.Clients(10, 10)
        await run.finish()
        await run.server.finish()
        await asyncio.gather(*watchers)
        assert {one[-1].state.state for one in seen} == {State.FINISHED}


async def test_a_client_that_never_reads_is_dropped_and_the_others_go_on(short_path):
    async with ServedRun(short_path, slow_reader_s=0.3) as run:
        await running(run)
        # More than the socket's buffers take.
        for number in range(20):
            run.log.tail.append(api.EventLine(number, 0.0, "note", "auto", "x" * 60_000))
        reader, writer = await run.connect()
        reader.set_exception(ConnectionError("nobody reads"))
        writer.transport.pause_reading()
        writer.write(
            b"GET /v1/stream?interval_s=0.2 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        await run.until(lambda: run.server.clients().writers == 1, "slow client")
        stream = messages(run, interval_s=0.2)
        await first(stream)
        await run.until(lambda: run.server.clients().writers == 1, "end of the slow client")
        run.pause(Depth.HOLD)
        await first(stream)
        await stream.aclose()
        writer.close()


async def test_a_client_that_is_killed_is_forgotten(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        reader, writer = await run.connect()
        writer.write(
            b"GET /v1/stream?interval_s=60 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b"101" in await reader.readline()
        writer.transport.abort()
        await run.until(lambda: run.server.clients() == api.Clients(0, 0), "end of the stream")


async def test_a_supervisor_that_is_gone_in_the_middle_of_a_stream_is_unreachable(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        seen = []
        watcher = asyncio.create_task(watch(run, seen))
        await run.until(lambda: seen, "snapshot")
        for stream in list(run.server._streams):
            stream._req.transport.abort()
        with pytest.raises(UnreachableError, match="ended the stream") as error:
            await watcher
        assert error.value.exit_code == 4


async def test_a_stream_lasts_longer_than_an_answer_may_take(short_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.3)
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client, asyncio.timeout(SOON_S):
            begin = time.monotonic()
            async for _ in client.stream(interval_s=0.2):
                if time.monotonic() - begin > 0.7:
                    break
            # A generator that is left holds its connection until it is collected.
            gc.collect()


async def test_a_run_that_nobody_supervises_is_not_running(short_path):
    async with ServedRun(short_path) as run:
        run.start()
        await run.finish()
    with pytest.raises(NoRunError) as error:
        async with run.client():
            pass
    assert (error.value.exit_code, error.value.code) == (3, "not_running")


ASKING = {
    "snapshot": lambda client: client.snapshot(),
    "act": lambda client: client.act(Action.KILL),
    "stream": lambda client: anext(client.stream()),
    "log": lambda client: client.log("supervisor"),
}


@pytest.mark.parametrize("what", ASKING)
async def test_a_socket_that_nobody_listens_on_is_unreachable(short_path, what):
    async with ServedRun(short_path) as run:
        async with run.client() as client:
            await run.server.finish()
            with pytest.raises(UnreachableError) as error:
                await ASKING[what](client)
        assert error.value.exit_code == 4
        assert ("it may still do this" if what == "act" else "supervisor.log") in str(error.value)
        run.start()
        await run.finish()


async def test_a_client_outside_its_context_says_so(short_path):
    async with ServedRun(short_path) as run:
        with pytest.raises(UnreachableError, match="outside its context"):
            await run.client().snapshot()
        run.start()
        await run.finish()


# -- events and logs -------------------------------------------------------------------------------------------


async def test_events_after_a_number_are_those_that_came_later(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        _, everything = await run.ask("GET", "/v1/events")
        number = everything[-2]["number"]
        _, later = await run.ask("GET", f"/v1/events?after={number}", read_only=True)
        assert later == everything[-1:]
        for after in ("x", "-1", "1.5"):
            status, answer = await run.ask("GET", f"/v1/events?after={after}")
            assert (status, answer["code"]) == (400, "bad_request")


async def test_a_log_is_read_from_where_one_left_off(short_path):
    async with ServedRun(short_path) as run:
        log = run.folder.log("prepare")
        log.write_bytes(b"one\ntwo\nthr")
        async with run.client(read_only=True) as client:
            chunk = await client.log("prepare")
            assert chunk.lines == ("one", "two")
            with log.open("ab") as file:
                file.write(b"ee\n\xff\x1b[2J\n")
            chunk = await client.log("prepare", offset=chunk.next_offset)
            assert chunk.lines == ("three", "\ufffd\x1b[2J")
            assert (await client.log("prepare", offset=chunk.next_offset)).lines == ()
            assert (await client.log("prepare", lines=1)).lines == ("\ufffd\x1b[2J",)
            assert (await client.log("prepare", offset=10**18)).lines == ()
        run.start()
        await run.finish()


@pytest.mark.parametrize(
    "source",
    ["nothing", "../run/prepare", "/etc/passwd", "..", "", "prepare.log", "prepare\0", "%2e%2e/x", "*"],
)
async def test_only_the_logs_of_the_run_can_be_read(short_path, source):
    (short_path / "secret.log").write_text("secret\n")
    async with ServedRun(short_path) as run:
        run.folder.log("prepare").write_text("one\n")
        status, answer = await run.ask("GET", "/v1/logs", params={"source": source})
        assert (status, answer["code"]) == (404, "no_such")
        assert "prepare" in answer["remedy"]
        async with run.client() as client:
            with pytest.raises(TapdeckError, match="no log"):
                await client.log(source)
        run.start()
        await run.finish()


@pytest.mark.parametrize("query", ["offset=x", "offset=-1", "lines=many", "lines=-5", "offset=1e3"])
async def test_a_number_that_is_none_is_refused(short_path, query):
    async with ServedRun(short_path) as run:
        run.folder.log("prepare").write_text("one\n")
        status, answer = await run.ask("GET", f"/v1/logs?source=prepare&{query}")
        assert (status, answer["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v2/run", "/v1/run/", "/v1/actions", "/v1/actions/", "/v1/../etc"]
)
async def test_an_unknown_path_is_answered_as_everything_else(short_path, path):
    async with ServedRun(short_path) as run:
        status, answer = await run.ask("GET", path)
        assert (status, answer["code"]) == (404, "bad_request")


async def test_a_path_that_is_no_text_is_answered_as_everything_else(short_path):
    async with ServedRun(short_path) as run:
        reader, writer = await run.connect()
        writer.write(b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 40" in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert (await run.ask("GET", "/v1/run"))[0] == 200


async def test_an_error_of_ours_in_an_answer_is_told_to_that_client_alone(short_path, monkeypatch):
    async with ServedRun(short_path) as run:
        await running(run)
        stream = messages(run, interval_s=0.2)
        await first(stream)

        def broken(*_, **__):
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(run.actions, "act", broken)
        async with run.client() as client:
            with pytest.raises(UnreachableError, match="status 500"):
                await client.act(Action.PAUSE)
            assert (await client.snapshot()).state.state == State.RUNNING
        await first(stream)
        await stream.aclose()


async def test_the_sockets_are_for_this_user_alone(short_path):
    async with ServedRun(short_path) as run:
        assert run.place.socket.stat().st_mode & 0o777 == 0o600
        assert run.place.readonly_socket.stat().st_mode & 0o777 == 0o600


async def test_connections_that_are_too_many_are_closed_and_those_that_are_there_go_on(
    short_path, monkeypatch
):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 5)
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client:
            await client.snapshot()
            idle = [await run.connect() for _ in range(8)]
            ends = [reader.read() for reader, _ in idle[4:]]
            assert await asyncio.gather(*ends) == [b""] * 4
            assert (await client.snapshot()).state.state == State.RUNNING
        for _, writer in idle:
            writer.close()
