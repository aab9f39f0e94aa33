"""F2: the network between any two hosts is cut; F4: a link is slow.  F3 is in ``messages``."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from bench.faults.hosts import Hosts, HostServer, HostWorker
from bench.faults.result import Budget, Result, judged, quantile

from cluster.chaos import Record
from cluster.server import PenstockServer
from cluster.streams import Answer, make_client, stream_completion
from cluster.varied import varied_requests
from penstock.wire.curve_keys import CurveKeys

FAILOVER_S, REFUSED_S = 10.0, 2.0
CUT_S = 6.0
PAIRS = (("p", "d"), ("g", "p"), ("g", "d"), ("g", "b"))
"""Of hosts that are cut from each other: the worker that reads prompts from that which writes answers, first of all,
since the gateway learns from it to send prompts elsewhere; then the gateway from each worker."""

SIGNS = ("worker_suspicions", "resubmissions", "kv_hand_overs_outrun", "kv_hand_overs_failed")
"""Counters that a cut moves."""

SLOW = "20mbit"
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
KEY = {"Authorization": "Bearer bench"}


@contextmanager
def _town() -> Iterator[tuple[Hosts, HostServer]]:
    """A gateway's host, and one each for three workers."""
    with Hosts(("g", *ROLES)) as hosts, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = Path(folder) / "keys"
        CurveKeys.ephemeral().save(keys)
        joined: list[str] = []
        for name, role in ROLES.items():
            flags = ["--role", role, "--keys", str(keys), "--name", name, "--kv-memory", "64MiB"]
            worker = stack.enter_context(HostWorker(hosts, name, flags))
            joined += ["--join", worker.endpoint]
        yield hosts, stack.enter_context(HostServer(hosts, "g", ["--keys", str(keys), *joined]))


def f2(budget: Budget) -> Result:
    """Each pair in turn, whatever the scale, then the gateway from everybody."""
    record, waits, idle_cuts, signs = Record(), [], [], {}
    with _town() as (hosts, server):
        for pair in PAIRS:
            before = _signs(server)
            with _only_these(server, pair):
                stalls = asyncio.run(_cut(hosts, server, pair, record))
            waits += stalls
            server.wait_all_ready(30.0)
            signs["-".join(pair)] = _signs(server) - before
            if not stalls or not signs["-".join(pair)]:
                idle_cuts.append("-".join(pair))
        refused = asyncio.run(_cut_off(hosts, server))
        server.wait_all_ready(30.0)
        server.wait_idle(10.0)
        clean = all(row["kv_pages_leaked"] == 0 for row in server.workers())
    checks = {
        f"answers differ or failed: {record.wrong[:2]}": not record.wrong,
        f"cuts that hit nothing: {idle_cuts}": not idle_cuts,
        "failover took too long": max(waits, default=0.0) <= FAILOVER_S,
        "no 503 without any worker": refused is not None,
        "no 503 in time": refused is None or refused <= REFUSED_S,
        "pages leaked": clean,
    }
    figures = {
        "cuts": len(PAIRS) + 1,
        "answers under way at a cut": len(waits),
        **{f"signs of {pair}": count for pair, count in signs.items()},
        "answers": record.complete,
        "wrong": len(record.wrong),
        "stall_p99_s": quantile(waits, 0.99),
        "stall_max_s": max(waits, default=0.0),
        "refused_after_s": refused,
    }
    return judged("F2", "network cut between any two hosts", checks, figures)


@contextmanager
def _only_these(server: PenstockServer, pair: tuple[str, str]) -> Iterator[None]:
    """Where two workers are cut from each other a third one, which does without them, is drained meanwhile."""
    others = [] if "g" in pair else [name for name in ROLES if name not in pair]
    for name in others:
        httpx.post(f"{server.url}/admin/workers/{name}/drain", headers=KEY, json={}, trust_env=False).raise_for_status()
    yield
    for name in others:
        httpx.post(
            f"{server.url}/admin/workers/{name}/resume", headers=KEY, json={}, trust_env=False
        ).raise_for_status()


def _signs(server: PenstockServer) -> int:
    """How often was noticed what a cut brings about: silent workers, requests submitted anew, missing pages."""
    told = server.metrics()
    return round(sum(told.get(f"penstock:{name}_total", 0.0) for name in SIGNS))


