"""A supervisor that says what a test tells it to: the control API on a real socket, and no run behind it.

Serves in a thread of its own, in the process of the test, whose identity it puts into `supervisor.json`. `/v1/run`,
`/v1/stream` and `/v1/actions` are there. Use as a context manager.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import WSCloseCode, web

from extractor.folders import RunFolder
from extractor.processes import RealMachine, own_identity
from extractor.protocol import api
from extractor.protocol.states import Action, Depth, Pause, Reason, State

START_UTC = 1_780_000_000.0
DEADLINE_S = 20.0


def snapshot_of(run: RunFolder, state: State = State.RUNNING, why: str = "", **changes: Any) -> api.Snapshot:
    """A run in the middle of its work."""
    is_paused = state in {State.HOLDING, State.HELD, State.UNLOADING, State.UNLOADED}
    depth = Depth.UNLOAD if "unload" in state else Depth.HOLD
    pauses = (Pause(Reason.OPERATOR, depth, START_UTC, "ops1"),) if is_paused else ()
    base = api.Snapshot(
        api_version=api.API_VERSION,
        revision=41,
        time_utc=START_UTC + 60,
        run=api.RunInfo(
            name=run.name,
            folder=str(run.path),
            output="/data/out",
            config_file=str(run.config),
            model="/models/small",
            device="cpu",
            taps=("layer_002", "final"),
            ids_after=(2, 7),
            ids_before=(3, 8),
            bytes_per_token=57_344,
            host="gpu-box",
            supervisor_pid=1,
            started_utc=START_UTC,
            user="ops1",
            tapdeck_version="0",
        ),
        state=api.StateInfo(state, START_UTC, why, pauses),
        progress=api.Progress(30_000_000, 12_400_000, 9000, 2310, 953, 2, 1, 4, 3),
        rates=api.Rates(4980.0, 4874.0, (), 1.0, 3900.0, 3300.0, 4800.0, START_UTC + 3960, 60.0),
        disk=api.Disk(
            "/data", 10**13, 10**12, 2310 * 10**9, 10**11, 711 * 10**9, 10**12, 286e6, None, True, "enough"
        ),
        telemetry=api.Telemetry(
            gpus=api.Unavailable("no_driver"),
            host=api.Unavailable("not_yet"),
            sampled_utc=START_UTC,
            interval_s=1.0,
        ),
        shards=None,
        replicas=(api.ReplicaInfo("0", "ready", 4711, 12, 3, 0, 9.5),),
        events=(api.EventLine(7, START_UTC, "note", "ops2", "text of an event"),),
        actions=dict.fromkeys(Action),
        clients=api.Clients(0, 0),
    )
    return msgspec.structs.replace(base, **changes)


class FakeSupervisor:
    """One run's supervisor.

    Attributes:
        asked: the actions it was asked for, with their bodies.
        refuse: status and answer for every action; None: they are accepted.
        on_action: called with each accepted action, in the server's thread; its result is shown to streams.
    """

    def __init__(self, run: RunFolder, snapshot: api.Snapshot) -> None:
        self.run = run
        self.asked: list[tuple[str, api.ActionRequest]] = []
        self.refuse: tuple[int, api.Refusal] | None = None
        self.on_action: Callable[[str], api.Snapshot | None] = lambda _: None
        self._snapshot = snapshot
        self._streams: set[web.WebSocketResponse] = set()
        self._num_streams = threading.Semaphore(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeSupervisor:
        self._thread.start()
        self._do(self._start())
        identity, machine = own_identity(RealMachine()), RealMachine()
        record = api.SupervisorRecord(
            pid=identity.pid,
            start_ticks=identity.start_ticks,
            boot_id=machine.boot_id(),
            host=machine.host(),
            socket=str(self.run.path / "s"),
            readonly_socket=str(self.run.path / "r"),
            started_utc=START_UTC,
            tapdeck_version="0",
            api_version=api.API_VERSION,
        )
        self.run.supervisor.write_bytes(msgspec.json.encode(record))
        return self

    def __exit__(self, *_: object) -> None:
        self.run.supervisor.unlink(missing_ok=True)
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def show(self, snapshot: api.Snapshot) -> None:
        """From now on the run is so; streams are told."""
        self._do(self._show(snapshot))

    def end(self, snapshot: api.Snapshot) -> None:
        """The run ends so: the last word, then nothing supervises it."""
        self.run.snapshot.write_bytes(msgspec.json.encode(snapshot))
        self.show(snapshot)
        self.run.supervisor.unlink()
        self._do(self._close())

    def die(self) -> None:
        """It is gone without a word; the last snapshot of the run stays."""
        self.run.snapshot.write_bytes(msgspec.json.encode(self._snapshot))
        self.run.supervisor.unlink()
        self._do(self._abort())

    def wait_stream(self) -> None:
        """Returns when one more stream has had its first message."""
        assert self._num_streams.acquire(timeout=DEADLINE_S), "nobody asked for a stream"

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/run", self._get),
                web.get("/v1/stream", self._stream),
                web.post("/v1/actions/{name}", self._act),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        for name in ("s", "r"):
            await web.UnixSite(self._runner, self.run.path / name).start()

    async def _get(self, _: web.Request) -> web.Response:
        return _json(self._snapshot)

    async def _act(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.asked.append((name, msgspec.json.decode(await request.read(), type=api.ActionRequest)))
        if self.refuse is not None:
            return _json(self.refuse[1], status=self.refuse[0])
        changed = self.on_action(name)
        if changed is not None:
            await self._show(changed)
        return _json(
            api.ActionResult(message=f"{name}d: as asked", revision=42, state=self._snapshot.state.state)
        )

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        await stream.send_str(_text(api.StreamSnapshot(0, self._snapshot)))
        self._streams.add(stream)
        self._num_streams.release()
        async for _ in stream:
            pass
        self._streams.discard(stream)
        return stream

    async def _show(self, snapshot: api.Snapshot) -> None:
        change = api.delta(self._snapshot, snapshot, seq=1)
        self._snapshot = snapshot
        for stream in self._streams:
            await stream.send_str(_text(change))

    async def _close(self) -> None:
        for stream in list(self._streams):
            await stream.close(code=WSCloseCode.OK)

    async def _abort(self) -> None:
        for stream in list(self._streams):
            stream._req.transport.abort()


def _text(message: api.StreamMessage) -> str:
    return msgspec.json.encode(message).decode()


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
