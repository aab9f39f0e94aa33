"""A real uvicorn on the loopback, and clients that do what they must not."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import sys
import termios
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from penstock.config.limits import RequestLimits
from penstock.launch.http_connection import MAX_PIPELINED, guarded_protocol

LIMITS = RequestLimits(max_header_bytes=2000)


class App:
    """GET answers 200 with the path; /endless streams until the client goes away."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.names: set[bytes] = set()  # of headers, when the body had been read
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        self.names.update(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/endless":
            watch = asyncio.ensure_future(receive())
            while not watch.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.gone.set()
            return
        await send({"type": "http.response.body", "body": scope["path"].encode() + body})


@contextlib.asynccontextmanager
async def serving(limits: RequestLimits = LIMITS) -> AsyncIterator[tuple[App, int]]:
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
    async with serving(RequestLimits(header_s=0.3)) as (app, port):
        answer, body = await exchange(port, b"GET / HTTP/1.1\r\nhost:")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert body is not None
        assert "limit of 0.3 s" in body["error"]["message"]
        answer, _ = await exchange(port)
        assert answer == b""  # said nothing, is told nothing
        assert app.asked == []


async def test_a_second_head_that_takes_too_long() -> None:
    async with serving(RequestLimits(header_s=1.0)) as (app, port):
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
    async with serving(RequestLimits(idle_client_s=0.3)) as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.gone.wait(), 60)
        writer.close()
        assert reader.at_eof() is False


async def test_a_slow_reader_is_not() -> None:
    idle_client_s = 1.0  # long enough for a machine that is busy with other things between two reads
    async with serving(RequestLimits(idle_client_s=idle_client_s)) as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        end = asyncio.get_running_loop().time() + 1.5 * idle_client_s
        while asyncio.get_running_loop().time() < end:
            assert await reader.read(1 << 20)
            await asyncio.sleep(idle_client_s / 50)
        assert not app.gone.is_set()
        writer.close()
        await asyncio.wait_for(app.gone.wait(), 60)


# --- where a request ends --------------------------------------------------------------------------------------------

UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    "anything": b"Connection: UPGRADE\r\nUpgrade: foo/1, bar\r\n",
}
INNER = b"GET /inner HTTP/1.1\r\nhost: y\r\n\r\n"
FRAMINGS = {
    "length": (b"Content-Length: %d\r\n\r\n" % len(INNER), INNER),
    "chunks": (b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)),
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
@pytest.mark.parametrize(("length", "body"), FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_an_upgrade_is_passed_over_and_the_body_is_no_request(upgrade: bytes, length: bytes, body: bytes) -> None:
    """As Java's own client sends it with every request."""
    head = b"POST /outer HTTP/1.1\r\nHost: x\r\n" + upgrade + length
    last = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    whole = head + body + last
    half = len(head) + len(body) // 2
    for cuts in ([], [len(head)], [len(head) - 1, len(head) + 1, half], [half, len(head) + len(body)]):
        async with serving() as (app, port):
            parts = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
            answer = await in_segments(port, parts)
            assert app.asked == ["/outer", "/last"], cuts
            assert answer.count(b"HTTP/1.1 200 OK") == 2
            assert b"/outer" + INNER in answer  # it is the body, whole
            assert b"HTTP/1.1 101" not in answer


async def in_segments(port: int, parts: list[bytes]) -> bytes:
    """Each part in a TCP segment of its own, which the server has read before the next one is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = writer.get_extra_info("socket")
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for part in parts:
            writer.write(part)
            while unacknowledged(made):  # noqa: ASYNC110 - the kernel has no event for it
                await asyncio.sleep(0)
            for _ in range(10):  # turns of the loop that it shares with the server
                await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


def unacknowledged(made: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(made.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


async def test_requests_with_upgrade_may_be_pipelined() -> None:
    async with serving() as (app, port):
        one = b"POST /%d HTTP/1.1\r\nHost: x\r\n" + UPGRADES["h2c"] + b"Content-Length: 2\r\n\r\nab"
        last = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
        answer, _ = await exchange(port, b"".join(one % i for i in range(5)) + last)
        assert app.asked == ["/0", "/1", "/2", "/3", "/4", "/last"]
        assert answer.count(b"HTTP/1.1 200 OK") == 6


POST = b"POST /outer HTTP/1.1\r\n"
HOST = b"Host: x\r\n"
BAD_FRAMINGS = {
    "two equal lengths": (400, POST + HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
    "a list of lengths": (400, POST + HOST + b"Content-Length: 5, 5\r\n\r\nhello"),
    "a length, then chunks": (400, POST + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "chunks, then a length": (400, POST + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
    "a length, then an unknown coding": (400, POST + HOST + b"Content-Length: 0\r\nTransfer-Encoding: x\r\n\r\n"),
    "an unknown coding": (501, POST + HOST + b"Transfer-Encoding: gzip\r\n\r\n"),
    "a coding below the chunks": (501, POST + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "chunks twice": (400, POST + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "chunks in HTTP/1.0": (400, b"POST /outer HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "the same with an upgrade": (
        400,
        POST + HOST + UPGRADES["h2c"] + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "no host": (400, b"GET /outer HTTP/1.1\r\n\r\n"),
    "two hosts": (400, b"GET /outer HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n"),
    "a host that is none": (400, b"GET /outer HTTP/1.1\r\nHost: a b\r\n\r\n"),
    "a host with a path": (400, b"GET /outer HTTP/1.1\r\nHost: x/y\r\n\r\n"),
    "a line that is continued": (400, POST + HOST + b"A: b\r\n c\r\n\r\n"),
    "CONNECT": (400, b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n"),
    "HTTP/2 at once": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
}


@pytest.mark.parametrize(("status", "raw"), BAD_FRAMINGS.values(), ids=BAD_FRAMINGS.keys())
async def test_a_head_that_two_could_read_in_two_ways(status: int, raw: bytes) -> None:
    """Refused, closed, and nothing behind it is parsed."""
    async with serving() as (app, port):
        answer, body = await exchange(port, raw + INNER)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert body is not None
        assert body["error"]["type"] == "invalid_request_error"
        assert app.asked == []


CHUNKED = POST + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_CHUNKS = {
    "no number": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a negative one": CHUNKED + b"-1\r\nhello\r\n0\r\n\r\n",
    "a number that does not fit": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nhello\r\n0\r\n\r\n",
    "longer than it says": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
    "an extension without an end": CHUNKED + b"5;" + b"x" * 300_000,
    "a trailer field without an end": CHUNKED + b"0\r\nx: " + b"y" * 300_000,
    "too many trailer fields": CHUNKED + b"0\r\n" + b"x: y\r\n" * 50_000,
}


@pytest.mark.parametrize("raw", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
async def test_bad_chunks_are_refused_aloud(raw: bytes) -> None:
    async with serving() as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):  # the rest is not read
            writer.write(raw)
            await writer.drain()
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert app.asked == ["/outer"]


async def test_trailer_fields_do_not_become_headers() -> None:
    """A proxy that takes a header away may hand through a trailer field of that name."""
    async with serving() as (app, port):
        trailer = b"5\r\nhello\r\n0\r\nAuthorization: Bearer stolen\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer, _ = await exchange(port, CHUNKED + trailer + last)
        assert app.asked == ["/outer", "/last"]
        assert b"/outerhello" in answer
        assert b"authorization" not in app.names
