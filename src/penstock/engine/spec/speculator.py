"""Draft tokens for the rows of a step, as many as pay; see ``engine.core.speculation`` for what the scheduler asks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.core.plan import Drawn, Row
from penstock.engine.core.request import Request
from penstock.engine.spec.gain import Acceptance, StepTimes, hopeless, worthwhile
from penstock.engine.spec.lookup import Guess, Lookup
from penstock.types import RequestId


class LookupSpeculator:
    """Guesses by looking answers up in their own requests; learns what that is worth here and now."""

    def __init__(self, *, most_each: int, most: int) -> None:
        """``most_each`` draft tokens for a request, ``most`` in a step."""
        self._most_each = most_each
        self._most = most
        self._times = StepTimes()
        self._acceptance = Acceptance()
        self._lookups: dict[RequestId, tuple[Request, Lookup]] = {}
        self._matches: dict[RequestId, int] = {}  # of the guesses in flight

    def propose(self, rows: Sequence[Row]) -> list[tuple[int, ...]]:
        """See ``Speculator.propose``."""
        line = self._times.line()
        self._matches.clear()
        if line is None or not rows or hopeless(len(rows), self._acceptance.best, line):
            return []
        guesses = [self._guess(row.request) for row in rows]
        if not any(guesses):
            return []
        chains = [tuple(self._acceptance.chain(g.match, len(g.tokens))) if g else () for g in guesses]
        counts = worthwhile(len(rows), chains, line, self._most)
        drafts = []
        for row, guess, count in zip(rows, guesses, counts, strict=True):
            drafts.append(guess.tokens[:count] if guess else ())
            if guess and count:
                self._matches[row.request.id] = guess.match
        return drafts

    def learn(self, rows: Sequence[Row], drawn: Sequence[Drawn], seconds: float) -> None:
        """See ``Speculator.learn``."""
        computed = len(rows)
        if self._matches:
            for row, new in zip(rows, drawn, strict=True):
                match = self._matches.get(row.request.id)
                if match is not None and row.draft:
                    computed += len(row.draft)
                    self._acceptance.learn(match, len(row.draft), len(new.tokens) - 1)
        self._times.learn(computed, seconds)

    def forget(self, request: RequestId) -> None:
        """See ``Speculator.forget``."""
        self._lookups.pop(request, None)
        self._matches.pop(request, None)

    def _guess(self, request: Request) -> Guess | None:
        """Never so far that the answer would have ended: the token after the last draft token is drawn too."""
        most = min(self._most_each, request.last - request.known - 1)
        return self._lookup(request).guess(most) if most > 0 else None

    def _lookup(self, request: Request) -> Lookup:
        """The request's tokens, brought up to date; made anew for another object of the same id."""
        known = self._lookups.get(request.id)
        if known is None or known[0] is not request:
            lookup = Lookup(request.tokens(0, request.known))
            self._lookups[request.id] = (request, lookup)
            return lookup
        lookup = known[1]
        if lookup.seen < request.known:
            lookup.extend(request.tokens(lookup.seen, request.known))
        return lookup
