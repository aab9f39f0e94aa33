"""Clients that leave, dawdle, never read, or speak bad HTTP: through a real uvicorn on the loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers
from penstock.launch.http_connection import guarded_protocol
from penstock.types import FinishReason

from .http_stage import CHAT, HELLO, MODEL, TEXT, app_of, stage
from .streams import NullStreams

PATIENCE_S = 60.0
LIMITS = RequestLimits(max_body_bytes=100_000, max_header_bytes=8192)


class _Server(uvicorn.Server):
    """Leaves signals to pytest."""

    @asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        task = asyncio.create_task(self._serve([listener]))
        while not self.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        try:
            yield
        finally:
            self.should_exit = self.force_exit = True
            await task


@dataclass
class Server:
    """A listening application."""

    streams: NullStreams
    port: int

    async def connect(self, *, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection."""
        made = socket.socket()
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=made, limit=1 << 24)

    async def say(self, raw: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.connect()
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer


@asynccontextmanager
async def listening(application: Any, limits: RequestLimits) -> AsyncIterator[int]:
    """The port of an application."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=guarded_protocol(limits), ws="none", lifespan="off", log_config=None)
    async with _Server(config).running(listener):
        yield listener.getsockname()[1]


@asynccontextmanager
async def serving(limits: RequestLimits) -> AsyncIterator[Server]:
    streams = NullStreams()
    async with listening(app_of(streams, limits), limits) as port:
        yield Server(streams, port)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(LIMITS) as running:
        yield running


def post(path: str, body: object, *headers: str, version: str = "1.1") -> bytes:
    raw = json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + raw


def chat(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1} | fields


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


# --- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_leaves_while_it_waits_frees_everything(server: Server, stream: bool, n: int):
    server.streams.gate = asyncio.Event()  # never set: no token ever comes
    _, writer = await server.connect()
    writer.write(post(CHAT, chat(stream=stream, n=n)))
    await asyncio.wait_for(server.streams.until(opened=n), PATIENCE_S)
    writer.transport.abort()
    await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)
    assert len(server.streams.closed) == n
    assert not server.streams.ended_by_caller


@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_leaves_amid_its_answer_frees_everything(server: Server, n: int):
    server.streams.script = lambda _: (tuple(range(10, 1000)), FinishReason.LENGTH)
    server.streams.batch_sizes = lambda _: 1
    server.streams.gate = asyncio.Event()
    server.streams.gate.set()
    reader, writer = await server.connect()
    writer.write(post(CHAT, chat(stream=True, n=n)))
    await reader.readuntil(b"0:3")
    server.streams.gate.clear()
    writer.close()
    await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)
    server.streams.gate.set()
    assert (await server.say(post(CHAT, chat(), "Connection: close")))[:12] == b"HTTP/1.1 200"


async def test_a_client_that_pipelines_and_leaves_frees_everything(server: Server):
    server.streams.gate = asyncio.Event()
    _, writer = await server.connect()
    writer.write(post(CHAT, chat(stream=True)))
    await asyncio.wait_for(server.streams.until(opened=1), PATIENCE_S)
    writer.write(post(CHAT, chat(stream=True)))
    await writer.drain()
    await server.say(b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")  # by now the second one was read
    writer.transport.abort()
    await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)


async def test_a_client_that_leaves_while_its_prompt_is_read_opens_nothing(server: Server):
    _, writer = await server.connect()
    whole = post(TEXT, {"model": MODEL, "prompt": "a b c"})
    writer.write(whole[:-3])
    await writer.drain()
    writer.transport.abort()
    assert (await server.say(post(TEXT, {"model": MODEL, "prompt": "a"}, "Connection: close")))[:12] == b"HTTP/1.1 200"
    assert len(server.streams.opened) == 1


async def test_many_clients_that_leave_at_once(server: Server):
    server.streams.gate = asyncio.Event()
    count = 200  # descriptors of both ends are in one process
    writers = []
    for _ in range(count):
        writers.append((await server.connect())[1])
        writers[-1].write(post(CHAT, chat(stream=True)))  # at once: a head that is late is not waited for
    await asyncio.wait_for(server.streams.until(opened=count), PATIENCE_S)
    for writer in writers:
        writer.transport.abort()
    await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)


async def test_a_client_that_never_reads_is_hung_up_on():
    async with serving(RequestLimits(idle_client_s=0.3)) as server:
        server.streams.script = lambda _: (tuple(i % 4000 + 10 for i in range(60_000)), FinishReason.LENGTH)
        server.streams.batch_sizes = lambda _: 16
        reader, writer = await server.connect(receive_buffer=4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(TEXT, {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 2000, "logprobs": 5}))
        await asyncio.wait_for(server.streams.until(opened=1), PATIENCE_S)
        await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)
        writer.transport.abort()
        assert (await server.say(post(CHAT, chat(), "Connection: close")))[:12] == b"HTTP/1.1 200"


async def test_whose_answer_has_not_begun_is_told_when_the_process_ends():
    """Its event loop cancels what still runs: that is no error of the server's, and another process may answer."""
    streams = NullStreams()
    streams.gate = asyncio.Event()
    async with stage(streams) as on:
        asked = asyncio.create_task(on.chat())
        await asyncio.wait_for(streams.until(opened=1), PATIENCE_S)
        asked.cancel()
        answer = await asked
    assert answer.status_code == 503
    assert "has stopped" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


# --- bad HTTP --------------------------------------------------------------------------------------------------------

RAW = {
    "a negative content length": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", [400]),
    "a content length in words": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n", [400]),
    "two content lengths": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        [400],
    ),
    "a length and chunks (smuggling)": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5c\r\nGET /admin/workers HTTP/1.1\r\n\r\n0\r\n\r\n",
        [400],
    ),
    "chunks by another name": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        [501],
    ),
    "a bad chunk size": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        [400],
    ),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", [400]),
    "line feeds alone": (b"GET /health HTTP/1.1\nHost: x\n\n", [400]),
    "raw bytes in a path": (b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
    "a NUL in a header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: a\0b\r\n\r\n", [400]),
    "a chunk of more than there is": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        [400],
    ),
    "a peer of ZeroMQ": (b"\xff" + b"\0" * 8 + b"\x7f\x03\0CURVE" + b"\0" * 47, [400]),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
    "a header without a name": (b"GET /health HTTP/1.1\r\n: x\r\n\r\n", [400]),
    "a header with a line break": (b"GET /health HTTP/1.1\r\nA: b\r\n c\r\nHost\r\n\r\n", [400]),
    "a huge content length": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99999999999\r\n\r\n",
        [413],
    ),
    "a header bomb": (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", [431]),
    "one long header": (b"GET /health HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", [431]),
    "a long path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", [431]),
    "HTTP/2 in clear": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
}


