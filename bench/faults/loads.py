"""L1, L2, L4 to L6: bursts, slow readers, disconnects, slow senders, one noisy client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from bench.faults.plain_client import PlainClient
from bench.faults.result import Budget, Result, judged, quantile

from cluster.server import PenstockServer
from penstock.cli.main import main

COMPLETIONS = "/v1/completions"
SATURATING = 192
"""Clients that ask for as much as a service can answer: with fewer of them its batches are small."""

GROUP = 50
"""Clients that hang up at once."""

STOPPED_S = 1.0
AMID = 0.99
COLLECTED_S = 4.0
KEPT_BYTES, NOISE_BYTES = 1024, 4 << 20
"""Of a client that hung up, on the average of many; and what memory may grow by for other reasons."""

NO_DECISIONS = "[routing]\nremembered_requests = 0\n"
"""Decisions of the latest thousand requests are kept to be asked for: 3 KiB each that are no leak."""

NOISE = 1.2
ROUNDS = 4
FEW = "[limits]\nmax_queued_requests = 40\n"
SLOW = "[limits]\nheader_s = 1.0\nslow_body_s = 1.0\nidle_client_s = 2.0\nmax_queued_requests = 40\n"


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True} | fields


def _server(*flags: str) -> PenstockServer:
    return PenstockServer(["--decode", "2", *flags])


async def _closed(port: int, clients: int, seconds: float) -> float:
    """Answers a second of so many clients, each asking anew when answered."""
    done = 0
    until = time.monotonic() + seconds
    client = PlainClient(port)

    async def one() -> None:
        nonlocal done
        while time.monotonic() < until:
            good = (await client.post(COMPLETIONS, _body())).status == 200
            done += good
            if not good:
                await asyncio.sleep(0.05)

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    client.close()
    return done / (time.monotonic() - began)


def l1(budget: Budget) -> Result:
    """Ten times as many requests as the service can answer: it answers as many as ever, and refuses the rest."""
    with _configured(FEW) as server:
        capacity = asyncio.run(_closed(server.port, SATURATING, budget.seconds / 2))
        rate = max(20, round(10 * capacity))
        came = asyncio.run(burst(server.port, rate, budget.seconds / 2))
        server.wait_idle(20.0)
    goodput = came.answered / came.seconds if came.answered else 0.0
    checks = {
        "goodput": goodput >= 0.9 * capacity,
        "refused without Retry-After, or otherwise": came.refused == came.honest,
        "nobody was refused": came.refused > 0,
        f"{came.hangs} had no answer": came.hangs == 0,
    }
    figures = {
        "capacity_per_s": capacity,
        "goodput_per_s": goodput,
        "answered": came.answered,
        "refused": came.refused,
        "hangs": came.hangs,
        "connections lost": came.lost,
    }
    return judged("L1", "burst of ten times the capacity", checks, figures)


@dataclass
class Burst:
    """What came of it."""

    answered: int = 0
    refused: int = 0
    honest: int = 0  # of those, told when to come again
    hangs: int = 0  # had no answer in time
    lost: int = 0  # had no connection, or one that ended
    seconds: float = 0.0  # until the last answer


async def burst(port: int, rate: int, seconds: float, *, timeout_s: float = 120.0) -> Burst:
    """So many requests a second, whatever becomes of them."""
    found, began = Burst(), time.monotonic()
    client = PlainClient(port, timeout_s=timeout_s)

    async def one(after: float) -> None:
        await asyncio.sleep(after)
        try:
            told = await client.post(COMPLETIONS, _body())
        except TimeoutError:
            found.hangs += 1
        except (OSError, asyncio.IncompleteReadError):
            found.lost += 1
        else:
            if told.status == 200:
                found.answered, found.seconds = found.answered + 1, time.monotonic() - began
            else:
                found.refused += 1
                found.honest += told.status in (429, 503) and (told.retry_after or 0) >= 1

    await asyncio.gather(*(one(index / rate) for index in range(round(rate * seconds))))
    client.close()
    return found


def l2(budget: Budget) -> Result:
    """Readers that take nothing: memory stays bounded, and they are hung up on."""
    count = budget.count(100, least=4)
    with _configured(SLOW) as server:
        pid = server.gateway_pid()
        httpx.post(f"{server.url}/v1/completions", json=_body(), timeout=30, trust_env=False)  # what is loaded once
        before = _rss(pid)
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(_begun(server, _body(max_tokens=1900, n=4), 4096)) for _ in range(count)]
            server.wait_for(lambda: server.metrics()["penstock:requests_open"] == 0, 90.0, "hung up on")
            grown = _rss(pid) - before
            del readers
        server.wait_idle(10.0)
    checks = {"memory": grown / count <= (1 << 20)}
    return judged("L2", "readers that read nothing", checks, {"readers": count, "KiB each": grown / count / 1024})


def l4(budget: Budget) -> Result:
    """Clients hang up in the middle of answers: work on them stops within a second, and nothing is kept."""
    count = budget.count(1000, least=20)
    waits: list[float] = []
    left, amid = count, 0
    with _configured(f"{NO_DECISIONS}[turns]\nfull_collection_s = {COLLECTED_S / 2}\n") as server:
        gateway = server.gateway_pid()
        _hung_up(server, min(count, GROUP))  # what is loaded and made once
        before, descriptors = _rss(gateway), _descriptors(gateway)
        while left:
            group = min(left, GROUP)
            left -= group
            running, wait_s = _hung_up(server, group)
            amid += running
            waits.append(wait_s)
        time.sleep(COLLECTED_S)  # until Python has freed what was in cycles
        kept, open_files = _rss(gateway) - before, _descriptors(gateway) - descriptors
        leaked = sum(row["kv_pages_leaked"] + row["kv_pages_used"] for row in server.workers())
    # Workers report every quarter of a second, and are asked every 20 ms.
    checks = {
        "work went on": quantile(waits, 1.0) <= STOPPED_S + 0.3,
        f"only {amid} of {count} were amid an answer": amid >= AMID * count,
        f"{leaked} pages are kept": leaked == 0,
        f"{open_files} descriptors are kept": open_files <= 2,
        f"{kept} bytes are kept": kept / count <= KEPT_BYTES or kept <= NOISE_BYTES,
    }
    figures = {
        "disconnects": count,
        "amid an answer": amid,
        "idle_after_p50_s": quantile(waits, 0.5),
        "idle_after_s": quantile(waits, 1.0),
        "pages kept": leaked,
        "descriptors kept": open_files,
        "KiB kept each": kept / count / 1024,
    }
    return judged("L4", "clients that hang up", checks, figures)


def _hung_up(server: PenstockServer, group: int) -> tuple[int, float]:
    """So many clients hang up at once: how many answers were being written, and after how long no work was left."""
    with contextlib.ExitStack() as stack:
        for _ in range(group):
            stack.enter_context(_begun(server, _body(max_tokens=1900), 1 << 20))
        running = round(server.metrics()["penstock:requests_open"])
    began = time.monotonic()
    server.wait_for(lambda: server.metrics()["penstock:requests_open"] == 0, 10.0, "closed")
    server.wait_idle(10.0)
    return running, time.monotonic() - began


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def l5(budget: Budget) -> Result:
    """Heads and bodies that come byte by byte: refused in time, and others are served meanwhile."""
    count = budget.count(200, least=10)
    with _configured(SLOW) as server:
        with contextlib.ExitStack() as stack:
            slow = []
            for index in range(count):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                more = b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{" if index % 2 else b""
                sock.sendall(head + more)
                slow.append(sock)
            began = time.monotonic()
            answer = httpx.post(f"{server.url}/v1/completions", json=_body(max_tokens=8), timeout=30, trust_env=False)
            served_s = time.monotonic() - began
            told = [sock.recv(4096) for sock in slow]
        refused = sum(b" 408 " in words for words in told)
    checks = {"not refused": refused == count, "others were not served": answer.status_code == 200 and served_s < 5}
    return judged("L5", "slow heads and bodies", checks, {"senders": count, "refused": refused, "served_s": served_s})


def l6(budget: Budget) -> Result:
    """One client asks for as much as it can: how much later others' first tokens come.

    With a key of its own it is a tenant; what it does to those who share one key with it is told, and is no bar.
    """
    with tempfile.TemporaryDirectory() as folder:
        keys = {name: make_key(Path(folder) / "keys.json", name) for name in ("polite", "noisy")}
        with _server("--api-key", "operator", "--api-keys", str(Path(folder) / "keys.json")) as server:
            asyncio.run(polite(server.port, 2.0, keys["polite"], keys["noisy"]))  # what is learned of this machine
            alone, beside, same = Noise(), Noise(), Noise()
            for _ in range(ROUNDS):  # in turn, so that what else the machine does falls upon each
                for found, noise in ((alone, None), (beside, keys["noisy"]), (same, keys["polite"])):
                    found.add(*asyncio.run(polite(server.port, budget.seconds / ROUNDS, keys["polite"], noise)))
            server.wait_idle(30.0)
    checks = {
        "others are slowed": beside.at(0.99) <= NOISE * alone.at(0.99),
        "there was no noise": beside.answered > 0,
        f"others are refused: {alone.refused} alone, {beside.refused} beside it": alone.refused == beside.refused == 0,
    }
    figures: dict[str, Any] = {"noisy requests answered": beside.answered, "samples": len(beside.ttft)}
    for share in (0.5, 0.9, 0.99):
        of = f"TTFT p{100 * share:g}"
        figures[f"{of} alone s"] = alone.at(share)
        figures[f"{of} beside a noisy tenant s"] = beside.at(share)
        figures[f"{of} ratio"] = beside.at(share) / max(alone.at(share), 1e-9)
    figures["TTFT p99 ratio with one key for both"] = same.at(0.99) / max(alone.at(0.99), 1e-9)
    return judged("L6", "one noisy client", checks, figures)


@dataclass
class Noise:
    """What a polite client saw, in all rounds of one kind."""

    ttft: list[float] = field(default_factory=list)
    answered: int = 0  # of the noisy one's requests
    refused: int = 0

    def add(self, ttft: list[float], answered: int, refused: int) -> None:
        """One round."""
        self.ttft += ttft
        self.answered += answered
        self.refused += refused

    def at(self, share: float) -> float:
        """Quantile of times to first token."""
        return quantile(self.ttft, share)


def make_key(path: Path, tenant: str) -> str:
    """A new key for this tenant."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["keys", "add", str(path), "--tenant", tenant]) == 0
    return told.getvalue().split()[0]


