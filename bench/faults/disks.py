"""F5: the disk below the KV store is slow, or hangs; F8: a disk is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench.faults.result import Budget, NotHereError, Result, judged, quantile

from cluster.server import PenstockServer
from cluster.streams import make_client, stream_completion
from cluster.varied import varied_requests
from penstock.bundled import storyteller
from penstock.weights.compression_convert import decompress_folder

SHIM = Path(__file__).with_name("slow_disk.c")
PAGE_S = {"quick": 0.0, "slow": 0.3, "hangs": 20.0}
"""How much longer each page takes."""

WAIT_S = 0.5
PATIENT = f"[kv_store]\nalways = true\nmax_wait_s = {WAIT_S}\n"
"""Pages are written and fetched whatever that is worth, or so small a model would never ask its disk."""

SLACK_S = 1.0
LENGTHS = slice(8, None)  # prompts that have several pages


@dataclass(frozen=True)
class Disk:
    """A folder that can be made slow, and what a service needs to find it so."""

    folder: Path
    delay: Path
    environ: dict[str, str]

    def each_page_takes(self, seconds: float) -> None:
        """From now on."""
        self.delay.write_text(str(round(seconds * 1e6)))


@contextmanager
def _slow_disk() -> Iterator[Disk]:
    """A preloaded library delays reads and writes below one folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotHereError("a C compiler, for the library that delays reads and writes")
    with tempfile.TemporaryDirectory() as folder:
        delay, library, kept = Path(folder) / "delay", Path(folder) / "slow_disk.so", Path(folder) / "kv"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True, capture_output=True)
        kept.mkdir()
        environ = {"LD_PRELOAD": str(library), "SLOW_DISK": str(delay), "SLOW_DISK_BELOW": str(kept)}
        disk = Disk(kept, delay, environ)
        disk.each_page_takes(0.0)
        yield disk


def f5(budget: Budget) -> Result:
    """A slow disk below the KV store: answers right and hardly later than computed, other requests as ever."""
    del budget
    figures: dict[str, Any] = {"wrong": 0}
    checks: dict[str, bool] = {}
    with _slow_disk() as disk:
        flags = ["--decode", "2", "--no-kv-peers", "--kv-disk", str(disk.folder), "--kv-disk-size", "64MiB"]
        with PenstockServer(flags, config=PATIENT, folder=disk.folder.parent, environ=disk.environ) as server:
            wanted: dict[str, Any] = {}
            computed, _ = asyncio.run(_timed(server, "kept", wanted))
            others, _ = asyncio.run(_timed(server, "new before", wanted))
            server.wait_for(lambda: _pages(server, "pages_written") >= 200, 60, "written to disk")
            for name, seconds in PAGE_S.items():
                _forget(server)
                disk.each_page_takes(seconds)
                began = _pages(server, "pages_read")
                took, wrong = asyncio.run(_timed(server, "kept", wanted))
                beside, more = asyncio.run(_timed(server, f"new {name}", wanted))
                read = _pages(server, "pages_read") - began
                figures |= {f"{name}: p99 s": took, f"{name}: others p99 s": beside, f"{name}: pages read": read}
                figures["wrong"] += wrong + more
                checks[f"{name}: {wrong + more} answers differ"] = wrong + more == 0
                checks[f"{name}: waited for"] = took <= computed + WAIT_S + SLACK_S
                checks[f"{name}: others are harmed"] = beside <= others + WAIT_S + SLACK_S
            checks["nothing was read from the disk"] = figures["quick: pages read"] > 0
            disk.each_page_takes(0.0)
            server.wait_idle(30.0)
            checks["pages leaked"] = all(row["kv_pages_leaked"] == 0 for row in server.workers())
    figures = {"computed: p99 s": computed, "others before: p99 s": others} | figures
    return judged("F5", "slow disk, or one that hangs, below the KV store", checks, figures)


async def _timed(server: PenstockServer, salt: str, wanted: dict[str, Any]) -> tuple[float, int]:
    """(p99 of whole answers, four at a time; answers that are others than the first time)."""
    took: list[float] = []
    wrong = 0

    async def one(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        nonlocal wrong
        began = time.monotonic()
        got = await stream_completion(client, server.url, body)
        took.append(time.monotonic() - began)
        wrong += wanted.setdefault(str(number), got.identical) != got.identical

    bodies = varied_requests(max_tokens=40, salt=salt, salt_each=True)[LENGTHS]
    async with make_client() as client:
        for start in range(0, len(bodies), 4):
            group = enumerate(bodies[start : start + 4], start=start)
            await asyncio.gather(*(one(client, number, body) for number, body in group))
    return quantile(took, 0.99), wrong


def _pages(server: PenstockServer, figure: str) -> int:
    rows = [row for worker in server.workers() for row in worker.get("kv_tiers", ()) if row["tier"] == "disk"]
    return sum(row[figure] for row in rows)


def _forget(server: PenstockServer) -> None:
    """Workers that have nothing in their memory."""
    before = {row["pid"] for row in server.workers()}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: not before & {row["pid"] for row in server.workers()}, 30, "forked anew")
    server.wait_all_ready(30)


def f8(budget: Budget) -> Result:
    """A full disk where the hashes of weights are kept: a warning, and service as ever."""
    with _full_disk() as disk, tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        decompress_folder(storyteller(), plain, report=lambda _: None)
        with PenstockServer([str(plain), "--weights-cache", str(disk), "--served-model-name", "storyteller"]) as server:
            body = {"model": "storyteller", "prompt": "Once", "max_tokens": 8}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, trust_env=False)
            warned = "manifest" in server.read_log() or "cannot" in server.read_log()
    checks = {"no answer": answer.status_code == 200, "nobody was told": warned}
    return judged("F8", "full disk below the weights' hashes", checks, {"answers": 1, "warned": warned})


@contextmanager
def _full_disk() -> Iterator[Path]:
    """A file system of 64 KiB that is full."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
        )
        if made.returncode:
            raise NotHereError(f"the right to mount: {made.stderr.decode().strip()}")
        try:
            room = Path(folder) / "full"
            try:
                with room.open("wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
            except OSError:
                pass
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], capture_output=True, check=False)
