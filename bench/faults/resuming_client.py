"""Many streams at once, by clients that go on at another gateway when theirs breaks off or is found silent.

Which gateways answer is looked at as a load balancer does: each is asked for /health all the time.  As little of the
processor's time is used as can be, for clients share the machine with the service: bytes are kept with the time at
which they came, and read as JSON when all is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httptools

from cluster.streams import AGAIN_S

LOOK_S = 0.25
"""Between two looks at the health of a gateway."""

SILENT_S = 3.0
"""A gateway that has not answered for so long, or refuses connections, gets no requests, and its clients hang up."""

OVER_S = 90.0
"""A stream that takes longer is lost."""

_DONE = b"data: [DONE]"
_RETRYABLE = (503, 529)


class Gateways:
    """Those of one service, and which of them answer.  Use: ``async with``."""

    def __init__(self, places: Sequence[tuple[str, int]], authorization: str) -> None:
        self.places = places
        self.authorization = authorization
        self.up = [True] * len(places)
        self._readers: set[Stream] = set()
        self._looking: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Gateways:
        self._looking = [asyncio.create_task(self._look(number)) for number in range(len(self.places))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._looking:
            task.cancel()

    def choose(self, first: int) -> int | None:
        """The first that answers, beginning with ``first``; None: none does now."""
        order = [(first + step) % len(self.places) for step in range(len(self.places))]
        return next((number for number in order if self.up[number]), None)

    @contextlib.contextmanager
    def reader(self, stream: Stream) -> Iterator[None]:
        """While this stream reads from a gateway."""
        self._readers.add(stream)
        try:
            yield
        finally:
            self._readers.discard(stream)

    async def _look(self, number: int) -> None:
        while True:
            self.up[number] = await self._answers(number)
            if not self.up[number] and any(self.up):  # where none answers, nothing is gained by leaving one
                for stream in [stream for stream in self._readers if stream.at == number]:
                    stream.hang_up()
            await asyncio.sleep(LOOK_S)

    async def _answers(self, number: int) -> bool:
        """Whatever it says."""
        host, port = self.places[number]
        writer = None
        try:
            async with asyncio.timeout(SILENT_S):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).startswith(b"HTTP/1.1 ")
        except (OSError, TimeoutError):
            return False
        finally:
            if writer is not None:
                writer.transport.abort()


@dataclass(eq=False)
class Stream:
    """One request and what came of it, over however many gateways."""

    body: dict[str, Any]
    key: str  # idempotency key
    first: int = 0  # the gateway that is asked first
    moments: list[float] = field(default_factory=list)  # when tokens came, in monotonic seconds
    gateways: list[int] = field(default_factory=list)  # in which order they were asked
    error: str = ""
    ended: bool = False
    _whole: list[bytes] = field(default_factory=list)  # events up to the last one with an id
    _rest: bytes = b""  # what came behind it
    _last_id: bytes = b""
    _connection: _Connection | None = None

    @property
    def at(self) -> int:
        """The gateway that it is read from now."""
        return self.gateways[-1] if self.gateways else self.first

    @property
    def complete(self) -> bool:
        """Has it come to its end?"""
        return bool(self._whole) and _DONE in self._whole[-1]

    def take(self, data: bytes) -> None:
        """A piece of the answer's body."""
        now = time.monotonic()
        self._rest += data
        named = self._rest.rfind(b"id: ")
        end = self._rest.find(b"\n\n", named) if named >= 0 else -1
        while end < 0 <= named:  # that event is not whole yet: the one before it
            named = self._rest.rfind(b"id: ", 0, named)
            end = self._rest.find(b"\n\n", named) if named >= 0 else -1
        if end >= 0:
            self._last_id = self._rest[named + 4 : self._rest.index(b"\n", named)]
            self._whole.append(self._rest[: end + 2])
            self._rest = self._rest[end + 2 :]
            self.moments.append(now)

    def longest_wait(self, since: float) -> float:
        """The longest time without a token, from ``since`` on."""
        late = [since, *(moment for moment in self.moments if moment > since)]
        return max((later - earlier for earlier, later in pairwise(late)), default=0.0)

    def identical(self) -> tuple[str, str | None, int | None]:
        """Text, reason of the end and number of tokens: what must not depend on how it was served."""
        text, finish, tokens = "", None, None
        for line in b"".join(self._whole).decode().splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        return text, finish, tokens

    async def read(self, gateways: Gateways) -> None:
        """To its end, or until it is lost: ``error`` says why."""
        try:
            async with asyncio.timeout(OVER_S):
                while not self.complete:
                    number = gateways.choose(self.first if not self.gateways else self.at)
                    if number is not None:
                        await self._ask(number, gateways)
                    if not self.complete:
                        await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            self.error = f"not over within {OVER_S:g} s, after {len(self.moments)} events"
        except RefusedError as error:
            self.error = str(error)
        finally:
            self.ended = True

    async def _ask(self, number: int, gateways: Gateways) -> None:
        host, port = gateways.places[number]
        request = self.begin_attempt(number, host, gateways.authorization)
        try:
            async with asyncio.timeout(SILENT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), host, port
                )
        except (OSError, TimeoutError):
            return
        self._connection = connection
        with gateways.reader(self):
            try:
                connection.send(request)
                await connection.over
            finally:
                self._connection = None
                connection.close()
        if connection.status not in (0, 200, *_RETRYABLE):
            raise RefusedError(f"status {connection.status}: {self._rest[:300].decode(errors='replace')}")

    def begin_attempt(self, number: int, host: str, authorization: str) -> bytes:
        """The request to this gateway, for all that has not come whole."""
        self.gateways.append(number)
        self._rest = b""
        raw = json.dumps(self.body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            f"Authorization: {authorization}",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
            f"Idempotency-Key: {self.key}",
        ]
        if self._last_id:
            lines.append(f"Last-Event-ID: {self._last_id.decode()}")
        return "\r\n".join([*lines, "\r\n"]).encode() + raw

    def hang_up(self) -> None:
        """Leave the gateway that it is read from."""
        if self._connection is not None:
            self._connection.close()


class RefusedError(Exception):
    """The service has answered with another status than a stream or a retry."""


class _Connection(asyncio.Protocol):
    """One answer."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()
        self._end()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._stream.take(body)

    def on_message_complete(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
