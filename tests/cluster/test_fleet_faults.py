"""Faults that several hosts have: members that flap, two of one name, clocks an hour apart, a host with little memory.

Each with real processes, and with streams that must end with the tokens of an undisturbed service.  Stolen keys are in
``test_node_keys.py``, the loss of a Redis of rates in ``test_rates.py``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.faults.clocks import SHIM

from penstock.config.api_keys import TenantEntry, edit_keys, new_key
from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock, streaming
from .member_sources import MembersFile
from .one_answer import Plain, compare
from .scaled_fleet import states
from .server import PATIENCE_S, PenstockNode, PenstockServer, PenstockWorker, free_port
from .streams import Answer, all_answers, keyed_completion, make_client, whole_answers
from .two_nodes import AGGREGATED, SPLIT, NodePair, free_ports, two_nodes
from .varied import varied_requests

TOKENS = 200
CLIENTS = 8

FLAPPING = "[failover]\nno_path_s = 60.0\n[membership]\nfile_poll_s = 0.1\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    CurveKeys.ephemeral().save(folder)
    return str(folder)


# --- a node that is killed --------------------------------------------------------------------------------------------

SAVING = 'kv_memory = "64MiB"\n[settings.failover]\nsave_tokens_s = 0.05\n'
SAVED_AFTER_S = 0.5


@pytest.mark.long
def test_the_streams_of_a_killed_nodes_gateway_go_on_from_what_the_other_node_has_saved(tmp_path: Path) -> None:
    body = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}

    async def ask_all(urls: Sequence[str], name: str, on_chunk: Callable[[list[Answer]], None]) -> list[Answer]:
        begun: dict[int, Answer] = {}

        def note(number: int, answer: Answer) -> None:
            begun[number] = answer
            on_chunk(list(begun.values()))

        async with make_client() as client:
            return await asyncio.gather(
                *(
                    keyed_completion(
                        client, urls, body | {"seed": seed}, key=f"{name}-{seed}", on_chunk=partial(note, seed)
                    )
                    for seed in range(CLIENTS)
                )
            )

    with two_nodes(tmp_path, workers=AGGREGATED, settings=SAVING) as pair:
        wanted = asyncio.run(ask_all([pair.b.url], "plain", lambda answers: None))
        began = time.monotonic()

        def kill(answers: list[Answer]) -> None:
            late = time.monotonic() > began + SAVED_AFTER_S
            if (
                late
                and pair.a.running
                and min(len(answer.times) for answer in answers) >= 10
                and len(answers) == CLIENTS
            ):
                pair.a.kill()

        got = asyncio.run(ask_all(pair.urls, "killed", kill))
        assert [answer.identical for answer in got] == [answer.identical for answer in wanted]
        hit = sum(answer.resumed > 0 for answer in got)
        assert hit > 0, "all was sent before the node was killed"
        assert pair.b.metrics()["penstock:idempotent_resumed_tokens_total"] >= 10 * hit
        pair.a.start()
        pair.a.wait_ready()
        pair.wait_all_ready()
        pair.assert_nothing_leaked()


# --- a member that flaps ----------------------------------------------------------------------------------------------


class Clients:
    """So many, each of whom reads one stream after the other until they are told to stop."""

    def __init__(self, server: PenstockServer) -> None:
        self._server = server
        self._over = threading.Event()
        self.read: list[tuple[int, str]] = []  # each whole stream: its seed, its text

    def run(self, seed: int) -> None:
        while not self._over.is_set():
            with streaming(self._server, max_tokens=TOKENS, seed=seed) as stream:
                self.read.append((seed, stream.read()))

    def stop(self) -> None:
        self._over.set()


@contextmanager
def clients(server: PenstockServer) -> Iterator[Clients]:
    """They ask while the block runs; none may fail."""
    whole = Clients(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked: list[Future[None]] = [pool.submit(whole.run, seed) for seed in range(CLIENTS)]
        try:
            yield whole
        finally:
            whole.stop()
        for one in asked:
            one.result()


def its_name(server: PenstockServer, file: MembersFile, one: PenstockWorker, two: PenstockWorker, flaps: int) -> None:
    """Comes and goes in the members file."""
    for _ in range(flaps):
        file.write(one)
        server.wait_for(lambda: states(server).get("two") != "ready", PATIENCE_S, "left out")
        file.write(one, two)
        server.wait_for(lambda: states(server).get("two") == "ready", PATIENCE_S, "used")


def its_process(
    server: PenstockServer, file: MembersFile, one: PenstockWorker, two: PenstockWorker, flaps: int
) -> None:
    """Is killed as soon as it is used, and begins anew."""
    for _ in range(flaps):
        before = server.worker("two")["pid"]
        two.kill()
        two.start()
        two.wait_ready()
        server.wait_for(
            lambda before=before: (  # type: ignore[misc]
                states(server).get("two") == "ready" and server.worker("two")["pid"] != before
            ),
            PATIENCE_S,
            "used",
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flap", "flaps"),
    [
        pytest.param(its_name, 4, id="its name, in short"),
        pytest.param(its_name, 30, id="its name", marks=pytest.mark.long),
        pytest.param(its_process, 12, id="its process", marks=pytest.mark.long),
    ],
)
def test_a_member_that_flaps_changes_no_answer(
    keys: str, tmp_path: Path, flap: Callable[..., None], flaps: int
) -> None:
    file = MembersFile(tmp_path / "members.json")
    with ExitStack() as stack:
        one, two = (stack.enter_context(PenstockWorker(["--keys", keys, "--name", name])) for name in ("one", "two"))
        file.write(one, two)
        flags = ["--keys", keys, "--members", f"file:{file.path}"]
        server = stack.enter_context(PenstockServer(flags, config=FLAPPING, folder=tmp_path))
        server.wait_for(lambda: states(server) == {"one": "ready", "two": "ready"}, PATIENCE_S, "joined")
        undisturbed = [ask(server, max_tokens=TOKENS, seed=seed) for seed in range(CLIENTS)]
        with clients(server) as asked:
            flap(server, file, one, two, flaps)
        assert len(asked.read) >= CLIENTS
        assert all(text == undisturbed[seed] for seed, text in asked.read)
        server.wait_for(lambda: states(server) == {"one": "ready", "two": "ready"}, PATIENCE_S, "whole")
        server.wait_idle()
        assert all(row["kv_pages_leaked"] == 0 for row in server.workers())


# --- two of one name --------------------------------------------------------------------------------------------------

TWIN = """
name = "twins"
keys = "{keys}"

