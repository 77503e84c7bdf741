"""The control API: HTTP and a WebSocket on two Unix sockets, one for operators and one that only looks.

Owns connections and nothing else: it asks `SnapshotMaker` and `Actions`. Which socket a request came through
decides whether it may change anything, so a read-only client is refused here, whatever it sends. Each
stream has a task of its own and sends what has changed since its last message: a client that does not read
holds up nobody, and is dropped after `SLOW_READER_S`. A connection that is gone may change nothing: nobody can
say any more which socket it came through.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from extractor.errors import TapdeckError
from extractor.processes import user_name
from extractor.protocol import api
from extractor.supervisor import log_files
from extractor.supervisor.actions import RequestRefusedError, decode_request
from extractor.supervisor.events import Who
from extractor.supervisor.waiting import until_set

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from extractor.folders import RunFolder
    from extractor.supervisor.actions import Actions
    from extractor.supervisor.core import Supervisor
    from extractor.supervisor.snapshot import SnapshotMaker

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SAFE = {"GET", "HEAD", "OPTIONS"}
"""Requests of all other methods may change something and are refused on the read-only socket."""
SLOW_READER_S = 20.0
MIN_INTERVAL_S = 0.2
"""Changes of state are sent at once, but not faster than this."""
MAX_INTERVAL_S = 60.0
END_WAIT_S = 3.0
MAX_BODY_BYTES = 64 * 1024
MAX_CONNECTIONS = 256
_encode = msgspec.json.Encoder().encode


class _Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


class Server:
    """The control API of one run."""

    def __init__(
        self,
        supervisor: Supervisor,
        actions: Actions,
        folder: RunFolder,
        *,
        slow_reader_s: float = SLOW_READER_S,
    ) -> None:
        """Serves nothing yet; `snapshots` is to be set before `start`.

        Args:
            supervisor: what consoles are told of.
            actions: what they may do.
            folder: of the run, for its logs.
            slow_reader_s: a client that reads nothing for so long is dropped.
        """
        self._slow_reader_s = slow_reader_s
        self._supervisor = supervisor
        self._actions = actions
        self._folder = folder
        self._streams: dict[web.WebSocketResponse, bool] = {}
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._is_ending = False
        self._path = ""
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []
        self.snapshots: SnapshotMaker | None = None

    def clients(self) -> api.Clients:
        """Consoles that are attached."""
        readers = sum(self._streams.values())
        return api.Clients(len(self._streams) - readers, readers)

    async def start(self, path: Path, readonly_path: Path) -> None:
        """Listens on both sockets. Whoever calls this holds the lock of the run.

        Raises:
            OSError: a socket cannot be made.
        """
        self._path = str(path)
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/run", self._run),
                web.get("/v1/stream", self._stream),
                web.get("/v1/events", self._events),
                web.get("/v1/logs", self._logs),
                web.post("/v1/actions/{name}", self._act),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=END_WAIT_S)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for place in (path, readonly_path):
            self._listeners.append(await loop.create_unix_server(self._connection, str(place)))
            # The folder keeps others out already. Not by umask, which the files of the output would get too.
            place.chmod(0o600)

    def _connection(self) -> asyncio.BaseProtocol:
        """Answers one more connection, or closes it at once: the run needs descriptors for its own files."""
        server = self._runner.server if self._runner is not None else None
        if server is None or len(server.connections) >= MAX_CONNECTIONS:
            return _Closed()
        return server()

    async def finish(self) -> None:
        """Tells every console the last state, then closes all connections."""
        self._is_ending = True
        self._supervisor.wake_watchers()
        await until_set(self._no_streams, END_WAIT_S)
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- requests --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(request)
            return await handler(request)
        except RequestRefusedError as refused:
            return _json(refused.answer, status=refused.status)
        except TapdeckError as error:
            return _json(api.Refusal(code=error.code, message=error.message, remedy=error.remedy), status=500)
        except web.HTTPException as error:
            answer = api.Refusal(
                code="bad_request", message=_clean(f"{error.reason}: {request.method} {request.path}")
            )
            return _json(answer, status=error.status)

    def _check(self, request: web.Request) -> None:
        version = request.headers.get(api.VERSION_HEADER)
        if version is not None and version != str(api.API_VERSION):
            raise RequestRefusedError(
                400,
                api.Refusal(
                    code="api_version",
                    message=f"this client speaks version {version} of the control API, the supervisor "
                    f"version {api.API_VERSION}",
                    remedy="one of them is from another installation; attach with the tapdeck that started the run",
                ),
            )
        # Actions are refused where they are logged: the audit shows who tried what.
        is_action = request.path.startswith("/v1/actions/")
        if request.method not in SAFE and self._is_read_only(request) and not is_action:
            raise RequestRefusedError(403, api.Refusal(code="read_only", message="this client is read-only"))

    async def _run(self, _: web.Request) -> web.Response:
        return _json(self._snapshot())

    async def _act(self, request: web.Request) -> web.Response:
        # Before the body is awaited: who asks may be gone by then.
        who, is_read_only = _peer(request), self._is_read_only(request)
        body = await request.read()
        asked = api.ActionRequest() if is_read_only else decode_request(body)
        return _json(self._actions.act(request.match_info["name"], asked, who, is_read_only=is_read_only))

    async def _events(self, request: web.Request) -> web.Response:
        after = _number(request, "after", 0)
        return _json([line for line in self._supervisor.events.tail if line.number > after])

    async def _logs(self, request: web.Request) -> web.Response:
        source = request.query.get("source", "supervisor")
        offset = None if "offset" not in request.query else _number(request, "offset", 0)
        lines = max(1, min(_number(request, "lines", 200), log_files.MAX_LINES))
        chunk = await asyncio.to_thread(log_files.read, self._folder, source, offset, lines)
        if chunk is None:
            known = ", ".join(self._folder.logs())
            raise RequestRefusedError(
                404,
                api.Refusal(code="no_such", message=f"there is no log {source}", remedy=f"one of: {known}"),
            )
        return _json(chunk)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        interval_s = _seconds(request, "interval_s", 1.0)
        stream = web.WebSocketResponse(heartbeat=10.0, compress=False)
        await stream.prepare(request)
        self._streams[stream] = self._is_read_only(request)
        self._no_streams.clear()
        change = self._supervisor.watch()
        # Its end is the client's; what a client says on a stream is not listened to.
        reader = asyncio.get_running_loop().create_task(_drain(stream))
        try:
            await self._send_changes(stream, change, reader, interval_s)
        except (TimeoutError, ConnectionError, aiohttp.ClientError):
            # It did not read for too long: closing politely would wait for it again.
            if request.transport is not None:
                request.transport.abort()
        finally:
            reader.cancel()
            self._supervisor.unwatch(change)
            del self._streams[stream]
            if not self._streams:
                self._no_streams.set()
        return stream

    async def _send_changes(
        self,
        stream: web.WebSocketResponse,
        change: asyncio.Event,
        reader: asyncio.Task[None],
        interval_s: float,
    ) -> None:
        seq = 0
        known = self._snapshot()
        await self._send(stream, api.StreamSnapshot(seq, known))
        while not reader.done():
            is_last = self._is_ending
            if not is_last:
                await _wait(change, reader, interval_s)
                change.clear()
            now = self._snapshot()
            seq += 1
            await self._send(stream, api.delta(known, now, seq=seq))
            known = now
            if is_last:
                async with asyncio.timeout(END_WAIT_S):
                    await stream.close()
                return

    async def _send(self, stream: web.WebSocketResponse, message: api.StreamMessage) -> None:
        async with asyncio.timeout(self._slow_reader_s):
            await stream.send_str(_encode(message).decode())

    def _snapshot(self) -> api.Snapshot:
        if self.snapshots is None:
            raise RuntimeError("the server was started without its snapshots")
        return self.snapshots.make()

    def _is_read_only(self, request: web.Request) -> bool:
        return request.transport is None or request.transport.get_extra_info("sockname") != self._path


async def _drain(stream: web.WebSocketResponse) -> None:
    async for _ in stream:
        pass


async def _wait(change: asyncio.Event, reader: asyncio.Task[None], interval_s: float) -> None:
    """Until the interval is over; sooner after a change of state, but never at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MIN_INTERVAL_S):
            await asyncio.shield(reader)
    waiter = asyncio.ensure_future(change.wait())
    await asyncio.wait(
        {waiter, reader}, timeout=max(0.0, interval_s - MIN_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
    )
    waiter.cancel()


def _json(value: Any, *, status: int = 200) -> web.Response:
    # Any: whatever msgspec can encode.
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise RequestRefusedError(
            400, api.Refusal(code="bad_request", message=f"{name}={text}: expected a number")
        )
    return value


def _seconds(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise RequestRefusedError(
            400,
            api.Refusal(
                code="bad_request",
                message=f"{name}={text}: expected seconds from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}",
            ),
        )
    return value


def _clean(text: str) -> str:
    """What a client sent, as text that can be written and shown: bytes that are no UTF-8 come as surrogates."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _peer(request: web.Request) -> Who:
    """Who is at the other end: uid and pid from the kernel, the place as the client says."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    origin = _clean(request.headers.get(api.ORIGIN_HEADER, ""))[:200] or None
    if connection is None:
        return Who("unknown", origin=origin)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return Who(user_name(uid), uid, pid, origin)
