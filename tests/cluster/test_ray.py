"""``penstock ray`` on a real Ray cluster of two hosts, in network namespaces: what dies, and what goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from . import keyed_load
from .asking import ask, streaming
from .envoy import PenstockPicker
from .keyed_load import KeyedLoad
from .ray_fleet import RayFleet, missing, ready_workers, seconds_until_answered
from .ray_hosts import REDIS_HOST, RayHosts
from .ray_members import outside_gateway, scaled_under_load
from .server import PATIENCE_S, PenstockServer
from .streams import all_answers
from .varied import varied_requests

GCS_AWAY_S, HEAD_AWAY_S = 120.0, 20.0
CLIENTS = 8

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}"),
    pytest.mark.timeout(600),
]


def answered(server: PenstockServer, *, together: bool = True) -> list[dict[str, object]]:
    bodies, headers = varied_requests(max_tokens=120)[:8], server.key_headers()
    answers = asyncio.run(all_answers(server.url, bodies, together=together, headers=headers))
    return [answer.identical for answer in answers]


def measured(what: str, seconds: float) -> None:
    """For ``-s``: the figures of docs/fleet.md."""
    print(f"\n{what}: {seconds:.2f} s")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    with RayHosts() as ray:
        yield ray


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, object]]:
    """What one worker answers, one request at a time."""
    with PenstockServer(["--aggregated"]) as server:
        return answered(server, together=False)


@pytest.fixture(scope="module")
def long_answer() -> str:
    with PenstockServer(["--aggregated"]) as server:
        return ask(server, max_tokens=900)


@pytest.fixture(scope="module")
def seeded() -> dict[int, keyed_load.Identical]:
    """What each client of ``loaded`` must get."""
    with PenstockServer(["--aggregated"]) as server:
        return keyed_load.undisturbed(server, CLIENTS)


@contextmanager
def loaded(fleet: RayFleet) -> Iterator[KeyedLoad]:
    """Streams at both gateways, so many at a time, without a pause."""
    load = KeyedLoad([fleet.a.url, fleet.b.url], CLIENTS, headers=fleet.a.key_headers())
    with load.running():
        load.wait_answers(CLIENTS, PATIENCE_S)
        yield load
        load.wait_answers(CLIENTS, PATIENCE_S)


@pytest.fixture
def fleet(cluster: RayHosts, tmp_path: Path) -> Iterator[RayFleet]:
    """Both nodes, ready; ended when the test ends, and nothing of them is left."""
    made = RayFleet(cluster, tmp_path)
    began = time.monotonic()
    made.command("up")
    measured("command to ready, two nodes", time.monotonic() - began)
    made.wait_whole()
    yield made
    made.command("down")
    for host in "ab":
        assert cluster.pids(host, "penstock") == set()


def test_both_nodes_answer_as_one_host_does_and_up_applies_changes(
    fleet: RayFleet, undisturbed: list[dict[str, object]], long_answer: str
) -> None:
    rows = fleet.nodes(code=0)
    assert {name: row["state"] for name, row in rows.items()} == {"a": "ready", "b": "ready"}
    assert {name: row["ray_address"] for name, row in rows.items()} == {name: fleet.ray.host(name) for name in "ab"}
    for gateway in (fleet.a, fleet.b):
        assert answered(gateway) == undisturbed
    pids = {name: row["pid"] for name, row in rows.items()}
    assert "a: as it was" in fleet.command("up")
    assert {name: row["pid"] for name, row in fleet.nodes(code=0).items()} == pids
    # Another worker at b: a's gateway finds it in the file, and its actor gives it the same file when both end.
    fleet.write(a={}, b={"decode": 2})
    said = fleet.command("up")
    assert "no longer" not in said
    assert "warning" not in said, "the GCS keeps its state in Redis"
    fleet.wait_whole("b-decode-1")
    changed = fleet.nodes(code=0)
    assert changed["a"]["pid"] == pids["a"]
    assert changed["b"]["pid"] != pids["b"]
    assert answered(fleet.a) == undisturbed
    for process in ("actor_pid", "pid"):  # the actor that replaces this one starts the node with the file that it had
        os.kill(fleet.nodes(code=0)["a"][process], signal.SIGKILL)
        fleet.wait_for_another("a", changed["a"])
        changed = fleet.nodes(code=0)
    fleet.wait_whole("b-decode-1")
    fleet.write(a={"more": "port = 9100"})
    assert "b: no longer in the file" in fleet.command("up")
    assert set(fleet.nodes(code=0)) == {"a"}
    assert fleet.ray.pids("b", "penstock") == set()
    assert ask(fleet.a, max_tokens=900) == long_answer


def test_the_node_of_a_killed_actor_goes_on_and_the_next_one_takes_it_over(fleet: RayFleet, long_answer: str) -> None:
    wanted = ask(fleet.a, max_tokens=40)
    before = fleet.nodes(code=0)["b"]
    with streaming(fleet.a, max_tokens=900) as stream, streaming(fleet.b, max_tokens=900) as own:
        stream.read(50)
        own.read(50)
        began = time.monotonic()
        os.kill(before["actor_pid"], signal.SIGKILL)
        measured("actor killed, a whole answer of its gateway", seconds_until_answered(fleet.b, wanted))
        assert stream.read() == own.read() == long_answer
    after = fleet.wait_for_another("b", before)
    measured("actor killed, another has taken its node over", time.monotonic() - began)
    assert after["actor_pid"] != before["actor_pid"]
    assert after["pid"] == before["pid"]
    assert after["restarts"] >= 1
    assert len(fleet.ray.pids("b", "penstock", "--name b")) >= 1
    # Its child alone: Ray does not notice, the actor starts it again and says why.
    os.kill(after["pid"], signal.SIGKILL)
    measured("node killed, a whole answer of its gateway", seconds_until_answered(fleet.b, wanted))
    again = fleet.wait_for_node("b", "ready")
    assert again["actor_pid"] == after["actor_pid"]
    assert again["pid"] != after["pid"]
    fleet.wait_whole()


def test_streams_go_on_when_a_host_dies_and_its_node_is_back_with_it(fleet: RayFleet, long_answer: str) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(fleet.a, max_tokens=900)) for _ in range(8)]
        for stream in streams:
            stream.read(50)
        fleet.ray.kill("b")
        assert [stream.read() for stream in streams] == [long_answer] * len(streams)
    assert "pid" not in fleet.wait_for_node("b", "restarting")
    assert "Ray nodes: 10.77.1.1" in fleet.command("status", code=1)
    began = time.monotonic()
    fleet.ray.start("b")
    fleet.wait_for_node("b", "ready")
    measured("host back, node ready (with `ray start`)", time.monotonic() - began)
    fleet.wait_whole()
    assert ask(fleet.b, max_tokens=900) == long_answer


def test_a_node_drains_with_its_ray_node(fleet: RayFleet, long_answer: str) -> None:
    row = fleet.nodes(code=0)["b"]
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(fleet.a, max_tokens=900)) for _ in range(4)]
        for stream in streams:
            stream.read(50)
        words = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds")
        done = fleet.ray.run("a", "ray.scripts.scripts", "drain-node", "--node-id", row["ray_node"], *words, "600")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [stream.read() for stream in streams] == [long_answer] * len(streams)
    drained = fleet.wait_for_node("b", "stopped")
    assert drained["reason"] == "its Ray node is being drained"
    fleet.a.wait_for(lambda: ready_workers(fleet.a) == {"a-prefill-0", "a-decode-0"}, PATIENCE_S, "missed")
    fleet.ray.kill("b")
    fleet.ray.start("b")
    fleet.wait_for_node("b", "ready")
    fleet.wait_whole()


def test_serving_goes_on_without_the_gcs_and_with_it_again(
    fleet: RayFleet, seeded: dict[int, keyed_load.Identical]
) -> None:
    """It is away for two minutes: longer than Ray's own limit, after which hosts and actors would end."""
    gcs, before = fleet.ray.gcs(), fleet.nodes(code=0)
    with loaded(fleet) as load:
        os.kill(gcs, signal.SIGSTOP)
        try:
            until = time.monotonic() + GCS_AWAY_S
            while time.monotonic() < until:
                load.wait_answers(CLIENTS, PATIENCE_S)
            assert load.resumed == 0
            os.kill(before["b"]["pid"], signal.SIGKILL)  # its actor needs no GCS to start it again
            fleet.b.wait_for(lambda: "b-decode-0" in ready_workers(fleet.b), PATIENCE_S, "back")
            done = fleet.ray.run("a", "penstock", "ray", "status", str(fleet.file))
            assert done.returncode == 1
            assert "does not answer within" in done.stderr
            assert "Traceback" not in done.stderr
        finally:
            os.kill(gcs, signal.SIGCONT)
        began = time.monotonic()
        after = fleet.wait_for_node("b", "ready")
        measured("GCS back under load, status told", time.monotonic() - began)
    assert load.failed == []
    assert load.differing(seeded) == 0
    assert after["actor_pid"] == before["b"]["actor_pid"]
    assert fleet.nodes()["a"]["pid"] == before["a"]["pid"]
    fleet.wait_whole()


