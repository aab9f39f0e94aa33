"""Did the system end a child for want of memory?  Told by its count of such kills, which does not say whom they hit.

A kill is counted when its victim is chosen, and the victim has ended only once its memory is freed: seconds may lie
between, so the count at a death is compared with that of some seconds before.  A kill explains one death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.launch.zygote import oom_kills

WITHIN_S = 5.0
"""For so long at most a victim's memory is being freed."""


class MemoryKills:
    """What was seen of the count lately."""

    def __init__(self, now: float, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        # When, and how many by then; those that explained a death since are among them.
        self._looks = deque([(now, count())])

    def look(self, now: float) -> None:
        """To be called every now and then."""
        self._looks.append((now, self._count()))
        while self._looks[0][0] < now - WITHIN_S:
            self._looks.popleft()

    def explain(self) -> bool:
        """Somebody was killed: was it by one of these?"""
        kills = self._count()
        if kills <= self._looks[0][1]:
            return False
        self._looks = deque((at, min(before + 1, kills)) for at, before in self._looks)
        return True
