"""L3: ten thousand streams wait for their first token behind a full queue, and another tenant is served meanwhile.

Three workers that write few answers at a time have a queue of thousands each.  What a stream that waits costs is the
gateway's proportional memory (PSS) with all of them there, less that before, a stream.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.loads import COMPLETIONS, make_key
from bench.faults.plain_client import PlainClient, text_of
from bench.faults.result import Budget, NotHereError, Result, judged

from cluster.server import PenstockServer, PenstockWorker
from penstock.wire.curve_keys import CurveKeys

STREAMS = 10_000
STREAM_BYTES = 50 << 10
SEEDS = 8
"""Answers that differ; each was written once by an idle service, and every later one is compared with that."""

WORKERS = 3
ROWS = 2
"""Answers that each worker writes at once, so that all others wait."""

WAITING_TOKENS, OTHER_TOKENS = 300, 8
OPENED_AT_ONCE = 500
"""Streams that are asked for before the gateway has taken all earlier ones: a burst is another load."""

ACCEPTED_S = 60.0
DESCRIPTORS_TO_SPARE = 200
FREED_S = 10.0
COLLECTED_S = 4.0
"""After which Python has freed what was in cycles; what the gateway has kept is looked at then."""

SERVED = 20
"""Answers of the other tenant while all streams wait."""


def _config(streams: int) -> str:
    """A queue for all of them, of which a tenant may take half; nobody is refused for how long it would wait."""
    limits = {"max_queued_requests": 2 * streams + 1000, "max_queued_tokens": 64 * streams, "first_byte_s": 3600}
    lines = ["[limits]", *(f"{name} = {value}" for name, value in limits.items())]
    return "\n".join([*lines, "[turns]", f"full_collection_s = {COLLECTED_S / 2}", ""])


def _body(seed: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "storyteller",
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": seed,
        "stream": True,
    }


class Waiting(asyncio.Protocol):
    """One raw connection that asks for a stream, and keeps what comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.came = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.came += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    @property
    def refused(self) -> bool:
        """Was something else than a stream told, or was it hung up on before the end?"""
        return (bool(self.came) and b" 200 " not in self.came[:16]) or (self.transport is None and not self.done)

    @property
    def done(self) -> bool:
        """Has the answer come whole?"""
        return b"data: [DONE]" in self.came

    @property
    def text(self) -> str:
        """What was written."""
        body, events = bytes(self.came).partition(b"\r\n\r\n")[2], []
        while body:
            size, _, body = body.partition(b"\r\n")
            count = int(size.split(b";")[0] or b"0", 16)
            events.append(body[:count])
            body = body[count + 2 :]
        return text_of(b"".join(events))


@dataclass
class Seen:
    """What came of it."""

    waiting: int = 0  # streams without a token when memory was measured
    grown: int = 0  # bytes of the gateway
    refused: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # seconds to the other tenant's first tokens meanwhile
    freed_s: float = 0.0  # after all had hung up
    kept: int = 0  # bytes that the gateway has more than before, when all is over
    open_s: float = 0.0