def test_a_killed_redis_and_its_gcs_are_back_with_the_cluster_that_they_had(
    fleet: RayFleet, seeded: dict[int, keyed_load.Identical]
) -> None:
    """After two minutes, by what Redis had written to its disk."""
    command = fleet.ray.command_of(fleet.ray.gcs())
    before = fleet.nodes(code=0)
    with loaded(fleet) as load:
        fleet.ray.kill(REDIS_HOST)
        fleet.a.wait_for(lambda: not fleet.ray.pids("a", "gcs_server"), PATIENCE_S, "the GCS has ended")
        until = time.monotonic() + GCS_AWAY_S
        while time.monotonic() < until:
            load.wait_answers(CLIENTS, PATIENCE_S)
        fleet.ray.start_redis()
        fleet.ray.spawn("a", command)
        began = time.monotonic()
        after = fleet.wait_for_node("b", "ready")
        measured("Redis and GCS started anew under load, status told", time.monotonic() - began)
    assert (load.failed, load.resumed) == ([], 0)
    assert load.differing(seeded) == 0
    assert after["pid"] == before["b"]["pid"]
    assert after["actor_pid"] == before["b"]["actor_pid"]
    os.kill(after["actor_pid"], signal.SIGKILL)
    fleet.wait_for_another("b", after)
    fleet.wait_whole()


