"""Actions over the control API: what they do, who may ask for them, and what is written down of it."""

import asyncio
import errno
import json
import os
import pwd

import pytest
from served_run import ServedRun

from console.client import Client
from extractor.errors import ConflictError, DiskSpaceError, RefusedError
from extractor.protocol import api
from extractor.protocol.states import Action, Depth, Reason, State
from extractor.supervisor.core import Stop
from extractor.supervisor.server import MAX_BODY_BYTES

pytestmark = pytest.mark.asyncio
# Action -> the state that it leads to from running, and what is asked of the run.
EFFECTS = {
    Action.PAUSE: (State.HOLDING, None),
    Action.RESUME: (State.RUNNING, None),
    Action.STOP: (State.DRAINING, Stop.DRAIN),
    Action.KILL: (State.DRAINING, Stop.KILL),
}
METHODS = {
    # Method -> statuses of (/v1/run, /v1/actions/pause, /v1/stream, /v1/nowhere) on the operators' socket.
    "GET": (200, 405, 400, 404),
    "HEAD": (200, 405, 400, 404),
    "OPTIONS": (405, 405, 405, 404),
    "POST": (405, 200, 405, 404),
    "PUT": (405, 405, 405, 404),
    "PATCH": (405, 405, 405, 404),
    "DELETE": (405, 405, 405, 404),
    "PROPFIND": (405, 405, 405, 404),
}
PATHS = ("/v1/run", "/v1/actions/pause", "/v1/stream", "/v1/nowhere")


async def running(run):
    run.start()
    await run.shard_in_flight(0)


async def test_every_action_is_covered_here():
    assert set(EFFECTS) == set(Action)


