"""A real HTTP/1.1 server on the loopback whose answers a test writes down, piece by piece."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Exchange:
    """The server's side of one request: write what the client shall get."""

    asked: Asked
    writer: asyncio.StreamWriter

    async def plain(self, status: int, body: Any, headers: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        if self.writer.is_closing():  # asyncio's loop would raise this; uvloop's has an error of its own
            raise ConnectionResetError
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, data: dict[str, Any] | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.piece(f"data: {text}\n\n".encode())

    async def end_stream(self) -> None:
        await self.piece(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


Script = Callable[[Exchange], Awaitable[None]]


@dataclass
class ScriptedServer:
    """Answers every request with the same script."""

    script: Script
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    hung_up: int = 0
    url: str = ""
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                asked = Asked(method, path, headers, json.loads(raw) if raw else None)
                self.asked.append(asked)
                await self.script(Exchange(asked, writer))
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up += 1
        finally:
            self.open.discard(writer)
            writer.close()


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for writer in [*server.open]:
            writer.close()
        await listener.wait_closed()


def text_chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def usage_chunk(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}
