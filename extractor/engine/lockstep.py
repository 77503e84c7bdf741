"""What keeps the ranks of a replica in step: rank 0 leads, the others do exactly what it does.

Over ZeroMQ in the socket folder of the replica, not over the collectives of the model: a hold may last hours, and
collectives time out. The leader alone is told anything by the supervisor; at every boundary it decides and the
followers hear the decision (`agree`). What followers have seen goes to the leader in step (`gather`), and what
their writer threads have written whenever it is complete (`hand_over`).

Every receive here may wait for ever. A rank that is gone ends it: the supervisor ends all ranks of a replica when
one dies or fails, and a rank without supervisor ends itself when its time is over (`extractor.engine.worker`).

Invariant: each question is asked by all ranks in the same order; two ranks that ask different ones are a bug that
ends the run before either acts on the answer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import zmq

from extractor.errors import BugError
from extractor.store.shares import Share

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.protocol import EngineSpec

T = TypeVar("T")
LINGER_MS = 5_000
"""How long what was handed over is kept for the leader when a follower exits."""
_NO_MORE = b""
"""Last message of a follower in place of a share."""


class _Word(msgspec.Struct, frozen=True):
    """One message in step: which question it answers, and the answer."""

    what: str
    value: Any


_encode = msgspec.msgpack.Encoder().encode
_decode_word = msgspec.msgpack.Decoder(_Word).decode
_decode_share = msgspec.msgpack.Decoder(Share).decode


class Lockstep(Protocol):
    """The other ranks, as one rank sees them. All but `hand_over` belongs to the compute thread."""

    def agree(self, what: str, decide: Callable[[], T]) -> T:
        """The leader's decision, on every rank. Blocking.

        Args:
            what: the question, in words; the same on all ranks.
            decide: called on the leader alone, and may block; its result is made of JSON's types.

        Raises:
            BugError: another rank asks something else.
        """

    def gather(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks in their order, on the leader; nothing on the others. Blocks on the leader.

        Args:
            what: what it is, in words; the same on all ranks.
            value: of this rank, of MessagePack's types.

        Raises:
            BugError: another rank gives something else.
        """

    def hand_over(self, share: Share) -> None:
        """Gives the leader what this rank has written. Any thread; never blocks."""

    def close(self, *, is_in_step: bool) -> None:
        """Ends the connections. Blocking.

        Args:
            is_in_step: all ranks do so now. Then the leader waits for everything that they hand over; else it
                takes what is there, and what a follower hands over may be lost with its leader.
        """


class Alone:
    """A replica of one rank."""

    def agree(self, _: str, decide: Callable[[], T]) -> T:
        """See `Lockstep`."""
        return decide()

    def gather(self, _: str, value: Any) -> list[Any]:
        """See `Lockstep`."""
        return [value]

    def hand_over(self, share: Share) -> None:
        """See `Lockstep`."""
        raise BugError(f"shard {share.index}: a single rank has nobody to hand its share to")

    def close(self, *, is_in_step: bool) -> None:
        """See `Lockstep`."""


