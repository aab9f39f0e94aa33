"""The scenes: each disturbs the fleet, tells what it has measured, and leaves it whole."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from bench.ray_nodes.rig import Rig, ready_rows
from bench.scenes import Row

from cluster.asking import ask, streaming
from cluster.keyed_load import KeyedLoad
from cluster.processes import alive
from cluster.ray_fleet import RayFleet, seconds_until_answered
from cluster.server import PATIENCE_S, PenstockServer

READY_BAR_S, ANSWER_BAR_S, ELSEWHERE_BAR_S, PLACED_BAR_S, CONTROL_BAR_S = 6.0, 3.0, 1.5, 10.0, 10.0
LONG, SHORT = 900, 40  # tokens of an answer
AFTER_ANSWERS = 3
"""For each stream at a time: so many more answers come after a blow before the load ends."""


def _median(scene: str, what: str, values: list[float], bar: float | None) -> Row:
    runs = ", ".join(f"{value:.2f}" for value in values)
    return Row(scene, what, statistics.median(values), "s", bar, f"runs {runs}")


def _counts(scene: str, rig: Rig, load: KeyedLoad) -> Iterator[Row]:
    told = f"{len(load.answers)} answered, {rig.streams} at a time; {load.resumed} asked again at another gateway"
    if load.failed:
        told += f"; {load.failed[0]}"
    yield Row(scene, "requests that failed", len(load.failed), "", 0, told)
    yield Row(scene, "answers that differ", load.differing(rig.wanted), "", 0)


def up(rig: Rig, options: argparse.Namespace) -> Iterator[Row]:
    """From the command to two nodes that are ready."""
    seconds: list[float] = []
    for _ in range(options.rounds):
        rig.down()
        seconds.append(rig.up()[1])
    yield _median("up", "command to two ready nodes", seconds, READY_BAR_S)


def actor(rig: Rig, options: argparse.Namespace) -> Iterator[Row]:
    """An actor is killed, and its node goes on; then a node's process, which its actor starts again."""
    fleet = rig.fleet()
    short, whole = ask(fleet.a, max_tokens=SHORT), ask(fleet.a, max_tokens=LONG)
    answered: list[float] = []
    taken_over: list[float] = []
    again: list[float] = []
    broken = 0
    for _ in range(options.rounds):
        before = fleet.wait_for_node("b", "ready")
        with streaming(fleet.a, max_tokens=LONG) as there, streaming(fleet.b, max_tokens=LONG) as own:
            for stream in (there, own):
                stream.read(50)
            began = time.monotonic()
            os.kill(before["actor_pid"], signal.SIGKILL)
            answered.append(seconds_until_answered(fleet.b, short))
            broken += sum(stream.read() != whole for stream in (there, own))
        after = fleet.wait_for_another("b", before)
        taken_over.append(time.monotonic() - began)
        broken += after["pid"] != before["pid"]
        os.kill(after["pid"], signal.SIGKILL)
        again.append(seconds_until_answered(fleet.b, short))
        fleet.wait_whole()
    yield _median("actor", "actor killed: whole answer of its gateway", answered, ANSWER_BAR_S)
    yield Row("actor", "streams that broke off or differ, and nodes that ended", broken, "", 0)
    yield _median("actor", "actor killed: another has its node", taken_over, None)
    yield _median("actor", "node killed: whole answer of its gateway", again, ANSWER_BAR_S)


def node(rig: Rig, _: argparse.Namespace) -> Iterator[Row]:
    """Host b is killed; later it is back."""
    fleet = rig.fleet()
    with rig.load([fleet.a.url], fleet.a.key_headers()) as load:
        there = sum(row["running"] for row in fleet.a.workers() if row["id"].startswith("b-"))
        killed = time.monotonic()
        rig.ray.kill("b")
        load.wait_answers(AFTER_ANSWERS * rig.streams, 2 * PATIENCE_S)
    yield from _counts("node", rig, load)
    waited = load.longest_wait_s(since=killed)
    yield Row("node", "host b killed: longest wait for a token at a", waited, "s", ELSEWHERE_BAR_S,
              f"{there} requests were at b's workers")  # fmt: skip
    fleet.wait_for_node("b", "restarting")
    yield Row(
        "node", "host b killed: Ray has noticed by", time.monotonic() - killed, "s", None, "looked for at the end"
    )
    began = time.monotonic()
    rig.ray.start("b")
    started = time.monotonic()
    fleet.wait_whole()
    placed = time.monotonic()
    told = f"`ray start` takes {started - began:.1f} s of it"
    yield Row("node", "host b back: its node is ready and used by a", placed - began, "s", PLACED_BAR_S, told)
    fleet.wait_for_node("b", "ready")


