"""The page of metrics: made beside the event loop, at most once in so many seconds, whoever asks for it how often.

Knows nothing about what is on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.clock import Clock

TakeSnapshot = Callable[[], Callable[[], bytes]]
"""Looks at everything, which is quick, and returns what makes a page of that, on any thread."""


class MetricsPage:
    """One for an application."""

    def __init__(self, take: TakeSnapshot, clock: Clock, cache_s: float) -> None:
        self._take = take
        self._clock = clock
        self._cache_s = cache_s
        self._made_at = -cache_s
        self._making: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """The page as it was ``cache_s`` ago at the earliest."""
        making = self._making
        now = self._clock.now()
        if making is None or (making.done() and (now - self._made_at >= self._cache_s or making.exception())):
            self._made_at = now
            making = self._making = asyncio.create_task(asyncio.to_thread(self._take()))
        return await asyncio.shield(making)  # whoever leaves takes it from nobody else