@pytest.mark.parametrize(("raw", "expected"), RAW.values(), ids=RAW.keys())
async def test_bad_http_is_refused_in_the_envelope(server: Server, raw: bytes, expected: list[int]):
    answer = await server.say(raw)
    assert statuses(answer) == expected
    assert not answer or set(json.loads(answer.split(b"\r\n\r\n", 1)[1])) == {"error"}
    assert (await server.say(post(CHAT, chat(), "Connection: close")))[:12] == b"HTTP/1.1 200"
    assert len(server.streams.opened) == 1


async def test_a_chunked_body_without_end_is_refused_early(server: Server):
    reader, writer = await server.connect()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    sent = 0
    while not reader.at_eof() and sent < 64 << 20:
        writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        sent += 0x4000
        try:
            await asyncio.wait_for(writer.drain(), 1)
            if reader._buffer:  # type: ignore[attr-defined]
                break
        except (ConnectionError, TimeoutError):
            break
    head = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
    assert statuses(head) == [413]
    assert b"connection: close" in head
    writer.transport.abort()


async def test_a_slow_body_is_given_up():
    async with serving(RequestLimits(slow_body_s=0.3)) as server:
        answer = await server.say(post(TEXT, {"model": MODEL, "prompt": "a"})[:-1])
        assert statuses(answer) == [408]
        assert b"0.3 s" in answer
        assert b"slow_body" in answer


async def test_a_refusal_reaches_a_client_that_is_still_sending(server: Server):
    reader, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
    assert statuses(head) == [415]
    writer.write(b"x" * 90000)  # nobody resets the connection before we have read the refusal
    await writer.drain()
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()


async def test_pipelined_requests_are_answered_in_order(server: Server):
    asked = b"".join(post(TEXT, {"model": MODEL, "prompt": "a", "seed": i, "max_tokens": 4}) for i in range(3))
    answer = await server.say(asked + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200] * 4
    seeds = [answer.index(b'"seed":%d' % i) for i in range(3)]
    assert seeds == sorted(seeds)
    assert answer.endswith(b"}")


async def test_http_1_0_gets_a_stream_in_one_piece(server: Server):
    answer = await server.say(post(CHAT, chat(stream=True), version="1.0"))
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length: %d" % len(body) in head.lower()
    assert body.endswith(b"data: [DONE]\n\n")


async def test_http_1_0_still_gets_statuses():
    async with stage(NullStreams(fail_at={0: NoWorkers("x")})) as on:
        answer = await on.chat(stream=True)
        assert answer.status_code == 503


async def test_expecting_100_continue(server: Server):
    reader, writer = await server.connect()
    head, body = post(TEXT, {"model": MODEL, "prompt": "a"}, "Expect: 100-continue", "Connection: close").split(
        b"\r\n\r\n", 1
    )
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_stream_over_a_kept_connection_is_followed_by_the_next(server: Server):
    reader, writer = await server.connect()
    for _ in range(3):
        writer.write(post(CHAT, chat(stream=True)))
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
        assert b"[DONE]" in answer
    writer.close()
    assert server.streams.open == set()


async def test_no_task_waits_for_a_client_to_leave(server: Server):
    server.streams.gate = asyncio.Event()  # never set
    before = len(asyncio.all_tasks())
    _, writer = await server.connect()
    writer.write(post(CHAT, chat(stream=True)))
    await asyncio.wait_for(server.streams.until(opened=1), PATIENCE_S)
    tasks = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    assert not any("_listen" in name for name in tasks)
    assert len(asyncio.all_tasks()) <= before + 2  # the application's, and one for streams that cannot be polled
    writer.transport.abort()
    await asyncio.wait_for(server.streams.until(none_open=True), PATIENCE_S)
