"""The front process of a catalogue: HTTP, and which model is loaded for whom.  Each model has a gateway of its own."""

from __future__ import annotations

import sys

import uvloop

from penstock.clock import MonotonicClock
from penstock.config.schema import StoreConfig
from penstock.edge.auth import KeyRing
from penstock.edge.catalogue import Store, make_catalogue_app
from penstock.launch.house import ModelHouse
from penstock.launch.http_process import SWITCH_S, HttpProcess, Rim


def run_storefront(config: StoreConfig, rim: Rim) -> int:
    """Serve until drained or told to stop; returns the exit code.  Runs in the forked child."""
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(_run(config, rim))


async def _run(config: StoreConfig, rim: Rim) -> int:
    clock = MonotonicClock()
    house = ModelHouse(config, rim.channel.send, clock)
    keys = KeyRing.of([config.api_key] if config.api_key else [])
    app = make_catalogue_app(Store(models=house, limits=config.limits, clock=clock, keys=keys, created=config.created))
    house.start()
    try:
        await HttpProcess(rim, config.limits, house.on_supervisor).serve(app)
    finally:
        await house.close()
    return 0