async def polite(port: int, seconds: float, key: str, noise: str | None = None) -> tuple[list[float], int, int]:
    """Of a client that asks now and then, beside 32 that ask all the time.

    (Its times to first token, answers to those, its requests that were not answered with 200).
    """
    ttft: list[float] = []
    refused = 0
    until = time.monotonic() + seconds
    quiet, loud = PlainClient(port, key), PlainClient(port, noise or "")

    async def noisy(number: int) -> int:
        done = 0
        prompt = [100 + (number * 37 + index) % 3000 for index in range(600)]
        while time.monotonic() < until:
            told = await loud.post(COMPLETIONS, _body(prompt=prompt, cache_salt=str(time.monotonic())))
            done += told.status == 200
        return done

    tasks = [asyncio.create_task(noisy(number)) for number in range(0 if noise is None else 32)]
    while time.monotonic() < until:
        body = _body(max_tokens=4, cache_salt=str(time.monotonic()), stream=True)
        told = await quiet.post(COMPLETIONS, body)
        if told.status == 200:
            ttft.append(told.first_s)
        else:
            refused += 1
        await asyncio.sleep(0.05)
    answered = sum(await asyncio.gather(*tasks))
    quiet.close()
    loud.close()
    return ttft, answered, refused


@contextlib.contextmanager
def _configured(config: str) -> Any:
    with (
        tempfile.TemporaryDirectory() as folder,
        PenstockServer(["--decode", "2"], config=config, folder=Path(folder)) as server,
    ):
        yield server


@contextlib.contextmanager
def _begun(server: PenstockServer, body: dict[str, Any], buffer: int) -> Any:
    """A stream whose first event has come, and of which nothing more is read."""
    raw = json.dumps(body | {"stream": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", server.port))
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        sock.sendall(head.encode() + raw)
        status = sock.recv(12, socket.MSG_WAITALL)
        assert status == b"HTTP/1.1 200", status
        yield sock


def _rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
