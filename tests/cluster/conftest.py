"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .server import PenstockServer

Serve = Callable[..., PenstockServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a service that is ready: ``serve("--aggregated", config="...")``; ended and searched when the test ends."""
    servers: list[PenstockServer] = []

    def _serve(*flags: str, config: str | None = None) -> PenstockServer:
        server = PenstockServer(flags, config=config, folder=tmp_path)
        servers.append(server)
        return server.__enter__()

    yield _serve
    for server in servers:
        print(server.read_log())  # shown when the test failed
        server.__exit__(None)
