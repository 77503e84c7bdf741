"""Ranks that are threads: they speak the real wire protocol over real sockets and compute nothing.

A rank behaves as the engine's worker does between two batches (`extractor.engine.orders`), and a test decides
everything else: when it has loaded, how many batches may leave it, how shards end, and when and how it dies.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import zmq

from extractor import protocol

FIRST_PID = 1 << 23
"""Beyond what Linux gives to a process."""
LINGER_MS = 1000
WAIT_S = 10.0


class _EndError(Exception):
    """The thread is to end, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ScriptedLauncher:
    """Starts ranks, and is the hand of the test on all of them.

    Attributes:
        ranks: every one that was started.
        committed: shards with their final name, in their order.
        shard_errors: shard -> how its next attempts end: text and errno name.
        closed_to: shards none of whose batches is let through.
        may_load: ranks get ready by themselves; else `ScriptedRank.load` has them do so.
        hangs_at_exit: a rank that has said its last word does not exit.
        on_start: called with each rank before its thread begins; may raise what a start raises.
    """

    MANY = 1 << 30

    def __init__(self, *, batches: int = 3, batch_tokens: int = 10) -> None:
        self.batches = batches
        self.batch_tokens = batch_tokens
        self.ranks: list[ScriptedRank] = []
        self.committed: list[int] = []
        self.shard_errors: defaultdict[int, deque[tuple[str, str | None]]] = defaultdict(deque)
        self.may_load = True
        self.hangs_at_exit = False
        self.closed_to: set[int] = set()
        self.on_start: Callable[[ScriptedRank], None] = lambda _: None
        self._allowed = 0
        self._lock = threading.Lock()

    def start(
        self,
        spec: Path,
        *,
        environment: Mapping[str, str],
        log: Path,
        keep_fds: Sequence[int],
        rank: int = 0,
    ) -> ScriptedRank:
        """See `Launcher`."""
        log.touch()
        rank = ScriptedRank(self, msgspec.json.decode(spec.read_bytes(), type=protocol.EngineSpec))
        self.on_start(rank)
        self.ranks.append(rank)
        rank.begin()
        return rank

    @property
    def rank(self) -> ScriptedRank:
        """The last one that was started."""
        return self.ranks[-1]

    @property
    def living(self) -> list[ScriptedRank]:
        return [rank for rank in self.ranks if rank.code is None]

    def allow(self, num_batches: int = MANY) -> None:
        """Lets so many batches through."""
        with self._lock:
            self._allowed = min(self.MANY, self._allowed + num_batches)
        for rank in self.living:
            rank.wake()

    def close_again(self) -> None:
        """Takes back what was allowed and not used."""
        with self._lock:
            self._allowed = 0

    def take_batch(self, shard: int) -> bool:
        with self._lock:
            if self._allowed == 0 or shard in self.closed_to:
                return False
            self._allowed -= 1 if self._allowed < self.MANY else 0
            return True

    def close(self) -> None:
        """Ends every rank."""
        for rank in self.ranks:
            rank.kill()


