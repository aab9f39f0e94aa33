"""A worker's heartbeat: one beat with every turn of its loop, which says when the step that begins should end."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from penstock.launch.heartbeat import HeartbeatSlot


class HeartbeatWriter:
    """See ``engine.loop.EngineHeartbeat``."""

    def __init__(self, slot: HeartbeatSlot, steps: Callable[[], int], now_ns: Callable[[], int] = monotonic_ns) -> None:
        """``steps``: steps computed so far."""
        self._slot = slot
        self._steps = steps
        self._now_ns = now_ns

    def beat(self, predicted_s: float) -> None:
        now = self._now_ns()
        self._slot.beat(now, now + int(predicted_s * 1e9), self._steps())