[settings]
kv_memory = "64MiB"

[settings.failover]
no_path_s = 60.0

[[nodes]]
name = "a"
address = "127.0.0.1"
gateways = 1
http_port = {http}
port = {own}
workers = [{{ count = 1 }}]

[[nodes]]
name = "{other}"
address = "127.0.0.1"
port = {others}
workers = [{{ count = 1 }}]
"""

CLAIM = "calls itself a-both-0, as the worker of this host does"


def test_two_nodes_of_one_name_leave_each_other_alone(keys: str, tmp_path: Path) -> None:
    """Two files, as of two deployments that were copied from each other: both hosts are "a", and know the other as "c".

    Each gateway uses its own worker of the name, also after that has died, and says what is wrong.
    """
    first = free_ports(4)
    places = ((first, first + 2), (first + 2, first))
    with ExitStack() as stack:
        nodes = []
        for number, (own, others) in enumerate(places):
            http = free_port()
            file = tmp_path / f"fleet-{number}.toml"
            file.write_text(TWIN.format(keys=keys, http=http, own=own, others=others, other="c"))
            nodes.append(PenstockNode(file, "a", http))
            nodes[-1].start()
            stack.push(nodes[-1].__exit__)
        for node in nodes:
            node.wait_ready()
            node.wait_for(lambda node=node: CLAIM in node.read_log(), PATIENCE_S, "told of")  # type: ignore[misc]
        answers = {ask(node, max_tokens=TOKENS) for node in nodes}
        assert len(answers) == 1
        node = nodes[0]
        (row,) = node.workers()
        assert row["pid"] in node.processes()
        assert CLAIM in penstock("status", "--url", node.url).stdout
        with streaming(node, max_tokens=TOKENS) as stream:
            stream.read(50)
            os.kill(row["pid"], signal.SIGKILL)
            assert {stream.read()} == answers
        (again,) = node.workers()
        assert (again["id"], again["state"], again["pid"] in node.processes()) == ("a-both-0", "ready", True)
        assert nodes[1].workers()[0]["pid"] in nodes[1].processes()


def test_a_node_that_is_started_twice_ends_with_the_reason(keys: str, tmp_path: Path) -> None:
    first, http = free_ports(4), free_port()
    file = tmp_path / "fleet.toml"
    file.write_text(TWIN.format(keys=keys, http=http, own=first, others=first + 2, other="b"))
    with PenstockNode(file, "a", http) as node:
        again = penstock("node", str(file), "--name", "a")
        assert again.returncode == 2
        assert f"port {first} on 127.0.0.1 is taken" in again.stderr
        assert len(again.stderr.strip().splitlines()) == 1
        assert len(ask(node, max_tokens=20)) > 5
    file.write_text(file.read_text().replace('name = "b"', 'name = "a"'))
    refused = penstock("node", str(file), "--name", "a")
    assert refused.returncode == 2
    assert "node a: there are two of this name" in refused.stderr


@pytest.mark.long
def test_of_two_members_of_one_name_the_second_takes_over_when_the_first_dies(keys: str, tmp_path: Path) -> None:
    file = MembersFile(tmp_path / "members.json")
    with ExitStack() as stack:
        workers = [stack.enter_context(PenstockWorker(["--keys", keys, "--name", "twin"])) for _ in range(2)]
        file.write(*workers)
        flags = ["--keys", keys, "--members", f"file:{file.path}"]
        server = stack.enter_context(PenstockServer(flags, config=FLAPPING, folder=tmp_path))
        server.wait_for(lambda: "calls itself twin" in server.read_log(), PATIENCE_S, "told of")
        undisturbed = ask(server, max_tokens=TOKENS)
        used, other = sorted(workers, key=lambda worker: worker.worker_pid() != server.worker("twin")["pid"])
        spare = other.worker_pid()
        with streaming(server, max_tokens=TOKENS) as stream:
            stream.read(50)
            used.kill()
            assert stream.read() == undisturbed
        assert server.worker("twin")["pid"] == spare
        used.start()  # it comes back, and the name is the other's now
        used.wait_ready()
        server.wait_for(lambda: server.read_log().count("calls itself twin") >= 2, PATIENCE_S, "told of again")
        assert ask(server, max_tokens=TOKENS) == undisturbed
        assert [(row["id"], row["pid"]) for row in server.workers()] == [("twin", spare)]


# --- clocks an hour apart ---------------------------------------------------------------------------------------------

HOUR_S = 3600
OTHER_TIME = ["unshare", "--time", "--monotonic", str(HOUR_S), "--boottime", str(HOUR_S)]
"""The words that make a command run where time since the start of the host is an hour more."""

PATIENT = 'kv_memory = "64MiB"\nfailover = { silence_s = 10.0, no_path_s = 60.0 }'
"""A busy machine is no reason to suspect a worker; a clock would be one at once."""


@pytest.fixture
def another_clock(tmp_path: Path) -> dict[str, str]:
    """The environment in which the wall clock is an hour ahead."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, for the library that shifts the clock")
    if subprocess.run([*OTHER_TIME, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a time namespace cannot be made here")
    library, shift = tmp_path / "wall_clock.so", tmp_path / "shift"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True, capture_output=True)
    shift.write_text(f"+{HOUR_S}")
    return {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(shift)}


def date_of(node: PenstockServer) -> float:
    return parsedate_to_datetime(node.get("/version").headers["date"]).timestamp()


def tenant_key(path: Path) -> dict[str, str]:
    """Writes a file with the key of a tenant that has a rate; returns the headers of its requests."""
    key, entry = new_key("ann", ("interactive",))
    with edit_keys(path, 10, make=True) as held:
        tenants = {"ann": TenantEntry(requests_per_minute=100_000)}
        held[0] = type(held[0])(salt=held[0].salt, tenants=tenants, keys=(entry,))
    return {"Authorization": f"Bearer {key}", "X-Penstock-Max-Wait-S": "60"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_whose_clocks_are_an_hour_apart_serve_as_one(
    tmp_path: Path, another_clock: dict[str, str], plain: Plain
) -> None:
    """Of node b both clocks are an hour ahead: the wall clock, and the time since its start."""
    headers = tenant_key(tmp_path / "api-keys.json")
    settings = f'{PATIENT}\napi_keys = "{tmp_path / "api-keys.json"}"'
    operator = {"PENSTOCK_API_KEY": "sk-of-the-test"}
    environs = {"a": operator, "b": operator | another_clock}
    with two_nodes(tmp_path, settings=settings, launchers={"b": OTHER_TIME}, environs=environs) as pair:
        assert abs(date_of(pair.b) - date_of(pair.a) - HOUR_S) < 30
        for node in pair.nodes:
            bodies = varied_requests(salt=f"quiet {node.name}")
            compare(asyncio.run(all_answers(node.url, bodies, together=True, headers=headers)), plain.varied, "quiet")
            node.wait_for(lambda node=node: hosts_of(node) == 2, PATIENCE_S, "divided")  # type: ignore[misc]
        assert pair.counted("worker_suspicions_total") == 0
        asyncio.run(deaths_and_repeated_streams(pair, headers, plain))
        pair.wait_all_ready()
        for node in pair.nodes:
            assert not [line for line in metric_lines(node) if line.rpartition(" ")[2].startswith("-")]
        pair.assert_nothing_leaked()


def hosts_of(node: PenstockServer) -> float:
    return node.metrics()["penstock:rate_limit_hosts"]


def metric_lines(node: PenstockServer) -> list[str]:
    return node.get("/metrics", **node.key_headers()).text.splitlines()


async def deaths_and_repeated_streams(pair: NodePair, headers: dict[str, str], plain: Plain) -> None:
    """A stream that was left at one gateway goes on at the other, and decode workers of either are killed."""
    bodies = varied_requests(salt="deaths")
    async with make_client(headers) as client:
        for number, (node, other) in enumerate(((pair.a, pair.b), (pair.b, pair.a))):
            victim = node.worker(f"{other.name}-decode-0")["pid"]
            killed = False

            def on_chunk(answer: Answer, victim: int = victim) -> None:
                nonlocal killed
                if not killed and len(answer.times) >= 5:
                    killed = True
                    os.kill(victim, signal.SIGKILL)

            urls = (node.url, other.url)
            streams = [
                keyed_completion(client, urls, body, key=f"{number}-{index}", on_chunk=on_chunk)
                for index, body in enumerate(bodies)
            ]
            compare(await asyncio.gather(*streams), plain.varied, f"killed {other.name}")
            assert killed
            first = await keyed_completion(client, node.url, bodies[0], key=f"again-{number}", hang_up_after=3)
            assert not first.done
            again = await keyed_completion(client, other.url, bodies[0], key=f"again-{number}")
            assert again.identical == plain.varied[0]


# --- a node with a fifth of the memory --------------------------------------------------------------------------------

MEMORY = {"b": 1.0, "a": 5.0}
"""MiB of KV pages of each worker.  The smaller one's are a context of 512 tokens, the larger one's of all 2,048."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [AGGREGATED, SPLIT], ids=["aggregated", "split"])
def test_a_node_with_a_fifth_of_the_memory_gets_what_fits_and_nothing_is_lost(
    tmp_path: Path, workers: Any, plain: Plain
) -> None:
    """Whichever gateway is asked: that of the small node takes what only the large one can serve."""
    of_node = {name: f'kv_memory = "{int(size * 1024)}KiB"' for name, size in MEMORY.items()}
    with two_nodes(tmp_path, workers=workers, settings="failover = { no_path_s = 60.0 }", of_node=of_node) as pair:
        pages = {row["id"]: row["kv_pages_free"] for row in pair.workers() if row["role"] in ("both", "decode")}
        small, large = (pages[next(name for name in pages if name.startswith(node))] for node in "ba")
        assert 4 * small <= large <= 6 * small
        models = [httpx.get(f"{node.url}/v1/models", trust_env=False).json()["data"] for node in pair.nodes]
        assert models[0][0]["max_model_len"] == models[1][0]["max_model_len"] == 2048
        for node, other in (pair.nodes, pair.nodes[::-1]):
            bodies = varied_requests(salt=f"memory {node.name}")
            compare(asyncio.run(both_gateways(node, other, bodies)), plain.varied * 2, f"streamed by {node.name}")
        done = {row["id"]: row["generation_tokens"] for row in pair.workers() if row["id"] in pages}
        assert all(count > 0 for count in done.values()), done
        pair.assert_nothing_leaked()


async def both_gateways(node: PenstockServer, other: PenstockServer, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All answers, streamed by one gateway, and at the same time in one piece by the other."""
    asked = all_answers(node.url, bodies, together=True), whole_answers(other.url, bodies)
    streamed, whole = await asyncio.gather(*asked)
    return [*streamed, *whole]