@dataclass(frozen=True)
class Absence:
    """Something of Ray's that is away for a while: how it goes, and how it comes back."""

    scene: str
    what: str
    strike: Callable[[], object]
    bring_back: Callable[[], object]
    lost: str = ""
    """The node that goes with it; the other one goes on."""

    def rows(self, rig: Rig, fleet: RayFleet, away_s: float) -> Iterator[Row]:
        """Under streams at both gateways."""
        before = fleet.nodes(code=0)
        with rig.load([fleet.a.url, fleet.b.url], fleet.a.key_headers()) as load:
            struck = time.monotonic()
            self.strike()
            _keep(load, struck + away_s)
            meanwhile, waited = len(load.answers), load.longest_wait_s(struck)
            began = time.monotonic()
            self.bring_back()
            started = time.monotonic()
            known = _seconds_until_ready(fleet, began, [node for node in before if node != self.lost])
            all_known = _seconds_until_ready(fleet, began, before) if self.lost else known
            load.wait_answers(rig.streams, PATIENCE_S)
        yield from _counts(self.scene, rig, load)
        told = f"{meanwhile} answers in {away_s:g} s"
        yield Row(self.scene, f"{self.what} away: longest wait for a token", waited, "s", None, told)
        told = f"under load; {started - began:.1f} s of it until it is started"
        name = f"{self.what} back: `penstock ray status` shows nodes as ready"
        yield Row(self.scene, name, known, "s", CONTROL_BAR_S, told)
        if self.lost:
            yield Row(self.scene, f"{self.what} back: node {self.lost} is ready", all_known, "s", PLACED_BAR_S, told)
        kept = fleet.nodes(code=0)
        anew = [node for node in kept if kept[node]["pid"] != before[node]["pid"] and node != self.lost]
        yield Row(self.scene, "nodes that were started anew without need", len(anew), "", 0, ", ".join(anew))
        began, killed = time.monotonic(), kept["b"]["actor_pid"]
        os.kill(killed, signal.SIGKILL)
        replaced = _seconds_until_ready(fleet, began, kept, ("b", killed))
        told = "without load"
        yield Row(self.scene, "then an actor killed: another has its node", replaced, "s", CONTROL_BAR_S, told)
        fleet.wait_whole()


def _keep(load: KeyedLoad, until: float) -> None:
    """Until that time, or until something has failed."""
    left = until - time.monotonic()
    while left > 0 and not load.failed:
        time.sleep(min(0.5, left))
        left = until - time.monotonic()


def _seconds_until_ready(
    fleet: RayFleet, began: float, names: Collection[str], other_than: tuple[str, int] | None = None
) -> float:
    def ready() -> bool:
        return ready_rows(fleet, names, other_than=other_than) is not None

    PenstockServer.wait_for(ready, 3 * PATIENCE_S, f"{', '.join(names)} are ready")
    return time.monotonic() - began


def gcs(rig: Rig, options: argparse.Namespace) -> Iterator[Row]:
    """It is stopped: connections to it stay open without an answer."""
    pid = rig.ray.gcs()
    strike, back = (lambda: os.kill(pid, signal.SIGSTOP)), (lambda: os.kill(pid, signal.SIGCONT))
    try:
        yield from Absence("gcs", "GCS", strike, back).rows(rig, rig.fleet(), options.away_s)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGCONT)


def redis(rig: Rig, options: argparse.Namespace) -> Iterator[Row]:
    """It is killed; its GCS ends with it, and comes back with it."""
    fleet, words = rig.fleet(), rig.ray.command_of(rig.ray.gcs())

    def strike() -> None:
        rig.ray.kill("r")

    def back() -> None:
        rig.ray.start_redis()
        if rig.ray.pids("a", "gcs_server"):
            rig.ray.end_gcs()
        rig.ray.spawn("a", words)

    yield from Absence("redis", "Redis and GCS", strike, back).rows(rig, fleet, options.away_s)


def head(rig: Rig, options: argparse.Namespace) -> Iterator[Row]:
    """Host a is killed, with the GCS; Redis is on another host.  Half of the clients are at its gateway."""
    strike, back = (lambda: rig.ray.kill("a")), (lambda: rig.ray.start("a"))
    yield from Absence("head", "head", strike, back, lost="a").rows(rig, rig.fleet(), options.away_s)
