"""A run under its supervisor, seen and steered from outside: the command line, plain HTTP on its socket, signals.

HTTP goes through the standard library, not through the product's own client: what works here works with curl.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support import outputs
from tests.support.product import Finished, Tapdeck, wait_until

DEADLINE_S = 400.0
"""A rank takes ten seconds to load on a quiet machine, and a minute on a busy one."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=20.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Answer:
    """Status and JSON body of one request."""

    status: int
    body: Any


def request(
    path: str, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """One HTTP request on a Unix socket."""
    connection = _UnixConnection(path)
    try:
        connection.request(method, url, None if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        return Answer(response.status, json.loads(response.read()))
    finally:
        connection.close()


@dataclass
class Supervised:
    """One run; it need not be running."""

    tapdeck: Tapdeck
    config: Path
    output: Path
    started: list[dict[str, Any]] = field(default_factory=list)

    def start(self, *more: str) -> dict[str, Any]:
        """`tapdeck start --detach`, which must succeed."""
        answer = self.try_start(*more).require(0).json
        self.started.append(answer)
        return answer

    def try_start(self, *more: str) -> Finished:
        """`tapdeck start --detach`, whatever comes of it."""
        return self.tapdeck.run("start", self.config, "--detach", "--json", *more)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def folder(self) -> Path:
        """The run folder."""
        (found,) = [run for run in self.tapdeck.runs() if run.name.startswith(f"{self.output.name}-")]
        return found

    @property
    def record(self) -> dict[str, Any]:
        """supervisor.json."""
        return dict(json.loads((self.folder / "supervisor.json").read_bytes()))

    @property
    def supervisor_pid(self) -> int:
        return int(self.record["pid"])

    def get(self, url: str) -> Answer:
        """A GET on the operators' socket."""
        return request(self.record["socket"], "GET", url)

    def act(self, action: str, **body: Any) -> Answer:
        """An action on the operators' socket."""
        return request(self.record["socket"], "POST", f"/v1/actions/{action}", body)

    def snapshot(self) -> dict[str, Any]:
        return dict(self.get("/v1/run").body)

    def last(self) -> dict[str, Any]:
        """The snapshot in the run folder."""
        return dict(json.loads((self.folder / "snapshot.json").read_bytes()))

    @property
    def state(self) -> str:
        """The state now; of the last snapshot when nobody answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return str(self.snapshot()["state"]["state"])
        return str(self.last()["state"]["state"])

    @property
    def worker_pid(self) -> int | None:
        """The rank that runs now."""
        pid = self.snapshot()["replicas"][0]["pid"]
        return None if pid is None else int(pid)

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """The first true value of a condition; shows events and logs when it never comes."""
        return wait_until(condition, what, state=self.describe, deadline_s=deadline_s)

    def wait_state(self, *states: str, deadline_s: float = DEADLINE_S) -> str:
        """Waits for one of these states."""

        def seen() -> str | None:
            state = self.state
            return state if state in states else None

        return str(self.wait(seen, f"state {' or '.join(states)}", deadline_s))

    def wait_gone(self, deadline_s: float = 60.0) -> None:
        """Waits until the supervisor's process is gone."""
        pid = self.started[-1]["pid"]
        self.wait(lambda: not psutil.pid_exists(pid), "end of the supervisor", deadline_s)

    def num_done(self) -> int:
        return len(outputs.final_shards(self.output))

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone."""
        os.kill(self.supervisor_pid, signal.SIGKILL)
        self.wait_gone()

    def kill_worker(self) -> int:
        """SIGKILL to the rank's session; its pid."""
        pid = self.worker_pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        return pid

    def events(self) -> list[dict[str, Any]]:
        return self.tapdeck.events(self.output)

    def describe(self) -> str:
        """Everything a person needs who reads a failed test."""
        parts = []
        for name in ("events.jsonl", "supervisor.log", "replica-0.log", "prepare.log", "conclude.log"):
            with contextlib.suppress(OSError):
                lines = (self.folder / name).read_text(errors="replace").splitlines()[-15:]
                parts.append(f"--- {name}\n" + "\n".join(lines))
        with contextlib.suppress(OSError, ValueError):
            parts.append(json.dumps(self.last()["state"]))
        return "\n".join(parts)


class Gate:
    """Lets batches leave the engine of a `tests.support.gated_worker` one by one."""

    MANY = 4000

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        os.mkfifo(folder / "gate")
        # Read and write, so that opening it does not wait for the rank.
        self._fd = os.open(folder / "gate", os.O_RDWR | os.O_NONBLOCK)

    @property
    def environment(self) -> dict[str, str]:
        """Of a supervisor whose ranks shall be gated."""
        return {"TAPDECK_WORKER_MODULE": "tests.support.gated_worker", "TAPDECK_TEST_GATE": str(self.folder)}

    def allow(self, num_batches: int) -> None:
        """Lets so many batches through."""
        os.write(self._fd, b"." * num_batches)

    def close_again(self) -> None:
        """Takes back what was allowed and not used."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, self.MANY):
                pass

    def heard(self) -> list[str]:
        """Requests that have taken effect in a rank."""
        try:
            return (self.folder / "heard").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return []

    def close(self) -> None:
        os.close(self._fd)
