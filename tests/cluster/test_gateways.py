"""Several gateways on one port: all are killed in mid-answer and clients go on; a request that workers die of ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from penstock.bundled import storyteller

from .examples import run_example
from .processes import socket_inodes
from .server import PATIENCE_S, PenstockServer
from .streams import Answer, BrokenAnswerError, all_answers, keyed_completion, make_client
from .varied import varied_requests

PACKAGE = Path(storyteller()).parents[1]

BODY: dict[str, Any] = {
    "model": "storyteller",
    "prompt": "Once upon a time",
    "max_tokens": 800,
    "ignore_eos": True,
    "logprobs": 1,
}

SHORT = BODY | {"max_tokens": 1}

WRITERS = 2
SCENES = 5
"""How often a blow is tried that is to hit an answer: on a busy machine one may be over before anybody strikes."""

CONFIG = "[failover]\npoison_tokens = 1000\n"
"""However long a hunter takes between two blows, the answer is not cleared by it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    """From a package that is gone as soon as the service runs: whatever is forked anew has its code all the same."""
    folder: Path = tmp_path_factory.mktemp("gateways")
    package = folder / "penstock"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "cpp", "model.safetensors"))
    flags = ["--gateways", "2", "--decode", str(WRITERS), "--event-loop", "uvloop"]
    paths = {"PYTHONPATH": os.pathsep.join((str(folder), *filter(None, sys.path)))}
    with PenstockServer([str(storyteller()), *flags], config=CONFIG, environ=paths, folder=folder) as running:
        running.wait_for(lambda: has_mapped(running.pid, "uvloop"), 30.0, "everything imported")
        assert has_mapped(running.pid, str(package)), "it runs from another package"
        for part in package.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        yield running


def has_mapped(pid: int, name: str) -> bool:
    """Has this process imported the extension?  The supervisor does so last."""
    return name in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def both_gateways(server: PenstockServer) -> None:
    """Until they are there and know all workers."""
    server.wait_ready()
    server.wait_all_ready()
    server.wait_for(lambda: len(server.gateway_pids(server.workers())) == 2, PATIENCE_S, "two gateways")


def kill_gateways(server: PenstockServer) -> None:
    for pid in server.gateway_pids(server.workers()):
        os.kill(pid, signal.SIGKILL)


def test_a_request_at_a_new_gateway_waits_for_its_first_worker(tmp_path: Path) -> None:
    with PenstockServer(["--aggregated"], config="[supervise]\nwedge_s = 60.0\n", folder=tmp_path) as server:
        (worker,) = rows = server.workers()
        (gateway,) = server.gateway_pids(rows)
        os.kill(worker["pid"], signal.SIGSTOP)
        os.kill(gateway, signal.SIGKILL)
        with closing(connection_to_new_gateway(server)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(SHORT), {"Content-Type": "application/json"})
            os.kill(worker["pid"], signal.SIGCONT)
            assert connection.getresponse().status == 200


def connection_to_new_gateway(server: PenstockServer) -> HTTPConnection:
    """To one that has met no worker yet."""
    made: list[HTTPConnection] = []

    def answers() -> bool:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            response.read()
        except (OSError, HTTPException):  # a connection that a killed gateway had taken
            connection.close()
            return False
        assert response.status == 503
        made.append(connection)
        return True

    server.wait_for(answers, PATIENCE_S, "a new gateway")
    return made[0]


def test_clients_go_on_when_every_gateway_is_killed(server: PenstockServer) -> None:
    async def ask(key: str, gateways: set[int]) -> Answer:
        def on_chunk(answer: Answer) -> None:
            if len(answer.times) == 5:
                while gateways:
                    os.kill(gateways.pop(), signal.SIGKILL)

        async with make_client() as client:
            return await keyed_completion(client, server.url, BODY, key=key, on_chunk=on_chunk)

    for attempt in range(SCENES):
        both_gateways(server)
        got = asyncio.run(ask(f"order-{attempt}", server.gateway_pids(server.workers())))
        server.wait_all_ready()
        wanted = asyncio.run(ask(f"order-{attempt}", set()))
        assert got.identical == wanted.identical
        assert (got.id, got.usage["penstock"]["charge_id"]) == (wanted.id, wanted.id)
        if got.resumed:
            assert got.usage["penstock"]["repeated"] is True
            return
    raise AssertionError("all was sent each time before a gateway was killed")


class Totals(NamedTuple):
    """What gateways counted of requests."""

    generation_tokens: float
    prompt_tokens: float
    first_tokens: float

    @classmethod
    def of(cls, server: PenstockServer, path: str = "") -> Totals:
        page = server.metrics(f"/metrics{path}")
        names = ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
        return cls(*(page.get(f"penstock:{name}", 0.0) for name in names))


def test_the_page_of_any_gateway_is_the_sum_of_all(tmp_path: Path) -> None:
    """Requests go to both gateways; one of them is killed, and nothing that it counted is lost."""
    requests, tokens = 16, 3
    with PenstockServer(["--gateways", "2"], folder=tmp_path) as server:
        both_gateways(server)
        prompt_tokens = 0
        for _ in range(requests):  # each over a connection of its own
            body = SHORT | {"max_tokens": tokens}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            prompt_tokens += answer.json()["usage"]["prompt_tokens"]
        counted = Totals(generation_tokens=requests * tokens, prompt_tokens=prompt_tokens, first_tokens=requests)
        assert published(server, counted) == counted
        assert Totals.of(server, "/gateway-0").first_tokens
        assert Totals.of(server, "/gateway-1").first_tokens
        assert "penstock:engine_steps_total" in server.metrics()
        assert "penstock:engine_steps_total" not in server.metrics("/metrics/gateway-0")

        os.kill(min(server.gateway_pids(server.workers())), signal.SIGKILL)
        both_gateways(server)
        assert published(server, counted) == counted, "what the killed one counted is still there"
        gone = httpx.get(f"{server.url}/metrics/gateway-2", timeout=60, trust_env=False)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "gateway_not_found")


