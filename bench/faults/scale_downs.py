"""F12: the fleet shrinks under load, a hundred times: drained, restarted, or ended, and no stream breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from bench.faults.result import Budget, Result, judged, quantile

from cluster.chaos import Record, client_loop
from cluster.server import PenstockServer
from cluster.streams import Answer, all_answers, make_client, stream_completion
from cluster.varied import varied_requests

SCALE_DOWNS = 100
CLIENTS = 8
WAYS = ("drain", "restart", "SIGTERM")
"""Drained, empty, and back by ``resume``; drained and forked anew; ended by a signal and forked anew."""

ROLES = ("prefill", "decode")
FLEET = ("--prefill", "2", "--decode", "2")
PATIENCE_S = 60.0


@dataclass
class Downs:
    """What was done, and what answers met it."""

    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)  # when each began
    stalls: list[float] = field(default_factory=list)
    met: int = 0  # answers that were under way at one


def f12(budget: Budget) -> Result:
    """Workers are drained, restarted and ended under load, again and again: no stream breaks."""
    count = budget.count(SCALE_DOWNS, least=6)
    record, downs = Record(), Downs()
    with PenstockServer(FLEET) as server:
        asyncio.run(_shrunk(server, record, downs, count))
        server.wait_all_ready()
        server.wait_idle()
        leaked = sum(row["kv_pages_leaked"] for row in server.workers())
        moved = server.metrics()
    checks = {
        f"streams broke: {record.wrong[:2]}": not record.wrong,
        f"only {downs.done.total()} scale-downs of {count}: {downs.failed[:2]}": downs.done.total() == count,
        "they met no answer": downs.met > 0,
        "pages leaked": leaked == 0,
    }
    figures = {
        "scale-downs": downs.done.total(),
        **{way: downs.done[way] for way in WAYS},
        "answers": record.complete,
        "under way at one": downs.met,
        "broken": len(record.wrong),
        "answers moved": round(moved.get("penstock:answers_moved_total", 0.0)),
        "stall_p99_s": quantile(downs.stalls, 0.99),
    }
    return judged("F12", "scale-downs under load", checks, figures)


async def _shrunk(server: PenstockServer, record: Record, downs: Downs, count: int) -> None:
    """Clients ask, and compare each answer with the undisturbed one, until all scale-downs are done."""
    bodies = varied_requests(max_tokens=40)
    undisturbed = await all_answers(server.url, bodies, together=False)
    work = list(zip(bodies, undisturbed, strict=True))
    over = False

    async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], **more: Any) -> Answer:
        began = time.monotonic()
        answer = await stream_completion(client, url, body, **more)
        steps = [began, *answer.times]
        met = [
            later - moment
            for moment in downs.moments
            for earlier, later in itertools.pairwise(steps)
            if earlier <= moment < later
        ]
        downs.stalls += met
        downs.met += bool(met)
        return answer

    async with make_client() as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            dice, going = random.Random(number), lambda: not over
            loop = client_loop(client, server.url, work, record, dice=dice, going=going, ask=ask, hang_up=0.05)
            tasks.create_task(loop)
        for number in range(count):
            role, way = ROLES[number % len(ROLES)], WAYS[number % len(WAYS)]
            try:
                await _scale_down(client, server, random.Random(number), role, way, downs)
            except (AssertionError, httpx.HTTPError) as error:
                downs.failed.append(f"{way} of a {role} worker: {error}")
        over = True


async def _scale_down(
    client: httpx.AsyncClient, server: PenstockServer, dice: random.Random, role: str, way: str, downs: Downs
) -> None:
    """One worker leaves: it has nothing any more, or its process is another one.  Then it is back."""
    await _until(server, lambda rows: all(row["state"] == "ready" for row in rows), "all ready")
    rows = await _rows(server)
    victim = dice.choice([row for row in rows if row["role"] == role and row["pid"]])
    name, pid = victim["id"], victim["pid"]
    downs.moments.append(time.monotonic())
    if way == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        (await client.post(f"{server.url}/admin/workers/{name}/{way}", json={})).raise_for_status()
    if way == "drain":
        await _until(server, lambda rows: not any(_has_work(row) for row in rows if row["id"] == name), "drained")
        (await client.post(f"{server.url}/admin/workers/{name}/resume", json={})).raise_for_status()
    else:
        await _until(server, lambda rows: all(row["pid"] != pid for row in rows if row["id"] == name), "replaced")
    await _until(server, lambda rows: all(row["state"] == "ready" for row in rows), "back")
    downs.done[way] += 1


def _has_work(row: dict[str, Any]) -> bool:
    return bool(row["running"] + row["queued"]) or row["state"] != "draining"


async def _rows(server: PenstockServer) -> list[dict[str, Any]]:
    return await asyncio.to_thread(server.workers)


async def _until(server: PenstockServer, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition(rows := await _rows(server)):
                return
            assert time.monotonic() < deadline, f"not {what} within {PATIENCE_S:g} s: {rows}"
        await asyncio.sleep(0.05)
