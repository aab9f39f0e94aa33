"""L7: clients that hedge.  Who has no first token when 95 of 100 would have one asks a second time, takes whichever
answer begins first, and hangs up on the other.

The cost is what workers compute more than for the same requests asked once: tokens of prompts and of answers.  Counted,
not timed: a busy machine makes for more hedges, and the share of them is told.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from bench.faults.plain_client import text_of
from bench.faults.result import Budget, Result, judged, quantile

from cluster.processes import stat
from cluster.server import PenstockServer

REQUESTS = 400
CLIENTS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 300, 60
EXTRA = 0.05
HEDGED_FROM = 0.95
"""Of the latest first tokens: who waits for longer than this share of them asks again."""

LATEST = 100

ROUNDS = 4
"""At most, until a request is hedged: patience follows a machine that has become faster."""

_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST = b'"text"'


@dataclass
class Round:
    """The same requests, once each: how they were hedged, and what that took."""

    hedges: int = 0
    first_s: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tokens: float = 0.0  # that workers computed
    cpu_s: float = 0.0  # of all processes of the service

    def extra(self, plain: Round) -> float:
        """Tokens computed beyond those of the round without hedges, as a share of them."""
        return self.tokens / plain.tokens - 1.0


class Patience:
    """How long a client waits before it asks again: by the latest first tokens, as hedging clients do."""

    def __init__(self, first_s: list[float], *, at_once: bool = False) -> None:
        self._latest = deque(first_s, maxlen=LATEST)
        self._at_once = at_once

    def add(self, first_s: float) -> None:
        """A first token came after so long."""
        self._latest.append(first_s)

    @property
    def seconds(self) -> float:
        """From now on."""
        return 0.0 if self._at_once else quantile(list(self._latest), HEDGED_FROM)


def l7(budget: Budget) -> Result:
    """Clients ask a second time when the first token is late, and hang up on the slower: what that costs."""
    count = budget.count(REQUESTS, least=40)
    with PenstockServer(["--decode", "2"]) as server:
        _round(server, 16, None)  # what is learned of this machine
        plain = _round(server, count, None)
        patience = Patience(plain.first_s)
        for _ in range(ROUNDS):
            hedged = _round(server, count, patience)
            if hedged.hedges:
                break
        always = _round(server, count, Patience([], at_once=True))
        leaked = sum(row["kv_pages_leaked"] + row["kv_pages_used"] for row in server.workers())
    failed = plain.failed + hedged.failed + always.failed
    differ = sum(one.texts != plain.texts for one in (hedged, always))
    checks = {
        f"requests failed: {failed[:2]}": not failed,
        "answers differ": differ == 0,
        "nothing was hedged": hedged.hedges > 0,
        "hedges cost too much": hedged.extra(plain) <= EXTRA,
        "pages are kept": leaked == 0,
    }
    figures = {
        "requests": count,
        "hedged": hedged.hedges,
        "tokens computed more": f"{hedged.extra(plain):+.2%}",
        "CPU": f"{hedged.cpu_s / plain.cpu_s - 1:+.1%}",
        "TTFT p99 s": quantile(hedged.first_s, 0.99),
        "TTFT p99 s without": quantile(plain.first_s, 0.99),
        "tokens computed more, every request asked twice at once": f"{always.extra(plain):+.2%}",
        "wrong": differ,
    }
    return judged("L7", "hedged requests", checks, figures)


def _round(server: PenstockServer, count: int, patience: Patience | None) -> Round:
    """All requests with prompts that no cache has; a second one for each that is late, none without ``patience``."""
    server.wait_idle()
    tokens, cpu_s = _computed(server), _cpu_s(server)
    found = asyncio.run(_asked(server.port, count, patience))
    server.wait_idle()
    time.sleep(0.5)  # workers report what they have computed every quarter of a second
    found.tokens, found.cpu_s = _computed(server) - tokens, _cpu_s(server) - cpu_s
    return found


def _computed(server: PenstockServer) -> float:
    told = server.metrics()
    return sum(
        told.get(f"penstock:{name}_total", 0.0) for name in ("prompt_tokens_computed", "worker_generation_tokens")
    )


def _cpu_s(server: PenstockServer) -> float:
    """Of all processes of the service."""
    fields = [stat(pid) for pid in server.processes()]
    return sum(int(one[11]) + int(one[12]) for one in fields if one) / _TICKS


async def _asked(port: int, count: int, patience: Patience | None) -> Round:
    found, salt, left = Round(), f"{time.monotonic()}", iter(range(count))

    async def client() -> None:
        for number in left:
            try:
                async with asyncio.timeout(60):
                    await _hedged(port, number, salt, patience, found)
            except (OSError, AssertionError, TimeoutError, asyncio.IncompleteReadError) as error:
                found.failed.append(f"{type(error).__name__}: {error}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client())
    return found


async def _hedged(port: int, number: int, salt: str, patience: Patience | None, found: Round) -> None:
    """One request, and a second one if the first is late; the slower of them is hung up on at the first token."""
    began = time.monotonic()
    streams = [_stream(port, _body(number, salt))]
    begins = [asyncio.ensure_future(anext(streams[0]))]
    try:
        if patience is not None:
            await asyncio.wait(begins, timeout=patience.seconds)
            if not begins[0].done():
                found.hedges += 1
                streams.append(_stream(port, _body(number, salt)))
                begins.append(asyncio.ensure_future(anext(streams[1])))
        await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
        winner = next(index for index, begin in enumerate(begins) if begin.done())
        found.first_s.append(time.monotonic() - began)
        if patience is not None:
            patience.add(found.first_s[-1])
        for index, begin in enumerate(begins):
            if index != winner:
                await _hung_up(begin, streams[index])
        events = bytearray(begins[winner].result())
        async with aclosing(streams[winner]) as rest:
            async for data in rest:
                events += data
        found.texts[number] = text_of(bytes(events))
    finally:
        for begin, stream in zip(begins, streams, strict=True):
            await _hung_up(begin, stream)


async def _hung_up(begin: asyncio.Future[bytes], stream: Any) -> None:
    begin.cancel()
    await asyncio.wait([begin])
    await stream.aclose()


async def _stream(port: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The events of an answer as they come, the first token with the first piece; closing it hangs up."""
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        first = bytearray()
        while size := int((await reader.readline()).split(b";")[0], 16):
            data = (await reader.readexactly(size + 2))[:size]
            first += data
            if _FIRST in first:
                yield bytes(first)
                break
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:size]
    finally:
        writer.close()


def _body(number: int, salt: str) -> dict[str, Any]:
    dice = random.Random(number)
    return {
        "model": "storyteller",
        "prompt": list(itertools.islice(iter(lambda: dice.randrange(6, 4096), None), PROMPT_TOKENS)),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": number,
        "cache_salt": f"{salt}-{number}",
        "stream": True,
    }