def published(server: PenstockServer, wanted: Totals) -> Totals:
    """The sum that both gateways have published, once it reaches what is wanted and any gateway's page shows it."""
    seen: list[Totals] = []

    def is_sum() -> bool:
        parts = zip(Totals.of(server, "/gateway-0"), Totals.of(server, "/gateway-1"), strict=True)
        seen.append(Totals(*map(sum, parts)))
        return seen[-1] >= wanted and Totals.of(server) == seen[-1]

    try:
        server.wait_for(is_sum, PATIENCE_S, "a page that is the sum")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen[-1]}, not {wanted}") from None
    return seen[-1]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_varied_answers_are_the_same_whichever_gateway_tells_them(server: PenstockServer) -> None:
    """Law 1 with two gateways: undisturbed, with one of them killed in mid-answer, then with both; and once more."""
    with PenstockServer(["--aggregated"]) as alone:
        plain = [answer.identical for answer in asyncio.run(all_answers(alone.url, varied_requests(), together=False))]

    async def ask(name: str, victims: set[int]) -> list[Answer]:
        def on_chunk(answer: Answer) -> None:
            if len(answer.times) == 5:
                while victims:
                    os.kill(victims.pop(), signal.SIGKILL)

        bodies = varied_requests(salt=name)
        async with make_client() as client:
            asked = [
                keyed_completion(client, server.url, body, key=f"{name}-{number}", on_chunk=on_chunk)
                for number, body in enumerate(bodies)
            ]
            return await asyncio.gather(*asked)

    def told(name: str, killed: int) -> bool:
        """All answers with these many gateways killed.  True when one of them was hit."""
        both_gateways(server)
        answers = asyncio.run(ask(name, set(sorted(server.gateway_pids(server.workers()))[:killed])))
        for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
            assert answer.identical == wanted, f"{name} killed: request {number} was answered differently"
        return any(answer.resumed for answer in answers)

    told("none", 0)
    told("one", 1)
    for attempt in range(SCENES):
        hit = told(f"both-{attempt}", 2)
        told(f"both-{attempt}", 0)
        if hit:
            return
    raise AssertionError("no answer was hit")


@pytest.mark.long
def test_an_answer_in_one_piece_is_the_same_from_both(server: PenstockServer) -> None:
    def ask() -> dict[str, Any]:
        headers = {"Idempotency-Key": "order-8"}
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = ask()
    kill_gateways(server)
    server.wait_ready()
    again = ask()
    assert first["choices"] == again["choices"]
    assert (first["id"], first["penstock"]) == (again["id"], again["penstock"])


@pytest.mark.long
def test_the_example_outlives_its_gateway(server: PenstockServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(SCENES):  # a quick answer may be over before it is seen
            told = pool.submit(run_example, "resume_stream.py", server.url, tmp_path)
            server.wait_for(lambda: told.done() or any(row["running"] for row in server.workers()), 60.0, "writing")  # noqa: B023
            hit = not told.done()
            kill_gateways(server)
            assert "charged as chatcmpl-" in told.result()
            server.wait_ready()
            if hit:
                return
    raise AssertionError("the example was never killed amid its answer")


@pytest.mark.timeout(300)
def test_a_request_that_crashes_its_workers_is_not_tried_on_all(server: PenstockServer) -> None:
    over = threading.Event()

    def crash() -> None:
        """Whoever may be writing the answer dies by itself, and again once the answer goes on elsewhere."""
        seen: set[int] = set()
        while len(seen) < 2 * WRITERS and not over.is_set():
            rows = [row for row in server.workers() if row["role"] == "decode" and row["pid"] not in seen]
            if len(rows) == WRITERS and any(row["running"] for row in rows):
                for row in rows:
                    os.kill(row["pid"], signal.SIGSEGV)
                    seen.add(row["pid"])

    async def ask(attempt: int) -> None:
        over.clear()
        async with make_client() as client:
            body = {**BODY, "max_tokens": 1900, "seed": attempt}
            crashes = asyncio.create_task(asyncio.to_thread(crash))
            try:
                await keyed_completion(client, server.url, body, key=f"bad-{attempt}")
            finally:
                over.set()  # one wave is enough where the answer moved on to a worker that it killed as well
                await crashes

    told = ""
    for attempt in range(SCENES):
        server.wait_all_ready()
        try:
            asyncio.run(ask(attempt))
        except BrokenAnswerError as error:
            told = str(error)
            break
    assert "poison_request" in told, told or "no answer was hit twice"
    assert "SIGSEGV" not in told
    assert "killed by SIGSEGV" in server.read_log()
    server.wait_all_ready()
    server.wait_idle()


CONNECTIONS = 400


def test_connections_are_shared_among_the_gateways(server: PenstockServer) -> None:
    pids = sorted(server.gateway_pids(server.workers()))
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(CONNECTIONS)
        ]
        ours = {client.getsockname()[1] for client in clients}

        def taken() -> list[int]:
            inodes = inodes_of(server.port, ours)
            return [len(inodes & socket_inodes(pid)) for pid in pids]

        server.wait_for(lambda: sum(taken()) == CONNECTIONS, 30.0, "all are accepted")
        assert max(taken()) <= 1.2 * CONNECTIONS / len(pids), taken()


def inodes_of(port: int, clients: set[int]) -> set[str]:
    """Sockets at ``port`` whose other ends are at these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = ((int(row[1].split(":")[1], 16), int(row[2].split(":")[1], 16), row[9]) for row in rows)
    return {inode for own, other, inode in ends if own == port and other in clients}
