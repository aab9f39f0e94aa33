"""Requests that arrive together begin so many a turn of the event loop, and all are answered."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import uvicorn

from penstock.config.limits import RequestLimits, TurnLimits
from penstock.launch.http_connection import guarded_protocol

from .http_stage import TEXT, app_of
from .streams import NullStreams
from .test_http_clients import PATIENCE_S, Server, _Server, post

CLIENTS, A_TURN = 500, 8
LIMITS = RequestLimits(max_queued_requests=CLIENTS)


class Counting:
    """An application, and how often it was called in each turn of the event loop."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = 0
        self.calls: Counter[int] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls[self._turn] += 1
        await self._app(scope, receive, send)

    def count_turns(self) -> None:
        self._turn += 1
        self._next = asyncio.get_running_loop().call_soon(self.count_turns)

    def stop(self) -> None:
        self._next.cancel()


async def test_five_hundred_at_once_of_whom_some_leave():
    streams, listener = NullStreams(), socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    app = Counting(app_of(streams, LIMITS))
    protocol = guarded_protocol(LIMITS, TurnLimits(client_reads_per_turn=A_TURN))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    raw = post(TEXT, {"model": "storyteller", "prompt": "Once", "max_tokens": 2, "seed": 1}, "Connection: close")
    async with _Server(config).running(listener):
        server = Server(streams, listener.getsockname()[1])
        clients = [await server.connect() for _ in range(CLIENTS)]
        app.count_turns()
        for _, writer in clients:
            writer.write(raw)
        await asyncio.sleep(0)  # all of it lies in the server's sockets
        for _, writer in clients[::5]:
            writer.transport.abort()
        stayed = [client for number, client in enumerate(clients) if number % 5]
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in stayed)), PATIENCE_S)
        app.stop()
        assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * len(stayed)
        await asyncio.wait_for(streams.until(none_open=True), PATIENCE_S)
        for _, writer in stayed:
            writer.close()
    assert max(app.calls.values()) <= A_TURN
    assert sum(app.calls.values()) >= len(stayed)


async def test_one_client_that_sends_in_pieces_is_answered_when_others_take_the_turns():
    streams, listener = NullStreams(), socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    protocol = guarded_protocol(LIMITS, TurnLimits(client_reads_per_turn=1))
    config = uvicorn.Config(app_of(streams, LIMITS), http=protocol, ws="none", lifespan="off", log_config=None)
    raw = post(TEXT, {"model": "storyteller", "prompt": "Once " * 9, "max_tokens": 2, "seed": 1}, "Connection: close")
    async with _Server(config).running(listener):
        server = Server(streams, listener.getsockname()[1])
        clients = [await server.connect() for _ in range(20)]
        for start in range(0, len(raw), 16):
            for _, writer in clients:
                writer.write(raw[start : start + 16])
            await asyncio.sleep(0)
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in clients)), PATIENCE_S)
        for _, writer in clients:
            writer.close()
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 20
    assert len(streams.closed) == 20
