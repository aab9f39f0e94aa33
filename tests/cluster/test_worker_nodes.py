"""One worker on several machines: the same answers as one process, through every death, and only with the keys."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.mesh import NodePlace, parse_mesh
from penstock.wire.curve_keys import CurveKeys

from .one_answer import (
    TRUSTING,
    Plain,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
    the_worker,
)
from .server import PATIENCE_S, START_S, PenstockServer, PenstockWorker, free_port
from .streams import all_answers
from .test_nodes import POISON, complete
from .varied import varied_requests


class PenstockNode(PenstockWorker):
    """A machine of a worker that gateways do not join: ready when it belongs to the worker."""

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            return "of the worker at tcp://" in self.read_log()

        self.wait_for(ready, timeout_s, "ready")


def flags_of(plan: str, nodes: int, node: int, master: int, keys: Path) -> list[str]:
    here = ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", f"tcp://127.0.0.1:{master}"]
    return ["--parallel", plan, *here, "--keys", str(keys), "--name", f"w{node}", "--kv-memory", TIGHT[plan]]


@contextmanager
def worker_of(plan: str, nodes: int, keys: Path) -> Iterator[tuple[PenstockWorker, list[PenstockNode]]]:
    """All machines of one worker, which find each other whichever begins first."""
    master = free_port()
    with ExitStack() as stack:
        others = [PenstockNode(flags_of(plan, nodes, node, master, keys)) for node in range(1, nodes)]
        for other in others:
            other.start()
            stack.push(other.__exit__)
        first = stack.enter_context(PenstockWorker(flags_of(plan, nodes, 0, master, keys)))
        for other in others:
            other.wait_ready()
        yield first, others


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "keys"
    CurveKeys.ephemeral().save(folder)
    return folder


def elsewhere(worker: dict[str, Any]) -> int:
    """A rank on another machine than the leader."""
    return int(next(rank["pid"] for rank in worker["ranks"] if rank["node"] > 0))


def pids_of(server: PenstockServer) -> set[int]:
    """The processes of all ranks; none while no worker is connected."""
    return {rank["pid"] for worker in server.workers() for rank in worker.get("ranks", ())}


BLOWS = {
    "leader killed": (the_worker, signal.SIGKILL),
    "other machine's rank killed": (elsewhere, signal.SIGKILL),
    "other machine's rank stopped": (elsewhere, signal.SIGSTOP),
}

TIGHT = {"pp2": "2560KiB", "tp2,pp2": "2560KiB", "pp3": "1536KiB"}
"""KV memory of a machine: 128 pages, one full context, where it has most layers."""

PLANS = {"pp2": 2, "tp2,pp2": 2, "pp3": 3}
"""With the number of machines."""


def cells() -> list[Any]:
    first = ("pp2", "other machine's rank killed")
    return [
        pytest.param(plan, blow, id=f"{plan}-{blow}", marks=() if (plan, blow) == first else pytest.mark.long)
        for plan in PLANS
        for blow in BLOWS
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "blow"), cells())
def test_a_worker_on_several_machines_gives_one_answer(
    plan: str, blow: str, plain: Plain, keys: Path, tmp_path: Path
) -> None:
    victim, signum = BLOWS[blow]
    mesh, nodes = parse_mesh(plan), PLANS[plan]
    with worker_of(plan, nodes, keys) as (first, _):
        joined = ["--keys", str(keys), "--join", first.endpoint]
        with PenstockServer(joined, config=f"{TRUSTING}no_path_s = 60.0\n", folder=tmp_path) as server:
            server.wait_all_ready()
            bodies = varied_requests(salt=f"{plan} {blow} nodes")
            killed = answers_with_a_kill(server, bodies, plain.varied, together=True, victim=victim, signum=signum)
            compare(asyncio.run(killed), plain.varied, f"{plan}, {blow}")
            compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, f"{plan}, cached")
            crowd_until_somebody_gives_way(server, plain, f"{plan}, crowded")
            assert_it_took_place(server, split=False, tight=True)
            (worker,) = server.workers()
            for node in range(nodes):
                there = {rank["rank"] for rank in worker["ranks"] if rank["node"] == node}
                assert there == set(mesh.node_ranks(NodePlace(nodes=nodes, node=node)))
            assert len({rank["pid"] for rank in worker["ranks"]}) == mesh.ranks
            assert all(rank["weight_bytes"] and rank["kv_bytes"] and rank["step_cpu_s"] for rank in worker["ranks"])


@pytest.mark.timeout(120)
def test_a_machine_without_the_keys_is_not_admitted(keys: Path, tmp_path: Path) -> None:
    others = tmp_path / "other-keys"
    CurveKeys.ephemeral().save(others)
    master = free_port()
    first, stranger = (
        PenstockWorker(flags_of("pp2", 2, node, master, folder)) for node, folder in enumerate((keys, others))
    )
    first.start()
    stranger.start()
    try:
        first.wait_for(lambda: "is not admitted to this worker" in first.read_log(), START_S, "asked by the stranger")
        stranger.wait_for(lambda: "other keys" in stranger.read_log(), START_S, "told why")
        assert "waiting for machine 0" in stranger.read_log()
        assert "join it: " not in first.read_log()
    finally:
        assert first.stop() == 0
        assert stranger.stop() == 0


@pytest.mark.timeout(120)
def test_a_machine_with_another_plan_ends_with_the_reason(keys: Path) -> None:
    master = free_port()
    first = PenstockWorker(flags_of("pp2", 2, 0, master, keys))
    other = PenstockWorker(flags_of("pp3", 2, 1, master, keys))
    first.start()
    other.start()
    try:
        assert other.wait_end(START_S) == 1
        assert "refuses this one: --parallel pp3; machine 0 has pp2" in other.read_log()
        assert first.running
    finally:
        first.stop()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_machine_that_comes_back_is_part_of_the_worker_again(keys: Path, tmp_path: Path) -> None:
    """Its service ended, not only a process: the gateway waits until it is there again."""
    with ExitStack() as stack:
        first, (other,) = stack.enter_context(worker_of("pp2", 2, keys))
        joined = ["--keys", str(keys), "--join", first.endpoint]
        server = stack.enter_context(PenstockServer(joined, config=f"{TRUSTING}no_path_s = 60.0\n", folder=tmp_path))
        server.wait_all_ready()
        before = pids_of(server)
        os.kill(other.pid, signal.SIGKILL)
        first.wait_for(lambda: "waiting for machine 1" in first.read_log(), PATIENCE_S, "alone")
        other.process.wait()
        again = PenstockNode(other.flags)
        stack.push(again.__exit__)
        again.start()
        again.wait_ready()
        server.wait_all_ready()
        server.wait_for(lambda: bool(pids_of(server)) and before.isdisjoint(pids_of(server)), PATIENCE_S, "anew")


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("signum", "verdict"), [(signal.SIGKILL, (200, "")), (signal.SIGSEGV, (422, "poison_request"))], ids=str
)
def test_a_request_is_blamed_for_ranks_that_crash_not_for_machines_that_go(
    keys: Path, tmp_path: Path, signum: int, verdict: tuple[int, str]
) -> None:
    with worker_of("pp2", 2, keys) as (first, _), ThreadPoolExecutor(1) as pool:
        joined = ["--keys", str(keys), "--join", first.endpoint]
        config = f"{TRUSTING}no_path_s = 60.0\npoison_tokens = 2048\n"
        with PenstockServer(joined, config=config, folder=tmp_path) as server:
            server.wait_all_ready()
            verdict_of = pool.submit(complete, server, POISON)
            ended: set[int] = set()

            def end_twice() -> bool:
                for row in server.workers():
                    if row["running"] and elsewhere(row) not in ended and len(ended) < 2:
                        ended.add(elsewhere(row))
                        os.kill(elsewhere(row), signum)
                return verdict_of.done()

            server.wait_for(end_twice, 120.0, "the request has ended")
            assert verdict_of.result() == verdict
            assert len(ended) == 2


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_machine_that_stands_still_is_given_up(keys: Path, tmp_path: Path, plain: Plain) -> None:
    """All of its processes, its supervisor too, which would end one that does: as of a machine that hangs."""
    with worker_of("pp2", 2, keys) as (first, (other,)):
        joined = ["--keys", str(keys), "--join", first.endpoint]
        with PenstockServer(joined, config=f"{TRUSTING}no_path_s = 60.0\n", folder=tmp_path) as server:
            server.wait_all_ready()
            frozen = other.processes()
            try:
                for pid in frozen:
                    os.kill(pid, signal.SIGSTOP)
                first.wait_for(lambda: "nothing came for 4 s" in first.read_log(), PATIENCE_S, "alone")
            finally:
                for pid in frozen:
                    os.kill(pid, signal.SIGCONT)
            bodies = varied_requests(salt="frozen")
            compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, "after standing still")
