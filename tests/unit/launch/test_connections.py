"""A real uvicorn on the loopback, and clients that do what they must not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from penstock.config.schema import Limits
from penstock.launch.connections import MAX_PIPELINED, guarded_protocol

LIMITS = Limits(max_header_bytes=2000)


class App:
    """GET answers 200 with the path; /endless streams until the client goes away."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/endless":
            watch = asyncio.ensure_future(receive())
            while not watch.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.gone.set()
            return
        await send({"type": "http.response.body", "body": scope["path"].encode() + body})


@contextlib.asynccontextmanager
async def serving(limits: Limits = LIMITS) -> AsyncIterator[tuple[App, int]]:
    app = App()
    config = uvicorn.Config(app, http=guarded_protocol(limits), lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def exchange(port: int, *pieces: bytes, then_read: bool = True) -> tuple[bytes, dict[str, Any] | None]:
    """Send, and read to the end: (everything, the JSON body of the last answer if it is one)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
    try:
        return answer, json.loads(answer.rpartition(b"\r\n\r\n")[2])
    except ValueError:
        return answer, None


async def test_ordinary_requests_pass() -> None:
    async with serving() as (app, port):
        answer, _ = await exchange(
            port,
            b"GET /one HTTP/1.1\r\nhost: x\r\n\r\n",
            b"POST /two HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\nconnection: close\r\n\r\n",
            b"y" * 5000,
        )
        assert app.asked == ["/one", "/two"]
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert b"y" * 5000 in answer  # a body is not part of the head


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 500 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000 + b"\r\n\r\n",
        b"GET /" + b"p" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000,  # and no end
    ],
    ids=["many", "long", "path", "endless"],
)
async def test_a_head_that_is_too_large(head: bytes) -> None:
    async with serving() as (app, port):
        answer, body = await exchange(port, head)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert body is not None
        assert "limit of 2000 bytes" in body["error"]["message"]
        assert app.asked == []


async def test_a_head_that_takes_too_long() -> None:
    async with serving(Limits(header_s=0.3)) as (app, port):
        answer, body = await exchange(port, b"GET / HTTP/1.1\r\nhost:")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert body is not None
        assert "limit of 0.3 s" in body["error"]["message"]
        answer, _ = await exchange(port)
        assert answer == b""  # said nothing, is told nothing
        assert app.asked == []


async def test_a_second_head_that_takes_too_long() -> None:
    async with serving(Limits(header_s=1.0)) as (app, port):
        answer, _ = await exchange(port, b"GET /one HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /two HTTP/1.1\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 408 " in answer
        assert app.asked == ["/one"]


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_what_is_no_http_gets_the_envelope(raw: bytes) -> None:
    async with serving() as (app, port):
        answer, body = await exchange(port, raw)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert body is not None
        assert body["error"]["type"] == "invalid_request_error"
        assert app.asked == []


async def test_a_flood_of_pipelined_requests_is_cut() -> None:
    async with serving() as (app, port):
        await exchange(port, b"GET /p HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
        assert len(app.asked) <= MAX_PIPELINED + 1


async def test_a_client_that_never_reads_is_hung_up_on() -> None:
    async with serving(Limits(idle_client_s=0.3)) as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.gone.wait(), 60)
        writer.close()
        assert reader.at_eof() is False


async def test_a_slow_reader_is_not() -> None:
    idle_client_s = 1.0  # long enough for a machine that is busy with other things between two reads
    async with serving(Limits(idle_client_s=idle_client_s)) as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        end = asyncio.get_running_loop().time() + 1.5 * idle_client_s
        while asyncio.get_running_loop().time() < end:
            assert await reader.read(1 << 20)
            await asyncio.sleep(idle_client_s / 50)
        assert not app.gone.is_set()
        writer.close()
        await asyncio.wait_for(app.gone.wait(), 60)
