"""F9: the wall clock jumps, a day forward and a day back, while answers are written."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from bench.faults.result import Budget, NotHereError, Result, judged

from cluster.chaos import Record
from cluster.server import PenstockServer
from cluster.streams import make_client, stream_completion
from cluster.varied import varied_requests

TELLS_S = 2.0
"""``Date`` has whole seconds and is up to one old; jumps are three seconds apart at least."""

SEEN_S = 10.0
JUMPS = ("+86400", "-86400", "+3", "-3", "+31536000", "+0")
SHIM = Path(__file__).with_name("wall_clock.c")


def f9(budget: Budget) -> Result:
    """A preloaded library shifts the wall clock of every process; monotonic time goes on."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotHereError("a C compiler, for the library that shifts the clock")
    record, shifts = Record(), []
    with tempfile.TemporaryDirectory() as folder:
        rate, library = Path(folder) / "shift", Path(folder) / "wall_clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True, capture_output=True)
        rate.write_text("+0")
        environ = {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(rate)}
        with PenstockServer(["--decode", "2"], environ=environ) as server:
            shifts = asyncio.run(_jumping(server, rate, record, max(1.0, budget.seconds / len(JUMPS) / 4)))
            deaths = server.metrics().get("penstock:worker_deaths_total", 0.0)
            suspicions = server.metrics().get("penstock:worker_suspicions_total", 0.0)
            lines = server.get("/metrics").text.splitlines()
            negative = [line for line in lines if line.rpartition(" ")[2].startswith("-")]
            server.wait_idle(10.0)
    checks = {
        f"answers differ or failed: {record.wrong[:2]}": not record.wrong,
        "nothing was answered": record.complete > 0,
        f"the clock did not jump: {shifts}": jumped(shifts),
        "workers were given up": deaths == suspicions == 0,
        f"negative figures: {negative[:2]}": not negative,
    }
    figures = {
        "jumps": len(JUMPS),
        "largest shift seen s": max(shifts, default=0.0),
        "answers": record.complete,
        "worker deaths": deaths,
        "suspicions": suspicions,
    }
    return judged("F9", "the wall clock jumps", checks, figures)


def jumped(shifts: list[float]) -> bool:
    """Did the service's clock differ from ours by each jump, as far as whole seconds and a slow answer let one say?"""
    return len(shifts) == len(JUMPS) and all(
        abs(shift - float(jump)) <= TELLS_S for shift, jump in zip(shifts, JUMPS, strict=True)
    )


def _shift(server: PenstockServer) -> float:
    """How far the service's wall clock is ahead of this process's, by the ``Date`` of an answer."""
    told = server.get("/version")
    return parsedate_to_datetime(told.headers["date"]).timestamp() - time.time()


async def _shifted(server: PenstockServer, jump: str) -> float:
    """The same once the jump is seen, or after ``SEEN_S``: the head of answers is made once a second."""
    deadline = time.monotonic() + SEEN_S
    while True:
        shift = await asyncio.to_thread(_shift, server)
        if abs(shift - float(jump)) <= TELLS_S or time.monotonic() >= deadline:
            return shift
        await asyncio.sleep(0.05)


async def _jumping(server: PenstockServer, rate: Path, record: Record, pause_s: float) -> list[float]:
    """Clients ask while the clock jumps; what the service's clock showed after each jump."""
    shifts = []
    bodies = varied_requests(max_tokens=30)[:8]
    over = False
    async with make_client() as client:
        wanted = [await stream_completion(client, server.url, body) for body in bodies]

        async def one(number: int) -> None:
            while not over:
                began = time.monotonic()
                try:
                    got = await stream_completion(client, server.url, bodies[number])
                except (AssertionError, httpx.HTTPError) as error:
                    record.wrong.append(f"{error} after {time.monotonic() - began:.1f} s")
                    return
                record.complete += 1
                if got.identical != wanted[number].identical:
                    record.wrong.append(f"request {number}: another answer")

        async with asyncio.TaskGroup() as tasks:
            for number in range(len(bodies)):
                tasks.create_task(one(number))
            for jump in JUMPS:
                await asyncio.to_thread(rate.write_text, jump)
                shifts.append(await _shifted(server, jump))
                await asyncio.sleep(pause_s)
            over = True
    return shifts
