"""Fixtures of the contract suites: one suite a port, run on every implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_rig import CARRIERS, Rig, make_rig


@pytest.fixture(params=[*CARRIERS, pytest.param("nixl", marks=pytest.mark.long)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made, closing = make_rig(request.param)
    yield made
    for thing in closing:
        thing.close()
