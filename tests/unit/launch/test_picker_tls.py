"""The picker's certificate: shown to proxies, read again when its files change, unless they do not match."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from certificates import write_certificate
from penstock.config.load import load_picker
from penstock.errors import ConfigError
from penstock.launch.picker.server import credentials

PATIENCE_S = 20.0


def files(folder: Path) -> dict[str, object]:
    cert, key = write_certificate(folder, "localhost")
    return {"members": "file:gateways.json", "tls_cert": str(cert), "tls_key": str(key)}


async def is_trusted(port: int, root: bytes) -> bool:
    """Whether a new connection that trusts ``root`` alone is answered."""
    trusting = grpc.ssl_channel_credentials(root)
    async with grpc.aio.secure_channel(f"localhost:{port}", trusting) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


async def test_a_changed_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    flags = files(tmp_path)
    cert, key = (Path(str(flags[name])) for name in ("tls_cert", "tls_key"))
    first = cert.read_bytes()
    server = grpc.server(ThreadPoolExecutor(4))
    tls = credentials(load_picker(flags, {}))
    assert tls is not None
    port = server.add_secure_port("localhost:0", tls)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.start()
    try:
        assert await is_trusted(port, first)
        other_cert, other_key = write_certificate(tmp_path / "other", "localhost")
        second = other_cert.read_bytes()
        assert not await is_trusted(port, second)
        cert.write_bytes(second)
        assert await is_trusted(port, first), "its key is not there yet, so the old one stays in force"
        key.write_bytes(other_key.read_bytes())
        assert await is_trusted(port, second)
        assert not await is_trusted(port, first)
    finally:
        await asyncio.to_thread(server.stop(0).wait)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    flags = files(tmp_path)
    Path(str(flags["tls_key"])).write_text("no key")
    with pytest.raises(ConfigError, match=r"--tls-key .*: has no private key in PEM"):
        credentials(load_picker(flags, {}))


def test_without_files_it_is_in_clear() -> None:
    assert credentials(load_picker({"members": "file:gateways.json"}, {})) is None
