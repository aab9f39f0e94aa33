"""What it costs a gateway to hear its workers: CPU seconds of one real gateway process, one of 16, in 60 s.

Its router, joined workers, links and event loop are those of the service, over ZeroMQ with CURVE as in production.  All
workers are played by this one process: their real ``KvEventPublisher`` says when a report is due and what it has; 16
gateways each; messages to the other 15 are not sent (the null world counts that a gateway is told the same whatever
their number: ``tests/null/test_reports.py``).  No requests: answers are measured elsewhere.

With ``--stretch K`` time passes K times slower for both processes (``stretched_time.py``), and figures are those of a
stretched second: so two cores can play more workers than they could in real time.

    python bench/reports.py                  # 200 idle workers, then 256 busy ones; median of 3 rounds of 60 s
    python bench/reports.py --scenes idle --rounds 1 --seconds 10
    python bench/reports.py --json reports.json --stretch 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.fleet_scale import stretched_time

from penstock.clock import Clock
from penstock.config.schema import GatewayConfig, SchedulerConfig, WorkerConfig
from penstock.engine.core.page_pool import PagePool
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.engine.service.gateways import ConnectedGateway, GatewayRequests
from penstock.engine.service.kv_events import KvEventPublisher
from penstock.launch.members.interface import Member
from penstock.launch.remote_workers import RemoteWorkers
from penstock.router.service import RouterService
from penstock.telemetry.metrics import WORKER_COUNTERS
from penstock.types import ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Hello, StepRates, WorkerReport
from penstock.wire.zeromq import ZmqTransport

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="bench-1")
GATEWAYS = 16
SCENES = {"idle": (200, 5.0), "busy": (256, 25.0)}
"""Name -> workers, and the bar: per cent of a core."""

STEP_S = 0.02  # of a busy worker
CHANGES_A_STEP = 10  # counters that a step moves
WARM_UP_S = 3.0
JOINED_AT_ONCE = 200
"""Workers that the gateway is given at a time: the process that plays them is one, and not a fleet of hosts."""
PLAYED_AT_ONCE = 1500
"""Workers of one process, which have seven descriptors each."""


class Played:
    """A worker, as far as gateways hear it."""

    def __init__(self, number: int, transport: ZmqTransport, clock: Clock, *, busy: bool) -> None:
        self.busy = busy
        self.listener = transport.listen("tcp://127.0.0.1:0")
        config = WorkerConfig(
            worker=WorkerId(f"both-{number}"),
            incarnation=1,
            role=Role.BOTH,
            endpoint=self.listener.endpoint,
            connector="curve",
            scheduler=SchedulerConfig(pages=64),
        )
        self._asks = GatewayRequests(config.gateway_silence_s)
        self._counters = {name: 12345.678 + index for index, name in enumerate(WORKER_COUNTERS)}
        self._config, self._steps = config, 0
        self._bulletins = KvEventPublisher(config, PrefixCache(PagePool(64)), self.listener, self._report)
        self._others = [ConnectedGateway(f"g{index}", 1, b"", 0.0, serial=1) for index in range(1, GATEWAYS)]
        self.next_step = clock.now() + number % 64 / 64 * STEP_S

    def _report(self) -> WorkerReport:
        config = self._config
        return WorkerReport(
            worker=config.worker,
            incarnation=1,
            role=Role.BOTH,
            state=WorkerState.READY,
            pid=os.getpid(),
            identity=IDENTITY,
            max_model_len=4096,
            steps=self._steps,
            step_s=STEP_S,
            running=8 if self.busy else 0,
            tokens_in_flight=1000 if self.busy else 0,
            kv_pages_free=1000,
            counters=dict(self._counters),
            rates=StepRates(1e-3, 1e-4, 1e-9, 1e-4),
            measured=100 + self._steps,
        )

    def turn(self, now: float) -> None:
        """As ``WorkerService`` does, without requests."""
        while (received := self.listener.recv()) is not None:
            if not isinstance(received.message, Hello):
                continue
            if received.message.discovery:
                self._bulletins.on_discovery(received.peer)
            else:
                self._bulletins.on_hello(
                    self._asks.on_hello(received.peer, received.message, now).gateway, received.message
                )
        if self.busy and now >= self.next_step:
            self.next_step = now + STEP_S
            self._steps += 1
            for name in list(self._counters)[:CHANGES_A_STEP]:
                self._counters[name] += 1.0
            self._bulletins.mark_changed()
        self._bulletins.send_due(self._asks.gateways(), now, waiting=self.busy)


def play(workers: list[Played], over: Callable[[], bool], stretch: float) -> None:
    """Until ``over``: who was spoken to takes its turn at once, all every 10 ms, or less often if many or idle.

    The first takes one each time, which also answers connections of all of them: their transport is one.
    """
    clock = stretched_time.StretchedClock(stretch)
    poller = zmq.Poller()
    by_socket: dict[Any, Played] = {}
    for worker in workers:
        socket = worker.listener.socket  # type: ignore[attr-defined]
        poller.register(socket, zmq.POLLIN)
        by_socket[socket] = worker
    looked, pause = 0.0, max(0.01, len(workers) / (25_600 if workers[0].busy else 1_500))
    while not over():
        spoken = [workers[0], *(by_socket[socket] for socket, _ in poller.poll(10 * stretch))]
        now = clock.now()
        if now - looked >= pause:
            looked, spoken = now, workers
        for worker in spoken:
            worker.turn(now)


async def gateway(endpoints: list[str], keys: CurveKeys, seconds: float, stretch: float) -> dict[str, float]:
    """A gateway's part that hears workers; what it cost this process, and what it cost to join them."""
    transport = ZmqTransport(keys, intervals=stretched_time.intervals(stretch))
    clock = stretched_time.StretchedClock(stretch)
    config = GatewayConfig(name="g0", model_name="bench")
    router = RouterService(config, connect=transport.connect_async, clock=clock, suspect=print)
    hello = Hello(gateway=config.name, incarnation=1, discovery=True)
    joined = RemoteWorkers(
        transport.connect_async, router.on_supervisor, hello, clock=clock, beat_s=config.failover.beat_s
    )
    members = [Member(name=endpoint, endpoint=endpoint) for endpoint in endpoints]
    reports = 0

    def heard(endpoint: str, report: WorkerReport) -> None:
        nonlocal reports
        reports += 1
        joined.on_report(endpoint, report)

    router.add_report_listener(heard)
    router.start()
    joined.start()
    before, began = cpu_s(), clock.now()
    until = began + 60.0 + len(endpoints) / 20
    wanted = 0
    while (ready := len(router.fleet.ready(Role.BOTH, None))) < len(endpoints):
        assert clock.now() < until, f"{ready} of {len(endpoints)} are ready: try a larger --stretch"
        if ready == wanted:
            wanted = min(len(endpoints), wanted + round(JOINED_AT_ONCE * stretch))
            joined.set_members(members[:wanted])
        await asyncio.sleep(0.1)
    row = {"joining_cpu_s": cpu_s() - before, "joining_s": clock.now() - began}
    await asyncio.sleep(WARM_UP_S)
    before, loop_before, began, reports = cpu_s(), time.thread_time(), clock.now(), 0
    await asyncio.sleep(seconds)
    row |= {"cpu_s": cpu_s() - before, "loop_cpu_s": time.thread_time() - loop_before}
    row |= {"seconds": clock.now() - began, "reports": reports}
    row["ready"] = len(router.fleet.ready(Role.BOTH, None))
    await joined.close()
    await router.close()
    transport.close()
    return row


