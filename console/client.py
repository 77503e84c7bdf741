"""The client of a run's control API: what console and command line know of a run, they know from here.

Async, over the supervisor's Unix socket. It holds no truth: a snapshot is what the supervisor said, and an
action has happened when the supervisor says so. A read-only client connects to the socket on which the
supervisor itself refuses everything that changes the run.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Self

import msgspec

from extractor.errors import (
    ConfigError,
    ConflictError,
    NoRunError,
    RefusedError,
    TapdeckError,
    UnreachableError,
)
from extractor.processes import ProcessIdentity, RealMachine, is_alive
from extractor.protocol import api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    import aiohttp

    from extractor.folders import RunFolder
    from extractor.protocol.states import Action, Depth

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 20.0
_decode_snapshot = msgspec.json.Decoder(api.Snapshot).decode
_decode_message = msgspec.json.Decoder(api.StreamMessage).decode
_decode_result = msgspec.json.Decoder(api.ActionResult).decode
_decode_refusal = msgspec.json.Decoder(api.Refusal).decode
_decode_log = msgspec.json.Decoder(api.LogChunk).decode


def supervisor_of(run: RunFolder) -> api.SupervisorRecord | None:
    """The supervisor that runs for a run on this machine; None when none does. Blocking, short."""
    record = last_supervisor_of(run)
    if record is None:
        return None
    machine = RealMachine()
    here = record.host == machine.host() and record.boot_id == machine.boot_id()
    return record if here and is_alive(machine, ProcessIdentity(record.pid, record.start_ticks)) else None


def last_supervisor_of(run: RunFolder) -> api.SupervisorRecord | None:
    """The supervisor that a run had last, alive or not. Blocking, short."""
    try:
        return msgspec.json.decode(run.supervisor.read_bytes(), type=api.SupervisorRecord)
    except (OSError, msgspec.DecodeError):
        return None


def last_snapshot(run: RunFolder) -> api.Snapshot | None:
    """What a run last looked like, from its folder; None if it never got so far. Blocking, short."""
    try:
        return _decode_snapshot(run.snapshot.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


class Client:
    """A connection to one supervisor. Use as an async context manager."""

    def __init__(self, run: RunFolder, *, read_only: bool = False) -> None:
        """Connects on first use.

        Args:
            run: the run.
            read_only: may look and not touch; refused by the supervisor.
        """
        self.run = run
        self.read_only = read_only
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Finds the supervisor.

        Raises:
            NoRunError: none runs for this run.
        """
        record = supervisor_of(self.run)
        if record is None:
            raise NoRunError(
                f"{self.run.name} is not running",
                remedy=f"tapdeck start {self.run.config} goes on with it; tapdeck status {self.run.name} "
                "shows its last state",
                code="not_running",
            )
        # A fifth of a second that an ended run, and the first picture of a live one, need not wait for.
        import aiohttp

        path = record.readonly_socket if self.read_only else record.socket
        headers = {api.VERSION_HEADER: str(api.API_VERSION)}
        ssh = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
        if ssh:
            headers[api.ORIGIN_HEADER] = f"ssh {ssh}"
        self._session = aiohttp.ClientSession(
            base_url="http://tapdeck",
            connector=aiohttp.UnixConnector(path),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection."""
        if self._session is not None:
            await self._session.close()

    async def snapshot(self) -> api.Snapshot:
        """The run as it is now.

        Raises:
            UnreachableError: no answer.
        """
        return _decode_snapshot(await self._get("/v1/run"))

    async def act(
        self,
        action: Action,
        *,
        depth: Depth | None = None,
        expected_revision: int | None = None,
        idempotency_key: str | None = None,
    ) -> api.ActionResult:
        """Asks the supervisor to act; returns once it has accepted.

        Raises:
            RefusedError: this client is read-only.
            ConflictError: the run has another revision, or its state does not allow the action.
            TapdeckError: the supervisor could not record it; nothing has changed.
            UnreachableError: no answer.
        """
        request = api.ActionRequest(
            depth=depth, expected_revision=expected_revision, idempotency_key=idempotency_key
        )
        with self._explained(
            f"it may still do this when it answers again; look with tapdeck status {self.run.name}"
        ):
            async with self._http.post(
                f"/v1/actions/{action}",
                data=msgspec.json.encode(request),
                headers={"Content-Type": "application/json"},
            ) as response:
                body = await response.read()
                if response.status != 200:
                    raise _error(body, response.status)
                return _decode_result(body)

    async def stream(self, *, interval_s: float = 1.0) -> AsyncIterator[api.Snapshot]:
        """The run now and after every change, at most every `interval_s`; also without a change, now and then.

        Ends when the supervisor ends the stream, after the last state of the run.

        Raises:
            UnreachableError: the supervisor is gone without a word.
        """
        from aiohttp import WSCloseCode, WSMsgType

        snapshot: api.Snapshot | None = None
        with self._explained():
            async with self._http.ws_connect(
                "/v1/stream", params={"interval_s": f"{interval_s:g}"}, max_msg_size=0, heartbeat=10.0
            ) as socket:
                async for message in socket:
                    if message.type not in {WSMsgType.TEXT, WSMsgType.BINARY}:
                        break
                    match _decode_message(message.data):
                        case api.StreamSnapshot() as whole:
                            snapshot = whole.snapshot
                        case api.Delta() as change:
                            if snapshot is None:
                                raise UnreachableError("the supervisor's stream began without a snapshot")
                            snapshot = api.apply(snapshot, change)
                    yield snapshot
                if socket.close_code != WSCloseCode.OK:
                    raise UnreachableError(
                        f"{self.run.name}: its supervisor ended the stream (code {socket.close_code})"
                    )

    async def log(self, source: str, *, offset: int | None = None, lines: int = 200) -> api.LogChunk:
        """Lines of a log, from `offset` on, or the last `lines` of them.

        Raises:
            TapdeckError: there is no such log, or no answer.
        """
        where = {"offset": str(offset)} if offset is not None else {}
        return _decode_log(await self._get("/v1/logs", source=source, lines=str(lines), **where))

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise UnreachableError("the client is used outside its context")
        return self._session

    async def _get(self, path: str, **params: str) -> bytes:
        with self._explained():
            async with self._http.get(path, params=params) as response:
                body = await response.read()
                if response.status != 200:
                    raise _error(body, response.status)
                return body

    @contextlib.contextmanager
    def _explained(self, remedy: str | None = None) -> Any:
        import aiohttp

        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            if supervisor_of(self.run) is None:
                raise NoRunError(
                    f"{self.run.name} has just ended",
                    remedy=f"tapdeck status {self.run.name} shows how",
                    code="not_running",
                ) from error
            raise UnreachableError(
                f"{self.run.name}: its supervisor does not answer: {str(error) or type(error).__name__}",
                remedy=remedy or f"the ranks do not depend on it; see {self.run.log('supervisor')}",
            ) from error


def _error(body: bytes, status: int) -> TapdeckError:
    try:
        refusal = _decode_refusal(body)
    except msgspec.DecodeError:
        return UnreachableError(f"the supervisor answered with status {status}")
    kinds = {400: ConfigError, 403: RefusedError, 404: NoRunError, 409: ConflictError}
    kind = kinds.get(status, TapdeckError)
    return kind(refusal.message, remedy=refusal.remedy, code=refusal.code)
