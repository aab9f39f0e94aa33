"""What the size of a fleet costs its gateways and workers, and whether very many streams outlive a gateway.

    python -m bench.fleet_scale                               # everything: 25 minutes on a quiet machine
    python -m bench.fleet_scale --only idle,worker --json rows.json --plot docs/fleet-scale.png
    python -m bench.fleet_scale --json rows.json --plot docs/fleet-scale.png --plot-only
    python -m bench.fleet_scale --only gateway --workers 1000 --stretch 4
    python -m bench.fleet_scale --only streams --streams 74000

- ``idle``: one of 16 gateways and 200 workers without requests (``bench/reports.py``).
- ``gateway``: one gateway and 50 to 4,096 such workers, and what it takes to join them.  With more than 500 workers a
  core time passes slower for the gateway and for those that play its workers (``--stretch``): everything periodic
  comes K times less often, and CPU seconds are counted for each stretched second (``stretched_time.py``).
- ``worker``: a worker and 1 to 300 gateways, idle, and with eight requests at a time.  Service, loop, scheduler and
  ZeroMQ with CURVE are those of production; the model is null, and a step waits for 20 ms.
- ``streams``: ``penstock serve --join --gateways 4`` in front of workers that are played, and 20,000 open streams, or
  as many as ``--streams`` says; the descriptors of a process limit them.  One gateway is killed; each client goes on
  with its key and its last event.  ``--pace`` is how long a stream waits for its next token: by default 30 s, and with
  more than 2,100 streams so long that all together get 70 tokens/s, which leaves the CPU to what is measured.

CPU seconds are those of the process in question, all threads included.  The plot has the CPU of a gateway by workers
and of a worker by gateways, if those scenes were run, and each bar with its figure.  Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import reports
from bench.fleet_scale.streams import (
    CLIENTS,
    GATEWAYS,
    STREAMS,
    TOKENS_PER_S,
    Service,
    default_pace_s,
    most_streams,
    patience_s,
    running,
)
from bench.fleet_scale.worker import measure
from bench.gateway.figures import anonymous_kib
from bench.scenes import Row, add_options, draw_bars, print_head, rows_to_plot, save, selected

FLEET = (300, 4096)
"""Gateways and workers of the largest fleet."""

UNSTRETCHED = 500
"""Played workers for each core of this machine with which a gateway is measured in real time."""

IDLE_BAR, WORKER_BAR = 5.0, 5.0  # per cent of a core


def idle(options: argparse.Namespace) -> Iterator[Row]:
    """16 gateways, 200 idle workers: what one of the gateways takes."""
    rounds = [_hear(200, options) for _ in range(options.rounds)]
    cores = [_core(row) for row in rounds]
    shown, rate = ", ".join(f"{core:.1f}" for core in cores), statistics.median(_rate(row, 200) for row in rounds)
    told = f"rounds {shown}; {rate:.2f} reports/s from each"
    yield Row(
        "idle",
        "gateway of 16, 200 idle workers",
        statistics.median(cores),
        "% of a core",
        IDLE_BAR,
        told,
    )


def gateway(options: argparse.Namespace) -> Iterator[Row]:
    """The same by number of workers."""
    for workers in options.workers:
        row = _hear(workers, options)
        core, rate = _core(row), _rate(row, workers)
        told = f"{100 * row['loop_cpu_s'] / row['seconds']:.1f} % its event loop, the rest ZeroMQ's I/O thread; "
        told += f"{rate:.2f} reports/s from each, {rate * workers:,.0f} in all"
        if (stretch := _stretch(workers, options)) != 1:
            told += f"; time stretched {stretch:g} times"
        yield Row("gateway", f"{workers} idle workers", core, "% of a core", None, told)
        yield Row("gateway", f"to join {workers} workers", row["joining_cpu_s"], "CPU seconds", None)


def _stretch(workers: int, options: argparse.Namespace) -> float:
    """As wanted, or as much as this machine's cores need."""
    if options.stretch is not None:
        return float(options.stretch)
    return max(1, workers // (UNSTRETCHED * (os.cpu_count() or 1)))


def _hear(workers: int, options: argparse.Namespace) -> dict[str, float]:
    """What ``reports.gateway`` has measured."""
    row = reports.measure("idle", options.seconds, workers, _stretch(workers, options))
    if row["ready"] < workers:
        raise RuntimeError(f"{row['ready']} of {workers} workers are ready at the end; try a larger --stretch")
    return row


def _core(row: dict[str, float]) -> float:
    """Per cent of a core."""
    return 100 * row["cpu_s"] / row["seconds"]


def _rate(row: dict[str, float], workers: int) -> float:
    """Reports a second from each."""
    return row["reports"] / row["seconds"] / workers


def worker(options: argparse.Namespace) -> Iterator[Row]:
    """A worker by number of gateways, idle and busy."""
    alone = {}
    for busy in (False, True):
        for count in options.gateways:
            core, hellos, told = measure(count, options.seconds, busy=busy)
            alone.setdefault(busy, core)
            what = f"{count} gateways, {'8 requests at a time' if busy else 'idle'}"
            yield Row("worker", what, core, "% of a core", None, f"{hellos:.2f} Hellos, {told:.2f} reports/s of each")
            if count == FLEET[0]:
                what = f"beats and events of {count} gateways, {'busy' if busy else 'idle'}"
                yield Row("worker", what, core - alone[busy], "% of a core", WORKER_BAR)
                each = (hellos + told) * FLEET[0]
                told_all = f"{each:,.0f} at each worker, {(hellos + told) * FLEET[1]:,.0f} at each gateway"
                yield Row(
                    "mesh",
                    f"{FLEET[0]} gateways, {FLEET[1]:,} {'busy' if busy else 'idle'} workers",
                    each * FLEET[1] / 1e6,
                    "million messages/s",
                    None,
                    told_all,
                )


def streams(options: argparse.Namespace) -> Iterator[Row]:
    """Memory of a stream, what opening one takes, and what becomes of all when a gateway is killed."""
    most = most_streams(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    count = options.streams or min(STREAMS, most)
    pace_s = options.pace or default_pace_s(count)
    if count > most:
        raise SystemExit(f"--streams {count}: the descriptors that a process may have suffice for {most} (ulimit -n)")
    with tempfile.TemporaryDirectory() as place, running(Path(place), pace_s) as service:
        service.figures(open=4)
        service.until(lambda found: found["begun"] == 4 * CLIENTS, 60, "warm")
        pids = service.gateways()
        cpu, before, began = service.cpu(), sum(map(anonymous_kib, pids)), time.monotonic()
        each = (count - 4 * CLIENTS) // CLIENTS
        service.figures(open=each)
        opened = (each + 4) * CLIENTS
        service.until(lambda found: found["begun"] == opened, patience_s(opened), "open")
        opening, more = time.monotonic() - began, each * CLIENTS
        memory, took = (sum(map(anonymous_kib, pids)) - before) / more, _ms_each(cpu, service.cpu(), more)
        told = f"{opened:,} streams at {GATEWAYS} gateways, a token each {pace_s:.0f} s"
        yield Row("streams", "memory of the gateways for a stream", memory, "KiB", None, told)
        yield Row("streams", "opened", more / opening, "streams/s", None, f"in {opening:.0f} s; for each {took}")
        yield _held_open(service, options.seconds)
        yield from _killed(service, opened, pace_s)


def _held_open(service: Service, seconds: float) -> Row:
    """What the gateways take while no stream is opened."""
    cpu, first, at = service.cpu(), service.figures(), time.monotonic()
    time.sleep(seconds)
    used, last, took = service.cpu(), service.figures(), time.monotonic() - at
    rest = {name: 100 * (used[name] - cpu[name]) / took for name in cpu}
    told = f"{(last['tokens'] - first['tokens']) / took:,.0f} tokens/s; " + ", ".join(
        f"{name} {rest[name]:.0f} %" for name in rest if name != "gateways"
    )
    return Row("streams", "CPU of all gateways while they are open", rest["gateways"], "% of a core", None, told)


def _killed(service: Service, opened: int, pace_s: float) -> Iterator[Row]:
    """One gateway is killed, and the clients go on."""
    last, pids = service.figures(), service.gateways()
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    service.until(lambda found: found["broken"] > 0, 30, "broken")
    cpu = service.cpu()
    found = service.until(
        lambda found: found["back"] == found["broken"] and found["open"] == opened, patience_s(opened), "back"
    )
    broken, seconds = found["broken"], found["back_at"] - killed
    took = _ms_each(cpu, service.cpu(), broken)
    reached = last["least"] + int((time.monotonic() - killed) / pace_s)
    after = service.until(
        lambda found: found["least"] > max(reached, last["least"]), 2 * pace_s + patience_s(opened), "going on"
    )
    told = f"{broken:,} of {opened:,} streams; all {opened:,} then had further tokens"
    yield Row("streams", "a gateway killed: all its streams were back after", seconds, "s", None, told)
    yield Row("streams", "reopened", broken / seconds, "streams/s", None, f"for each {took}")
    yield Row("streams", "streams that failed, or had a wrong token", after["wrong"] + after["failed"], "", 0)


def _ms_each(before: dict[str, float], after: dict[str, float], streams: int) -> str:
    """What each kind of process took for a stream, in words; what else they did meanwhile is part of it."""
    spent = {name: 1e3 * (after[name] - before[name]) / streams for name in before}
    return ", ".join(f"{name} {ms:.1f} ms" for name, ms in spent.items())


SCENES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "idle": idle,
    "gateway": gateway,
    "worker": worker,
    "streams": streams,
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """CPU of a gateway by workers, and of a worker by gateways; below them what has a bar."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = re.match(r"(\d+) (idle workers|gateways, .*)", row.what)
        if found is not None and row.scene in ("gateway", "worker"):
            lines.setdefault(found[2], []).append((int(found[1]), row.value))
    titles = {"workers": "a gateway and its workers", "gateways": "a worker and its gateways"}
    shown = [peers for peers in titles if any(peers in name for name in lines)]
    bars = [row for row in rows if row.bar is not None and row.unit == "% of a core"]
    heights = [4.0] * bool(shown) + [0.8 + 0.3 * len(bars)] * bool(bars)
    if not heights:
        raise SystemExit("there is nothing to plot: it shows rows of the scenes idle, gateway and worker")
    figure = pyplot.figure(figsize=(5 * max(1, len(shown)) + 2, sum(heights)), layout="constrained")
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    panels = parts.pop(0).subplots(1, len(shown), squeeze=False)[0] if shown else ()
    for peers, axes in zip(shown, panels, strict=True):
        for name, points in lines.items():
            if peers in name:
                axes.plot(*zip(*sorted(points), strict=True), "o-", label=name.removeprefix("gateways, "))
        axes.set(xlabel=peers, ylabel="per cent of a core", title=titles[peers], xscale="log")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    if bars:
        axes = parts.pop().subplots()
        draw_bars(axes, bars)
        axes.set(xlabel="per cent of a core; black: the bar")
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet_scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES, plot_only=True)
    parser.add_argument("--rounds", type=int, default=3, help="of the scene idle, whose median counts (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: 20)")
    parser.add_argument(
        "--stretch",
        type=float,
        metavar="K",
        help="of the scenes idle and gateway: time passes K times slower for the gateway and for those that play its "
        "workers, so that K times as many can be played (default: 1 for each 500 workers a core)",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[50, 200, 1000, FLEET[1]])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 16, 100, FLEET[0]])
    parser.add_argument(
        "--streams",
        type=int,
        metavar="N",
        help=f"open at a time (default: {STREAMS:,}, or as many as there are descriptors for)",
    )
    parser.add_argument(
        "--pace",
        type=float,
        metavar="SECONDS",
        help="from token to token of a stream (default: 30, or with many streams so long that all together get "
        f"{TOKENS_PER_S:g} tokens/s)",
    )
    options = parser.parse_args()
    if (known := rows_to_plot(parser, options)) is not None:
        plot(known, options.plot)
        return 0
    names = selected(parser, options.only, SCENES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print_head(f", {hard:,} descriptors a process")
    rows: list[Row] = []
    for name in names:
        for row in SCENES[name](options):
            rows.append(row)
            print(row.line(), flush=True)
    if options.json:
        rows = save(options.json, rows, SCENES)
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
