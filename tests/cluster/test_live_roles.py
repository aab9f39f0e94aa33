"""Real workers change roles, drain and restart amid answers: every token stays what it was, and nothing is lost.

By default one service is stirred for a while; ``--long`` adds kills in the middle, TCP, guessed tokens, windows of
time in which everything happens at once, joined workers and rolling restarts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock, streaming
from .one_answer import TRUSTING
from .server import MOST_OUT_S, PATIENCE_S, PenstockServer, PenstockWorker
from .streams import Answer, all_answers, make_client, stream_completion
from .varied import varied_requests

FLEET = ["--prefill", "2", "--decode", "2"]
TOKENS = 112
SCENES = 20

Stir = Callable[[PenstockServer, httpx.AsyncClient, random.Random], Awaitable[None]]


async def tell(server: PenstockServer, client: httpx.AsyncClient, worker: str, verb: str, **body: Any) -> None:
    """Until it is done: on a busy machine another worker may be silent for so long that this one is needed."""
    async with asyncio.timeout(MOST_OUT_S):
        while True:
            answer = await client.post(f"{server.url}/admin/workers/{worker}/{verb}", json=body)
            if answer.status_code == 200:
                return
            assert answer.status_code in (409, 503), answer.text
            await asyncio.sleep(0.02)


async def drains(server: PenstockServer, client: httpx.AsyncClient, dice: random.Random) -> None:
    """A decode worker lets the other go on, and is back."""
    rows = (await client.get(f"{server.url}/admin/workers")).json()["workers"]
    busy = [row["id"] for row in rows if row["role"] == "decode" and row["running"]]
    if not busy:
        await asyncio.sleep(0.005)
        return
    worker = dice.choice(busy)
    await tell(server, client, worker, "drain")
    await until_it_has_nothing(server, client, worker)
    await tell(server, client, worker, "resume")


async def changes_roles(server: PenstockServer, client: httpx.AsyncClient, dice: random.Random) -> None:
    """A worker of each kind becomes one of the other, and comes back."""
    worker, away, home = dice.choice([("decode-1", "prefill", "decode"), ("prefill-1", "decode", "prefill")])
    await tell(server, client, worker, "role", role=away)
    await asyncio.sleep(dice.uniform(0.0, 0.05))  # how long it stays is part of what is tested
    await tell(server, client, worker, "role", role=home)


async def dies_amid_a_drain(server: PenstockServer, client: httpx.AsyncClient, dice: random.Random) -> None:
    """Whoever lets go, or whoever takes over, is killed in the middle."""
    rows = {row["id"]: row for row in (await client.get(f"{server.url}/admin/workers")).json()["workers"]}
    worker, victim = dice.choice([("decode-0", "decode-0"), ("decode-0", "decode-1"), ("prefill-0", "prefill-0")])
    if not all(row["state"] == "ready" for row in rows.values()):
        await asyncio.sleep(0.02)
        return
    await tell(server, client, worker, "restart")
    await asyncio.sleep(dice.uniform(0.0, 0.01))
    with suppress(ProcessLookupError):
        os.kill(rows[victim]["pid"], signal.SIGKILL)


async def until_it_has_nothing(server: PenstockServer, client: httpx.AsyncClient, worker: str) -> None:
    async with asyncio.timeout(MOST_OUT_S):
        while True:
            rows = (await client.get(f"{server.url}/admin/workers")).json()["workers"]
            if any(row["id"] == worker and row["running"] == row["kv_pages_used"] == 0 for row in rows):
                return
            await asyncio.sleep(0.005)


async def answers_while(server: PenstockServer, stirs: list[Stir], rounds: int) -> list[list[Answer]]:
    """All answers at once, so many times over, while the service is stirred; each stir is seen to its end."""
    dice, told, enough = random.Random(5), list[list[Answer]](), asyncio.Event()
    async with make_client() as client:

        async def stir() -> None:
            while not enough.is_set():
                await dice.choice(stirs)(server, client, dice)

        stirring = asyncio.create_task(stir())
        for number in range(rounds):
            bodies = varied_requests(max_tokens=TOKENS, salt=f"{number}", salt_each=True)
            answers = [stream_completion(client, server.url, body) for body in bodies]
            gathered = asyncio.gather(*answers)
            await asyncio.wait([stirring, gathered], return_when=asyncio.FIRST_COMPLETED)
            if stirring.done():
                stirring.result()
            told.append(await gathered)
        enough.set()  # cut off, it would leave a worker drained, and the other could not drain any more
        await stirring
    return told


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """The answers of one worker, to one request at a time."""
    with PenstockServer(["--aggregated"]) as server:
        bodies = varied_requests(max_tokens=TOKENS)
        return [answer.identical for answer in asyncio.run(all_answers(server.url, bodies, together=False))]


def at_rest(server: PenstockServer) -> None:
    """Everybody is ready again and holds nothing."""

    async def settle() -> None:
        async with make_client() as client:
            for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                await tell(server, client, name, "role", role=name.split("-")[0])
                await tell(server, client, name, "resume")

    asyncio.run(settle())
    server.wait_all_ready()
    server.wait_idle()
    assert all(row["kv_pages_leaked"] == 0 for row in server.workers())


def check(told: list[list[Answer]], plain: list[dict[str, Any]]) -> None:
    for answers in told:
        for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
            assert answer.identical == wanted, f"request {number} was answered differently"


def stir_until(
    server: PenstockServer, plain: list[dict[str, Any]], stirs: list[Stir], rounds: int, **more: int
) -> None:
    """So many rounds, and again while a counter is not above what it must be: on a busy machine few answers may have
    begun when a worker drains."""
    for _ in range(SCENES):
        check(asyncio.run(answers_while(server, stirs, rounds)), plain)
        metrics = server.metrics()
        found = {name: metrics[f"penstock:{name}"] for name in more}
        if all(found[name] > least for name, least in more.items()):
            return
    raise AssertionError(f"of {more} there were only {found}")


@pytest.mark.timeout(400)
def test_answers_are_the_same_while_workers_drain_and_change_roles(plain: list[dict[str, Any]]) -> None:
    with PenstockServer(FLEET) as server:
        stir_until(server, plain, [drains, changes_roles], 2, answers_moved_total=0, worker_role_changes_total=3)
        at_rest(server)
        told = penstock("admin", "role", "decode-0", "prefill", "--url", server.url)
        assert told.returncode == 0
        assert told.stdout.startswith("decode-0: prefill, ready")
        told = penstock("admin", "role", "decode-1", "prefill", "--url", server.url)
        assert told.returncode == 2
        assert "last ready one that writes answers" in told.stderr
        os.kill(server.worker("decode-0")["pid"], signal.SIGKILL)
        server.wait_for(lambda: server.worker("decode-0")["incarnation"] > 1, PATIENCE_S, "forked anew")
        server.wait_all_ready()
        assert server.worker("decode-0")["role"] == "prefill", "a restarted worker has the role that it was given"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [[], ["--transfer", "tcp"], ["--speculate", "head"], ["--kv-memory", "8MiB"]])
def test_the_same_with_deaths_in_the_middle(flags: list[str], plain: list[dict[str, Any]]) -> None:
    with PenstockServer([*FLEET, *flags]) as server:
        stirs = [drains, changes_roles, dies_amid_a_drain]
        stir_until(server, plain, stirs, 20, answers_moved_total=20, worker_deaths_total=5)
        at_rest(server)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_rolling_restart_amid_answers() -> None:
    with PenstockServer(FLEET) as server:
        undisturbed = ask(server, max_tokens=1500)
        before = {row["id"]: row["pid"] for row in server.workers()}
        with streaming(server, max_tokens=1500) as stream:
            stream.read(30)
            told = penstock("admin", "restart", "--all", "--url", server.url)
            assert told.returncode == 0, told.stderr
            assert stream.read() == undisturbed
        assert len(told.stdout.splitlines()) == 4
        after = {row["id"]: row["pid"] for row in server.workers()}
        assert all(after[name] != before[name] for name in before)
        server.wait_idle()


def who_writes(server: PenstockServer) -> str:
    """The decode worker that has a request, once it has said so."""
    found: list[str] = []

    def told() -> bool:
        found[:] = [row["id"] for row in server.workers() if row["role"] == "decode" and row["running"]]
        return bool(found)

    server.wait_for(told, PATIENCE_S, "told who writes")
    return found[0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_joined_worker_that_is_stopped_hands_its_answers_over(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    CurveKeys.ephemeral().save(folder)
    with ExitStack() as stack:
        keys = ["--keys", str(folder)]
        p, d, e = (
            stack.enter_context(PenstockWorker(["--role", role, *keys, "--name", name]))
            for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"))
        )
        joins = [word for worker in (p, d, e) for word in ("--join", worker.endpoint)]
        one = stack.enter_context(PenstockServer([*keys, *joins], config=TRUSTING, folder=tmp_path))
        other = stack.enter_context(PenstockServer([*keys, *joins]))
        undisturbed = ask(one, max_tokens=1500)
        with streaming(one, max_tokens=1500) as stream:
            stream.read(30)
            writes = who_writes(one)
            assert (d if writes == "d" else e).stop() == 0
            assert stream.read() == undisturbed
        assert one.metrics()["penstock:resubmissions_total"] == 0
        left = "e" if writes == "d" else "d"
        told = penstock("admin", "role", left, "both", "--url", other.url)
        assert told.returncode == 0, told.stderr
        one.wait_for(lambda: one.worker(left)["role"] == "both", PATIENCE_S, "of the same view")