def l3(budget: Budget) -> Result:
    """Streams that wait for a token cost little, others are served meanwhile, and all is freed when they go."""
    count = budget.count(STREAMS, least=200)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + DESCRIPTORS_TO_SPARE:
        raise NotHereError(f"{count + DESCRIPTORS_TO_SPARE} descriptors a process; the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with _service(count) as (server, keys):
        seen = asyncio.run(_streams(server, keys, count))
        clean = all(row["kv_pages_leaked"] == 0 for row in server.workers())
    checks = {
        f"only {seen.waiting} of {count} waited": seen.waiting >= 0.9 * count,
        f"{seen.refused} were refused": seen.refused == 0,
        "memory": seen.grown / max(1, seen.waiting) <= STREAM_BYTES,
        f"others had {len(seen.others)} answers": len(seen.others) >= SERVED,
        f"answers differ: {seen.wrong[:2]}": not seen.wrong,
        "not freed": seen.freed_s <= FREED_S,
        "pages leaked": clean,
    }
    figures = {
        "streams that wait": seen.waiting,
        "KiB each": seen.grown / max(1, seen.waiting) / 1024,
        "opened in s": seen.open_s,
        "of others, meanwhile": len(seen.others),
        "their TTFT max s": max(seen.others, default=0.0),
        "compared": seen.finished + len(seen.others),
        "wrong": len(seen.wrong),
        "freed after s": seen.freed_s,
        "MiB kept": seen.kept / (1 << 20),
    }
    return judged("L3", "streams that wait for a token", checks, figures)


@contextmanager
def _service(count: int) -> Iterator[tuple[PenstockServer, dict[str, str]]]:
    """A gateway and workers of both phases, whose queues have room for all together."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        secret, ring = Path(folder) / "keys", Path(folder) / "keys.json"
        CurveKeys.ephemeral().save(secret)
        flags = ["--keys", str(secret), "--api-key", "operator", "--api-keys", str(ring)]
        keys = {name: make_key(ring, name) for name in ("waiting", "other")}
        for number in range(WORKERS):
            words = ["--role", "both", "--keys", str(secret), "--name", f"w{number}", "--max-running", str(ROWS)]
            worker = stack.enter_context(PenstockWorker([*words, "--kv-memory", "64MiB"]))
            flags += ["--join", worker.endpoint]
        yield stack.enter_context(PenstockServer(flags, config=_config(count), folder=Path(folder))), keys


async def _streams(server: PenstockServer, keys: dict[str, str], count: int) -> Seen:
    seen, gateway = Seen(), server.gateway_pid()
    other = PlainClient(server.port, keys["other"])
    wanted = {seed: await _alone(server.port, keys["waiting"], seed, WAITING_TOKENS) for seed in range(SEEDS)}
    other_wanted = await _alone(server.port, keys["other"], 0, OTHER_TOKENS)
    await asyncio.gather(*(_alone(server.port, keys["waiting"], 0, 8) for _ in range(64)))  # what is made once
    await asyncio.to_thread(server.wait_idle, 30.0)
    before = pss(gateway)
    began = time.monotonic()
    streams = await _opened(server, keys["waiting"], count)
    seen.open_s = time.monotonic() - began
    seen.grown = pss(gateway) - before
    seen.waiting = sum(not stream.came for stream in streams)
    for _ in range(SERVED):
        told = await other.post(COMPLETIONS, _body(0, OTHER_TOKENS))
        if told.status == 200:
            seen.others.append(told.first_s)
            if told.text != other_wanted:
                seen.wrong.append(f"the other tenant's: {told.text}")
    seen.refused = sum(stream.refused for stream in streams)
    for number, stream in enumerate(streams):
        if stream.done:
            seen.finished += 1
            if stream.text != wanted[number % SEEDS]:
                seen.wrong.append(f"stream {number}: another answer")
        if stream.transport is not None:
            stream.transport.abort()
    other.close()
    began = time.monotonic()
    await asyncio.to_thread(_wait_freed, server)
    seen.freed_s = time.monotonic() - began
    await asyncio.sleep(COLLECTED_S)
    seen.kept = pss(gateway) - before
    return seen


def _accepted(server: PenstockServer, streams: list[Waiting]) -> int:
    return round(server.metrics().get("penstock:requests_open", 0.0)) + sum(
        stream.done or stream.refused for stream in streams
    )


def _wait_freed(server: PenstockServer) -> None:
    server.wait_for(lambda: server.metrics()["penstock:requests_open"] == 0, 30.0, "closed")
    server.wait_idle(30.0)


async def _alone(port: int, key: str, seed: int, tokens: int) -> str:
    client = PlainClient(port, key)
    told = await client.post(COMPLETIONS, _body(seed, tokens))
    client.close()
    assert told.status == 200, told
    return told.text


async def _opened(server: PenstockServer, key: str, count: int) -> list[Waiting]:
    """So many connections, each of which has asked, and was let in."""
    loop, found = asyncio.get_running_loop(), list[Waiting]()
    for number in range(count):
        raw = json.dumps(_body(number % SEEDS, WAITING_TOKENS)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        request = f"{head}Authorization: Bearer {key}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        found.append(Waiting(request))
    for start in range(0, count, OPENED_AT_ONCE):
        async with asyncio.TaskGroup() as tasks:
            for stream in found[start : start + OPENED_AT_ONCE]:
                tasks.create_task(loop.create_connection(lambda one=stream: one, "127.0.0.1", server.port))
        asked = found[: start + OPENED_AT_ONCE]
        await _until(lambda asked=asked: _accepted(server, asked) >= len(asked))
    return found


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ACCEPTED_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not all were let in within {ACCEPTED_S:g} s"
        await asyncio.sleep(0.1)


def pss(pid: int) -> int:
    """Bytes of memory of a process, what it shares counted in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise NotHereError("/proc/PID/smaps_rollup")
