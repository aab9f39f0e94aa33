"""Disorder with a purpose: clients that come and go, and a hand that kills and stops workers while they are busy.

Everything is bounded in time and count, and seeded; what was done is recorded, so that a test can insist that it took
place.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .streams import Answer, stream_completion

HANG_S = 60.0
"""An answer that takes longer is a hang."""

Ask = Callable[..., Awaitable[Answer]]
"""As ``stream_completion``."""


@dataclass
class Record:
    """What took place."""

    complete: int = 0
    hung_up: int = 0
    kills: int = 0
    stops: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    longest_gap_s: float = 0.0


async def client_loop(
    client: httpx.AsyncClient,
    url: str | Sequence[str],
    work: list[tuple[dict[str, Any], Answer]],
    record: Record,
    *,
    dice: random.Random,
    going: Callable[[], bool],
    ask: Ask = stream_completion,
    hang_up: float = 0.15,
) -> None:
    """Ask one question after the other while it is ``going``, and compare each answer with the undisturbed one.

    ``hang_up`` is the share of answers that nobody waits for.
    """
    while going():
        body, wanted = dice.choice(work)
        hang_up_after = dice.randrange(1, 20) if dice.random() < hang_up else None
        began = time.monotonic()
        try:
            async with asyncio.timeout(HANG_S):
                got = await ask(client, url, body, hang_up_after=hang_up_after)
        except (AssertionError, httpx.HTTPError, TimeoutError) as error:
            record.wrong.append(f"{type(error).__name__}: {error} (after {time.monotonic() - began:.1f} s)")
            continue
        if not got.done:
            record.hung_up += 1
            if not got.begins(wanted):
                record.wrong.append(f"another beginning: {got.identical} instead of {wanted.identical}")
            continue
        record.complete += 1
        record.slowest_s = max(record.slowest_s, time.monotonic() - began)
        gaps = [b - a for a, b in zip(got.times, got.times[1:], strict=False)]
        record.longest_gap_s = max([record.longest_gap_s, *gaps])
        if got.identical != wanted.identical:
            record.wrong.append(f"another answer: {got.identical} instead of {wanted.identical}")


def busy_workers(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Workers that have requests now."""
    return [worker for worker in workers if worker["state"] == "ready" and worker["running"] + worker["queued"] > 0]


async def disturb_loop(
    workers: Callable[[], Awaitable[list[dict[str, Any]]]],
    record: Record,
    *,
    dice: random.Random,
    going: Callable[[], bool],
    pause_s: tuple[float, float],
    stop_every: int,
) -> None:
    """Again and again: pick a busy worker, and kill it, or every ``stop_every``-th time only stop it.

    The pause between two blows is part of what is tested (how often trouble comes), not a wait for something.
    """
    blows = 0
    while going():
        await asyncio.sleep(dice.uniform(*pause_s))
        busy = busy_workers(await workers())
        if not busy:
            continue
        victim = dice.choice(busy)
        blows += 1
        stop = blows % stop_every == 0
        try:
            os.kill(victim["pid"], signal.SIGSTOP if stop else signal.SIGKILL)
        except ProcessLookupError:
            continue
        if stop:
            record.stops += 1
        else:
            record.kills += 1
