"""Do requests go on while gateways and workers come and go, by each source of members, and how soon are new ones used?

Clients stream the same answers again and again, each time with a key, while gateways become four of two and workers six
of two, and then one and two: three gateways and four workers go, one of the gateways killed amid a stream.  Gateways
learn of workers as installed, from:

- ``file``: ``--members file:PATH``, looked at each second.
- ``dns``: ``--members dns:NAME``, SRV records of a name server that is asked every 2 s.  Needs the extra dns.
- ``nats``: ``--members nats:URL/BUCKET``.  Needs nats-server and the extra nats.
- ``ray``: ``--members ray:NAME``, the actors of a fleet on a cluster of two hosts in network namespaces, which are
  asked every 2 s.  Needs the extra ray, redis-server, root and iproute2.

Bars: no request fails, no answer differs from that of one process, nothing that stays is started anew, and the last of
four gateways uses the last of four new workers at most 3 s after the members have changed.

    python -m bench.members                                   # twelve minutes
    python -m bench.members --only file,dns --rounds 1
    python -m bench.members --json rows.json --plot docs/members.svg

What this machine lacks is named, and the other sources are measured.  Exits with 1 when a bar is missed or nothing was
measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.faults.result import NotHereError
from bench.scenes import Row, add_options, finish, plot_seconds, print_head, rows_to_plot, selected

from cluster.keyed_load import Identical, undisturbed
from cluster.member_sources import AS_INSTALLED, SOURCES
from cluster.scaled_fleet import Scaled, scaled_by
from cluster.server import PenstockServer
from penstock.config.limits import MembershipConfig

USED_BAR_S = 3.0

Wanted = Mapping[int, Identical]


def by_ray(folder: Path, wanted: Wanted) -> Scaled:
    """On a cluster of its own.  Raises NotHereError."""
    from cluster.ray_fleet import missing

    if why := missing():
        raise NotHereError(why)
    from cluster.ray_hosts import RayHosts
    from cluster.ray_members import scaled_under_load

    with RayHosts() as hosts:
        return scaled_under_load(hosts, folder, wanted, poll_s=MembershipConfig().ray_poll_s)


def by_source(name: str, folder: Path, wanted: Wanted) -> Scaled:
    """Raises NotHereError."""
    return scaled_by(SOURCES[name], folder, wanted, AS_INSTALLED)


SCENES: dict[str, Callable[[Path, Wanted], Scaled]] = {
    **{name: partial(by_source, name) for name in SOURCES},
    "ray": by_ray,
}


def rows_of(scene: str, rounds: Sequence[Scaled], clients: int) -> Iterator[Row]:
    """The lines of the table: sums, and of seconds the most."""
    loads = [done.load for done in rounds]
    answered, resumed = sum(len(load.answers) for load in loads), sum(load.resumed for load in loads)
    failed = [why for load in loads for why in load.failed]
    told = f"{answered} answered, {clients} at a time; {resumed} went on at another gateway"
    yield Row(scene, "requests that failed", len(failed), "", 0, "; ".join([told, *failed[:1]]))
    yield Row(scene, "answers that differ", sum(done.differing for done in rounds), "", 0)
    yield Row(scene, "processes that were started anew", sum(done.restarts for done in rounds), "", 0)
    yield _most(scene, "four gateways use four new workers after", [done.used_s for done in rounds], USED_BAR_S)
    yield _most(scene, "four workers are forgotten after", [done.forgotten_s for done in rounds], None)
    yield _most(scene, "longest wait for a token", [done.waited_s for done in rounds], None)


def _most(scene: str, what: str, seconds: Sequence[float], bar: float | None) -> Row:
    return Row(scene, what, max(seconds), "s", bar, f"rounds {', '.join(f'{each:.2f}' for each in seconds)}")


def measure(names: Sequence[str], options: argparse.Namespace) -> Iterator[list[Row]]:
    """Run the scenes, and print their rows; those of each source when it is done."""
    with PenstockServer(["--aggregated"]) as server:
        wanted = undisturbed(server, options.clients)
    for name in names:
        rounds: list[Scaled] = []
        try:
            for _ in range(options.rounds):
                with tempfile.TemporaryDirectory() as folder:
                    rounds.append(SCENES[name](Path(folder), wanted))
        except NotHereError as missing:
            print(f"{name} is not measured: needs {missing}", file=sys.stderr, flush=True)
            continue
        rows = list(rows_of(name, rounds, options.clients))
        print("\n".join(row.line() for row in rows), flush=True)
        yield rows


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.members", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES, plot_only=True)
    parser.add_argument("--rounds", type=int, default=3, help="of each source, of which the worst counts (default: 3)")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time (default: 8)")
    options = parser.parse_args()
    if (known := rows_to_plot(parser, options)) is not None:
        plot_seconds(known, options.plot)
        return 0
    names = selected(parser, options.only, SCENES)
    print_head()
    return finish(measure(names, options), options, SCENES)


if __name__ == "__main__":
    sys.exit(main())
