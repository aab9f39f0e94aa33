"""What a drain, a role change and a rolling restart cost: gaps between the tokens of running answers, and seconds.

Answers run all the time, each followed by the next.  Every so often one of two decode workers is told to drain; when it
has nothing left it resumes, and the other one's turn comes.  The gaps of answers that were being written meanwhile are
compared with those of quiet times, and with what a SIGKILL at the same place costs.  Then roles are changed to and fro,
and everything is restarted, one worker after the other.

    python bench/drain.py                                      # the bundled model
    python bench/drain.py --model ~/models/llama --answers 16 --prompt-len 2000 --rounds 10
    python bench/drain.py --transfer tcp --save drain.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.http_client import HttpStreamClient, StreamError

LOOK_S = 0.002
DECODERS = ("decode-0", "decode-1")


@dataclass
class Record:
    """When the tokens of each answer came, and what was done when."""

    answers: list[list[float]] = field(default_factory=list)
    deeds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # kind -> (from, to)
    took: dict[str, list[float]] = field(default_factory=dict)  # kind -> seconds until the operator was answered
    failed: int = 0

    def gaps(self, kind: str) -> np.ndarray:
        """Milliseconds between two events of an answer, where the gap overlaps with a deed of this kind."""
        spans = self.deeds[kind]
        return 1000 * np.asarray(
            [b - a for a, b in self._pairs() if any(b > since and a < until for since, until in spans)]
        )

    def quiet(self) -> np.ndarray:
        """The same where nothing was done."""
        spans = [span for deeds in self.deeds.values() for span in deeds]
        return 1000 * np.asarray(
            [b - a for a, b in self._pairs() if not any(b > since and a < until for since, until in spans)]
        )

    def _pairs(self) -> list[tuple[float, float]]:
        return [pair for times in self.answers for pair in pairwise(times)]


class Service:
    """The service under test, as an operator and as clients see it."""

    def __init__(self, url: str, client: HttpStreamClient) -> None:
        self.url = url
        self._client = client

    async def workers(self) -> dict[str, dict[str, Any]]:
        reply = await self._client.get("/admin/workers")
        return {row["id"]: row for row in json.loads(reply.body)["workers"]}

    async def model(self) -> str:
        return json.loads((await self._client.get("/v1/models")).body)["data"][0]["id"]

    async def tell(self, worker: str, verb: str, **body: Any) -> float:
        """Seconds until the service said that the worker has taken it."""
        began = time.perf_counter()
        reply = await self._client.post(f"/admin/workers/{worker}/{verb}", json.dumps(body).encode())
        if reply.status != 200:
            raise SystemExit(f"{worker} {verb}: {reply.status} {reply.body.decode()}")
        return time.perf_counter() - began

    async def until(self, so: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(60):
            while not so(await self.workers()):  # noqa: ASYNC110 - the service signals nothing
                await asyncio.sleep(LOOK_S)

    async def answer(self, body: dict[str, Any], record: Record) -> None:
        times: list[float] = []
        record.answers.append(times)
        try:
            reply = await self._client.post(
                "/v1/completions", json.dumps(body).encode(), lambda data, at: times.append(at)
            )
        except StreamError:
            record.failed += 1
            return
        record.failed += reply.status != 200
        if reply.status == 400:
            raise SystemExit(reply.body.decode())
        del times[-1:]  # [DONE]


@asynccontextmanager
async def load(service: Service, args: argparse.Namespace, record: Record) -> AsyncIterator[None]:
    """So many answers at any time."""
    dice, model = random.Random(1), await service.model()

    async def one() -> None:
        while True:
            prompt = [dice.randrange(100, 3000) for _ in range(args.prompt_len)]
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": args.tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
            }
            await service.answer(body, record)

    tasks = [asyncio.create_task(one()) for _ in range(args.answers)]
    await asyncio.sleep(args.quiet)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def deed(record: Record, kind: str, what: Awaitable[float]) -> None:
    """Do it, and note when; a gap that it caused may end a little later."""
    since = time.perf_counter()
    record.took.setdefault(kind, []).append(await what)
    record.deeds.setdefault(kind, []).append((since, time.perf_counter() + 0.05))


async def drain(service: Service, worker: str) -> float:
    """Until it holds nothing."""
    began = time.perf_counter()
    await service.tell(worker, "drain")
    await service.until(lambda rows: rows[worker]["running"] == rows[worker]["queued"] == 0)
    took = time.perf_counter() - began
    await service.tell(worker, "resume")
    return took


async def kill(service: Service, worker: str) -> float:
    began = time.perf_counter()
    row = (await service.workers())[worker]
    os.kill(row["pid"], signal.SIGKILL)
    await service.until(
        lambda rows: rows[worker]["incarnation"] > row["incarnation"] and rows[worker]["state"] == "ready"
    )
    return time.perf_counter() - began


async def restart(service: Service, worker: str) -> float:
    began = time.perf_counter()
    before = (await service.workers())[worker]["incarnation"]
    await service.tell(worker, "restart", force=worker.startswith("prefill"))  # there is no other
    await service.until(lambda rows: rows[worker]["incarnation"] > before and rows[worker]["state"] == "ready")
    return time.perf_counter() - began


async def play(service: Service, args: argparse.Namespace) -> Record:
    record = Record()
    async with load(service, args, record):
        for number in range(args.rounds):
            worker = DECODERS[number % 2]
            await deed(record, "drain", drain(service, worker))
            await asyncio.sleep(args.quiet)
            await deed(record, "role, to prefill", service.tell(worker, "role", role="prefill"))
            await service.until(lambda rows, worker=worker: rows[worker]["running"] == 0)
            record.deeds["role, to prefill"][-1] = (record.deeds["role, to prefill"][-1][0], time.perf_counter())
            await deed(record, "role, back", service.tell(worker, "role", role="decode"))
            await asyncio.sleep(args.quiet)
            if args.kills:
                await deed(record, "SIGKILL", kill(service, worker))
                await asyncio.sleep(args.quiet)
        for worker in sorted(await service.workers()):
            await deed(record, "restart", restart(service, worker))
            await asyncio.sleep(args.quiet)
    return record


async def totals(service: Service) -> dict[str, float]:
    """What workers and gateway counted."""
    reply = await service._client.get("/metrics")
    found: dict[str, float] = {}
    for line in reply.body.decode().splitlines():
        if line.startswith("penstock:") and (name := line.split("{")[0].removeprefix("penstock:")):
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return {
        name: found.get(name, 0.0) for name in ("answers_moved_total", "resubmissions_total", "kv_transfer_bytes_total")
    }


def table(record: Record, counted: dict[str, float]) -> str:
    lines = [
        "| | times | takes, median | longest | gaps p50 | p99 | p99.9 | longest |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        _row("quiet", [], record.quiet()),
        *(_row(kind, record.took[kind], record.gaps(kind)) for kind in record.deeds),
    ]
    said = ", ".join(f"{name.removesuffix('_total')} {value:g}" for name, value in counted.items())
    return "\n".join([*lines, "", f"{len(record.answers)} answers, {record.failed} failed; {said}"])


def _row(kind: str, took: list[float], gaps: np.ndarray) -> str:
    cells = [f"{len(took)}", f"{1000 * np.median(took):.0f} ms", f"{1000 * max(took):.0f} ms"] if took else ["", "", ""]
    cells += [f"{np.percentile(gaps, q):.1f} ms" for q in (50, 99, 99.9, 100)] if len(gaps) else [""] * 4
    return f"| {kind} | {' | '.join(cells)} |"


async def measure(args: argparse.Namespace) -> tuple[Record, dict[str, float]]:
    url = f"http://127.0.0.1:{args.port}"
    async with HttpStreamClient(url) as client:
        service = Service(url, client)
        record = await play(service, args)
        return record, await totals(service)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the bundled model")
    parser.add_argument("--transfer", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--answers", type=int, default=8, help="running at any time (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--quiet", type=float, default=0.5, help="seconds between two deeds (default: %(default)s)")
    parser.add_argument("--kills", action="store_true", help="compare with SIGKILL")
    parser.add_argument("--port", type=int, default=8197)
    parser.add_argument("--save", type=Path, metavar="JSON")
    args = parser.parse_args()
    penstock = [sys.executable, "-m", "penstock"]
    serve = [*penstock, "serve", *([args.model] if args.model else []), "--port", str(args.port)]
    serve += ["--prefill", "1", "--decode", "2", "--transfer", args.transfer]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{args.port}"
            subprocess.run([*penstock, "chat", "--url", url, "--wait", "300", "hello"], check=True, capture_output=True)
            record, counted = asyncio.run(measure(args))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    if args.save:
        args.save.write_text(json.dumps({"answers": record.answers, "deeds": record.deeds, "took": record.took}))
    print(table(record, counted))


if __name__ == "__main__":
    main()
