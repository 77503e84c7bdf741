"""A played run with its control API on real sockets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
from played_run import PlayedRun

from console.client import Client
from extractor.protocol import api
from extractor.supervisor.actions import Actions
from extractor.supervisor.place import Place
from extractor.supervisor.server import Server
from extractor.supervisor.snapshot import SnapshotMaker


class ServedRun(PlayedRun):
    """Use as an async context manager; serves from then on, and runs from `start` on.

    Attributes:
        server: of the control API.
        place: of its sockets.
    """

    def __init__(self, folder: Path, *, slow_reader_s: float = 20.0, shards: int = 4) -> None:
        super().__init__(folder, shards=shards)
        self._slow_reader_s = slow_reader_s

    async def __aenter__(self) -> ServedRun:
        await super().__aenter__()
        self.place = Place(self.folder)
        self.actions = Actions(self.supervisor)
        self.server = Server(self.supervisor, self.actions, self.folder, slow_reader_s=self._slow_reader_s)
        info = api.RunInfo(
            name=self.folder.name,
            folder=str(self.folder.path),
            output=str(self.output),
            config_file=str(self.folder.config),
            model="/models/tiny",
            device="cpu",
            host="here",
            supervisor_pid=os.getpid(),
            started_utc=1.0,
            user="ops1",
            tapdeck_version="0",
        )
        self.server.snapshots = SnapshotMaker(self.supervisor, info, clients=self.server.clients)
        await self.server.start(self.place.socket, self.place.readonly_socket)
        self.place.announce()
        self._sessions = {
            True: aiohttp.ClientSession(
                "http://x", connector=aiohttp.UnixConnector(str(self.place.readonly_socket))
            ),
            False: aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(self.place.socket))),
        }
        return self

    async def __aexit__(self, *error: Any) -> None:
        for session in self._sessions.values():
            await session.close()
        await self.server.finish()
        self.place.__exit__(None, None, None)
        await super().__aexit__(*error)

    def client(self, *, read_only: bool = False) -> Client:
        return Client(self.folder, read_only=read_only)

    async def ask(
        self, method: str, path: str, *, read_only: bool = False, **options: Any
    ) -> tuple[int, Any]:
        """Status and decoded body of a plain request, as curl makes them."""
        async with self._sessions[read_only].request(method, path, **options) as response:
            if method == "HEAD":
                return response.status, None
            return response.status, await response.json()

    async def connect(self, *, read_only: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection."""
        path = self.place.readonly_socket if read_only else self.place.socket
        return await asyncio.open_unix_connection(str(path))

    def audit(self) -> list[dict[str, Any]]:
        return self.events("action")
