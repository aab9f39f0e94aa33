"""Gateways outside a fleet on Ray, which follow it with ``--members ray:``, also while it grows and shrinks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .keyed_load import Identical, KeyedLoad, leave_one_gateway
from .ray_fleet import KEY, RayFleet, ready_workers
from .ray_hosts import RayHosts
from .server import PATIENCE_S, PenstockServer

FEW = ("a-both-0", "a-both-1")
MANY = (*FEW, *(f"b-both-{number}" for number in range(4)))
"""Workers of the fleet; each has a process of its own."""

NODE_OF_FEW = {"gateways": 1, "workers": '{ role = "both", count = 2 }'}
NODE_OF_MORE = {"gateways": 0, "workers": '{ role = "both", count = 4 }'}


@dataclass
class Scaled:
    """What came of it."""

    load: KeyedLoad
    used_s: float  # from the end of `penstock ray up` until four gateways use the four new workers
    forgotten_s: float  # from the end of the other one until the gateway that is left knows two workers
    restarts: int  # of the gateway that is left, and of the node with the two workers


def outside_gateway(ray: RayHosts, folder: Path, keys: Path, silent_s: float = 45.0) -> PenstockServer:
    """On host a, not of the fleet."""
    config = f'[membership]\nray_address = "{ray.address}"\nray_poll_s = 0.5\nray_silent_s = {silent_s}\n'
    config += "[failover]\nno_path_s = 120.0\n"
    place = ("--host", ray.host("a"), "--api-key", KEY)
    server = PenstockServer(["--members", "ray:two hosts", "--keys", str(keys), *place], config=config, folder=folder)
    server.url = f"http://{ray.host('a')}:{server.port}"
    server.launcher = ray.inside("a")
    return server


def scaled_under_load(ray: RayHosts, folder: Path, wanted: Mapping[int, Identical]) -> Scaled:
    """Workers 2 -> 6 -> 2 and gateways 2 -> 4 -> 1, of the four one is killed.  ``wanted``: of each client's seed."""
    fleet = RayFleet(ray, folder)
    fleet.write(a=NODE_OF_FEW)
    fleet.command("up")
    try:
        with ExitStack() as stack:
            gateways = [outside_gateway(ray, folder, fleet.keys) for _ in range(4)]
            for gateway in gateways[:2]:
                stack.enter_context(gateway)
            for gateway in gateways[:2]:
                _wait_uses(gateway, FEW)
            load = KeyedLoad([gateway.url for gateway in gateways[:2]], len(wanted), headers=gateways[0].key_headers())
            with load.running():
                return _scaled(fleet, gateways, load, stack)
    finally:
        fleet.command("down")


def _scaled(fleet: RayFleet, gateways: list[PenstockServer], load: KeyedLoad, stack: ExitStack) -> Scaled:
    """``gateways``: of which the first two run; ``stack``: ends the others."""
    stays = gateways[0]
    for gateway in gateways[2:]:
        stack.enter_context(gateway)
        load.urls.append(gateway.url)
    before = stays.gateway_pid(), fleet.nodes(code=0)["a"]["pid"]
    fleet.write(a=NODE_OF_FEW, b=NODE_OF_MORE)
    fleet.command("up")
    began = time.monotonic()
    for gateway in gateways:
        _wait_uses(gateway, MANY)
    used_s = time.monotonic() - began
    stays.wait_for(lambda: stays.worker("b-both-3")["running"] > 0, PATIENCE_S, "asked")

    leave_one_gateway(gateways, load)
    fleet.write(a=NODE_OF_FEW)
    fleet.command("up")
    began = time.monotonic()
    _wait_uses(stays, FEW)
    forgotten_s = time.monotonic() - began
    load.wait_answers(len(load.urls), 2 * PATIENCE_S)
    load.stop()
    stays.wait_idle()
    after = stays.gateway_pid(), fleet.nodes(code=0)["a"]["pid"]
    assert all(row["kv_pages_leaked"] == 0 for row in stays.workers())
    return Scaled(load, used_s, forgotten_s, sum(one != other for one, other in zip(before, after, strict=True)))


def _wait_uses(gateway: PenstockServer, workers: tuple[str, ...]) -> None:
    def used() -> bool:
        return ready_workers(gateway) == set(workers) == {row["id"] for row in gateway.workers()}

    gateway.wait_for(used, 2 * PATIENCE_S, f"using {', '.join(workers)}")
