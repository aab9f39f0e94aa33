from __future__ import annotations

import asyncio

import pytest
from tests.scripted_server import Exchange, scripted, text_chunk

from penstock.http_client import HttpStreamClient, ServerAddress, StreamError


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8000", ServerAddress("127.0.0.1", 8000, False, "")),
        ("localhost:81/api/", ServerAddress("localhost", 81, False, "/api")),
        ("https://example.org", ServerAddress("example.org", 443, True, "")),
        ("http://[::1]:8000", ServerAddress("::1", 8000, False, "")),
    ],
)
def test_base_urls(url: str, server: ServerAddress):
    assert ServerAddress.parse(url) == server


@pytest.mark.parametrize("url", ["", "ftp://x", "http://"])
def test_other_urls_are_refused(url: str):
    with pytest.raises(ValueError, match="not an http"):
        ServerAddress.parse(url)


def test_a_header_cannot_smuggle_another():
    with pytest.raises(ValueError, match="line break"):
        HttpStreamClient("http://127.0.0.1:1", headers={"X-A": "b\r\nX-C: d"})


async def test_every_event_is_handed_over_with_the_moment_of_its_arrival():
    go = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("one")
        await go.wait()
        await exchange.piece(b"data: tw")
        await exchange.piece(b"o\n\ndata: three\n\n")
        await exchange.end_stream()

    found: list[tuple[bytes, float]] = []

    def take(data: bytes, arrived: float) -> None:
        found.append((data, arrived))
        go.set()

    async with scripted(script) as server, HttpStreamClient(server.url, api_key="k") as client:
        reply = await client.post("/v1/completions", b'{"a": 1}', take)
    assert reply.status == 200
    assert [data for data, _ in found] == [b"one", b"two", b"three", b"[DONE]"]
    times = [arrived for _, arrived in found]
    assert times == sorted(times)
    assert times[0] < times[1] == times[2]
    assert server.asked[0].body == {"a": 1}
    assert server.asked[0].headers["authorization"] == "Bearer k"


async def test_connections_are_used_again():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(200, {"path": exchange.asked.path})

    async with scripted(script) as server, HttpStreamClient(server.url + "/base") as client:
        bodies = [(await client.get(f"/{n}")).body for n in range(3)]
    assert bodies == [b'{"path": "/base/0"}', b'{"path": "/base/1"}', b'{"path": "/base/2"}']
    assert server.connections == 1


async def test_a_connection_that_the_server_closed_while_idle_is_replaced():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(200, {})
        exchange.writer.close()

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        for _ in range(3):
            assert (await client.get("/")).status == 200
    assert server.connections == 3


async def test_an_error_status_has_its_body():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(429, {"error": {}}, "Retry-After: 3\r\n")

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        reply = await client.post("/", b"{}", lambda *_: None)
    assert (reply.status, reply.body, reply.headers["retry-after"]) == (429, b'{"error": {}}', "3")


async def test_a_stream_that_breaks_off_is_an_error():
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(text_chunk("x"))
        exchange.writer.close()

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        with pytest.raises(StreamError) as caught:
            await client.post("/", b"{}", lambda *_: None)
    assert caught.value.kind == "connection lost"


async def test_a_stream_is_asked_for_again_behind_the_last_event_that_was_handled():
    """All of these come in one piece, and the callback refuses the third."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        if "last-event-id" not in exchange.asked.headers:
            await exchange.piece(b"".join(b"id: 0:%d\ndata: %d\n\n" % (n, n) for n in (1, 2, 3, 4)))
        await exchange.end_stream()

    taken: list[bytes] = []

    def take(data: bytes, _: float) -> None:
        if data == b"3":
            raise StreamError("connection lost", "told so by the server")
        taken.append(data)

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        await client.post_resumable("/", b"{}", take, key="k")
    assert taken == [b"1", b"2", b"[DONE]"]
    assert [asked.headers.get("last-event-id") for asked in server.asked] == [None, "0:2"]


async def test_what_a_callback_raises_ends_the_exchange():
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event("x")
        await exchange.end_stream()

    def refuse(data: bytes, _: float) -> None:
        raise StreamError("bad chunk", data.decode())

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        with pytest.raises(StreamError, match="bad chunk: x"):
            await client.post("/", b"{}", refuse)


async def test_no_http_is_a_bad_reply():
    async def script(exchange: Exchange) -> None:
        exchange.writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        with pytest.raises(StreamError) as caught:
            await client.get("/")
    assert caught.value.kind == "bad reply"


async def test_nobody_listens():
    async def script(exchange: Exchange) -> None:
        raise AssertionError("not reached")

    async with scripted(script) as server:
        url = server.url
    async with HttpStreamClient(url) as client:
        with pytest.raises(StreamError) as caught:
            await client.get("/")
    assert caught.value.kind == "connection refused"


async def test_cancelling_hangs_up():
    begun = asyncio.Event()
    hung_up = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        begun.set()
        try:
            while True:
                await exchange.event("x")
                await asyncio.sleep(0.001)
        except ConnectionError:
            hung_up.set()
            raise

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        task = asyncio.create_task(client.post("/", b"{}", lambda *_: None))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(hung_up.wait(), 60)


async def test_a_body_without_length_ends_with_the_connection():
    async def script(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello")
        exchange.writer.close()

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        assert (await client.get("/")).body == b"hello"
