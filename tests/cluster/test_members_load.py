"""Gateways 2 -> 4 -> 1 and workers 2 -> 6 -> 2 while clients ask, by each source of members but Ray's."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.faults.result import NotHereError

from . import keyed_load
from .member_sources import SOURCES
from .scaled_fleet import scaled_by
from .server import PenstockServer

CLIENTS = 6


@pytest.fixture(scope="module")
def seeded() -> dict[int, keyed_load.Identical]:
    """What each client must get."""
    with PenstockServer(["--aggregated"]) as server:
        return keyed_load.undisturbed(server, CLIENTS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES)
def test_gateways_and_workers_come_and_go_under_load_and_no_request_fails(
    source: str, tmp_path: Path, seeded: dict[int, keyed_load.Identical]
) -> None:
    try:
        done = scaled_by(SOURCES[source], tmp_path, seeded)
    except NotHereError as missing:
        pytest.skip(f"needs {missing}")
    done.assert_unharmed()
