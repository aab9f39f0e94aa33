"""Threads for the work of many tenants: whose turn it is goes round, and small work does not wait for large.

Knows nothing about what is worked on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class FairThreads:
    """Two threads: one for work of up to ``small`` bytes, one for what is larger.  One for an event loop."""

    def __init__(self, name: str, small: int) -> None:
        self._small = small
        self._lanes = (_Lane(f"{name}-small"), _Lane(f"{name}-large"))

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` bytes of this tenant's, in its turn."""
        lane = self._lanes[size > self._small]
        await lane.turn(tenant)
        result: T = await asyncio.wrap_future(lane.start(work))
        return result


class _Lane:
    """One thread.  Tenants that wait for it have it in turns (round robin), each with its oldest work."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False

    async def turn(self, tenant: str) -> None:
        """Wait for the thread.  It is then the caller's, who must ``start`` something at once."""
        if not self._busy:
            self._busy = True
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._next()  # it was our turn just now
            raise

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do it.  The thread is the next one's when it is done, even if nobody waits for the result any more."""
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(self._next)

        future = self._pool.submit(work)
        future.add_done_callback(ended)
        return future

    def _next(self) -> None:
        while self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the others
            if not place.done():
                place.set_result(None)
                return
        self._busy = False
