"""Which tokens of an answer have been counted: what is told several times, in parts, by several requests, counts once.

Each request counts what it was told beyond what others before it were, whichever of them ends first.  Knows nothing of
who counts, and what for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from penstock.edge.event_ids import Place


class Part(NamedTuple):
    """Of an answer, what was not counted before."""

    first: bool  # nothing of it was: its prompt and the request count, too
    tokens: int
    stored: int  # of those, tokens that come from a stored response


_NONE: frozenset[int] = frozenset()


class Counted:
    """How far each choice of an answer has been counted."""

    __slots__ = ("_first", "_over", "_tokens")

    def __init__(self) -> None:
        self._first = True
        self._tokens: dict[int, int] = {}
        self._over = _NONE  # choices of which all is

    @classmethod
    def elsewhere(cls, places: Mapping[int, Place]) -> Self:
        """Up to there by whoever told it: another gateway, or this one long ago.

        Who has nothing yet is told all, so the prompt and the request count here.
        """
        made = cls()
        made._first = bool(places) and not any(each.tokens or each.closed or each.ended for each in places.values())
        made._tokens = {choice: place.tokens for choice, place in places.items()}
        made._over = frozenset(choice for choice, place in places.items() if place.ended)
        return made

    def take(self, told: Sequence[tuple[int, int]]) -> Part:
        """``told``: of each choice, its tokens and how many of them, from the first on, were stored."""
        first, self._first = self._first, False
        tokens = stored = 0
        for choice, (end, stored_end) in enumerate(told):
            begin = self._tokens.get(choice, 0)
            if choice in self._over or end <= begin:
                continue
            tokens += end - begin
            stored += max(0, stored_end - begin)
            self._tokens[choice] = end
        return Part(first, tokens, stored)
