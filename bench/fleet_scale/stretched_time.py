"""Time that passes K times slower for everything that a process does by time, so that few cores can stand for many.

All that is periodic comes K times less often: the clock, the timers of the event loop and those of ZeroMQ's I/O thread
are stretched together.  What is done each time is done at its real speed.  So CPU seconds of a stretched second are
what the same process takes of a core in a real one, though this machine has not the cores for its peers.

Not stretched: how long work takes.  Messages that would have come together may come one by one, each with a wake-up of
its own, so a stretched figure is an upper bound of the real one; how far above is found by measuring with several K.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import asdict
from typing import Any, TypeVar, TypeVarTuple

import uvloop

from penstock.launch import event_loop
from penstock.wire.zeromq import INTERVALS, ZmqIntervals

_Result = TypeVar("_Result")
_Words = TypeVarTuple("_Words")


class StretchedClock:
    """A ``penstock.clock.Clock``: seconds of stretched time."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch

    def now(self) -> float:
        return time.monotonic() / self._stretch


class StretchedLoop(uvloop.Loop):
    """An event loop whose ``time()`` and timers are stretched: whatever sleeps on it, with or without a deadline."""

    def __init__(self, stretch: float) -> None:
        super().__init__()
        self._stretch = stretch

    def time(self) -> float:
        return super().time() / self._stretch

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Words], object],
        *args: *_Words,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_later(delay * self._stretch, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Words], object],
        *args: *_Words,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(when * self._stretch, callback, *args, context=context)


def run(work: Coroutine[Any, Any, _Result], stretch: float) -> _Result:
    """``event_loop.run``, stretched.  Unstretched it is that, and on a stretched loop it is uvloop, as there."""
    if stretch == 1:
        return event_loop.run(work)
    with asyncio.Runner(loop_factory=lambda: StretchedLoop(stretch)) as runner:
        runner.get_loop().set_exception_handler(event_loop.AcceptErrorHandler())
        return runner.run(work)


def intervals(stretch: float) -> ZmqIntervals:
    """ZeroMQ's timers, stretched."""
    return ZmqIntervals(**{name: round(value * stretch) for name, value in asdict(INTERVALS).items()})