def test_the_node_of_another_host_goes_on_without_the_head_and_joins_it_again(
    fleet: RayFleet, seeded: dict[int, keyed_load.Identical]
) -> None:
    before = fleet.nodes(code=0)
    with loaded(fleet) as load:
        fleet.ray.kill("a")
        until = time.monotonic() + HEAD_AWAY_S
        while time.monotonic() < until:
            load.wait_answers(CLIENTS, PATIENCE_S)
        began = time.monotonic()
        fleet.ray.start("a")
        fleet.wait_for_another("a", before["a"])
        measured("head back under load, its node ready", time.monotonic() - began)
    assert load.failed == []
    assert load.resumed > 0, "no stream was open at the head's gateway"
    assert load.differing(seeded) == 0
    assert fleet.nodes(code=0)["b"]["pid"] == before["b"]["pid"]
    fleet.wait_whole()


GROUP = """
[[groups]]
nodes = ["a", "b"]
group = "pp2"
"""


def test_a_worker_over_both_nodes_is_placed_as_one_group(
    cluster: RayHosts, tmp_path: Path, undisturbed: list[dict[str, object]], long_answer: str
) -> None:
    fleet = RayFleet(cluster, tmp_path)
    fleet.write(a={"workers": ""}, b={"workers": ""})
    fleet.file.write_text(fleet.file.read_text() + GROUP)
    fleet.command("up")
    try:
        fleet.wait_whole("a-both-0")
        assert [row["id"] for row in fleet.b.workers()] == ["a-both-0"]
        assert answered(fleet.a) == undisturbed
        before = fleet.nodes(code=0)
        with streaming(fleet.a, max_tokens=900) as stream:
            stream.read(50)
            for process in ("actor_pid", "pid"):
                os.kill(before["b"][process], signal.SIGKILL)
            assert stream.read() == long_answer
        after = fleet.wait_for_another("b", before["b"])
        assert after["actor_pid"] != before["b"]["actor_pid"]
        assert after["pid"] != before["b"]["pid"]
        assert fleet.nodes(code=0)["a"]["pid"] == before["a"]["pid"]
        # Of a change both are restarted, in another group.
        fleet.file.write_text(fleet.file.read_text().replace("pp2", "tp2,pp2"))
        said = fleet.command("up")
        assert "a: changed, drains" in said
        assert "b: changed, drains" in said
        fleet.wait_whole("a-both-0")
        assert answered(fleet.b) == undisturbed
        # Without the group they are no longer placed together; Ray ends both actors with their placement group.
        fleet.write()
        with ThreadPoolExecutor() as pool, streaming(fleet.a, max_tokens=900) as stream:
            stream.read(50)
            up = pool.submit(fleet.command, "up")
            assert stream.read() == long_answer
            said = up.result()
        assert {line for line in said.splitlines() if "ended" in line} == {"a: has ended", "b: has ended"}
        assert "killed" not in said
        fleet.wait_whole()
    finally:
        fleet.command("down")
    for host in "ab":
        assert cluster.pids(host, "penstock") == set()