def cpu_s() -> float:
    """Of this process, threads of ZeroMQ included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def play_part(numbers: Sequence[int], keys: CurveKeys, line: Connection, stretch: float, *, busy: bool) -> None:
    """In a process of its own: plays these workers until the other end of ``line`` says something or closes."""
    transport = ZmqTransport(keys, intervals=stretched_time.intervals(stretch))
    clock = stretched_time.StretchedClock(stretch)
    workers = [Played(number, transport, clock, busy=busy) for number in numbers]
    line.send([worker.listener.endpoint for worker in workers])
    play(workers, line.poll, stretch)
    transport.close()


def measure(scene: str, seconds: float, count: int | None = None, stretch: float = 1) -> dict[str, float]:
    """One round, with so many workers.  Seconds, but for those of CPU, are of stretched time."""
    count, busy = count or SCENES[scene][0], scene == "busy"
    keys, fork = CurveKeys.ephemeral(), multiprocessing.get_context("fork")
    lines, endpoints = list[Connection](), list[str]()
    for first in range(PLAYED_AT_ONCE, count, PLAYED_AT_ONCE):
        numbers = range(first, min(count, first + PLAYED_AT_ONCE))
        here, there = fork.Pipe()
        fork.Process(target=play_part, args=(numbers, keys, there, stretch), kwargs={"busy": busy}, daemon=True).start()
        lines.append(here)
        endpoints += here.recv()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        keys.save(place)
        transport = ZmqTransport(keys, intervals=stretched_time.intervals(stretch))
        played, clock = range(min(count, PLAYED_AT_ONCE)), stretched_time.StretchedClock(stretch)
        workers = [Played(number, transport, clock, busy=busy) for number in played]
        endpoints += [worker.listener.endpoint for worker in workers]
        (place / "endpoints.json").write_text(json.dumps(endpoints))
        command = [sys.executable, __file__, "--gateway", folder, "--seconds", str(seconds)]
        command += ["--stretch", str(stretch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            play(workers, lambda: child.poll() is not None, stretch)
            assert child.stdout is not None
            row: dict[str, float] = json.loads(child.stdout.read())
        transport.close()
    for line in lines:
        line.send("over")
    return row


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--stretch", type=float, default=1, metavar="K", help="time passes K times slower (default: 1)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gateway", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gateway is not None:
        logging.getLogger("penstock").setLevel(logging.ERROR)  # that it waits for workers is what is measured
        endpoints = json.loads((given.gateway / "endpoints.json").read_text())
        work = gateway(endpoints, CurveKeys.load(given.gateway), given.seconds, given.stretch)
        print(json.dumps(stretched_time.run(work, given.stretch)))
        return
    found: dict[str, Any] = {}
    for scene in given.scenes:
        count, bar = SCENES[scene]
        rows = [measure(scene, given.seconds, stretch=given.stretch) for _ in range(given.rounds)]
        parts = [100 * row["cpu_s"] / row["seconds"] for row in rows]
        each = [row["reports"] / row["seconds"] / count for row in rows]
        median = statistics.median(parts)
        found[scene] = {"rounds": rows, "per_cent_of_a_core": median, "bar": bar}
        print(
            f"{count} {scene} workers: {median:.1f} % of a core ({', '.join(f'{part:.1f}' for part in parts)}), "
            f"{statistics.median(each):.1f} reports/s from each; bar {bar:g} %: {'met' if median <= bar else 'NOT met'}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
