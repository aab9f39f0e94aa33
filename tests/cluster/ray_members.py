"""Gateways outside a fleet on Ray, which follow it with ``--members ray:``, also while it grows and shrinks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .keyed_load import Identical
from .ray_fleet import KEY, RayFleet
from .ray_hosts import RayHosts
from .scaled_fleet import GATEWAYS, PATIENT, Scaled, Scaling, scale
from .server import PenstockServer

FEW = ("a-both-0", "a-both-1")
MANY = (*FEW, *(f"b-both-{number}" for number in range(4)))
"""Workers of the fleet; each has a process of its own."""

NODE_OF_FEW = {"gateways": 1, "workers": '{ role = "both", count = 2 }'}
NODE_OF_MORE = {"gateways": 0, "workers": '{ role = "both", count = 4 }'}


def outside_gateway(
    ray: RayHosts, folder: Path, keys: Path, *, silent_s: float = 45.0, poll_s: float = 0.5
) -> PenstockServer:
    """On host a, not of the fleet."""
    config = f'[membership]\nray_address = "{ray.address}"\nray_poll_s = {poll_s}\nray_silent_s = {silent_s}\n'
    place = ("--host", ray.host("a"), "--api-key", KEY)
    flags = ["--members", "ray:two hosts", "--keys", str(keys), *place]
    server = PenstockServer(flags, config=config + PATIENT, folder=folder)
    server.url = f"http://{ray.host('a')}:{server.port}"
    server.launcher = ray.inside("a")
    return server


def scaled_under_load(ray: RayHosts, folder: Path, wanted: Mapping[int, Identical], *, poll_s: float = 0.5) -> Scaled:
    """As ``scaled_by``, with the workers of a fleet on Ray; all are of node a but those that come and go."""
    fleet = RayFleet(ray, folder)

    def apply(**nodes: dict[str, object]) -> None:
        fleet.write(**nodes)
        fleet.command("up")

    scaling = Scaling(
        few=FEW,
        many=MANY,
        grow=lambda: apply(a=NODE_OF_FEW, b=NODE_OF_MORE),
        shrink=lambda: apply(a=NODE_OF_FEW),
        end_others=lambda: None,
        pids=lambda: [fleet.nodes(code=0)["a"]["pid"]],
    )
    apply(a=NODE_OF_FEW)
    try:
        gateways = [outside_gateway(ray, folder, fleet.keys, poll_s=poll_s) for _ in range(GATEWAYS)]
        return scale(scaling, gateways, wanted)
    finally:
        fleet.command("down")