class ScriptedRank:
    """One rank; also the process that the supervisor has of it.

    Attributes:
        heard: requests, in their order.
        code: exit code; None while it lives.
        kills: how often it was killed while it lived.
        shard: in hand.
    """

    def __init__(self, launcher: ScriptedLauncher, spec: protocol.EngineSpec) -> None:
        self.spec = spec
        self.pid = FIRST_PID + len(launcher.ranks)
        self.heard: list[protocol.AnyRequest] = []
        self.code: int | None = None
        self.kills = 0
        self.shard: int | None = None
        self._launcher = launcher
        self._may_load = launcher.may_load
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._fd_lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._is_waited_for = threading.Event()
        self._is_ready = False
        self._is_in_flight = False
        self._batch = 0
        self._shards: deque[int] = deque()
        self._holds = self._owes_held = False
        self._hold_number = 0
        self._drains = self._stops = self._finishes = False
        self._thread = threading.Thread(target=self._run, name=f"rank-{self.pid}", daemon=True)

    # -- the process -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._thread.start()

    def poll(self) -> int | None:
        """See `RankProcess`."""
        return self.code

    def wait(self, timeout_s: float) -> int | None:
        """See `RankProcess`."""
        self._is_waited_for.set()
        self.wake()
        self._thread.join(timeout_s)
        return self.code

    def kill(self, *, wait: bool = True) -> None:
        """See `RankProcess`."""
        if self.code is None:
            self.kills += 1
            self.die()
            if wait:
                self._thread.join(WAIT_S)
                assert not self._thread.is_alive(), "a rank does not end"

    # -- the hand of the test ----------------------------------------------------------------------------

    def die(self, code: int = -9) -> None:
        """Ends without a word."""

        def end() -> None:
            raise _EndError(code)

        self._do(end)

    def load(self) -> None:
        """Gets ready."""
        self._do(lambda: setattr(self, "_may_load", True))

    def say(self, *reports: protocol.AnyReport) -> None:
        """Reports whatever one likes."""
        self._do(lambda: [self._say(report) for report in reports])

    def say_raw(self, payload: bytes) -> None:
        """Sends what is no report."""
        self._do(lambda: self._socket.send(payload))

    def fail(self, code: str, message: str = "it broke", exit_code: int = 7) -> None:
        """Ends as the worker does after an error: `Failed`, `Bye`."""

        def end() -> None:
            self._say(protocol.Failed(code, exit_code, message, None, ""))
            self._leave(exit_code)

        self._do(end)

    def wake(self) -> None:
        with self._fd_lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def _do(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self.wake()

    # -- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        code = 99
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.IDENTITY, f"{self.spec.replica}.0".encode())
        try:
            self._socket.connect(self.spec.endpoint)
            self._live()
        except _EndError as end:
            code = end.code
        finally:
            self._socket.close()
            context.term()
            with self._fd_lock:
                os.close(self._fd)
                self._fd = -1
            self.code = code

    def _live(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._fd, zmq.POLLIN)
        self._say(protocol.Hello(protocol.PROTOCOL_VERSION, self.pid, 0.0))
        self._say(protocol.Stage("load"))
        while True:
            self._take()
            if not self._step():
                poller.poll()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        while self._socket.poll(0):
            self._tell(protocol.decode_request(self._socket.recv()))
        while self._commands:
            self._commands.popleft()()

    def _tell(self, request: protocol.AnyRequest) -> None:
        self.heard.append(request)
        match request:
            case protocol.WorkShard():
                self._shards.append(request.shard)
            case protocol.Finish():
                self._finishes = True
            case protocol.Stop():
                self._stops = True
            case protocol.Drain():
                self._drains = True
            case protocol.Hold():
                self._holds = self._owes_held = True
                self._hold_number = request.number
            case protocol.Resume():
                self._holds = self._owes_held = False

    def _step(self) -> bool:
        """Does one thing; False: there is nothing to do."""
        if not self._is_ready:
            return self._get_ready()
        if self._is_in_flight:
            return self._end_batch()
        if self._owes_held:
            self._owes_held = False
            self._say(protocol.Held(self.shard, self._hold_number))
            return True
        return self._between_shards() if self.shard is None else self._between_batches(self.shard)

    def _get_ready(self) -> bool:
        if self._may_load:
            self._say(protocol.Stage("proof"))
            self._say(protocol.Ready(1.5, (), {"a": 1}, {"torch": "2"}, 100, ("GPU-1",)))
            self._is_ready = True
        return self._is_ready

    def _between_shards(self) -> bool:
        if self._stops or self._drains:
            self._leave(0)
        if not self._holds and self._shards:
            self.shard, self._batch = self._shards.popleft(), 0
            # The first batch belongs to it: who sees that the shard began knows that a batch is at the gate.
            self._is_in_flight = self._launcher.batches > 0
            self._say(protocol.ShardStarted(self.shard))
            return True
        if not self._holds and self._finishes:
            self._leave(0)
        return False

    def _between_batches(self, shard: int) -> bool:
        if self._stops or (self._holds and self._drains):
            self.shard = None
        elif self._holds:
            return False
        elif self._batch == self._launcher.batches:
            self.shard = None
            self._end_shard(shard)
        else:
            self._is_in_flight = True
        return True

    def _end_batch(self) -> bool:
        assert self.shard is not None
        if not self._launcher.take_batch(self.shard):
            return False
        self._is_in_flight = False
        self._say(protocol.BatchDone(self.shard, self._batch, self._launcher.batch_tokens))
        self._batch += 1
        return True

    def _end_shard(self, shard: int) -> None:
        tokens = self._launcher.batches * self._launcher.batch_tokens
        errors = self._launcher.shard_errors[shard]
        if errors:
            self._say(protocol.ShardFailed(shard, *errors.popleft()))
        else:
            self._launcher.committed.append(shard)
            self._say(protocol.ShardDone(shard, 1, tokens, tokens, tokens * 100, 0))

    def _leave(self, code: int) -> None:
        self._say(protocol.Bye(12345))
        while not self._is_waited_for.wait(0.001) or self._launcher.hangs_at_exit:
            # A process that ends takes longer than its last words.
            while self._commands:
                self._commands.popleft()()
        raise _EndError(code)

    def _say(self, report: protocol.AnyReport) -> None:
        self._socket.send(protocol.encode(report))
