"""A fleet under systemd: one unit for each node, which runs ``penstock node``.  Pure: values to text.

What the settings mean is in systemd.service(5), systemd.exec(5) and systemd.kill(5).
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from penstock.config.fleet_file import FleetFile, FleetNode
from penstock.config.schema import ServeConfig
from penstock.deploy.workloads import WRITTEN_FILES, WRITTEN_FOLDERS, checked_node

STOP_MARGIN_S = 15
"""After ``drain_s``, for processes to end; then systemd kills what is left."""

UNIT = """\
# Made by `penstock manifests systemd`.  Requests of clients are answered with the keys in /etc/penstock/environment
# (PENSTOCK_API_KEY=...), unless the fleet file names a file of API keys.
[Unit]
Description=Penstock, node {node} of {fleet}
Wants=network-online.target
After=network-online.target
# Restarted however often it ends: the other nodes serve meanwhile, and use it again when it is back.
StartLimitIntervalSec=0

[Service]
Type=notify
TimeoutStartSec=infinity
User={user}
Group={user}
EnvironmentFile=-/etc/penstock/environment
Environment=XDG_CACHE_HOME=/var/cache/{unit} XDG_RUNTIME_DIR=/run/{unit} PYTHONDONTWRITEBYTECODE=1
ExecStart={command}
Restart=always
RestartSec=2
# SIGTERM goes to the supervisor alone, which drains: a second one, as each worker would get, ends it at once.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
# A worker that is killed for lack of memory is restarted by the supervisor; the others go on.
OOMPolicy=continue
LimitNOFILE=1048576
CacheDirectory={unit}
RuntimeDirectory={unit}
RuntimeDirectoryMode=0700
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
{more}
[Install]
WantedBy=multi-user.target
"""


def systemd_units(fleet: FleetFile, file: str, *, executable: str, fleet_path: str, user: str) -> dict[str, str]:
    """The text of each node's unit by its file name; ``file``: where the fleet was read from, ``fleet_path``: where
    hosts have it.

    Raises ConfigError for settings that are none.
    """
    units = {}
    for node in fleet.nodes:
        config, unit = checked_node(fleet, node, file), f"penstock-{node.name}"
        words = (executable, "node", fleet_path, "--name", node.name)
        units[f"{unit}.service"] = UNIT.format(
            node=node.name,
            fleet=fleet.name.replace("%", "%%").replace("\n", " "),
            unit=unit,
            user=user,
            command=" ".join(map(quoted, words)),
            stop_s=math.ceil(config.supervise.drain_s) + STOP_MARGIN_S,
            more="".join(f"{line}\n" for line in _more(node, config)),
        )
    return units


def _more(node: FleetNode, config: ServeConfig) -> list[str]:
    """What depends on the node's settings."""
    lines = ["PrivateDevices=yes"] if config.device == "cpu" else []  # otherwise a GPU could not be reached
    folders = [getattr(config, key) for key in WRITTEN_FOLDERS]
    folders += [str(PurePosixPath(path).parent) for path in (getattr(config, key) for key in WRITTEN_FILES) if path]
    # Those in a home folder are written by the rights of the user alone.
    lines += [f"ReadWritePaths={quoted(folder)}" for folder in dict.fromkeys(folders) if folder and folder[0] == "/"]
    if node.gateways and 0 < (node.http_port or config.port) < 1024:
        lines += ["AmbientCapabilities=CAP_NET_BIND_SERVICE", "CapabilityBoundingSet=CAP_NET_BIND_SERVICE"]
    return lines


def quoted(word: str) -> str:
    """A word of a command line as systemd.service(5) reads it."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if any(char in " \t\n'\"\\;" for char in word) or not word else plain