def test_a_node_is_placed_where_ray_has_its_address_and_what_it_reserves(cluster: RayHosts, tmp_path: Path) -> None:
    """Penstock knows the host by another address than Ray does.  Of the host's one seat two cannot be reserved."""
    fleet = RayFleet(cluster, tmp_path)
    node = {"address": "127.0.0.1", "more": f'ray = {{ address = "{cluster.host("b")}", resources = {{ seat = 2 }} }}'}
    fleet.write(b=node)
    assert "waits for Ray to place its actor" in fleet.command("up", "--timeout", "10", code=1)
    assert fleet.nodes(code=1)["b"]["state"] == "pending"
    fleet.command("down")
    fleet.write(b=node | {"more": node["more"].replace("seat = 2", "seat = 1")})
    fleet.command("up")
    try:
        assert fleet.nodes(code=0)["b"]["ray_address"] == cluster.host("b")
        assert ready_workers(fleet.b) == {"b-prefill-0", "b-decode-0"}
        assert len(ask(fleet.b, max_tokens=20)) > 5
    finally:
        fleet.command("down")


def test_a_picker_knows_the_fleets_gateways(fleet: RayFleet, tmp_path: Path) -> None:
    config = tmp_path / "picker.toml"
    config.write_text(f'[membership]\nray_address = "{fleet.ray.address}"\nray_poll_s = 0.5\n')
    picker = PenstockPicker("ray:two hosts", ["--config", str(config)])
    picker.launcher = fleet.ray.inside("a")
    with picker:
        for name in "ab":
            ready = f"gateway is ready  gateway={fleet.ray.host(name)}:8000"
            picker.wait_for(lambda ready=ready: ready in picker.read_log(), PATIENCE_S, ready)


def test_a_gateway_follows_the_fleets_members(fleet: RayFleet, tmp_path: Path, long_answer: str) -> None:
    with outside_gateway(fleet.ray, tmp_path, tmp_path / "keys", silent_s=5.0) as server:
        server.wait_for(lambda: len(ready_workers(server)) == 4, PATIENCE_S, "whole")
        assert {row["id"]: row["labels"]["node"] for row in server.workers()}["b-decode-0"] == "b"
        assert ask(server, max_tokens=900) == long_answer
        gcs = fleet.ray.gcs()
        os.kill(gcs, signal.SIGSTOP)
        try:
            server.wait_for(lambda: "Ray does not answer" in server.read_log(), PATIENCE_S, "noticed")
            assert len(ready_workers(server)) == 4, "the last good ones stay"
            assert ask(server, max_tokens=900) == long_answer
        finally:
            os.kill(gcs, signal.SIGCONT)
        server.wait_for(lambda: "are read again" in server.read_log(), 2 * PATIENCE_S, "read again")
        fleet.write(a={})
        fleet.command("up")
        server.wait_for(lambda: ready_workers(server) == {"a-prefill-0", "a-decode-0"}, PATIENCE_S, "only a's")
        assert ask(server, max_tokens=900) == long_answer


def test_gateways_and_workers_come_and_go_under_load_and_no_request_fails(
    cluster: RayHosts, tmp_path: Path, seeded: dict[int, keyed_load.Identical]
) -> None:
    """Gateways 2 -> 4 -> 1, workers 2 -> 6 -> 2; ``test_members_load`` has the other sources of members."""
    done = scaled_under_load(cluster, tmp_path, seeded)
    done.assert_unharmed()


def test_what_is_wrong_is_said_in_one_line(cluster: RayHosts, tmp_path: Path) -> None:
    fleet = RayFleet(cluster, tmp_path)
    fleet.file.write_text(fleet.file.read_text().replace(f'keys = "{tmp_path}/keys"', 'keys = "keys"'))
    assert "give the whole path" in fleet.command("up", code=2)
    fleet.write()
    said = fleet.command("up", "--address", f"{cluster.host('a')}:1", code=2)
    assert "no Ray cluster at" in said
    assert len(said.strip().splitlines()) == 1
    assert "does not run on this cluster" in fleet.command("down")
    assert fleet.nodes(code=1)["a"]["state"] == "not started"
    # Reported by its actor: the keys are not on its host.
    shutil.rmtree(tmp_path / "keys")
    assert "keys" in fleet.command("up", "--timeout", "10", code=1)
    fleet.command("down")
