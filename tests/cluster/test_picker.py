"""``penstock picker``: as a process, and asked by a real Envoy in front of two real gateways."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.http_client import HttpStreamClient
from penstock.interfaces import IDEMPOTENCY_KEY
from penstock.launch.picker.choice import GatewayRanking, affinity_key

from .asking import body, penstock
from .envoy import SERVED_BY, Envoy, PenstockPicker
from .server import PATIENCE_S, PenstockServer, free_port

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
KEYS = [f"key-{number}" for number in range(24)]
FEW = {"max_tokens": 8}


def write_members(file: Path, *ports: int) -> str:
    members = [{"name": f"at-{port}", "endpoint": f"tcp://127.0.0.1:{port}"} for port in ports]
    file.write_text(json.dumps({"members": members}))
    return f"file:{file}"


# --- the process ------------------------------------------------------------------------------------------------------


def health(port: int, service: str) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status)


def test_it_tells_when_it_is_ready_and_ends_orderly(tmp_path: Path) -> None:
    """Without a gateway that could serve: that is no fault of the picker's."""
    members = write_members(tmp_path / "gateways.json", free_port())
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(tmp_path / "notify"))
    notified.settimeout(PATIENCE_S)
    picker = PenstockPicker(members)
    picker._environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
    with notified, picker:
        assert notified.recv(64) == b"READY=1"
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert health(picker.port, service) == health(picker.health_port, service) == SERVING
        assert picker.ready_gateways() == 0
        assert "0 of 1 gateways can serve" in picker.read_log()
        assert picker.stop() == 0
        assert notified.recv(64) == b"STOPPING=1"


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--members", "list:a"), "expected file:PATH"),
        (("--members", "file:a", "--listen", "tcp://127.0.0.1:TAKEN"), "is the port taken?"),
        (("--members", "file:a", "--listen", "tcp://127.0.0.1:0", "--metrics-port", "TAKEN"), "--metrics-port"),
    ],
)
def test_what_is_found_wrong_at_the_start_is_said_in_one_line(words: tuple[str, ...], because: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        free = () if "--metrics-port" in words else ("--metrics-port", "0")
        ended = penstock("picker", *(word.replace("TAKEN", port) for word in words), "--health-port", "0", *free)
    assert ended.returncode == 2
    assert because in ended.stderr
    assert "Traceback" not in ended.stderr


# --- with Envoy -------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Two gateways, each a service of its own with the bundled model, behind an Envoy that asks a picker."""

    gateways: dict[str, PenstockServer]  # by HOST:PORT
    picker: PenstockPicker
    envoy: Envoy
    members: Path

    def home(self, key: str) -> str:
        """Where a key belongs."""
        return GatewayRanking(self.gateways).by_key(affinity_key({IDEMPOTENCY_KEY: key.encode()}).value, 1)[0]

    def ask(self, key: str | None, **headers: str) -> tuple[str, str]:
        """The gateway that answered, and the text."""
        return ask_through(self.envoy, key, **headers)

    def wait_ready(self, count: int) -> None:
        self.picker.wait_for(lambda: self.picker.ready_gateways() == count, PATIENCE_S, f"known that {count} serve")


def ask_through(envoy: Envoy, key: str | None, **headers: str) -> tuple[str, str]:
    answer = post(envoy, key, **headers)
    assert answer.status_code == 200, answer.text
    return answer.headers[SERVED_BY], answer.json()["choices"][0]["message"]["content"]


def post(envoy: Envoy, key: str | None, **headers: str) -> httpx.Response:
    keyed = {"Idempotency-Key": key} if key is not None else {}
    return httpx.post(
        f"{envoy.url}/v1/chat/completions", json=body(**FEW), headers=keyed | headers, timeout=60, trust_env=False
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        servers = [stack.enter_context(gateway()) for _ in range(2)]
        ports = [server.port for server in servers]
        members = tmp_path / "gateways.json"
        picker = stack.enter_context(PenstockPicker(write_members(members, *ports)))
        envoy = stack.enter_context(Envoy(tmp_path, ports, picker.port))
        gateways = {f"127.0.0.1:{server.port}": server for server in servers}
        yield Place(gateways, picker, envoy, members)


def gateway(port: int | None = None) -> PenstockServer:
    """With a worker of its own."""
    return PenstockServer(["--aggregated", "--threads", "1"], port=port)


def told(server: PenstockServer) -> Counter[str]:
    """How requests with a key were met, by the gateway's metrics."""
    found: Counter[str] = Counter()
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("penstock:idempotent_requests_total"):
            found[line.split('met="')[1].split('"')[0]] += int(float(line.split()[-1]))
    return found


@pytest.mark.long
def test_a_key_and_a_session_meet_their_gateway_and_others_take_turns(place: Place) -> None:
    place.wait_ready(2)
    before = sum((told(server) for server in place.gateways.values()), Counter[str]())
    first = {key: place.ask(key) for key in KEYS}
    assert {key: at for key, (at, _) in first.items()} == {key: place.home(key) for key in KEYS}
    assert {at for at, _ in first.values()} == set(place.gateways)
    assert {key: place.ask(key) for key in KEYS} == first
    met = sum((told(server) for server in place.gateways.values()), Counter[str]()) - before
    assert met["new"] == len(KEYS), met
    assert met.total() == 2 * len(KEYS), met
    sessions = {name: {place.ask(None, session_id=name)[0] for _ in range(3)} for name in KEYS[:8]}
    assert all(len(at) == 1 for at in sessions.values())
    assert set().union(*sessions.values()) == set(place.gateways)
    turns = [place.ask(None)[0] for _ in range(6)]
    assert turns[::2] == [turns[0]] * 3
    assert turns[1::2] == [turns[1]] * 3
    assert turns[0] != turns[1]


@pytest.mark.long
def test_a_header_of_a_client_chooses_no_gateway(place: Place) -> None:
    place.wait_ready(2)
    (other,) = set(place.gateways) - {place.home("k")}
    assert place.ask("k", **{"x-gateway-destination-endpoint": other})[0] == place.home("k")


@pytest.mark.long
def test_a_gateway_is_killed_and_its_requests_go_elsewhere_with_the_same_tokens(place: Place) -> None:
    place.wait_ready(2)
    before = {key: place.ask(key) for key in KEYS}
    gone = place.home(KEYS[0])
    (left,) = set(place.gateways) - {gone}
    place.gateways[gone].kill()
    began = time.monotonic()
    after = {key: place.ask(key) for key in KEYS}  # at first while the picker still names the dead one
    assert {at for at, _ in after.values()} == {left}
    assert {key: text for key, (_, text) in after.items()} == {key: text for key, (_, text) in before.items()}
    place.wait_ready(1)
    print(f"known {time.monotonic() - began:.2f} s after {len(KEYS)} requests were begun")
    with gateway(int(gone.rpartition(":")[2])):
        place.wait_ready(2)
        assert {key: place.ask(key) for key in KEYS} == before


@pytest.mark.long
async def test_a_stream_of_a_gateway_that_is_killed_goes_on_at_the_next_one(place: Place) -> None:
    place.wait_ready(2)
    request = json.dumps(body(max_tokens=400, stream=True)).encode()

    async def read(key: str, victim: PenstockServer | None) -> list[bytes]:
        """All events' choices; the victim is killed when some have come."""
        events: list[bytes] = []

        def on_event(data: bytes, _: float) -> None:
            if data != b"[DONE]":
                events.append(json.dumps(json.loads(data)["choices"]).encode())
            if len(events) == 50 and victim is not None:
                os.kill(victim.pid, signal.SIGKILL)

        async with HttpStreamClient(place.envoy.url) as client:
            reply = await client.post_resumable("/v1/chat/completions", request, on_event, key=key)
        assert reply.status == 200, reply.body
        return events

    undisturbed = await read("undisturbed", None)
    victim = place.gateways[place.home(KEYS[0])]
    assert texts(await read(KEYS[0], victim)) == texts(undisturbed)
    victim.kill()  # waits until all of it has ended


def texts(events: list[bytes]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in json.loads(event))


@pytest.mark.long
def test_a_gateway_that_is_no_member_any_more_gets_nothing(place: Place) -> None:
    place.wait_ready(2)
    gone = place.home(KEYS[0])
    (left,) = set(place.gateways) - {gone}
    write_members(place.members, int(left.rpartition(":")[2]))
    place.wait_ready(1)
    assert {place.ask(key)[0] for key in KEYS} == {left}


@pytest.mark.long
def test_without_a_picker_requests_are_spread_or_refused_as_the_failure_mode_says(place: Place, tmp_path: Path) -> None:
    place.wait_ready(2)
    before = {key: place.ask(key)[1] for key in KEYS}
    ports = [server.port for server in place.gateways.values()]
    with Envoy(tmp_path, ports, place.picker.port, fail_open=False) as closed:
        assert ask_through(closed, KEYS[0]) == (place.home(KEYS[0]), before[KEYS[0]])
        place.picker.kill()
        after = {key: place.ask(key) for key in KEYS}
        assert {key: text for key, (_, text) in after.items()} == before, "open: any gateway gives the same tokens"
        assert {at for at, _ in after.values()} == set(place.gateways)
        assert {post(closed, key).status_code for key in KEYS[:4]} == {500}, "closed: Envoy answers"
        again = PenstockPicker(place.picker.members)
        again.port = place.picker.port
        with again:
            place.picker = again
            place.wait_ready(2)
            again.wait_for(lambda: post(closed, KEYS[0]).status_code == 200, PATIENCE_S, "asked again")
            again.wait_for(lambda: place.ask(KEYS[0])[0] == place.home(KEYS[0]), PATIENCE_S, "asked again")
            assert {key: place.ask(key) for key in KEYS} == {key: (place.home(key), before[key]) for key in KEYS}


@pytest.mark.long
def test_without_a_gateway_that_serves_the_picker_answers(place: Place) -> None:
    place.wait_ready(2)
    for server in place.gateways.values():
        server.kill()
    place.wait_ready(0)
    answer = post(place.envoy, KEYS[0])
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "service_unavailable"