async def test_a_run_without_a_batch_for_a_minute_says_so_and_what_can_be_done(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        run.skip(59)
        assert "no batch" not in run.server.snapshots.make().state.why
        run.skip(2)
        why = run.server.snapshots.make().state.why
        assert why.startswith("no batch for 61 s; ")
        assert "`tapdeck kill`" in why
        run.pause(Depth.HOLD)
        assert "no batch" not in run.server.snapshots.make().state.why


@pytest.mark.parametrize("action", Action)
async def test_an_action_is_done_answered_and_written_down(short_path, action):
    async with ServedRun(short_path) as run:
        await running(run)
        if action == Action.RESUME:
            run.pause(Depth.HOLD)
        before, old = run.pauses.revision, run.state
        async with run.client() as client:
            answer = await client.act(action, expected_revision=before)
        state, stop = EFFECTS[action]
        assert (answer.state, answer.revision) == (state, before + 1)
        assert answer.message
        assert run.supervisor.stop == stop
        line = run.audit()[-1]
        assert (line["action"], line["old"], line["new"], line["result"]) == (action, old, state, "ok")
        assert line["revision"] == before + 1
        assert line["who"]["uid"] == os.getuid()
        assert line["who"]["pid"] == os.getpid()
        assert line["who"]["user"] == pwd.getpwuid(os.getuid()).pw_name
        if stop is None:
            run.launcher.allow()
            if action == Action.PAUSE:
                run.resume()
            await run.end()


@pytest.mark.parametrize("action", Action)
async def test_a_read_only_client_is_refused_every_action_and_that_is_written_down(short_path, action):
    async with ServedRun(short_path) as run:
        await running(run)
        before = run.pauses.revision
        async with run.client(read_only=True) as client:
            with pytest.raises(RefusedError) as refused:
                await client.act(action)
            assert refused.value.exit_code == 5
            assert (await client.snapshot()).state.state == State.RUNNING
        assert run.pauses.revision == before
        assert run.supervisor.stop is None
        line = run.audit()[-1]
        assert (line["action"], line["result"]) == (action, "this client is read-only")
        assert line["who"]["pid"] == os.getpid()


@pytest.mark.parametrize("body", [b"no json", b'{"depth": "nap"}', b'{"unknown": 1}', b"[]"])
async def test_a_read_only_client_is_told_that_it_is_whatever_it_sends(short_path, body):
    async with ServedRun(short_path) as run:
        await running(run)
        status, answer = await run.ask("POST", "/v1/actions/pause", read_only=True, data=body)
        assert (status, answer["code"]) == (403, "read_only")
        assert len(run.audit()) == 1


@pytest.mark.parametrize("method", METHODS)
async def test_what_a_method_may_do_depends_on_the_socket_alone(short_path, method):
    async with ServedRun(short_path) as run:
        await running(run)
        for path, status in zip(PATHS, METHODS[method], strict=True):
            assert (await run.ask(method, path))[0] == status, path
        run.resume()
        before = run.pauses.revision
        for path, status in zip(PATHS, METHODS[method], strict=True):
            expected = status if method in {"GET", "HEAD", "OPTIONS"} else 403
            # The router knows no other method there, and says so before anybody asks who it is.
            allowed = {expected, 405} if path == "/v1/actions/pause" and method != "POST" else {expected}
            assert (await run.ask(method, path, read_only=True))[0] in allowed, path
        assert run.pauses.revision == before
        run.launcher.allow()
        await run.end()


async def test_an_action_of_a_client_that_is_gone_is_not_done(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        for read_only in (True, False):
            _, writer = await run.connect(read_only=read_only)
            writer.write(b"POST /v1/actions/kill HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert (await run.ask("GET", "/v1/run"))[0] == 200
        assert run.supervisor.stop is None


async def test_a_connection_of_which_nothing_is_known_is_read_only(short_path):
    class Gone:
        transport = None

    async with ServedRun(short_path) as run:
        assert run.server._is_read_only(Gone())


@pytest.mark.parametrize("shift", [-1, 1])
async def test_an_action_on_another_revision_is_a_conflict_and_changes_nothing(short_path, shift):
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client:
            await client.act(Action.PAUSE)
            revision = run.pauses.revision
            with pytest.raises(ConflictError, match="pause by") as refused:
                await client.act(Action.RESUME, expected_revision=revision + shift)
        assert (refused.value.exit_code, refused.value.code) == (6, "conflict")
        assert run.pauses.revision == revision
        assert run.pauses.has(Reason.OPERATOR)
        assert "has changed since you looked" in run.audit()[-1]["result"]


async def test_of_two_who_act_on_the_same_revision_one_wins(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        revision = run.pauses.revision
        async with run.client() as one, run.client() as two:
            answers = await asyncio.gather(
                one.act(Action.PAUSE, expected_revision=revision),
                two.act(Action.STOP, expected_revision=revision),
                return_exceptions=True,
            )
        assert sorted(type(answer).__name__ for answer in answers) == ["ActionResult", "ConflictError"]


async def test_a_request_that_is_repeated_with_its_key_is_answered_and_not_done_again(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client:
            first = await client.act(Action.PAUSE, idempotency_key="a")
            await client.act(Action.RESUME)
            again = await client.act(Action.PAUSE, idempotency_key="a")
        assert again == first
        assert run.pauses.depth is None
        assert [line["action"] for line in run.audit()] == ["pause", "resume"]


async def test_a_key_of_another_request_is_a_conflict_and_not_its_answer(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client:
            await client.act(Action.PAUSE, idempotency_key="a")
            for action, depth in ((Action.STOP, None), (Action.PAUSE, Depth.UNLOAD)):
                with pytest.raises(ConflictError, match="idempotency key"):
                    await client.act(action, depth=depth, idempotency_key="a")
        assert run.supervisor.stop is None
        assert run.pauses.depth == Depth.HOLD


async def test_a_refused_request_may_be_repeated_with_its_key(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        async with run.client() as client:
            with pytest.raises(ConflictError):
                await client.act(Action.RESUME, idempotency_key="a")
            await client.act(Action.PAUSE)
            answer = await client.act(Action.RESUME, idempotency_key="a")
        assert answer.state == State.RUNNING


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 200, None),
        (b"no json", 400, "bad_request"),
        (b"\xff\xfe", 400, "bad_request"),
        (b"[]", 400, "bad_request"),
        (b'{"depht": "hold"}', 400, "bad_request"),
        (b'{"depth": 3}', 400, "bad_request"),
        (b'{"expected_revision": "1"}', 400, "bad_request"),
        (b'{"depth": "nap"}', 400, "bad_request"),
        (b'{"depth": "park"}', 409, "not_possible"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "bad_request"),
        (b"{" * 10_000, 400, "bad_request"),
    ],
)
async def test_a_body_is_taken_as_it_is_meant_or_refused(short_path, body, status, code):
    async with ServedRun(short_path) as run:
        await running(run)
        before = run.pauses.revision
        answered, answer = await run.ask("POST", "/v1/actions/pause", data=body)
        assert (answered, answer.get("code")) == (status, code)
        assert run.pauses.revision == before + (status == 200)


async def test_an_unknown_action_is_refused_with_those_that_are_known(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        status, answer = await run.ask("POST", "/v1/actions/explode")
        assert (status, answer["code"]) == (404, "no_such")
        assert all(action in answer["remedy"] for action in Action)
        assert run.audit()[-1]["action"] == "explode"


async def test_the_origin_of_a_client_is_in_the_audit(short_path, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 5 10.0.0.1 22")
    async with ServedRun(short_path) as run:
        await running(run)
        async with Client(run.folder) as client:
            await client.act(Action.PAUSE)
        assert run.audit()[-1]["who"]["origin"] == "ssh 10.1.2.3"
        assert "ssh 10.1.2.3" in run.pauses.pauses[0].by


async def test_an_origin_that_is_no_text_harms_nobody(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        reader, writer = await run.connect()
        writer.write(
            b"POST /v1/actions/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
            b"Tapdeck-Origin: \xff\xc2\x9b31m\xe2\x80\xae" + b"x" * 5000 + b"\r\n\r\n"
        )
        assert b"200 OK" in await reader.readline()
        writer.close()
        await writer.wait_closed()
        async with run.client() as client:
            snapshot = await client.snapshot()
        assert snapshot.state.state == State.DRAINING
        origin = run.audit()[-1]["who"]["origin"]
        assert origin.startswith("??31m?x")
        assert len(origin) == 200
        run.launcher.allow()
        await run.end()


@pytest.mark.parametrize("action", Action)
async def test_on_a_full_disk_a_run_can_be_ended_and_a_pause_says_why_not(short_path, monkeypatch, action):
    async with ServedRun(short_path) as run:
        await running(run)
        if action == Action.RESUME:
            run.pause(Depth.HOLD)
        before = run.pauses.pauses

        def refuse(pauses):
            raise DiskSpaceError("pauses.json: no space") from OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(run.pauses, "_change", refuse)
        async with run.client() as client:
            if EFFECTS[action][1] is None:
                with pytest.raises(DiskSpaceError.__mro__[2], match="no space") as refused:
                    await client.act(action)
                assert refused.value.code == "disk_space"
                assert run.pauses.pauses == before
                assert "no space" in run.audit()[-1]["result"]
            else:
                await client.act(action)
                assert run.supervisor.stop == EFFECTS[action][1]


@pytest.mark.parametrize("action", Action)
async def test_nothing_can_be_done_to_a_run_that_has_ended(short_path, action):
    async with ServedRun(short_path) as run:
        await running(run)
        await run.finish()
        async with run.client() as client:
            snapshot = await client.snapshot()
            assert snapshot.actions[action] is not None
            with pytest.raises(ConflictError):
                await client.act(action)
        assert run.state == State.FINISHED


async def test_a_request_of_another_version_is_refused_with_both(short_path):
    async with ServedRun(short_path) as run:
        for method, path in (("GET", "/v1/run"), ("POST", "/v1/actions/kill")):
            status, answer = await run.ask(method, path, headers={api.VERSION_HEADER: "99"})
            assert (status, answer["code"]) == (400, "api_version")
            assert "99" in answer["message"]
            assert str(api.API_VERSION) in answer["message"]
        assert run.supervisor.stop is None
        run.start()
        await run.finish()


async def test_the_audit_is_one_line_of_json_whatever_the_name_of_the_action(short_path):
    async with ServedRun(short_path) as run:
        await running(run)
        status, _ = await run.ask("POST", "/v1/actions/a%0Ab%22%1b[31m")
        assert status == 404
        lines = [json.loads(line) for line in run.folder.events.read_bytes().splitlines()]
        assert lines[-1]["event"] == "action"
