"""HTTP with as little of the processor's time as can be: clients share the machine with the service they ask.

Keeps connections and takes the answers' heads apart; nothing else is looked at.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """An answer.  ``first_s``: from the question to the first byte of the body."""

    status: int
    head: bytes
    first_s: float
    body: bytes = b""

    @property
    def retry_after(self) -> int | None:
        """Seconds that a refusal says."""
        _, found, rest = self.head.lower().partition(b"\r\nretry-after:")
        return int(rest.split(b"\r\n", 1)[0]) if found else None

    @property
    def text(self) -> str:
        """What the events of a streamed completion say."""
        return text_of(self.body)


def text_of(events: bytes) -> str:
    """What the events of a streamed completion say."""
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


class PlainClient:
    """Any number of requests at once, each over a connection of its own; those that are free are used again."""

    def __init__(self, port: int, key: str = "", *, timeout_s: float = 120.0) -> None:
        self._port = port
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._timeout_s = timeout_s
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: dict[str, Any]) -> Told:
        """Ask and read the whole answer.  Raises OSError, IncompleteReadError or TimeoutError when there is none."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{self._authorization}"
            f"Content-Length: {len(raw)}\r\n\r\n"
        ).encode()
        writer = None
        try:
            async with asyncio.timeout(self._timeout_s):
                there = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
                reader, writer = there
                began = time.monotonic()
                writer.write(head + raw)
                told = await reader.readuntil(b"\r\n\r\n")
                first_s, answer = await self._read(reader, told.lower(), began)
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        if b"\r\nconnection: close" in told.lower():
            writer.close()
        else:
            self._free.append((reader, writer))
        return Told(int(told[9:12]), told, first_s, answer)

    async def _read(self, reader: asyncio.StreamReader, head: bytes, began: float) -> tuple[float, bytes]:
        _, sized, rest = head.partition(b"\r\ncontent-length:")
        if sized:
            body = await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
            return time.monotonic() - began, body
        first_s, parts = None, []
        while size := int((await reader.readline()).split(b";")[0], 16):
            first_s = first_s or time.monotonic() - began
            parts.append((await reader.readexactly(size + 2))[:size])
        await reader.readline()
        return first_s or time.monotonic() - began, b"".join(parts)

    def close(self) -> None:
        """Hang up."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()