class Leader:
    """Rank 0 of several."""

    def __init__(
        self,
        folder: str,
        num_ranks: int,
        *,
        on_share: Callable[[Share], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """Waits until every follower is there. Blocking.

        Args:
            folder: ZeroMQ address of the socket folder.
            num_ranks: leader included.
            on_share: called with each share that is handed over, in a thread of its own.
            on_fault: called with what `on_share` raised.
        """
        self._heard: dict[int, deque[_Word]] = {rank: deque() for rank in range(1, num_ranks)}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"{folder}/lockstep")
        self._shares = self._context.socket(zmq.PULL)
        self._shares.setsockopt(zmq.LINGER, 0)
        self._shares.bind(f"{folder}/shares")
        self._end_fd = os.eventfd(0)
        self._on_share = on_share
        self._on_fault = on_fault
        self._thread = threading.Thread(target=self._take_shares, name="shares", daemon=True)
        self._thread.start()
        self._hear("joined")

    def agree(self, what: str, decide: Callable[[], T]) -> T:
        """See `Lockstep`."""
        value = decide()
        for rank in self._heard:
            self._socket.send_multipart([str(rank).encode(), _encode(_Word(what, value))])
        return value

    def gather(self, what: str, value: Any) -> list[Any]:
        """See `Lockstep`."""
        return [value, *self._hear(what)]

    def hand_over(self, share: Share) -> None:
        """See `Lockstep`."""
        raise BugError(f"shard {share.index}: the leader publishes, it hands nothing over")

    def close(self, *, is_in_step: bool) -> None:
        """See `Lockstep`."""
        if not is_in_step:
            os.eventfd_write(self._end_fd, 1)
        self._thread.join()
        os.close(self._end_fd)
        self._socket.close()
        self._shares.close()
        self._context.term()

    def _hear(self, what: str) -> list[Any]:
        """One word of every follower, in their order."""
        while not all(self._heard.values()):
            sender, payload = self._socket.recv_multipart()
            # A follower may be a word ahead of another one.
            self._heard[int(sender)].append(_decode_word(payload))
        words = [words.popleft() for words in self._heard.values()]
        for rank, word in zip(self._heard, words, strict=True):
            _require_same(what, word.what, f"rank {rank}")
        return [word.value for word in words]

    def _take_shares(self) -> None:
        poller = zmq.Poller()
        poller.register(self._shares, zmq.POLLIN)
        poller.register(self._end_fd, zmq.POLLIN)
        num_open = len(self._heard)
        while num_open:
            ready = dict(poller.poll())
            if self._shares not in ready:
                return
            payload = self._shares.recv()
            if payload == _NO_MORE:
                num_open -= 1
                continue
            try:
                self._on_share(_decode_share(payload))
            except BaseException as error:  # noqa: BLE001 - border of the thread: other shares still come
                self._on_fault(error)


class Follower:
    """Any other rank."""

    def __init__(self, folder: str, rank: int) -> None:
        """Says that this rank is there; does not wait for the leader.

        Args:
            folder: ZeroMQ address of the socket folder.
            rank: of this process.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.connect(f"{folder}/lockstep")
        self._shares = self._context.socket(zmq.PUSH)
        self._shares.setsockopt(zmq.LINGER, LINGER_MS)
        self._shares.setsockopt(zmq.SNDHWM, 0)
        self._shares.connect(f"{folder}/shares")
        self._shares_lock = threading.Lock()
        self.gather("joined", None)

    def agree(self, what: str, _: Callable[[], T]) -> T:
        """See `Lockstep`."""
        word = _decode_word(self._socket.recv())
        _require_same(what, word.what, "the leader")
        value: T = word.value
        return value

    def gather(self, what: str, value: Any) -> list[Any]:
        """See `Lockstep`."""
        self._socket.send(_encode(_Word(what, value)))
        return []

    def hand_over(self, share: Share) -> None:
        """See `Lockstep`."""
        with self._shares_lock:
            self._shares.send(_encode(share))

    def close(self, *, is_in_step: bool) -> None:  # noqa: ARG002 - it waits for nobody either way
        """See `Lockstep`; blocks up to `LINGER_MS`."""
        with self._shares_lock:
            self._shares.send(_NO_MORE)
        self._socket.close()
        self._shares.close()
        self._context.term()


def join(
    spec: EngineSpec,
    rank: int,
    *,
    on_share: Callable[[Share], None],
    on_fault: Callable[[BaseException], None],
) -> Lockstep:
    """Connects a rank with the others of its replica. Blocks on the leader until all are there.

    Args:
        spec: of the replica.
        rank: of this process.
        on_share: called on the leader, in a thread of its own, with each share that is handed over.
        on_fault: called with what `on_share` raised.
    """
    if spec.tp == 1:
        return Alone()
    folder = spec.endpoint.rpartition("/")[0]
    if rank:
        return Follower(folder, rank)
    return Leader(folder, spec.tp, on_share=on_share, on_fault=on_fault)


def _require_same(mine: str, theirs: str, who: str) -> None:
    if mine != theirs:
        raise BugError(f"ranks are out of step: {mine!r} here, {theirs!r} from {who}")
