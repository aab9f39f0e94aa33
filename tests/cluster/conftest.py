"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .one_answer import Plain, plain_answers
from .server import PenstockServer

Serve = Callable[..., PenstockServer]


@pytest.fixture(scope="session")
def plain(plain_storyteller: Path) -> Plain:
    """What the bundled model answers on one worker, by the best kernels, out of plain weights."""
    return plain_answers([str(plain_storyteller)])


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
        print(server.gist_of_log())  # shown when the test failed
        server.__exit__(None)
