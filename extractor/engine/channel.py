"""The rank's end of the line to its supervisor: one thread that owns the socket.

The compute thread and the writer threads only put reports into a queue, and requests are handed on in the
channel's own thread as they arrive, so a supervisor that is slow or gone never holds up a batch, and a batch
never holds up a request. A lifeline (the read end of a pipe whose other end only the supervisor holds) tells
when the supervisor is gone, also by SIGKILL. What requests mean is in `extractor.engine.orders`.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING

import zmq

from extractor import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.protocol import AnyReport, AnyRequest

LINGER_MS = 5_000
"""How long unsent reports are kept for the supervisor when the rank exits."""


class Channel:
    """Reports out, requests in; both without blocking."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        *,
        lifeline_fd: int | None,
        on_request: Callable[[AnyRequest], None],
        on_supervisor_gone: Callable[[], None],
    ) -> None:
        """Connects.

        Args:
            endpoint: ZeroMQ address of the supervisor.
            identity: of this rank, "REPLICA.RANK".
            lifeline_fd: read end of the lifeline; None: nobody is watched.
            on_request: called in the channel's thread with each request; must not block.
            on_supervisor_gone: called in the channel's thread once the supervisor is gone.
        """
        self._on_request = on_request
        self._on_supervisor_gone = on_supervisor_gone
        self._outgoing: queue.SimpleQueue[AnyReport | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0)
        self._lifeline_fd = lifeline_fd
        self._is_alone = False
        self._thread = threading.Thread(
            target=self._run, args=(endpoint, identity), name="channel", daemon=True
        )
        self._thread.start()

    def send(self, report: AnyReport) -> None:
        """Queues a report. Any thread; never blocks."""
        self._outgoing.put(report)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Sends what is queued, then ends the thread. Blocks up to `LINGER_MS`."""
        self._outgoing.put(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()

    def _run(self, endpoint: str, identity: str) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        socket.connect(endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._lifeline_fd is not None:
            poller.register(self._lifeline_fd, zmq.POLLIN | zmq.POLLERR)
        open_ = True
        while open_:
            for source, _ in poller.poll():
                if source is socket:
                    self._on_request(protocol.decode_request(socket.recv()))
                elif source == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    open_ = self._flush(socket)
                else:
                    # Nobody ever writes into the lifeline: readable means closed.
                    poller.unregister(self._lifeline_fd)
                    self._is_alone = True
                    self._on_supervisor_gone()
        if self._is_alone:
            socket.setsockopt(zmq.LINGER, 0)
        socket.close()
        context.term()

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Sends everything queued; False when the channel is to be closed."""
        while True:
            try:
                report = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if report is None:
                return False
            socket.send(protocol.encode(report))
