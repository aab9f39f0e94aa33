"""Clients of streams: plain sockets that read whatever comes and keep how far each stream is.

They count tokens by the ids of events (``0:17``), not events, for one event may carry several tokens.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import time
from typing import Any

from .figures import say

_ID = re.compile(rb"id: 0:(\d+)\n")
CONNECT_AT_ONCE = 64


def request(path: str, body: dict[str, Any] | None, port: int) -> bytes:
    """A whole request."""
    raw = json.dumps(body).encode() if body is not None else b""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


class _Crowd:
    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.last: dict[int, bytes] = {}
        self.read = 0
        self.events = 0
        self.chunks = 0
        self.broken = 0
        self.gaps: list[float] | None = None
        self._came: dict[int, float] = {}

    def open(self, count: int, port: int, asked: bytes) -> None:
        for i in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(asked)
            sock.setblocking(False)
            self.sockets[sock.fileno()] = sock
            self.epoll.register(sock.fileno(), select.EPOLLIN)
            if i % CONNECT_AT_ONCE == CONNECT_AT_ONCE - 1:
                self.turn(0.02)

    def turn(self, wait_s: float) -> None:
        for fd, _ in self.epoll.poll(wait_s, 1024):
            try:
                data = self.sockets[fd].recv(1 << 18)
            except (BlockingIOError, ConnectionError):
                data = b""
            if not data:
                self.broken += 1
                self.epoll.unregister(fd)
                continue
            self.read += len(data)
            self.events += data.count(b"data: ")
            if self.gaps is not None:
                now = time.monotonic()
                before = self._came.get(fd)
                if before is not None:
                    self.gaps.append(now - before)
                self._came[fd] = now
            if b"id: 0:" in data:
                self.last[fd] = data

    def tokens(self) -> int:
        """Of all streams, by the last id of each."""
        total = 0
        for data in self.last.values():
            found = _ID.findall(data)
            total += int(found[-1]) if found else 0
        return total

    def begun(self) -> int:
        return len(self.last)

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.epoll.close()


def run(line: socket.socket) -> None:
    """Runs in a child.  ``open``, ``look`` (figures so far) and ``close`` over ``line``; between them it reads."""
    os.nice(5)
    crowd = _Crowd()
    say(line, "ready")
    line.setblocking(False)
    while True:
        crowd.turn(0.005)
        try:
            raw = line.recv(1 << 16)
        except BlockingIOError:
            continue
        if not raw:
            return
        asked = json.loads(raw)
        if "open" in asked:
            crowd.open(asked["open"], asked["port"], request(asked["path"], asked["body"], asked["port"]))
        if asked.get("gaps"):
            crowd.gaps = []
        if asked.get("close"):
            crowd.close()
            crowd = _Crowd()
        gaps = sorted(crowd.gaps or [0.0])
        say(
            line,
            {
                "at": time.monotonic(),
                "tokens": crowd.tokens(),
                "bytes": crowd.read,
                "events": crowd.events,
                "begun": crowd.begun(),
                "broken": crowd.broken,
                "gap_p50": gaps[len(gaps) // 2],
                "gap_p99": gaps[len(gaps) * 99 // 100],
            },
        )
