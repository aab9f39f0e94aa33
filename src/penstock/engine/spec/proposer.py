"""Proposes draft tokens for the rows of a step, as many as pay: from n-grams of the request, or from a draft model.

Prompt lookup decoding (Saxena 2023; LLMA, arXiv:2304.04487) costs no model, and in a step without a match less than a
microsecond: places are chained by their last two tokens, as LZ77 does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.clock import Clock, MonotonicClock
from penstock.engine.core.plan import SampledTokens, ScheduledTokens
from penstock.engine.core.request import Request
from penstock.engine.spec.acceptance import (
    MIN_GAIN,
    AcceptanceByDepth,
    AcceptanceByKind,
    SpeculationBudget,
    StepTimeModel,
    best_depth,
    cannot_pay,
    choose_draft_lengths,
)
from penstock.engine.spec.draft_model import Drafter
from penstock.types import RequestId

LONGEST_MATCH = 16
"""A longer match says no more."""

CANDIDATES = 8
"""Latest places that are compared further back."""

SEARCHED_TOKENS = 32_768
"""Tokens at the end of a prompt that are searched."""


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """What may come next, and how many tokens before it stood in the same order earlier."""

    match: int
    tokens: tuple[int, ...]


class NgramIndex:
    """The tokens of one request: prompt, then answer.

    ``_last``: where the latest place of each two tokens ends.  ``_before``: of the place that ends here, where the one
    before it ends; -1 for none.
    """

    __slots__ = ("_before", "_last", "_tokens", "token_count")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.token_count = len(tokens)  # tokens that were given, also those that are not searched
        self._tokens = list(tokens[-SEARCHED_TOKENS:])
        text = np.array(self._tokens, np.int64)
        pairs = text[:-1] << 32 | text[1:]
        order = np.argsort(pairs, kind="stable")  # equal pairs side by side, in the order of the text
        sorted_pairs, ends = pairs[order], order + 1
        before = np.full(len(text), -1, np.int64)
        before[ends[1:]] = np.where(sorted_pairs[1:] == sorted_pairs[:-1], ends[:-1], -1)
        self._before: list[int] = before.tolist()
        self._last: dict[int, int] = dict(zip(sorted_pairs.tolist(), ends.tolist(), strict=True))

    def extend(self, tokens: Sequence[int]) -> None:
        """These came since."""
        own, last = self._tokens, self._last
        for token in tokens:
            if own:
                pair = own[-1] << 32 | token
                self._before.append(last.get(pair, -1))
                last[pair] = len(own)
            else:
                self._before.append(-1)
            own.append(token)
        self.token_count += len(tokens)

    def propose(self, most: int) -> NgramDraft | None:
        """Up to ``most`` tokens; None when the last two tokens never stood together before.

        The longest match counts, among equals the latest.  What runs beyond the end of the text goes round: a text
        that repeats itself is expected to do so again.
        """
        text, before = self._tokens, self._before
        end = before[-1] if before else -1
        if end < 0 or most < 1:
            return None
        best, at = 0, 0
        for _ in range(CANDIDATES):
            match = self._match(end)
            if match > best:
                best, at = match, end + 1
            end = before[end]
            if end < 0 or best == LONGEST_MATCH:
                break
        follows = text[at : at + most]
        period = len(text) - at
        while len(follows) < most:
            follows.append(follows[len(follows) - period])
        return NgramDraft(best, tuple(follows))

    def _match(self, end: int) -> int:
        """How many tokens up to ``end`` are the last ones of the text; two at least."""
        text, match, most = self._tokens, 2, min(LONGEST_MATCH, end + 1)
        last = len(text) - 1
        while match < most and text[end - match] == text[last - match]:
            match += 1
        return match


PLAIN_EVERY = 40
"""One in this many steps with drafts goes without, for comparison."""

RETRY_AFTER_STEPS = 400
"""Steps after which drafts that promised nothing are tried again, ``RETRIES`` times."""

RETRIES = 16

REST_STEPS = 32
"""Steps for which it is believed that drafts promise nothing."""

MEASURED_EVERY = 8
"""One in this many steps without drafts is measured closely."""

FIRST_ACCEPTANCE = 0.7
"""How often a head's or a draft model's guess is thought to stand before it was tried."""


class SpeculationLedger:
    """What steps cost, and whether guessing has paid: the same for every way to guess."""

    def __init__(self) -> None:
        self.times = StepTimeModel()
        self.budget = SpeculationBudget()
        self._plain_steps = 0  # since the last one with drafts
        self._unsettled_s = 0.0  # of guessing that brought nothing

    def on_plain_step(self, rows: int, seconds: float, guessing_s: float) -> None:
        """A step without drafts took ``seconds``, and looking for drafts ``guessing_s``.

        One in eight is measured closely, because this runs in every step, also without drafting.
        """
        self._unsettled_s += guessing_s
        self._plain_steps += 1
        if self._plain_steps % MEASURED_EVERY == 1:
            self.times.record(rows, seconds)
            if self._unsettled_s:
                base, slope = self.times.fit() or (0.0, 0.0)
                self.budget.record(-self._unsettled_s / max(base + slope * rows, 1e-9))
                self._unsettled_s = 0.0
        if self.budget.on_step():
            self.times.discount_drafted()

    def on_step(
        self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float, guessing_s: float
    ) -> None:
        """A step of ``rows`` took ``seconds``, and drafting for it ``guessing_s``."""
        count, drafted = len(rows), sum(len(row.draft) for row in rows)
        if not drafted:
            self.on_plain_step(count, seconds, guessing_s)
            return
        self._plain_steps = 0
        seconds = self.times.clipped(count + drafted, seconds, guessed=True)
        self.times.record(count + drafted, seconds, guessed=True)
        base, slope = self.times.fit() or (0.0, 0.0)
        plain = base + slope * count
        if plain > 0:
            tokens = sum(len(new.tokens) for new in drawn)
            self.budget.record(tokens / count - (seconds + guessing_s) / plain)
        self.budget.on_step()


class NgramProposer:
    """Guesses by looking answers up in their own requests; learns what that is worth here and now."""

    def __init__(self, *, most_each: int, most: int, clock: Clock | None = None) -> None:
        """``most_each`` draft tokens for a request, ``most`` in a step."""
        self._most_each = most_each
        self._most = most
        self._clock = clock or MonotonicClock()
        self._ledger = SpeculationLedger()
        self._acceptance = AcceptanceByKind([match / (match + 2) for match in range(LONGEST_MATCH + 1)])
        self._lookups: dict[RequestId, tuple[Request, NgramIndex]] = {}
        self._matches: dict[RequestId, int] = {}  # of the guesses in flight
        self._drafting_s = 0.0

    def propose(self, rows: Sequence[ScheduledTokens]) -> list[tuple[int, ...]]:
        self._matches.clear()
        self._drafting_s = 0.0
        if not self._ledger.budget.is_open:
            return []
        line = self._ledger.times.fit()
        if line is None or not rows:
            return []
        if cannot_pay(len(rows), self._acceptance.best, line):
            return []
        begin = self._clock.now()
        guesses = [self._draft(row.request) for row in rows]
        drafts = []
        if any(guesses):
            chains = [tuple(self._acceptance.chain_rates(g.match, len(g.tokens))) if g else () for g in guesses]
            counts = choose_draft_lengths(len(rows), chains, line, self._most)
            for row, guess, count in zip(rows, guesses, counts, strict=True):
                drafts.append(guess.tokens[:count] if guess else ())
                if guess and count:
                    self._matches[row.request.id] = guess.match
        self._drafting_s = self._clock.now() - begin
        return drafts

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        if self._matches:
            for row, new in zip(rows, drawn, strict=True):
                match = self._matches.get(row.request.id)
                if match is not None and row.draft:
                    self._acceptance.record(match, len(row.draft), len(new.tokens) - 1)
            self._ledger.on_step(rows, drawn, seconds, self._drafting_s)
        else:
            self._ledger.on_plain_step(len(rows), seconds, self._drafting_s)

    def remove_request(self, request: RequestId) -> None:
        self._lookups.pop(request, None)
        self._matches.pop(request, None)

    def _draft(self, request: Request) -> NgramDraft | None:
        """Never so far that the answer would have ended: the token after the last draft token is drawn too."""
        most = min(self._most_each, request.local_end - request.known - 1, 1 + self._ledger.times.guessed)
        return self._lookup(request).propose(most) if most > 0 else None

    def _lookup(self, request: Request) -> NgramIndex:
        """The request's tokens, brought up to date; made anew for another object of the same id."""
        known = self._lookups.get(request.id)
        if known is None or known[0] is not request:
            lookup = NgramIndex(request.tokens(0, request.known))
            self._lookups[request.id] = (request, lookup)
            return lookup
        lookup = known[1]
        if lookup.token_count < request.known:
            lookup.extend(request.tokens(lookup.token_count, request.known))
        return lookup


