"""The bare ASGI application that the gateway is measured beside: ready-made chunks, written at a fixed pace.

The same server (uvicorn with httptools), the same event loop, chunks of the same size.  One timer wakes all streams, so
that a token costs a task switch, uvicorn's ``send`` and the write, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import uvicorn

from penstock.config.schema import BACKLOG, EventLoop
from penstock.launch import event_loop

from .figures import say

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class _Bare:
    def __init__(self, size: int) -> None:
        self.pace = 0.0
        self.sent = 0
        self.streams = 0
        self.dropped = False  # all streams are to end
        self._tick: asyncio.Future[None] | None = None
        self._chunk = (b"data: " + b"x" * size)[: size - 2] + b"\n\n"

    async def beat(self) -> None:
        """Wakes all streams once a ``pace``; a turn that is late is made up for, as a worker's step would be."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self.pace:
                await asyncio.sleep(0.01)
                due = loop.time()
                if self.dropped:
                    self._wake()
                continue
            due = max(due + self.pace, loop.time() - self.pace)
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._wake()

    def _wake(self) -> None:
        tick, self._tick = self._tick, None
        if tick is not None:
            tick.set_result(None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self.streams += 1
        loop = asyncio.get_running_loop()
        try:
            while not self.dropped:
                if self._tick is None:
                    self._tick = loop.create_future()
                await self._tick
                await send({"type": "http.response.body", "body": self._chunk, "more_body": True})
                self.sent += 1
        finally:
            self.streams -= 1


def serve(line: socket.socket, listener: socket.socket, size: int, loop_kind: EventLoop) -> None:
    """Runs in a child; over ``line`` as ``workers.serve``."""

    async def go() -> None:
        bare = _Bare(size)
        server = uvicorn.Server(
            uvicorn.Config(
                bare, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, backlog=BACKLOG
            )
        )
        loop = asyncio.get_running_loop()
        line.setblocking(False)

        def asked() -> None:
            raw = line.recv(1 << 16)
            if not raw:
                server.should_exit = True
                loop.remove_reader(line.fileno())
                return
            said = json.loads(raw)
            bare.pace = float(said.get("pace", bare.pace))
            bare.dropped = bool(said.get("drop", False))
            say(line, {"sent": bare.sent, "running": bare.streams})

        loop.add_reader(line.fileno(), asked)
        task = loop.create_task(bare.beat())
        say(line, "ready")
        await server.serve([listener])
        task.cancel()

    event_loop.run(go(), loop_kind)
