"""Images from public addresses, and from none other: a real server on the loopback stands for the Internet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from penstock.errors import RequestError
from penstock.processing.multimodal import image_fetch
from penstock.processing.multimodal.image_fetch import HostResolver, ImageFetcher, is_public

IMAGE = b"image" * 100


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "240.0.0.1", "nonsense", ""),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("168.63.129.16", "::ffff:168.63.129.16", "fec0::1", "3fff::1", "2606:4700::5efe:10.0.0.1"),
        *("2606:4700::200:5efe:127.0.0.1", "5f00::1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "::127.0.0.1", "64:ff9b:1::1"),
    ],
)
def test_internal_addresses(address: str):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses(address: str):
    assert is_public(address)


Handler = Callable[[str], bytes | None]
"""Request line to response; None: never answer."""


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            response = handler((await reader.readuntil(b"\r\n\r\n")).decode())
            if response is None:
                await reader.read()  # until the client hangs up
            else:
                writer.write(response)
                await writer.drain()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    running = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]
    await asyncio.gather(*serving)  # what the client left behind is closed before the loop is


def answer(body: bytes = IMAGE, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(headers or [f"Content-Length: {len(body)}"])]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Plain HTTP goes to this port of the loopback."""
    return lambda port: monkeypatch.setitem(image_fetch.PORTS, "http", port)


async def names(host: str, port: int) -> Sequence[str]:
    """example.com is here; inside.example.com is behind the wall, as one of its two addresses says."""
    return ["127.0.0.1", "10.0.0.1"] if host.startswith("inside") else ["127.0.0.1"]


def fetcher(max_bytes: int = 10_000, max_seconds: float = 5.0) -> ImageFetcher:
    """To which the loopback is public."""
    return ImageFetcher(
        max_bytes=max_bytes, max_seconds=max_seconds, resolve=names, public=lambda address: address == "127.0.0.1"
    )


async def test_a_body_comes_with_a_length_in_chunks_or_until_the_end(loopback: Callable[[int], None]):
    chunked = b"3\r\nima\r\n2\r\nge\r\n0\r\n\r\n"
    for response, body in (
        (answer(), IMAGE),
        (answer(chunked, "200 OK", "Transfer-Encoding: chunked"), b"image"),
        (answer(IMAGE, "200 OK", "Connection: close"), IMAGE),
    ):
        heads: list[str] = []

        def respond(head: str, response: bytes = response, heads: list[str] = heads) -> bytes:
            heads.append(head)
            return response

        async with server(respond) as port:
            loopback(port)
            assert await fetcher().fetch("http://example.com/a b?x=ü#part", "here") == body
        assert heads[0].startswith("GET /a%20b?x=%C3%BC HTTP/1.1\r\nHost: example.com\r\n")


async def test_an_address_that_takes_no_connections_is_passed_over(loopback: Callable[[int], None]):
    async def two(host: str, port: int) -> Sequence[str]:
        return ["::1", "127.0.0.1"]

    async with server(lambda head: answer()) as port:
        loopback(port)
        both = ImageFetcher(max_bytes=10_000, max_seconds=5.0, resolve=two, public=lambda address: True)
        assert await both.fetch("http://example.com/", "here") == IMAGE
        nobody = ImageFetcher(max_bytes=10_000, max_seconds=5.0, resolve=two, public=lambda address: True)
    with pytest.raises(RequestError, match="could not be fetched"):
        await nobody.fetch("http://example.com/", "here")


async def test_redirects_are_followed_and_looked_at(loopback: Callable[[int], None]):
    def respond(head: str) -> bytes:
        path = head.split()[1]
        if path == "/moved":
            return answer(b"", "302 Found", "Location: /there", "Content-Length: 0")
        if path == "/inside":
            return answer(b"", "301 Moved", "Location: http://inside.example.com/secret", "Content-Length: 0")
        if path == "/round":
            return answer(b"", "307 Temporary", "Location: /round", "Content-Length: 0")
        return answer()

    async with server(respond) as port:
        loopback(port)
        assert await fetcher().fetch("http://example.com/moved", "here") == IMAGE
        for path, why in (("/inside", "not a public"), ("/round", "redirects")):
            with pytest.raises(RequestError, match=why):
                await fetcher().fetch(f"http://example.com{path}", "here")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://inside.example.com/", "not a public"),
        ("ftp://example.com/a.png", "must begin with data:"),
        ("file:///etc/passwd", "must begin with data:"),
        ("http:///a.png", "must begin with data:"),
        ("http://user:secret@example.com/", "neither a user"),
        ("http://example.com:22/", "another port"),
        ("http://example.com:x/", "cannot be read"),
        ("http://[::1/", "cannot be read"),
    ],
)
async def test_urls_that_are_not_fetched(url: str, why: str):
    with pytest.raises(RequestError, match=why) as told:
        await fetcher().fetch(url, "messages[0]")
    assert told.value.param == "messages[0]"


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://localhost/", "http://2130706433/", "http://[::1]/"])
async def test_this_very_host_is_not_fetched_from(url: str):
    with pytest.raises(RequestError, match="not a public"):
        await ImageFetcher(max_bytes=10, max_seconds=5).fetch(url, "here")


async def test_size_and_time_are_limited(loopback: Callable[[int], None]):
    for response, why in (
        (answer(bytes(20_000)), "max_image_bytes"),
        (answer(b"", "404 Not Found"), "status 404"),
        (answer(b"", "200 OK", *(f"X-{i}: {'x' * 4000}" for i in range(30))), "max_image_bytes"),
        (b"nonsense\r\n\r\n", "could not be fetched"),
        (b"", "no answer"),
    ):
        async with server(lambda head, response=response: response) as port:
            loopback(port)
            with pytest.raises(RequestError, match=why):
                await fetcher().fetch("http://example.com/", "here")
    async with server(lambda head: None) as port:
        loopback(port)
        with pytest.raises(RequestError, match="remote_image_s"):
            await fetcher(max_seconds=0.05).fetch("http://example.com/", "here")


async def test_only_hosts_that_the_operator_names_are_fetched_from():
    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError(f"{host} was asked for")

    images = ImageFetcher(max_bytes=1, max_seconds=5.0, hosts=("cdn.example.com", ".example.org"), resolve=nowhere)
    for url in ("https://example.com/a", "https://xexample.org/a", "https://cdn.example.com.evil.net/a"):
        with pytest.raises(RequestError, match="some hosts only"):
            await images.fetch(url, "here")
    for url in ("https://CDN.example.com./a", "https://a.b.example.org/a"):
        with pytest.raises(RequestError, match="could not be fetched"):
            await images.fetch(url, "here")


async def test_a_name_server_that_says_nothing_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch):
    goes_on = threading.Event()

    def getaddrinfo(host: str, port: int, type: int) -> list[tuple[object, ...]]:
        assert host == "quick" or goes_on.wait(60)
        return [(0, 0, 0, "", ("1.1.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolver = HostResolver(patience_s=0.01)
    for _ in range(image_fetch.RESOLVERS - 1):
        with pytest.raises(OSError, match="too long"):
            await resolver("slow", 80)
    resolver._patience_s = 60.0
    assert await resolver("quick", 80) == ["1.1.1.1"]
    assert await asyncio.to_thread(lambda: 1) == 1, "the loop's own threads are free"
    monkeypatch.setattr(image_fetch, "MAX_RESOLVING", image_fetch.RESOLVERS - 1)
    with pytest.raises(OSError, match="too many"):
        await resolver("quick", 80)
    goes_on.set()
    resolver.close()
