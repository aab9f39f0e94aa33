"""``penstock node``: the workers and gateways of one host of a fleet file."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parsing import COMMANDS
from penstock.config.fleet_file import FleetFile, FleetNode, read_fleet_file
from penstock.config.load import dump_toml, load_node
from penstock.errors import ConfigError
from penstock.launch.node_lease import LeaseWatch
from penstock.sidecar import end_with_parent

EPILOG = """\
examples:
  penstock node fleet.toml --name a          on the host of node a
  penstock node fleet.toml --name b          on the host of node b

Nodes need keys: `penstock host-keys shared ~/penstock-keys` makes some to copy to all (docs/fleet.md has others).

fleet.toml:
  name = "two hosts"
  model = "/models/llama"
  keys = "~/penstock-keys"

  [[nodes]]
  name = "a"
  address = "10.0.0.1"
  gateways = 1
  workers = [{ role = "prefill", count = 1 }]

  [[nodes]]
  name = "b"
  address = "10.0.0.2"
  workers = [{ role = "decode", count = 2 }]

The same file is what `penstock simulate --fleet` reads, once it has a [profile.NAME] (`penstock calibrate`).
docs/fleet.md has all fields.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "node",
        help=COMMANDS["node"],
        description="Run the workers and gateways that a fleet file has for this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("fleet", metavar="FLEET", help="the file")
    parser.add_argument("--name", metavar="NODE", help="which node this is (default: the one named like this host)")
    parser.add_argument("--print-config", action="store_true", help="print the node's settings and exit")
    parser.add_argument(
        "--end-with-parent", type=int, metavar="PID", help="end at once when this process's parent does"
    )
    parser.add_argument(
        "--lease", type=Path, metavar="FILE", help="drain and end when no process has locked this file for 30 s"
    )


def run(args: argparse.Namespace) -> int:
    """Run the node until stopped.  0 after an orderly end.

    Raises ConfigError, ModelError, KernelError, RestartLimitReached.
    """
    fleet = read_fleet_file(args.fleet)
    node = chosen_node(fleet, args.name)
    config = load_node(fleet, node, args.fleet)
    if args.print_config:
        print(dump_toml(config, f"penstock node {args.fleet} --name {node.name}"), end="")
        return 0
    if args.end_with_parent is not None:
        check_parent(args.end_with_parent)
    lease = None if args.lease is None else opened_lease(args.lease)
    from penstock.launch.node import serve_node

    return serve_node(fleet, node, config, os.path.expanduser(args.fleet), lease)


def check_parent(pid: int) -> None:
    """Have the kernel kill this process when its parent ends.  Raises ConfigError if that is another one already."""
    end_with_parent()
    if os.getppid() != pid:
        raise ConfigError(f"--end-with-parent {pid}: the parent of this process is {os.getppid()}")


def opened_lease(path: Path) -> LeaseWatch:
    """Raises ConfigError."""
    try:
        return LeaseWatch(path)
    except OSError as error:
        raise ConfigError(f"--lease {path}: {error.strerror}") from None


def chosen_node(fleet: FleetFile, name: str | None, hosts: Sequence[str] = ()) -> FleetNode:
    """The node of that name; without one the only node, or that of this host's name.  Raises ConfigError."""
    if not fleet.nodes:
        raise ConfigError(f"fleet {fleet.name}: it has [[workers]] for the simulator and no [[nodes]] that could run")
    if name is not None:
        return fleet.node(name)
    if len(fleet.nodes) == 1:
        return fleet.nodes[0]
    host = socket.gethostname()
    for known in hosts or (host.lower(), host.lower().partition(".")[0]):
        for node in fleet.nodes:
            if node.name == known:
                return node
    names = ", ".join(node.name for node in fleet.nodes)
    raise ConfigError(f"fleet {fleet.name}: no node is named like this host, {host}: add --name NODE, of {names}")
