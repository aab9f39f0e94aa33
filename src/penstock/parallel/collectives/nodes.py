"""Ranks on several machines: hidden states between stages and records of steps, over links that are encrypted.

::

    same machine       ShmCollectives    through memory that its ranks map
    another machine    RemoteRank        one link a pair of ranks, a thread that reads it ahead, and one that beats

The threads are why a rank that computes makes nobody wait who has something small for it, and why one that ends is
noticed soon, whatever this one does.  Ranks that divide a layer are on one machine, so nothing else is needed.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GroupError, ProtocolError
from penstock.parallel.collectives.shm import CHECK_S, ShmCollectives
from penstock.wire.rank_link import RECORD_BYTES

READ_AHEAD_RECORDS = 64
"""Records of one kind that are read ahead; what comes on top waits at the sender."""

MESSAGE_BYTES = 64 << 20
"""The longest message: the record of a step of a million tokens is shorter."""

BEAT_S = 1.0
"""How often each end of a link says that it is there, so that the other one does not take it for gone."""

_LABEL = struct.Struct("<BxxxIQ")  # kind, rows, bytes of the whole
PIECE_BYTES = RECORD_BYTES - _LABEL.size
"""What a record has of an array; larger ones go piece by piece."""


class _Kind(IntEnum):
    ARRAY = 0
    MESSAGE = 1
    REPORT = 2
    BEAT = 3


class RecordLink(Protocol):
    """A connection to one rank (``wire.rank_link.RankLink``)."""

    def send(self, *parts: bytes | memoryview) -> None: ...

    def recv(self) -> bytes: ...

    def close(self) -> None: ...


def _nothing(data: bytes) -> None:
    """What is done with reports that nobody expects."""


class RemoteRank:
    """A rank on another machine.  Call ``start`` before anything is received."""

    def __init__(
        self,
        link: RecordLink,
        name: str,
        *,
        on_lost: Callable[[str], None],
        on_report: Callable[[bytes], None] = _nothing,
    ) -> None:
        """``on_lost``: called once with the reason why the link has ended, unless it was closed here, by the thread
        that notices it, before others learn of it.  ``on_report``: called with each report by the thread that reads."""
        self.name = name
        self._link = link
        self._on_lost = on_lost
        self._on_report = on_report
        self._come = {kind: queue.SimpleQueue[tuple[int, int, memoryview] | None]() for kind in _Kind}
        self._room = {kind: threading.Semaphore(READ_AHEAD_RECORDS) for kind in _Kind}
        self._closed = False
        self._why = ""
        self._losing = threading.Lock()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=body, name=f"{body.__name__} {name}", daemon=True)
            for body in (self._read, self._beat)
        ]

    def start(self) -> None:
        """Begin to read, and to say that this end is there."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the link, and the threads."""
        self._closed = True
        self._link.close()
        for room in self._room.values():
            room.release()
        for thread in self._threads:
            thread.join()

    def send_array(self, array: NDArray[np.float32]) -> None:
        """Raises GroupError when the link has ended."""
        data = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)
        self._send(_Kind.ARRAY, len(array), data.data)

    def send_message(self, message: bytes) -> None:
        """Raises GroupError when the link has ended."""
        self._send(_Kind.MESSAGE, 0, memoryview(message))

    def send_report(self, report: bytes) -> None:
        """A report goes by what is waiting to be received."""
        self._send(_Kind.REPORT, 0, memoryview(report))

    def recv_array(self, shape: tuple[int, ...], check: Callable[[], None]) -> NDArray[np.float32]:
        """The next array, of this shape.  ``check`` is called while it is waited for."""
        array = np.empty(shape, np.float32)
        data, first = array.reshape(-1).view(np.uint8), 0
        while first == 0 or first < array.nbytes:
            rows, total, piece = self._next(_Kind.ARRAY, check)
            if (rows, total, len(piece)) != (len(array), array.nbytes, min(PIECE_BYTES, array.nbytes - first)):
                raise GroupError(f"{self.name} sent an array of another shape than {list(shape)}")
            data[first : first + len(piece)] = piece
            first += PIECE_BYTES
        return array

    def recv_message(self, check: Callable[[], None]) -> bytes:
        """The next message.  ``check`` is called while it is waited for."""
        parts: list[memoryview] = []
        come = total = 0
        while not parts or come < total:
            _, total, piece = self._next(_Kind.MESSAGE, check)
            come += len(piece)
            parts.append(piece)
            if total > MESSAGE_BYTES or come > total or (come < total and not piece):
                raise GroupError(f"{self.name} sent a message of {total} bytes; at most {MESSAGE_BYTES} are allowed")
        return b"".join(parts)

    def _send(self, kind: _Kind, rows: int, data: memoryview) -> None:
        label = _LABEL.pack(kind, rows, len(data))
        try:
            for first in range(0, max(1, len(data)), PIECE_BYTES):
                self._link.send(label, data[first : first + PIECE_BYTES])
        except OSError as error:
            self._lose(error)
            raise GroupError(self._why) from error

    def _lose(self, error: Exception) -> None:
        with self._losing:
            if self._why:
                return
            self._why = f"the link to {self.name} has ended: {error}"
            if not self._closed:
                self._on_lost(self._why)

    def _next(self, kind: _Kind, check: Callable[[], None]) -> tuple[int, int, memoryview]:
        while True:
            try:
                record = self._come[kind].get(timeout=CHECK_S)
            except queue.Empty:
                check()
                continue
            if record is None:
                self._come[kind].put(None)  # for whoever asks next
                raise GroupError(self._why)
            self._room[kind].release()
            return record

    def _read(self) -> None:
        try:
            while not self._closed:
                record = self._link.recv()
                if len(record) < _LABEL.size:
                    raise ProtocolError(f"a record of {len(record)} bytes")
                number, rows, total = _LABEL.unpack_from(record)
                if number >= len(_Kind):
                    raise ProtocolError(f"a record of kind {number}")
                kind, piece = _Kind(number), memoryview(record)[_LABEL.size :]
                if kind is _Kind.REPORT:
                    self._on_report(bytes(piece))
                elif kind is not _Kind.BEAT:
                    self._room[kind].acquire()
                    self._come[kind].put((rows, total, piece))
        except (OSError, ProtocolError) as error:
            self._lose(error)
        self._over.set()
        for come in self._come.values():
            come.put(None)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._link.send(_LABEL.pack(_Kind.BEAT, 0, 0))
            except OSError:
                return  # the thread that reads finds out, too


