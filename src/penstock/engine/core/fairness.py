"""Whose turn it is: the virtual time of each tenant, class by class.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over tokens, as virtual token counters do it (Sheng et al., Fairness
in Serving Large Language Models, 2024): a tenant's time moves on by what is computed for it, divided by its weight,
and whoever's time is least is served next.  A prompt is charged when it is let in, less what was cached; an answer
token by token.  Whoever comes back begins at the present: nobody saves up turns by staying away.  Answers are charged
only while others wait: what nobody else wants is free.

A *line* is a tenant's requests of one class; classes have nothing in common.  Pure; knows no pages and no queues.
"""

from __future__ import annotations

Line = tuple[int, str]
"""(rank of the class, tenant)."""

REMEMBERED_LINES = 1024
"""When there are more, the half that is least ahead of the present is forgotten, and begins there when it is back."""


class FairClock:
    """Virtual seconds are weighted tokens."""

    def __init__(self, *, output_weight: float, memory_s: float) -> None:
        """``output_weight``: what a token of an answer counts, against one of a prompt; ``memory_s``: for how long a
        tenant counts as being there after its last request came."""
        self._output_weight = output_weight
        self._memory_s = memory_s
        self._times: dict[Line, float] = {}
        self._present: dict[int, float] = {}  # rank -> where its line stood that was served last
        self._seen: dict[Line, float] = {}  # -> when a request of it came last

    def at(self, line: Line) -> float:
        """Where a line stands.  The least is served next."""
        time = self._times.get(line)
        return self._present.get(line[0], 0.0) if time is None else time

    def arrived(self, line: Line, now: float) -> None:
        """A request of this line came."""
        self._seen[line] = now
        if len(self._seen) > REMEMBERED_LINES:
            self._forget_unseen(now)

    def queued(self, line: Line) -> None:
        """The line begins to wait: from the present on, or from later if it was served ahead of that."""
        present = self._present.get(line[0], 0.0)
        self._times[line] = max(self._times.get(line, 0.0), present)
        if len(self._times) > REMEMBERED_LINES:
            foremost = sorted(self._times, key=lambda each: (-self._times[each], each))[: REMEMBERED_LINES // 2]
            self._times = {each: self._times[each] for each in {*foremost, line}}

    def admitted(self, line: Line, tokens: int, weight: float) -> None:
        """A request of this line is let in, with so many tokens to compute."""
        start = self.at(line)
        self._present[line[0]] = max(self._present.get(line[0], 0.0), start)
        self._times[line] = start + tokens / weight

    def wrote(self, line: Line, tokens: int, weight: float) -> None:
        """So many tokens of an answer are computed while others wait."""
        self._times[line] = self.at(line) + self._output_weight * tokens / weight

    def contended(self, rank: int, now: float) -> bool:
        """Were others there of late whom a line of this class should not keep for long: of its class, or before it?"""
        if len(self._seen) < 2:
            return False
        self._forget_unseen(now)
        before = sum(seen < rank for seen, _ in self._seen)
        return before > 0 or sum(seen == rank for seen, _ in self._seen) > 1

    def _forget_unseen(self, now: float) -> None:
        self._seen = {line: seen for line, seen in self._seen.items() if now - seen < self._memory_s}
