"""What an open stream keeps of a gateway's memory, without its router's part and its prompt's tokens."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import Callable

import uvicorn

from penstock.config.limits import RequestLimits
from penstock.launch.http_connection import guarded_protocol
from penstock.types import TokenBatch, ValidRequest

from .http_stage import CHAT, app_of
from .streams import NullStreams
from .test_http_clients import PATIENCE_S, _Server, chat, post

STREAMS = 200
MOST_BYTES = 14_000
"""Of a stream, and of its client here: 12,300 with CPython 3.11, 16,700 with a coroutine for each layer."""


class OneToken:
    """``PollableTokenStream`` of an answer that has begun and never goes on."""

    def __init__(self) -> None:
        self._batch: TokenBatch | None = TokenBatch(tokens=(65,))

    def begin(self, ready: Callable[[], None]) -> Callable[[], TokenBatch | None]:
        ready()
        return self._poll

    def _poll(self) -> TokenBatch | None:
        batch, self._batch = self._batch, None
        return batch

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def __aiter__(self) -> OneToken:
        raise AssertionError("who polls does not iterate")

    async def __anext__(self) -> TokenBatch:
        raise AssertionError("who polls does not iterate")


class Begun(NullStreams):
    """All answers have begun and never go on."""

    def stream(self, request: ValidRequest) -> OneToken:  # type: ignore[override]
        return OneToken()


def heard(client: socket.socket) -> bool:
    """Has the answer begun?"""
    try:
        return bool(client.recv(1 << 16))
    except BlockingIOError:
        return False


async def opened(port: int, raw: bytes, clients: int) -> list[socket.socket]:
    """Clients whose answers have begun."""
    loop, made = asyncio.get_running_loop(), list[socket.socket]()
    for _ in range(clients):
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, raw)
        made.append(client)
    for client in made:
        while not heard(client):  # noqa: ASYNC110 - a socket that is not the loop's has no event
            await asyncio.sleep(0.001)
    return made


async def test_an_open_stream_keeps_little():
    limits = RequestLimits(max_queued_requests=2 * STREAMS)
    listener = socket.create_server(("127.0.0.1", 0), backlog=STREAMS)
    config = uvicorn.Config(
        app_of(Begun(), limits), http=guarded_protocol(limits), ws="none", lifespan="off", log_config=None
    )
    raw = post(CHAT, chat(stream=True, max_tokens=64))
    async with _Server(config).running(listener):
        port = listener.getsockname()[1]
        clients = await asyncio.wait_for(opened(port, raw, 20), PATIENCE_S)  # what is made once is made
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            clients += await asyncio.wait_for(opened(port, raw, STREAMS), PATIENCE_S)
            gc.collect()
            kept = (tracemalloc.get_traced_memory()[0] - before) / STREAMS
        finally:
            tracemalloc.stop()
        for client in clients:
            client.close()
    assert kept < MOST_BYTES, f"{kept:,.0f} bytes a stream"
