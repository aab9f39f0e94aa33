"""``penstock ray`` on a real Ray cluster of two hosts, in network namespaces: what dies, and what goes on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, streaming
from .envoy import PenstockPicker
from .ray_hosts import RayHosts
from .server import PATIENCE_S, PenstockServer
from .streams import all_answers
from .varied import varied_requests

KEY = "a-key-of-the-tests-of-ray"

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "64MiB"

[settings.failover]
no_path_s = 60.0
"""

NODE = """
[[nodes]]
name = "{name}"
address = "{address}"
gateways = {gateways}
workers = [{workers}]
{more}
"""


WORKERS = '{{ role = "prefill", count = 1 }}, {{ role = "decode", count = {decode} }}'

GCS_AWAY_S = 120.0


def no_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return True
    return subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode != 0


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (requirements-test.txt)"),
    pytest.mark.skipif(no_namespaces(), reason="needs root, iproute2 and network namespaces"),
    pytest.mark.timeout(600),
]


class Gateway(PenstockServer):
    """The gateways of a node that Ray started: they can be asked, and are not ours to end."""

    def __init__(self, address: str) -> None:
        super().__init__([], environ={"PENSTOCK_API_KEY": KEY})
        self.url = f"http://{address}:8000"

    @property
    def running(self) -> bool:
        return True


class RayFleet:
    """A cluster with a fleet file of nodes a and b, and the gateway of each."""

    def __init__(self, ray: RayHosts, folder: Path) -> None:
        self.ray = ray
        self.file = folder / "fleet.toml"
        self._keys = folder / "keys"
        CurveKeys.ephemeral().save(self._keys)
        self.a, self.b = (Gateway(ray.host(name)) for name in "ab")
        self.write()

    def write(self, **nodes: dict[str, Any]) -> None:
        """The file; ``nodes``: what is otherwise in a node, ``{}`` for a node as it is.  Without any, both."""
        texts = []
        for name, given in (nodes or {"a": {}, "b": {}}).items():
            fields = {"gateways": 1, "decode": 1, "more": ""} | given
            fields.setdefault("workers", WORKERS.format(decode=fields.pop("decode")))
            http = f'http_host = "0.0.0.0"\nsettings = {{ api_key = "{KEY}" }}' if fields["gateways"] else ""
            fields["more"] += f"\n{http}"
            texts.append(NODE.format(name=name, address=self.ray.host(name), **fields))
        self.file.write_text(FLEET.format(keys=self._keys) + "".join(texts))

    def command(self, action: str, *words: str, code: int = 0) -> str:
        return self.ray.penstock("ray", action, str(self.file), *words, code=code)

    def nodes(self, code: int | None = None) -> dict[str, dict[str, Any]]:
        """The rows of ``penstock ray status``, by node; ``code``: what it must end with."""
        done = self.ray.run("a", "penstock", "ray", "status", str(self.file), "--json")
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return {row["node"]: row for row in json.loads(done.stdout)["nodes"]}

    def wait_for_node(self, name: str, state: str) -> dict[str, Any]:
        """Until a node has this state; its row."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.nodes()[name])
            return found["state"] == state

        PenstockServer.wait_for(reached, 2 * PATIENCE_S, state)
        return found

    def wait_for_another(self, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """Until a node is ready in another process, or has another actor; its row."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.nodes()[name])
            same = all(found.get(what) == before[what] for what in ("pid", "actor_pid"))
            return found["state"] == "ready" and not same

        PenstockServer.wait_for(reached, 2 * PATIENCE_S, "another")
        return found

    def wait_whole(self, *workers: str) -> None:
        """Until each gateway has these workers, ready; none given: all four."""
        wanted = set(workers or ("a-prefill-0", "a-decode-0", "b-prefill-0", "b-decode-0"))
        for gateway in (self.a, self.b):
            try:
                gateway.wait_for(lambda gateway=gateway: ready_workers(gateway) >= wanted, 2 * PATIENCE_S, "whole")
            except AssertionError:
                rows = [(row["id"], row["state"]) for row in gateway.workers()]
                raise AssertionError(f"{gateway.url} is not whole: {rows}; {self.nodes()}") from None


