"""A real NATS server with JetStream, and a bucket of members in it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from .server import PATIENCE_S, PenstockServer, free_port

BUCKET = "workers"


def nats_program() -> str | None:
    """None: it is not installed."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/sbin")


def member(name: str, endpoint: str) -> str:
    """What a key of the bucket has."""
    return json.dumps({"name": name, "endpoint": endpoint})


class NatsServer:
    """With its store in ``folder``.  Needs ``nats_program`` and the extra nats."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        place = ["-a", "127.0.0.1", "-p", str(self.port)]
        self._words = [str(nats_program()), *place, "-js", "-sd", str(folder / "jetstream")]

    async def __aenter__(self) -> NatsServer:
        self.start()
        connection = await self.connect()
        await connection.jetstream().create_key_value(bucket=BUCKET)
        await connection.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    async def connect(self) -> Any:
        """A client, which must be closed."""
        import nats

        return await nats.connect(self.url)

    def start(self) -> None:
        """It listens when this returns."""
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        PenstockServer.wait_for(self._listens, PATIENCE_S, "listening")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def put(self, key: str, value: str | None) -> None:
        """None: it is deleted."""
        connection = await self.connect()
        bucket = await connection.jetstream().key_value(BUCKET)
        await (bucket.delete(key) if value is None else bucket.put(key, value.encode()))
        await connection.close()
