"""How long others are kept waiting while something runs: threads by the interpreter's lock, tasks by the event loop.

Counted is the processor time of this process, not the clock: what other processes take is left out.  A machine with
other work keeps a thread waiting now and then all the same; code that holds the lock does so every time.  So a few
attempts are made, and the best counts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

ATTEMPTS = 20
NAP_S = 0.001


def longest_pause(work: Callable[[], object], *, allowed_s: float) -> float:
    """The longest that a thread beside ``work`` had to wait, in the first attempt within ``allowed_s``, or the best."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, _watched_by_a_thread(work))
        if best < allowed_s:
            break
    return best


async def longest_pause_of_the_loop(work: Callable[[], Awaitable[object]], *, allowed_s: float) -> float:
    """The same of a task beside ``work``."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, await _watched_by_a_task(work))
        if best < allowed_s:
            break
    return best


def _watched_by_a_thread(work: Callable[[], object]) -> float:
    worst, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal worst
        while not done.is_set():
            before = time.process_time()
            time.sleep(NAP_S)
            worst = max(worst, time.process_time() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return worst


async def _watched_by_a_task(work: Callable[[], Awaitable[object]]) -> float:
    worst, done = 0.0, False

    async def watch() -> None:
        nonlocal worst
        while not done:
            before = time.process_time()
            await asyncio.sleep(NAP_S)
            worst = max(worst, time.process_time() - before)

    watcher = asyncio.create_task(watch())
    try:
        await work()
    finally:
        done = True
        await watcher
    return worst