class DraftModelProposer:
    """Asks a head or a draft model; learns what its guesses are worth, and how many of them."""

    def __init__(self, drafter: Drafter, *, most_each: int, most: int) -> None:
        """``most_each`` draft tokens for a request, ``most`` in a step."""
        self._drafter = drafter
        self._most_each = most_each
        self._most = most
        self._ledger = SpeculationLedger()
        self._acceptance = AcceptanceByDepth(FIRST_ACCEPTANCE, most_each)
        self._first, self._further = StepTimeModel(), StepTimeModel()  # of guessing
        self._drafting_s = 0.0
        self._since_plain = self._idle = self._rest = 0
        self._tries = RETRIES
        self._follows = False

    def propose(self, rows: Sequence[ScheduledTokens]) -> list[tuple[int, ...]]:
        self._drafting_s = 0.0
        wanted = self._ledger.budget.is_open and self._rest <= 1
        if wanted != self._follows:
            self._follows = wanted
            self._drafter.set_active(wanted)
        if not self._ledger.budget.is_open:
            self._tries = RETRIES  # for when it is
        depth = self._depth(len(rows)) if self._ledger.budget.is_open else 0
        if depth == 0:
            return []
        drafts = self._drafter.draft(rows, depth)
        first, further = self._drafter.seconds
        if any(drafts):  # a draft model's first reading is no loss, and no measure of what comes
            first = self._first.clipped(len(rows), first)
            self._first.record(len(rows), first)
            if depth > 1:
                each = self._further.clipped(len(rows), further / (depth - 1))
                self._further.record(len(rows), each)
                further = each * (depth - 1)
            self._drafting_s = first + further
        return drafts

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        if self._drafting_s == 0.0:
            self._ledger.on_plain_step(len(rows), seconds, 0.0)
            return
        for row, new in zip(rows, drawn, strict=True):
            if row.draft:
                self._acceptance.record(len(row.draft), len(new.tokens) - 1)
        self._ledger.on_step(rows, drawn, seconds, self._drafting_s)

    def remove_request(self, request: RequestId) -> None:
        self._drafter.remove_request(request)

    def _depth(self, rows: int) -> int:
        """How many tokens to guess for each row now."""
        if self._rest > 0:
            self._rest -= 1
            return 0
        line = self._ledger.times.fit()
        if line is None or not 0 < rows <= self._drafter.places:
            return 0
        if self._since_plain >= PLAIN_EVERY:
            self._since_plain = 0
            return 0
        most = min(self._most_each, self._most // rows, 1 + self._ledger.times.guessed)
        if most < 1:
            return 0
        passes = (_at(self._first, rows), _at(self._further, rows))
        depth, gain = best_depth(rows, self._acceptance.chain_rates(most), line, passes)
        if gain < MIN_GAIN and not self._tried_again():
            return 0
        self._since_plain += 1
        return depth

    def _tried_again(self) -> bool:
        """Whether to try again what promises no gain."""
        if self._tries > 0:
            self._tries -= 1
            return True
        self._rest = REST_STEPS
        self._idle += REST_STEPS
        if self._idle >= RETRY_AFTER_STEPS:
            self._idle, self._tries = 0, RETRIES
        return False


def _at(times: StepTimeModel, rows: int) -> float:
    line = times.fit()
    return 0.0 if line is None else line[0] + line[1] * rows
