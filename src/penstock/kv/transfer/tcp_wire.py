"""A connected socket that waits for as long as it was told and no longer, and copies nothing.

Knows no frames.  Used by one thread; ``hang_up`` may be called by any.  What is sent or read waits in the system, in
one call for all of it: waking a thread of Python costs as much as copying a page.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

MAX_PARTS = 512
"""Buffers in one call; the system takes 1,024."""

HUNG_UP = "the other end hung up"

_SHORTEST_S = 1e-3  # to wait; zero would be for ever

Part = bytes | bytearray | memoryview


class Wire:
    """Raises TimeoutError when nothing moves for ``patience_s``, ConnectionError or OSError when the other is gone."""

    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.patience_s = patience_s
        self._told = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}  # for how long the system waits

    def exactly(self, nbytes: int) -> bytearray:
        """So many bytes."""
        raw = bytearray(nbytes)
        self.fill(memoryview(raw))
        return raw

    def fill(self, view: memoryview) -> None:
        """All of it."""
        while view.nbytes:
            view = view[self.some(view, socket.MSG_WAITALL) :]

    def some(self, view: memoryview, flags: int = 0) -> int:
        """What is there; at least a byte."""
        self._be_patient(socket.SO_RCVTIMEO)
        try:
            got = self.sock.recv_into(view, 0, flags)
        except BlockingIOError:
            raise self.silence() from None
        if got == 0:
            raise ConnectionError(HUNG_UP)
        return got

    def send(self, parts: Sequence[Part]) -> None:
        """All of these, straight from where they lie."""
        self._be_patient(socket.SO_SNDTIMEO)
        views = [memoryview(part) for part in parts]
        at = 0
        while at < len(views):
            try:
                sent = self.sock.sendmsg(views[at : at + MAX_PARTS])
            except BlockingIOError:
                raise self.silence() from None
            at = advance(views, at, sent)

    def silence(self) -> TimeoutError:
        """What is wrong when nothing moves."""
        return TimeoutError(f"nothing moved for {self.patience_s:g} s")

    def hang_up(self) -> None:
        """Whoever waits hears of it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """May be called twice."""
        self.sock.close()

    def _be_patient(self, option: int) -> None:
        if self._told[option] != self.patience_s:
            self._told[option] = self.patience_s
            seconds = max(self.patience_s, _SHORTEST_S)
            timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def advance(views: list[memoryview], at: int, nbytes: int) -> int:
    """``nbytes`` more of ``views[at:]`` are done: where the first stands that is not, cut to what is left of it."""
    while nbytes:
        size = views[at].nbytes
        if nbytes < size:
            views[at] = views[at][nbytes:]
            return at
        nbytes -= size
        at += 1
    return at
