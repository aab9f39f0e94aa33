"""``asyncio.Event`` for what is waited for seldom: it keeps no queue while nobody waits (0.7 KiB each).

Knows nothing about what is signalled.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Used by one event loop."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        """Need nobody wait?"""
        return self._is_set

    def set(self) -> None:
        """All who wait go on."""
        self._is_set = True
        waiting, self._waiting = self._waiting, ()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Who comes now waits."""
        self._is_set = False

    async def wait(self) -> bool:
        """Until it is set."""
        if not self._is_set:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting = (*self._waiting, waiter)
            try:
                await waiter
            finally:
                self._waiting = tuple(each for each in self._waiting if each is not waiter)
        return True
