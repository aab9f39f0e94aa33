"""The channel between supervisor and gateway: whole messages over an inherited SEQPACKET socket pair.

Never blocks: messages that a busy gateway does not receive are queued.  Knows nothing about what the messages mean.
"""

from __future__ import annotations

import logging
import socket
from collections import deque

from penstock.errors import ProtocolError
from penstock.wire.codec import decode_message, encode_message
from penstock.wire.supervisor_messages import (
    LoadModel,
    ServiceDraining,
    SupervisorMessage,
    SuspectWorker,
    UnloadModel,
    WorkerDown,
    WorkerRemoved,
    WorkerUp,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 10
MAX_WAITING = 4096
"""Queued messages for a gateway that does not read; it is found hung long before."""

_KINDS = (WorkerUp, WorkerDown, WorkerRemoved, ServiceDraining, SuspectWorker, LoadModel, UnloadModel)


class Channel:
    """One end of the pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends; each process closes the other's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages are queued."""
        return bool(self._waiting)

    def send(self, message: SupervisorMessage) -> None:
        """Send now or with a later ``flush``; without effect if the other end is closed.

        A message that cannot be encoded or is too large is logged and not sent.
        """
        try:
            frame = encode_message(message)
            if len(frame) > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"{len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        except ProtocolError as error:
            log.error("%s is not sent: %s", type(message).__name__, error)
            return
        self._waiting.append(frame)
        self.flush()

    def flush(self) -> None:
        """Send as many queued messages as the other end receives."""
        while self._waiting:
            try:
                self._sock.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:  # the other end is closed; its death is noticed by other means
                self._waiting.clear()
                return
            self._waiting.popleft()

    def receive(self) -> SupervisorMessage | None:
        """The next message; None: there is none now.  Raises EOFError if the other end is closed.

        Raises ProtocolError for anything else.
        """
        try:
            frame = self._sock.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        if not frame:
            raise EOFError
        message = decode_message(frame)
        if isinstance(message, _KINDS):
            return message
        raise ProtocolError(f"{type(message).__name__} does not belong on this channel")

    def close(self) -> None:
        """May be called twice."""
        self._sock.close()
