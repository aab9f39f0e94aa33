"""Gateways outside a fleet on Ray follow it with ``--members ray:`` while it grows and shrinks under load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .keyed_load import Identical, KeyedLoad
from .ray_fleet import KEY, RayFleet, ready_workers
from .ray_hosts import RayHosts
from .server import PATIENCE_S, PenstockServer

FEW = ("a-both-0", "a-both-1")
MANY = (*FEW, *(f"b-both-{number}" for number in range(4)))
"""Workers of the fleet; each has a process of its own."""

USED_S = 10.0
"""From the end of ``penstock ray up`` until each of four gateways uses all of four new workers, on two cores."""


@dataclass
class Scaled:
    """What came of it."""

    load: KeyedLoad
    used_s: float  # from the end of `penstock ray up` until four gateways use the four new workers
    forgotten_s: float  # from the end of the other one until the gateway that is left knows two workers
    restarts: int  # of the gateway that is left, and of the node with the two workers


def outside_gateway(ray: RayHosts, folder: Path, keys: Path, poll_s: float = 0.5) -> PenstockServer:
    """On host a, not of the fleet."""
    config = f'[membership]\nray_address = "{ray.address}"\nray_poll_s = {poll_s}\nray_silent_s = 5.0\n'
    config += "[failover]\nno_path_s = 120.0\n"
    place = ("--host", ray.host("a"), "--api-key", KEY)
    server = PenstockServer(["--members", "ray:two hosts", "--keys", str(keys), *place], config=config, folder=folder)
    server.url = f"http://{ray.host('a')}:{server.port}"
    server.launcher = ray.inside("a")
    return server


def scaled_under_load(ray: RayHosts, folder: Path, wanted: Mapping[int, Identical]) -> Scaled:
    """Workers 2 -> 6 -> 2 and gateways 2 -> 4 -> 1, of the four one is killed.  ``wanted``: of each client's seed."""
    fleet = RayFleet(ray, folder)
    few = {"gateways": 1, "workers": '{ role = "both", count = 2 }'}
    more = {"gateways": 0, "workers": '{ role = "both", count = 4 }'}
    fleet.write(a=few)
    fleet.command("up")
    try:
        return _scaled(fleet, folder, wanted, few, more)
    finally:
        fleet.command("down")


def _scaled(
    fleet: RayFleet,
    folder: Path,
    wanted: Mapping[int, Identical],
    few: dict[str, object],
    more: dict[str, object],
) -> Scaled:
    with ExitStack() as stack:
        gateways = [outside_gateway(fleet.ray, folder, fleet.keys) for _ in range(4)]
        for gateway in gateways[:2]:
            stack.enter_context(gateway)
        for gateway in gateways[:2]:
            _wait_uses(gateway, FEW)
        load = KeyedLoad([gateway.url for gateway in gateways[:2]], len(wanted), headers=gateways[0].key_headers())
        with ThreadPoolExecutor(1) as pool, ExitStack() as asking:
            asking.callback(load.stop)  # before the pool waits for its thread
            asked = pool.submit(load.run)
            for gateway in gateways[2:]:
                stack.enter_context(gateway)
                load.urls.append(gateway.url)
            before = gateways[0].gateway_pid(), fleet.nodes(code=0)["a"]["pid"]
            fleet.write(a=few, b=more)
            fleet.command("up")
            began = time.monotonic()
            for gateway in gateways:
                _wait_uses(gateway, MANY)
            used_s = time.monotonic() - began

            gateways[3].wait_for(lambda: gateways[3].metrics()["penstock:requests_open"] > 0, PATIENCE_S, "asked")
            gateways[3].kill()
            for gateway in gateways[1:]:
                load.urls.remove(gateway.url)
            for gateway in gateways[1:3]:
                gateway.stop()
            fleet.write(a=few)
            fleet.command("up")
            began = time.monotonic()
            _wait_uses(gateways[0], FEW)
            forgotten_s = time.monotonic() - began
            load.wait_answers(len(wanted), 2 * PATIENCE_S)
            load.stop()
            asked.result()
        after = gateways[0].gateway_pid(), fleet.nodes(code=0)["a"]["pid"]
        restarts = sum(one != other for one, other in zip(before, after, strict=True))
        gateways[0].wait_idle()
        return Scaled(load, used_s, forgotten_s, restarts)


def _wait_uses(gateway: PenstockServer, workers: tuple[str, ...]) -> None:
    def used() -> bool:
        rows = gateway.workers()
        return ready_workers(gateway) == set(workers) == {row["id"] for row in rows}

    gateway.wait_for(used, 2 * PATIENCE_S, f"using {', '.join(workers)}")
