"""``penstock ray``: a fleet file on a Ray cluster, which starts its nodes and starts them again."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from penstock.cli.console import text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.base import expanded_path
from penstock.config.fleet_file import FleetFile, read_fleet_file
from penstock.launch.ray_cluster import RayCluster, connected
from penstock.launch.ray_fleet import FleetRollout, NodeStatus, check_for_ray, fleet_status

EPILOG = """\
examples:
  penstock ray up fleet.toml                     start the nodes, or apply what has changed in the file
  penstock ray status fleet.toml
  penstock ray down fleet.toml                   drain the nodes and end them

Run it on a host of the cluster (`ray start --head`, and `ray start --address=HOST:6379` on the others).  Each host
needs Penstock with the extra, pip install 'penstock[ray]', and the keys and the model at the paths of the file.
docs/fleet.md has the whole way.
"""

HEADS = ("NODE", "STATE", "RAY NODE", "PID", "RESTARTS", "WORKERS")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "ray",
        help=COMMANDS["ray"],
        description="Run the nodes of a fleet file on a Ray cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("action", choices=("up", "status", "down"), help="what to do")
    parser.add_argument("fleet", metavar="FLEET", help="the fleet file")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the cluster (default: RAY_ADDRESS, or the cluster of this host)"
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="up: wait for no node to be ready, not even for a changed one before the next drains",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="up: for all to be ready; default: %(default)g s"
    )
    parser.add_argument("--json", action="store_true", help='status: print {"nodes": [...]}')


def run(args: argparse.Namespace) -> int:
    """0 when it is done; of ``status`` 1 unless all nodes of the file are ready.

    Raises ConfigError without Ray or a cluster, PenstockError when nodes are not ready in time.
    """
    fleet = read_fleet_file(args.fleet)
    check_for_ray(fleet, args.fleet)
    with connected(args.address) as cluster:
        if args.action == "status":
            return show_status(cluster, fleet, as_json=args.json)
        text = expanded_path(args.fleet, "FLEET").read_text(encoding="utf-8")
        rollout = FleetRollout(cluster, fleet, text, lambda line: print(line, flush=True))
        if args.action == "up":
            rollout.up(None if args.no_wait else args.timeout)
        elif rollout.down() == 0:
            print(f"fleet {fleet.name} does not run on this cluster", file=sys.stderr)
    return 0


def show_status(cluster: RayCluster, fleet: FleetFile, *, as_json: bool) -> int:
    """Print all nodes; 0 if those of the file are ready and there are no others."""
    rows = fleet_status(cluster, fleet)
    if as_json:
        print(json.dumps({"nodes": [_fields(row) for row in rows]}))
    else:
        print(text_table([_cells(row) for row in rows], headers=HEADS, right=(3, 4)))
        for row in rows:
            if row.reason:
                print(f"{row.node}: {row.reason}")
            if not row.in_file:
                print(f"{row.node}: it is not in the file; `penstock ray up` ends it")
    return 0 if all(row.state == "ready" and row.in_file for row in rows) else 1


def _fields(row: NodeStatus) -> dict[str, object]:
    known = {} if row.report is None else msgspec.to_builtins(row.report)
    return known | {
        "node": row.node,
        "state": row.state,
        "reason": row.reason,
        "restarts": row.restarts,
        "in_file": row.in_file,
    }


def _cells(row: NodeStatus) -> list[str]:
    report = row.report
    places = [member.endpoint.removeprefix("tcp://") for member in report.members] if report and report.pid else []
    return [
        row.node,
        row.state,
        report.ray_address if report else "-",
        str(report.pid) if report and report.pid else "-",
        str(row.restarts),
        ", ".join(places) or "-",
    ]
