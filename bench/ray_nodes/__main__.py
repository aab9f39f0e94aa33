"""Nodes on a real Ray cluster: how soon they are ready, and what goes on without an actor, a host, the GCS or Redis.

Three hosts are network namespaces of this machine: a with Ray's head, b, and r with the Redis that keeps the state of
the GCS.  a and b have a node each, with a prefill worker, a decode worker and a gateway.  Needs the extra ray,
redis-server, root and iproute2.

    python -m bench.ray_nodes                                  # everything: 12 minutes
    python -m bench.ray_nodes --only up,actor
    python -m bench.ray_nodes --only gcs --away-s 20 --json rows.json --plot docs/ray-nodes.svg

- ``up``: ``penstock ray up`` of two nodes on a cluster that runs, to its end, which is when both are ready.
- ``actor``: the actor of a node is killed, and then the process of a node.
- ``node``: all processes of host b are killed under streams at host a's gateway; then ``ray start`` is run there again.
- ``gcs``: the GCS is stopped (SIGSTOP) under streams at both gateways, and goes on after ``--away-s``.
- ``redis``: Redis is killed, which ends the GCS; both are started again after ``--away-s``.
- ``head``: all processes of host a are killed, GCS and node included, and ``ray start --head`` is run there after
  ``--away-s``.

Each stream has a key: where its gateway is killed its client goes on at the other one.  Every answer is compared with
that of one process.  Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

from bench.faults.result import NotHereError
from bench.ray_nodes import scenes
from bench.ray_nodes.rig import Rig
from bench.scenes import Row, add_options, plot_seconds, print_head, rows_to_plot, save, selected

SCENES: dict[str, Callable[[Rig, argparse.Namespace], Iterator[Row]]] = {
    "up": scenes.up,
    "actor": scenes.actor,
    "node": scenes.node,
    "gcs": scenes.gcs,
    "redis": scenes.redis,
    "head": scenes.head,
}


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ray_nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES, plot_only=True)
    parser.add_argument("--rounds", type=int, default=3, help="of up and actor, whose medians count (default: 3)")
    parser.add_argument("--streams", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--away-s", type=float, default=120.0, help="of gcs, redis and head (default: 120)")
    options = parser.parse_args()
    if (known := rows_to_plot(parser, options)) is not None:
        plot_seconds(known, options.plot)
        return 0
    names = selected(parser, options.only, SCENES)
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: each process compiles what it imports, which takes it seconds")
    print_head()
    rows: list[Row] = []
    try:
        rig = Rig(options.streams)
    except NotHereError as missing:
        print(f"nothing is measured: needs {missing}", file=sys.stderr)
        return 1
    with rig:
        for name in names:
            for row in SCENES[name](rig, options):
                rows.append(row)
                print(row.line(), flush=True)
            if options.json:
                save(options.json, rows, SCENES)
        rig.down()
    if options.plot:
        plot_seconds(save(options.json, rows, SCENES) if options.json else rows, options.plot)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