def ready_workers(server: PenstockServer) -> set[str]:
    """The names of those; a gateway that does not answer yet has none."""
    try:
        return {row["id"] for row in server.workers() if row["state"] == "ready"}
    except httpx.TransportError:
        return set()


def answered(server: PenstockServer, *, together: bool = True) -> list[dict[str, object]]:
    bodies, headers = varied_requests(max_tokens=120)[:8], server.key_headers()
    answers = asyncio.run(all_answers(server.url, bodies, together=together, headers=headers))
    return [answer.identical for answer in answers]


def seconds_until_answered(server: PenstockServer, wanted: str) -> float:
    """Until a whole answer has come, which must be ``wanted``; it is asked once a gateway is ready."""
    began = time.monotonic()
    found: list[str] = []

    def answers() -> bool:
        try:
            if server.get("/ready").status_code != 200:
                return False
            found.append(ask(server, max_tokens=40))
        except httpx.TransportError:
            return False
        return True

    server.wait_for(answers, PATIENCE_S, "answered")
    assert found == [wanted]
    return time.monotonic() - began


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


def test_serving_goes_on_without_the_gcs_and_with_it_again(fleet: RayFleet, long_answer: str) -> None:
    """It is away for two minutes: longer than Ray's own limit, after which hosts and actors would end."""
    (gcs,) = fleet.ray.pids("a", "gcs_server")
    before = fleet.nodes(code=0)
    os.kill(gcs, signal.SIGSTOP)
    try:
        until = time.monotonic() + GCS_AWAY_S
        while time.monotonic() < until:
            for gateway in (fleet.a, fleet.b):
                assert ask(gateway, max_tokens=900) == long_answer
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
    measured("GCS back, status told", time.monotonic() - began)
    assert after["actor_pid"] == before["b"]["actor_pid"]
    assert fleet.nodes()["a"]["pid"] == before["a"]["pid"]
    fleet.wait_whole()


def test_a_killed_gcs_is_back_with_the_cluster_that_it_had(fleet: RayFleet, long_answer: str) -> None:
    """After two minutes, by what it had written to Redis."""
    (gcs,) = fleet.ray.pids("a", "gcs_server")
    command = fleet.ray.command_of(gcs)
    before = fleet.nodes(code=0)
    os.kill(gcs, signal.SIGKILL)
    until = time.monotonic() + GCS_AWAY_S
    while time.monotonic() < until:
        for gateway in (fleet.a, fleet.b):
            assert ask(gateway, max_tokens=900) == long_answer
    fleet.ray.spawn("a", command)
    began = time.monotonic()
    after = fleet.wait_for_node("b", "ready")
    measured("GCS started anew, status told", time.monotonic() - began)
    assert after["pid"] == before["b"]["pid"]
    assert after["actor_pid"] == before["b"]["actor_pid"]
    os.kill(after["actor_pid"], signal.SIGKILL)
    fleet.wait_for_another("b", after)
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
    finally:
        fleet.command("down")
    for host in "ab":
        assert cluster.pids(host, "penstock") == set()


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
    config = f'[membership]\nray_address = "{fleet.ray.address}"\nray_poll_s = 0.5\nray_silent_s = 5.0\n'
    flags = [
        "--members",
        "ray:two hosts",
        "--keys",
        str(tmp_path / "keys"),
        "--host",
        fleet.ray.host("a"),
        "--api-key",
        KEY,
    ]
    server = PenstockServer(flags, config=config, folder=tmp_path)
    server.url = f"http://{fleet.ray.host('a')}:{server.port}"
    server.launcher = fleet.ray.inside("a")
    with server:
        server.wait_for(lambda: len(ready_workers(server)) == 4, PATIENCE_S, "whole")
        assert {row["id"]: row["labels"]["node"] for row in server.workers()}["b-decode-0"] == "b"
        assert ask(server, max_tokens=900) == long_answer
        (gcs,) = fleet.ray.pids("a", "gcs_server")
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
