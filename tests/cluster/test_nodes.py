"""``penstock node``: two hosts of one fleet file, here as two services on the loopback that share only TCP and keys."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from bench.peers.checkpoint import write_checkpoint
from bench.peers.places import SHAPES
from bench.peers.processes import memory_bytes

from penstock.config.fleet_file import PORTS_A_WORKER, read_fleet_file
from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock, streaming
from .server import PATIENCE_S, PenstockNode, PenstockServer, free_port
from .streams import all_answers
from .varied import varied_requests

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "64MiB"

[settings.failover]
no_path_s = 60.0
poison_tokens = 2000
"""
"""A signal plays what ends a worker: it comes when the request has had some tokens, which here do not clear it."""

NODE = """
[[nodes]]
name = "{name}"
address = "127.0.0.1"
gateways = 1
http_port = {http}
port = {port}
workers = [{workers}]
"""

SPLIT = '{ role = "prefill", count = 1 }, { role = "decode", count = 1 }'

GROUP = """
[[groups]]
nodes = ["a", "b"]
group = "pp2"
"""

PORTS = 6
"""Of a node with up to three workers."""


def free_ports() -> tuple[int, int]:
    """The first of so many ports each, for two nodes, that were free a moment ago."""
    while True:
        first = free_port()
        with ExitStack() as stack:
            try:
                for port in range(first, first + 2 * PORTS):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
        return first, first + PORTS


@dataclass(frozen=True)
class Fleet:
    """Both nodes, running."""

    a: PenstockNode
    b: PenstockNode


def write_fleet(folder: Path, workers: str = SPLIT, groups: str = "") -> tuple[Path, tuple[int, int]]:
    """The file, and the ports of both nodes' gateways.  ``workers``: of each node."""
    CurveKeys.ephemeral().save(folder / "keys")
    http, ports = (free_port(), free_port()), free_ports()
    file = folder / "fleet.toml"
    nodes = [NODE.format(name=name, http=http[i], port=ports[i], workers=workers) for i, name in enumerate("ab")]
    file.write_text("".join((FLEET.format(keys=folder / "keys"), *nodes, groups)))
    return file, http


@contextmanager
def running(folder: Path, workers: str = SPLIT, groups: str = "", *, count: int = 4) -> Iterator[Fleet]:
    """``count``: of the workers that each gateway knows."""
    file, (first, second) = write_fleet(folder, workers, groups)
    with ExitStack() as stack:
        a, b = PenstockNode(file, "a", first), PenstockNode(file, "b", second)
        for node in (a, b):  # side by side: each waits for the other's workers
            node.start()
            stack.callback(node.kill)
        for node in (a, b):
            node.wait_ready()
            node.wait_for(lambda node=node: len(node.workers()) == count, PATIENCE_S, "whole")
            node.wait_all_ready()
        yield Fleet(a, b)


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, object]]:
    """What one worker answers, one request at a time."""
    with PenstockServer(["--aggregated"]) as server:
        return answered(server, together=False)


def answered(server: PenstockServer, *, together: bool = True) -> list[dict[str, object]]:
    bodies = varied_requests(max_tokens=120)[:16]
    return [answer.identical for answer in asyncio.run(all_answers(server.url, bodies, together=together))]


def ready_workers(server: PenstockServer) -> set[str]:
    return {row["id"] for row in server.workers() if row["state"] == "ready"}


def test_both_nodes_answer_as_one_host_does(tmp_path: Path, undisturbed: list[dict[str, object]]) -> None:
    with running(tmp_path) as fleet:
        roles = {"a-prefill-0": "prefill", "a-decode-0": "decode", "b-prefill-0": "prefill", "b-decode-0": "decode"}
        for node in (fleet.a, fleet.b):
            assert {row["id"]: row["role"] for row in node.workers()} == roles
            assert answered(node) == undisturbed
        pids = {row["id"]: row["pid"] for row in fleet.a.workers()}
        assert {row["id"]: row["pid"] for row in fleet.b.workers()} == pids
        os.kill(pids["b-decode-0"], signal.SIGKILL)
        for node in (fleet.a, fleet.b):
            node.wait_for(lambda node=node: pids["b-decode-0"] != node.worker("b-decode-0")["pid"], PATIENCE_S, "anew")
            assert answered(node) == undisturbed
        for node in (fleet.a, fleet.b):
            node.wait_idle()
            assert all(row["kv_pages_leaked"] == 0 for row in node.workers())
        for node in (fleet.a, fleet.b):
            assert node.stop() == 0
            node.assert_nothing_left()


