"""A fleet in containers of one host: one service of Compose for each node, which runs ``penstock node``.

The fleet file travels within, as an inline config (Compose 2.23.1 and later).  Nodes reach each other by the names of
their services, so their addresses are replaced.  Pure: values to values.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import tomli_w
from msgspec import structs

from penstock.config.fleet_file import FleetFile, FleetNode
from penstock.deploy.workloads import (
    Settings,
    absolute_path,
    checked_node,
    is_path,
    read_folders,
    resource_name,
    written_folders,
)
from penstock.errors import ConfigError

STOP_MARGIN_S = 15
"""After ``drain_s``, for processes to end; then they are killed."""

HTTP_PORT = 8000
FLEET_PATH = "/etc/penstock/fleet.toml"
KEYS_PATH = "/keys"

FILES = ("api_keys", "tls_cert", "tls_key", "kv_key")
"""Settings that name files of the host, which containers get: of ``api_keys`` with its folder, of others alone, as a
certificate may be a link to elsewhere."""

SHARED_FOLDER = re.compile(r"/|/[^/]+|/home/[^/]+|~[^/]*|\.|\.\.(/\.\.)*")
"""A folder that is no file's own, by its path: one at the root, a home folder, or where Compose is started."""

PROBE = {"interval": "10s", "timeout": "10s", "retries": 3, "start_period": "3600s", "start_interval": "5s"}
"""The start may take an hour: the supervisor itself ends one that makes no progress (``start_s``)."""


def compose_document(fleet: FleetFile, raw: Mapping[str, Any], file: str, *, image: str) -> dict[str, Any]:
    """The document; ``raw``: the fleet file as TOML was read, ``file``: where from.  Raises ConfigError."""
    inside, mounts = _inside(fleet, raw)
    services = {
        node.name: _service(fleet, node, file, image=image, mounts=mounts[node.name], number=number)
        for number, node in enumerate(fleet.nodes)
    }
    text = tomli_w.dumps(inside).replace("$", "$$")  # Compose puts variables in
    return {
        "name": resource_name(fleet.name, file),
        "services": services,
        "configs": {"fleet": {"content": text}},
    }


def _inside(fleet: FleetFile, raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The fleet file as containers read it, and by node the host's path of each file that they mount."""
    inside, mounts = copy.deepcopy(dict(raw)), {KEYS_PATH: fleet.keys or "./host-keys"}
    inside.pop("kubernetes", None)
    inside["keys"] = KEYS_PATH
    for node in inside["nodes"]:
        node |= {"address": node["name"], "listen": "0.0.0.0"}  # noqa: S104 - in a network of the fleet's own
        if node.get("gateways"):
            node |= {"http_host": "0.0.0.0", "http_port": HTTP_PORT}  # noqa: S104 - of its container
    own = {}
    for node in inside["nodes"]:
        own[node["name"]] = _mounted(node.get("settings", {}), f"/files/{node['name']}")
    mounts |= _mounted(inside.get("settings", {}), "/files")
    model = fleet.model
    if model is not None and is_path(model):
        folder = str(PurePosixPath(absolute_path("model", model, "containers")).parent)
        mounts[folder] = folder
    return inside, {name: mounts | files for name, files in own.items()}


def _mounted(settings: dict[str, Any], folder: str) -> dict[str, str]:
    """Let settings name files where containers have them.  Returns what is mounted, by its path there.

    Raises ConfigError for a file of API keys without a folder of its own.
    """
    mounts = {}
    for key in [key for key in settings if key.replace("-", "_") in FILES]:
        place, path = f"{folder}/{key}", PurePosixPath(settings[key])
        if key.replace("-", "_") != "api_keys":
            mounts[place], settings[key] = str(path), place
            continue
        if SHARED_FOLDER.fullmatch(str(path.parent)):
            raise ConfigError(
                f'{key} = "{path}": containers get the folder of this file, to see changes of keys; move it from '
                f"{path.parent} to a folder of its own"
            )
        # `penstock keys` replaces the file.  Mounted alone it would stay the old one, with keys that were revoked.
        mounts[place], settings[key] = str(path.parent), f"{place}/{path.name}"
    return mounts


def _volumes(mounts: Mapping[str, str], settings: Settings) -> list[str | dict[str, Any]]:
    """What a node's container has of the host.  Raises ConfigError."""
    found: list[str | dict[str, Any]] = []
    for inside, outside in mounts.items():
        source = outside if outside.startswith(("/", ".", "~")) else f"./{outside}"  # not the name of a volume
        found.append(f"{source}:{inside}:ro")
    for path in read_folders(settings, "containers"):
        if not any(PurePosixPath(path).is_relative_to(inside) for inside in mounts):
            found.append(f"{path}:{path}:ro")
    for path in written_folders(settings, "containers"):
        # A missing one is an error of Compose's: if Docker made it, it would be root's.
        found.append({"type": "bind", "source": path, "target": path, "bind": {"create_host_path": False}})
    return found


def _service(
    fleet: FleetFile, node: FleetNode, file: str, *, image: str, mounts: Mapping[str, str], number: int
) -> dict[str, Any]:
    config = checked_node(fleet, node, file)
    scheme = "https" if config.tls_cert else "http"
    # A part of a worker is ready when the worker is, which is asked where the others reach it.
    targets = [f"tcp://127.0.0.1:{worker.port}" for worker in fleet.members(node)]
    targets += [f"tcp://{worker.leader.name}:{worker.port}" for worker in fleet.parts(node)]
    keys = ["--keys", KEYS_PATH, "--node", node.name] if targets else []
    targets += [f"{scheme}://127.0.0.1:{HTTP_PORT}"] if node.gateways else []
    service: dict[str, Any] = {
        "image": image,
        "command": ["node", FLEET_PATH, "--name", node.name],
        "configs": [{"source": "fleet", "target": FLEET_PATH}],
        "volumes": _volumes(mounts, structs.asdict(config)),
        "user": "${PENSTOCK_USER:-10001:10001}",  # whom the files with keys belong to
        "read_only": True,
        "tmpfs": ["/tmp"],  # noqa: S108 - of the container
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{math.ceil(config.supervise.drain_s) + STOP_MARGIN_S}s",
        "healthcheck": {"test": ["CMD", "penstock", "probe", "--ready", *keys, *targets], **PROBE},
    }
    if node.gateways:
        service["ports"] = [f"{node.http_port or config.port + number}:{HTTP_PORT}"]
        if config.api_keys is None:
            service["environment"] = {"PENSTOCK_API_KEY": "${PENSTOCK_API_KEY:?the key of clients}"}
    return service
