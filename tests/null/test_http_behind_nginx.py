"""The door behind a real nginx that keeps connections, hands ``Upgrade`` on and has its own rule for ``/admin/``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from penstock.config.limits import RequestLimits
from penstock.launch.http_connection import guarded_protocol

PATIENCE_S = 60.0
TRIES = 5

CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream penstock {{ server 127.0.0.1:{port}; keepalive 1; }}
    server {{
        listen unix:{folder}/http;
        location /admin/ {{ return 403; }}
        location / {{
            proxy_pass http://penstock;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""


class App:
    """Answers each request with its path, after the body has been read."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changed = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        self.changed.set()
        if scope["path"] != "/at-once":
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
        answer = scope["path"].encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]}
        )
        await send({"type": "http.response.body", "body": answer})

    async def until(self, count: int) -> None:
        """So many requests have come."""
        while len(self.asked) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE_S)


@contextlib.contextmanager
def nginx(port: int, folder: Path) -> Iterator[Path]:
    """One before that port; it listens at the path."""
    program = shutil.which("nginx", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("no nginx: apt-get install nginx-light")
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port))
    with subprocess.Popen([program, "-e", "stderr", "-p", folder, "-c", config]) as process:
        try:
            yield folder / "http"
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@contextlib.asynccontextmanager
async def behind_nginx(folder: Path) -> AsyncIterator[tuple[App, Path]]:
    app = App()
    config = uvicorn.Config(app, http=guarded_protocol(RequestLimits()), lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([listener]))
    try:
        with nginx(listener.getsockname()[1], folder) as path:
            yield app, path
    finally:
        server.should_exit = server.force_exit = True
        await task


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return await asyncio.open_unix_connection(path)
            await asyncio.sleep(0.01)


async def ask(path: Path, raw: bytes) -> bytes:
    """Everything that one request of ``Connection: close`` is answered."""
    reader, writer = await connect(path)
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return answer


INNER = b"POST /admin/workers/prefill-0/drain HTTP/1.1\r\nHost: y\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("outer", ["/at-once", "/patient"])
async def test_a_body_behind_an_upgrade_is_no_request(tmp_path: Path, protocol: bytes, outer: str) -> None:
    async with behind_nginx(tmp_path) as (app, path):
        for tries in range(TRIES):
            seen = len(app.asked)
            reader, writer = await connect(path)
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\nContent-Length: %d\r\n\r\n"
                % (outer.encode(), protocol, len(INNER))
            )
            await app.until(seen + 1)  # nginx has sent the head on, and the body is a segment of its own
            writer.write(INNER)
            answer = await asyncio.wait_for(reader.readuntil(outer.encode()), PATIENCE_S)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            victim = await ask(path, b"GET /victim HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert victim.endswith(b"\r\n\r\n/victim"), "a client got the answer to somebody else's request"
            assert app.asked == [outer, "/victim"] * (tries + 1)
            writer.close()


async def test_its_rule_for_admin_holds(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (app, path):
        answer = await ask(path, INNER.replace(b"Host: y", b"Host: y\r\nConnection: close"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert app.asked == []