def test_answers_go_on_when_a_node_dies_and_it_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    with running(tmp_path) as fleet:
        wanted = ask(fleet.a, max_tokens=900)
        with ExitStack() as stack:
            streams = [stack.enter_context(streaming(fleet.a, max_tokens=900)) for _ in range(4)]
            for stream in streams:
                stream.read(50)
            fleet.b.kill()
            assert [stream.read() for stream in streams] == [wanted] * len(streams)
        fleet.a.wait_for(lambda: ready_workers(fleet.a) == {"a-prefill-0", "a-decode-0"}, PATIENCE_S, "missed")
        fleet.b.start()
        fleet.b.wait_ready()
        fleet.a.wait_all_ready()
        assert ask(fleet.a, max_tokens=900) == wanted
        assert ask(fleet.b, max_tokens=900) == wanted


@pytest.mark.parametrize(
    ("change", "words", "because"),
    [
        (("", ""), ["--name", "c"], "there is no node 'c'; its nodes: a, b"),
        (("", ""), [], "add --name NODE, of a, b"),
        (('kv_memory = "64MiB"', "kv_memry = 1"), ["--name", "a"], "did you mean kv_memory?"),
        (('kv_memory = "64MiB"', 'model = "x"'), ["--name", "a"], "model is no setting of a node"),
        (("keys =", "# keys ="), ["--name", "a"], "keys is missing"),
        (('role = "prefill"', 'role = "reader"'), ["--name", "a"], "Invalid enum value 'reader'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, change: tuple[str, str], words: list[str], because: str
) -> None:
    file, _ = write_fleet(tmp_path)
    file.write_text(file.read_text().replace(*change))
    run = penstock("node", str(file), *words)
    assert run.returncode == 2
    assert because in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_port_of_a_worker_that_is_taken_ends_a_node(tmp_path: Path) -> None:
    file, _ = write_fleet(tmp_path)
    node = read_fleet_file(str(file)).node("a")
    for port in range(node.port, node.port + 2 * PORTS_A_WORKER):
        with socket.create_server((node.address, port)):
            run = penstock("node", str(file), "--name", "a")
        assert run.returncode == 2
        assert run.stderr.splitlines()[-1].endswith(
            f"port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with port of node a"
        )


def test_gateways_follow_the_file_without_a_restart(tmp_path: Path) -> None:
    """Of node a, while node b is taken out of it, comes back with another worker, and the file is broken for a time."""
    with running(tmp_path) as fleet:
        wanted = ask(fleet.a, max_tokens=200)
        gateway, whole = fleet.a.pid, fleet.a.fleet.read_text()
        both = {"a-prefill-0", "a-decode-0", "b-prefill-0", "b-decode-0"}
        alone, _, _ = whole.partition('\n[[nodes]]\nname = "b"')
        fleet.a.fleet.write_text(alone)
        fleet.a.wait_for(
            lambda: {row["id"] for row in fleet.a.workers()} == both - {"b-prefill-0", "b-decode-0"},
            PATIENCE_S,
            "left out",
        )
        assert ask(fleet.a, max_tokens=200) == wanted
        fleet.b.kill()
        fleet.a.fleet.write_text(alone + "[[nodes]")
        fleet.a.wait_for(lambda: "members are not read from" in fleet.a.read_log(), PATIENCE_S, "noticed")
        more = '{ role = "prefill", count = 1 }, { role = "decode", count = 2 }'
        head, _, tail = whole.rpartition(SPLIT)
        fleet.a.fleet.write_text(head + more + tail)
        fleet.b.start()
        fleet.b.wait_ready()
        fleet.a.wait_for(lambda: ready_workers(fleet.a) == both | {"b-decode-1"}, PATIENCE_S, "used")
        assert ask(fleet.a, max_tokens=200) == ask(fleet.b, max_tokens=200) == wanted
        assert fleet.a.pid == gateway


def ranks_of(node: PenstockServer) -> dict[int, int]:
    """The process of each rank of the only worker, by the number of its node; none while it is away."""
    found = [row for row in node.workers() if row["state"] == "ready"]
    return {rank["node"]: rank["pid"] for row in found for rank in row.get("ranks", ())}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_worker_over_two_nodes_answers_as_one_process_does_and_forms_again(
    victim: int, tmp_path: Path, undisturbed: list[dict[str, object]]
) -> None:
    """A rank of a node is killed in the middle of streams; the gateways of both nodes have no other worker."""
    with running(tmp_path, "", GROUP, count=1) as fleet:
        for node in (fleet.a, fleet.b):
            assert [row["id"] for row in node.workers()] == ["a-both-0"]
            assert answered(node) == undisturbed
        wanted = ask(fleet.a, max_tokens=900)
        before = ranks_of(fleet.b)
        assert set(before) == {0, 1}
        with ExitStack() as stack:
            streams = [stack.enter_context(streaming(node, max_tokens=900)) for node in (fleet.a, fleet.b)]
            for stream in streams:
                stream.read(50)
            os.kill(before[victim], signal.SIGKILL)
            assert [stream.read() for stream in streams] == [wanted] * len(streams)
        assert set(ranks_of(fleet.b).values()).isdisjoint(before.values()), "any death ends all ranks"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_of_a_worker_over_two_dies_and_is_part_of_it_again(tmp_path: Path) -> None:
    """Beside workers of the nodes' own: streams go on at those."""
    with running(tmp_path, '{ role = "both", count = 1 }', GROUP, count=3) as fleet:
        wanted = ask(fleet.a, max_tokens=900)
        with ExitStack() as stack:
            streams = [stack.enter_context(streaming(fleet.a, max_tokens=900)) for _ in range(12)]
            for stream in streams:
                stream.read(50)
            fleet.b.kill()
            assert [stream.read() for stream in streams] == [wanted] * len(streams)
        fleet.a.wait_for(lambda: ready_workers(fleet.a) == {"a-both-0"}, PATIENCE_S, "missed")
        fleet.b.start()
        fleet.b.wait_ready()
        fleet.a.wait_for(lambda: ready_workers(fleet.a) == {"a-both-0", "a-both-1", "b-both-0"}, PATIENCE_S, "whole")
        assert ask(fleet.b, max_tokens=900) == wanted
        for node in (fleet.b, fleet.a):
            assert node.stop() == 0
            node.assert_nothing_left()


POISON = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "seed": 1}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_request_that_crashes_workers_of_both_nodes_is_tried_by_no_gateway(tmp_path: Path) -> None:
    with running(tmp_path) as fleet, ThreadPoolExecutor(1) as pool:
        told = pool.submit(complete, fleet.a, POISON)
        crashed: set[int] = set()

        def crash() -> bool:
            """Whatever decodes crashes, whichever node it is on, until the request has failed."""
            for row in fleet.b.workers():
                if row["role"] == "decode" and row["running"] and row["pid"] not in crashed:
                    os.kill(row["pid"], signal.SIGSEGV)
                    crashed.add(row["pid"])
            return told.done()

        fleet.b.wait_for(crash, 120.0, "the request has failed")
        assert told.result() == (422, "poison_request")
        assert 2 <= len(crashed) <= 4
        for node in (fleet.a, fleet.b):
            node.wait_all_ready()
        pids = {row["pid"] for row in fleet.a.workers()}
        for node in (fleet.a, fleet.b):
            assert complete(node, POISON | {"seed": 2}) == (422, "poison_request")
            assert complete(node, POISON | {"prompt": "Once", "max_tokens": 4}) == (200, "")
        assert {row["pid"] for row in fleet.a.workers()} == pids


@contextmanager
def alone(folder: Path, model: Path, workers: int) -> Iterator[PenstockNode]:
    """Node a without a node b, with a model of its own."""
    file, (http, _) = write_fleet(folder, f'{{ role = "both", count = {workers} }}')
    text, _, _ = file.read_text().partition('\n[[nodes]]\nname = "b"')
    file.write_text(text.replace("\n[settings]", f'model = "{model}"\n\n[settings]', 1))
    with PenstockNode(file, "a", http) as node:
        node.wait_for(lambda: len(node.workers()) == workers, PATIENCE_S, "whole")
        node.wait_all_ready()
        yield node


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_workers_of_a_node_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    """Of 194 MB: what two workers more take besides KV pages is less than one copy."""
    model = tmp_path / "model"
    write_checkpoint(model, SHAPES["100m"], 1, lambda *_: None)
    weights = (model / "model.safetensors").stat().st_size
    held: dict[int, int] = {}
    for workers in (1, 3):
        folder = tmp_path / f"{workers} workers"
        folder.mkdir()
        with alone(folder, model, workers) as node:
            body = {"model": "model", "prompt": list(range(100, 400)), "max_tokens": 32, "ignore_eos": True}
            bodies = [body | {"cache_salt": str(number)} for number in range(4 * workers)]
            asyncio.run(all_answers(node.url, bodies, together=True))
            node.wait_for(lambda node=node: all(row["steps"] for row in node.workers()), PATIENCE_S, "all at work")  # type: ignore[misc]
            memory = memory_bytes(node.pid)
            held[workers] = memory["pss"] - memory["pss_shared_memory"]
    print(f"\nweights {weights / 1e6:.0f} MB, PSS without KV pages by workers: {held}")
    assert held[1] > weights
    assert held[3] - held[1] < weights


def complete(node: PenstockServer, body: dict[str, object]) -> tuple[int, str]:
    """The status, and the error's code."""
    response = httpx.post(f"{node.url}/v1/completions", json=body, timeout=120, trust_env=False)
    return response.status_code, "" if response.status_code == 200 else response.json()["error"]["code"]
