"""A gateway outside a fleet on Ray, which follows it with ``--members ray:``."""

from __future__ import annotations

from pathlib import Path

from .ray_fleet import KEY
from .ray_hosts import RayHosts
from .server import PenstockServer


def outside_gateway(ray: RayHosts, folder: Path, keys: Path, silent_s: float = 45.0) -> PenstockServer:
    """On host a, not of the fleet."""
    config = f'[membership]\nray_address = "{ray.address}"\nray_poll_s = 0.5\nray_silent_s = {silent_s}\n'
    config += "[failover]\nno_path_s = 120.0\n"
    place = ("--host", ray.host("a"), "--api-key", KEY)
    server = PenstockServer(["--members", "ray:two hosts", "--keys", str(keys), *place], config=config, folder=folder)
    server.url = f"http://{ray.host('a')}:{server.port}"
    server.launcher = ray.inside("a")
    return server