class NodeCollectives:
    """One rank's ``PointToPoint`` to a group whose ranks are on several machines, and its ``StepChannel``."""

    def __init__(
        self, local: ShmCollectives, remote: Mapping[int, RemoteRank], check: Callable[[], None] = lambda: None
    ) -> None:
        """``local``: the group, of which only ranks on this machine are reached; ``remote``: the others, by their
        number in the group, as far as this rank exchanges anything with them.  ``check``: called while it waits."""
        self._local = local
        self._remote = remote
        self._check = check

    @property
    def rank(self) -> int:
        return self._local.rank

    @property
    def size(self) -> int:
        return self._local.size

    def send(self, array: NDArray[np.float32], to: int) -> None:
        """To another rank, which receives what one rank sends it in this order."""
        if to in self._remote:
            self._remote[to].send_array(array)
        else:
            self._local.send(array, to)

    def recv(self, source: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The next array that a rank sent to this one, of this shape."""
        if source in self._remote:
            return self._remote[source].recv_array(shape, self._check)
        return self._local.recv(source, shape)

    def send_message(self, message: bytes, to: int) -> None:
        """Bytes to another rank, which receives what one rank sends it in this order."""
        if to in self._remote:
            self._remote[to].send_message(message)
        else:
            self._local.send_message(message, to)

    def recv_message(self, source: int) -> bytes:
        """The next message of a rank."""
        if source in self._remote:
            return self._remote[source].recv_message(self._check)
        return self._local.recv_message(source)
