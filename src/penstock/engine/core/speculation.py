"""What the scheduler asks of whoever guesses tokens, and when a guess stands.

Guesses are a means to compute more tokens in a step and nothing else: which tokens an answer has never depends on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.core.plan import Drawn, Row
from penstock.types import RequestId


class Speculator(Protocol):
    """Guesses for rows that each compute one token; see ``engine.spec``."""

    def propose(self, rows: Sequence[Row]) -> Sequence[tuple[int, ...]]:
        """Draft tokens for each row, to follow its token; nothing at all when none is worth its time."""
        ...

    def learn(self, rows: Sequence[Row], drawn: Sequence[Drawn], seconds: float) -> None:
        """A step of such rows, with or without drafts, was computed in so long."""
        ...

    def forget(self, request: RequestId) -> None:
        """The request has left; an unknown one is no error."""
        ...


def standing(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the ``drawn`` tokens stand.

    ``drawn[i]`` was drawn after ``draft[:i]``, so it stands when all of these were drawn before it.  The first always
    does.
    """
    count = 1
    for guessed, token in zip(draft, drawn, strict=False):
        if guessed != token:
            break
        count += 1
    return count