async def _cut(hosts: Hosts, server: PenstockServer, pair: tuple[str, str], record: Record) -> list[float]:
    """Clients ask; the cut comes, stays a while and is mended.  How long answers that met it stood still.

    Nothing is found in a cache: each prompt is read, and its pages travel, in the time of the cut, too.
    """
    bodies = varied_requests(max_tokens=40)
    stalls: list[float] = []
    cut_at = 0.0
    over = False

    async def one(client: httpx.AsyncClient, number: int, work: list[tuple[dict[str, Any], Answer]]) -> None:
        dice = random.Random(number)
        while not over:
            body, wanted = dice.choice(work)
            began = time.monotonic()
            try:
                async with asyncio.timeout(60):
                    got = await stream_completion(client, server.url, body | {"cache_salt": str(dice.random())})
            except (AssertionError, httpx.HTTPError, TimeoutError) as error:
                record.wrong.append(f"{'-'.join(pair)}: {type(error).__name__}: {error}")
                continue
            record.complete += 1
            if got.identical != wanted.identical:
                record.wrong.append(f"{'-'.join(pair)}: another answer")
            moments = [began, *got.times]
            stalls.extend(b - max(a, cut_at) for a, b in pairwise(moments) if a <= cut_at < b)

    async with make_client() as client:
        client.headers.update(KEY)
        work = [(body, await stream_completion(client, server.url, body)) for body in bodies]
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(one(client, number, work))
            await asyncio.sleep(1.0)
            cut_at = time.monotonic()
            hosts.cut(*pair)
            await asyncio.sleep(CUT_S)
            hosts.mend(*pair)
            await asyncio.sleep(2.0)
            over = True
    return stalls


async def _cut_off(hosts: Hosts, server: PenstockServer) -> float | None:
    """The gateway alone: how long until a request is refused with 503, once that is known."""
    for name in ROLES:
        hosts.cut("g", name)
    body = {"model": "storyteller", "prompt": [50, 51], "max_tokens": 4}
    try:
        async with make_client() as client:
            client.headers.update(KEY)
            deadline = time.monotonic() + FAILOVER_S
            ready = f"{server.url}/ready"
            while (await client.get(ready)).status_code == 200 and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            began = time.monotonic()
            answer = await client.post(f"{server.url}/v1/completions", json=body)
            return time.monotonic() - began if answer.status_code == 503 else None
    finally:
        for name in ROLES:
            hosts.mend("g", name)


def f4(budget: Budget) -> Result:
    """The link between the prefill and the decode worker is slow: answers right, and others unharmed."""
    rounds = budget.count(3)
    record, wanted = Record(), {}
    with _town() as (hosts, server):
        before = asyncio.run(timed(server.url, record, rounds, wanted))
        hosts.slow("p", "d", SLOW)
        slowed = asyncio.run(timed(server.url, record, rounds, wanted))
        server.wait_idle(10.0)
        clean = all(row["kv_pages_leaked"] == 0 for row in server.workers())
    checks = {
        f"answers differ or failed: {record.wrong[:2]}": not record.wrong,
        "answers take over three times as long": slowed <= 3 * before + 1.0,
        "pages leaked": clean,
    }
    figures = {
        "rate": SLOW,
        "answers": record.complete,
        "wrong": len(record.wrong),
        "p99_before_s": before,
        "p99_slow_s": slowed,
    }
    return judged("F4", "slow link between the workers", checks, figures)


async def timed(url: str, record: Record, rounds: int, wanted: dict[int, Any]) -> float:
    """The p99 of whole answers, four at a time, new prefixes each round.

    Each answer is compared with the first one to its request; those are kept in ``wanted`` for calls that follow.
    """
    took: list[float] = []

    async def one(client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            got = await stream_completion(client, url, body)
        except (AssertionError, httpx.HTTPError) as error:
            record.wrong.append(f"{type(error).__name__}: {error}")
            return
        took.append(time.monotonic() - began)
        record.complete += 1
        if wanted.setdefault(index, got.identical) != got.identical:
            record.wrong.append(f"request {index}: another answer")

    async with make_client() as client:
        client.headers.update(KEY)
        for number in range(rounds):
            bodies = varied_requests(max_tokens=40, salt=f"{time.monotonic()}-{number}", salt_each=True)
            for start in range(0, len(bodies), 4):
                group = enumerate(bodies[start : start + 4], start=start)
                await asyncio.gather(*(one(client, index, body) for index, body in group))
    return quantile(took, 0.99)
