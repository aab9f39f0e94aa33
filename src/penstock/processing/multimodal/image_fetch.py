"""Fetches images from public addresses, where the operator allows it (``remote_images``).

Never from an internal address: a name is resolved once, every address of it must be public, and the connection goes to
one of exactly those; each redirect is checked the same way.  No proxy, no cookie, no credentials.  One time limit
covers everything, one size limit the body.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httptools

from penstock.processing.multimodal.image_preprocessing import bad_image

MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 64 << 10
MAX_URL_CHARS = 2048
PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 64 << 10
_INWARD = tuple(
    map(
        ipaddress.ip_network,
        (
            *("64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "::/96", "192.0.0.0/24", "192.88.99.0/24"),
            *("fec0::/10", "3fff::/20", "5f00::/16", "168.63.129.16/32"),
        ),
    )
)
"""Networks in which other addresses hide (translated, tunnelled, compatible ones), or whose members are no public
hosts: site-local and documentation addresses, segment routing, and the address at which Azure serves its machines."""

_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
"""The third quarter of addresses that hide one of IPv4 (RFC 5214, 6.1)."""

RESOLVERS = 4
RESOLVE_S = 5.0
MAX_RESOLVING = 64
"""Threads that resolve names, how long one is waited for, and how many may be asked for at a time: a name server that
says nothing holds its own threads up, not those of the loop."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses."""


def is_public(address: str) -> bool:
    """Whether this is an address of the public Internet.  One that cannot be parsed is not."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return is_public(str(found.ipv4_mapped))
    if any(found in network for network in _INWARD):
        return False
    if isinstance(found, ipaddress.IPv6Address) and int(found) >> 32 & 0xFFFFFFFF in _ISATAP:
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


class HostResolver:
    """Resolves names as the system does, on threads of its own."""

    def __init__(self, patience_s: float = RESOLVE_S) -> None:
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolver")
        self._asked = 0  # that are not over, waited for or not

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Addresses of a name.  Raises OSError, also when it takes too long or too many are asked for."""
        if self._asked >= MAX_RESOLVING:
            raise OSError("too many names are being resolved")
        self._asked += 1
        asked = asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)
        asked.add_done_callback(self._over)
        done, _ = await asyncio.wait([asked], timeout=self._patience_s)
        if not done:
            raise OSError("resolving the name takes too long")
        return asked.result()

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _over(self, asked: asyncio.Future[list[str]]) -> None:
        self._asked -= 1
        if not asked.cancelled():
            asked.exception()  # its caller may be gone


def _addresses(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class ImageFetcher:
    """Fetches over HTTP/1.1."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_seconds: float,
        hosts: Sequence[str] = (),
        resolve: Resolve | None = None,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        """``hosts``: the only ones that are fetched from, ``.example.com`` for all below that name; empty: any.
        ``resolve`` and ``public`` are exchanged in tests only."""
        self._hosts = tuple(host.lower().rstrip(".") for host in hosts)
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._resolve: Resolve = resolve or HostResolver()
        self._public = public
        self._tls = ssl.create_default_context()

    async def fetch(self, url: str, where: str) -> bytes:
        """The body at ``url``.  Raises RequestError, naming ``where``; never reveals an internal server's response."""
        try:
            async with asyncio.timeout(self._max_seconds):
                return await self._follow(url, where)
        except TimeoutError:
            raise bad_image(where, f"fetching it took more than {self._max_seconds:g} s (remote_image_s).") from None
        except (OSError, ValueError, httptools.HttpParserError):
            raise bad_image(where, "it could not be fetched.") from None

    async def _follow(self, url: str, where: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(_split(url, where), where)
            if answer.status in _REDIRECTS and answer.location:
                url = urljoin(url, answer.location)
                continue
            if answer.status != 200:
                raise bad_image(where, f"its server answered with status {answer.status}.")
            return bytes(answer.body)
        raise bad_image(where, f"it is behind more than {MAX_REDIRECTS} redirects.")

    async def _get(self, url: SplitResult, where: str) -> _FetchResponse:
        host, port = str(url.hostname), PORTS[url.scheme]
        if self._hosts and not self._allowed(host):
            raise bad_image(where, "this server fetches from some hosts only, and its is none of them.")
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._public, addresses)):
            raise bad_image(where, "its address is not a public one.")
        reader, writer = await self._connect(url, addresses)
        try:
            writer.write(_request(url))
            await writer.drain()
            return await self._read(reader, where)
        finally:
            writer.transport.abort()  # at once: an orderly end of TLS may take longer than all of this may

    def _allowed(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        return any(name.endswith(allowed) if allowed.startswith(".") else name == allowed for allowed in self._hosts)

    async def _connect(
        self, url: SplitResult, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first of these that takes connections.  Raises OSError."""
        tls = self._tls if url.scheme == "https" else None
        name = url.hostname if tls is not None else None
        failed: OSError | None = None
        for address in addresses:
            try:
                return await asyncio.open_connection(address, PORTS[url.scheme], ssl=tls, server_hostname=name)
            except OSError as error:
                failed = error
        raise failed or OSError("no address")

    async def _read(self, reader: asyncio.StreamReader, where: str) -> _FetchResponse:
        answer = _FetchResponse()
        parser = httptools.HttpResponseParser(answer)
        answer.parser = parser
        received = 0
        while not answer.complete:
            data = await reader.read(_CHUNK)
            if not data:
                break  # a body without a length ends so
            received += len(data)
            parser.feed_data(data)
            if len(answer.body) > self._max_bytes or received > self._max_bytes + MAX_HEAD_BYTES:
                raise bad_image(where, f"it is larger than {self._max_bytes} bytes (max_image_bytes).")
        if not answer.status:
            raise bad_image(where, "its server gave no answer.")
        return answer


class _FetchResponse:
    """What ``httptools`` calls while it reads a response."""

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = None
        self.status = 0
        self.location = ""
        self.body = bytearray()
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"location":
            self.location = value.decode("latin-1")[:MAX_URL_CHARS]

    def on_headers_complete(self) -> None:
        if self.parser is not None:
            self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _split(url: str, where: str) -> SplitResult:
    """The parts of a URL that may be fetched."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise bad_image(where, "its URL cannot be read.") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise bad_image(where, "its URL must begin with data:, https:// or http://.")
    if parts.username is not None or parts.password is not None or port not in (None, PORTS[parts.scheme]):
        raise bad_image(where, "its URL may name neither a user nor another port than its scheme's.")
    return parts


def _request(url: SplitResult) -> bytes:
    path = quote(url._replace(scheme="", netloc="", fragment="").geturl() or "/", safe="!$%&'()*+,/:;=?@[]~")
    host = str(url.hostname)
    lines = [
        f"GET {path if path.startswith('/') else '/' + path} HTTP/1.1",
        f"Host: [{host}]" if ":" in host else f"Host: {host.encode('idna').decode()}",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "User-Agent: penstock",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")
