"""A watchdog of an event loop: how long each turn held it, by the thread's own CPU time and by the clock, and by whom.

It wraps what asyncio's own loop does between two looks at its selector, so it works there only; what the gateway does
in a turn is the same on uvloop.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import events
from typing import Any

KEPT = 12
"""Of the longest turns."""


class TurnWatch:
    """Of one loop.  ``install`` before it runs."""

    def __init__(self) -> None:
        self.turns = 0
        self.worst: list[tuple[float, float, str]] = []  # CPU seconds, seconds by the clock, the longest callback
        self.stalls: list[float] = []
        self._cpu = time.thread_time_ns()
        self._wall = time.monotonic_ns()
        self._longest = (0, "")
        self._collecting = 0
        self._collected = 0

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        selector: Any = loop._selector  # type: ignore[attr-defined]
        select, run, watch = selector.select, events.Handle._run, self

        def watched_select(timeout: float | None = None) -> Any:
            watch.turn_ended()
            found = select(timeout)
            watch.turn_began()
            return found

        def watched_run(handle: Any) -> None:
            began = time.thread_time_ns()
            run(handle)
            took = time.thread_time_ns() - began
            if took > watch._longest[0]:
                watch._longest = took, _name(handle)

        selector.select = watched_select
        events.Handle._run = watched_run  # type: ignore[method-assign]
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time_ns()
        else:
            self._collected += time.thread_time_ns() - self._collecting

    def turn_began(self) -> None:
        self._cpu, self._wall = time.thread_time_ns(), time.monotonic_ns()
        self._longest = 0, ""
        self._collected = 0

    def turn_ended(self) -> None:
        cpu, wall = time.thread_time_ns() - self._cpu, time.monotonic_ns() - self._wall
        self.turns += 1
        entry = cpu / 1e9, wall / 1e9, self._who()
        if len(self.worst) < KEPT or entry[0] > self.worst[-1][0]:
            self.worst = sorted([*self.worst, entry], reverse=True)[:KEPT]
        if wall > 20e6:
            self.stalls.append(wall / 1e9)

    def _who(self) -> str:
        took, name = self._longest
        collected = f", collections {self._collected / 1e6:.1f} ms" if self._collected > 1e6 else ""
        return f"{name} {took / 1e6:.1f} ms{collected}"

    def reset(self) -> None:
        """Forget what was seen."""
        self.turns, self.worst, self.stalls = 0, [], []

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "turns": self.turns,
            "worst": self.worst[:8],
            "stalls": len(self.stalls),
            "longest": max(self.stalls, default=0.0),
        }


def _name(handle: Any) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine = owner.get_coro()
        return f"task {getattr(coroutine, '__qualname__', coroutine)}"
    return str(
        getattr(callback, "__qualname__", None) or getattr(getattr(callback, "func", None), "__qualname__", callback)
    )
