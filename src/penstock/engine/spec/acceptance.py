"""Whether draft tokens are worth their time: how often they are accepted, how long steps take, and what follows.

A step of r rows is expected to take base + slope * r seconds.  Reading the weights is most of a small step, so further
rows are cheap; where arithmetic is the limit they are not, and then nothing is drafted.  Both are measured all the
time, and decay slowly, so that drafts that lost once are tried again later.  What trying may cost is bounded by an
account in units of plain steps, so the machine's speed cancels out: drafting is switched off when it is empty.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

DECAY = 0.97
"""Share of what was measured that is still believed one measurement of the same kind later."""

DECAY_OTHER_KIND = 0.998
"""The same, one measurement of the other kind later."""

FIRST_SLOPE = 0.01
"""What a further row is thought to cost before it was measured, as a share of a step: little, so that it is tried."""

FIRST_SLOPE_WEIGHT = 2.0
"""How many measurements, a row apart, that thought is worth."""

MAX_BELIEVED_RATIO = 1.5
"""A step that took longer than this times the expectation was held up: it counts as this many times."""

TRUSTED_WEIGHT = 4.0
"""Measurements of a kind after which one more is doubted."""

MIN_GAIN = 1.05
"""The gain in tokens a second that drafting must promise; below it, measuring errors decide."""

PRIOR_TRIES = 2.0
"""How many tries the first opinion of a kind of guess is worth."""


class _Sums:
    """Sums over measurements of one kind."""

    __slots__ = ("product", "rows", "rows2", "seconds", "weight")

    def __init__(self) -> None:
        self.weight = self.rows = self.rows2 = self.seconds = self.product = 0.0

    def fade(self, share: float) -> None:
        self.weight *= share
        self.rows *= share
        self.rows2 *= share
        self.seconds *= share
        self.product *= share

    def add(self, rows: int, seconds: float) -> None:
        self.weight += 1.0
        self.rows += rows
        self.rows2 += rows * rows
        self.seconds += seconds
        self.product += rows * seconds


class StepTimeModel:
    """Seconds of steps that only write answers, by their number of rows.

    Steps with guesses and steps without are remembered apart: an hour of the one says nothing new about the other.
    """

    def __init__(self) -> None:
        self._plain, self._guessed = _Sums(), _Sums()

    def record(self, rows: int, seconds: float, *, guessed: bool = False) -> None:
        """A step of ``rows`` rows took ``seconds``."""
        seconds = self.clipped(rows, seconds, guessed=guessed)
        own, other = (self._guessed, self._plain) if guessed else (self._plain, self._guessed)
        own.fade(DECAY)
        other.fade(DECAY_OTHER_KIND)
        own.add(rows, seconds)

    def clipped(self, rows: int, seconds: float, *, guessed: bool = False) -> float:
        """The seconds that a step of ``rows`` rows counts with.

        While little is known, a step of r rows may take as long as r steps.
        """
        line, own = self.fit(), self._guessed if guessed else self._plain
        if line is None:
            return seconds
        base, slope = line
        expected = base + slope * rows if own.weight >= TRUSTED_WEIGHT else (base + slope) * rows
        return min(seconds, MAX_BELIEVED_RATIO * expected)

    @property
    def guessed(self) -> int:
        """Steps with guesses that are remembered."""
        return int(self._guessed.weight)

    def discount_drafted(self) -> None:
        """Steps with guesses are long ago: the machine may have changed since."""
        self._guessed.fade(0.1)

    def fit(self) -> tuple[float, float] | None:
        """(seconds of a step without rows, seconds of each row); None before anything was measured.

        Its slope is that of least squares, drawn to ``FIRST_SLOPE`` where the numbers of rows were too much alike to
        tell; it goes through the middle of the steps without guesses, which guessing is compared with.
        """
        plain, guessed = self._plain, self._guessed
        weight = plain.weight + guessed.weight
        if weight == 0.0:
            return None
        rows, seconds = (plain.rows + guessed.rows) / weight, (plain.seconds + guessed.seconds) / weight
        spread = plain.rows2 + guessed.rows2 - weight * rows * rows
        together = plain.product + guessed.product - weight * rows * seconds
        slope = (together + FIRST_SLOPE_WEIGHT * FIRST_SLOPE * seconds) / (spread + FIRST_SLOPE_WEIGHT)
        slope = max(slope, 0.0)
        if plain.weight > 0.0:
            rows, seconds = plain.rows / plain.weight, plain.seconds / plain.weight
        return max(seconds - slope * rows, 0.0), slope


class AcceptanceByKind:
    """How often a guessed token stood, by its kind: what was known of it before, and how many guesses stood before it
    in the same step."""

    def __init__(self, first: Sequence[float]) -> None:
        """``first``: what is thought of each kind before it was tried."""
        self._tries = [PRIOR_TRIES] * len(first)
        self._stood = [PRIOR_TRIES * share for share in first]

    def rate(self, kind: int) -> float:
        """Expected share, 0 to 1; kinds beyond the last are like the last."""
        kind = min(kind, len(self._tries) - 1)
        return self._stood[kind] / self._tries[kind]

    @property
    def best(self) -> float:
        """The rate of the kind that is accepted most often."""
        return max(stood / tries for stood, tries in zip(self._stood, self._tries, strict=True))

    def record(self, kind: int, guessed: int, stood: int) -> None:
        """The first ``stood`` of ``guessed`` tokens, the first of this kind, were accepted; the next one, if any, was
        wrong."""
        last = len(self._tries) - 1
        for index in range(min(stood + 1, guessed)):
            own = min(kind + index, last)
            self._tries[own] = DECAY * self._tries[own] + 1
            self._stood[own] = DECAY * self._stood[own] + (index < stood)

    def chain_rates(self, kind: int, most: int) -> Iterator[float]:
        """For each of ``most`` guessed tokens: how likely it and all before it stand."""
        likely = 1.0
        for index in range(most):
            likely *= self.rate(kind + index)
            yield likely


class AcceptanceByDepth:
    """How often guesses of one step stand, one behind the other.  What little is known of one is thought to be as of
    the one before it."""

    def __init__(self, first: float, most: int) -> None:
        """``first``: what is thought of the first guess before it was tried."""
        self._first = first
        self._tries, self._stood = [0.0] * most, [0.0] * most

    def record(self, guessed: int, stood: int) -> None:
        """The first ``stood`` of ``guessed`` tokens were accepted; the next one, if any, was wrong."""
        for index in range(min(stood + 1, guessed, len(self._tries))):
            self._tries[index] = DECAY * self._tries[index] + 1
            self._stood[index] = DECAY * self._stood[index] + (index < stood)

    def chain_rates(self, most: int) -> list[float]:
        """For each of ``most`` guessed tokens: how likely it and all before it stand."""
        likely, share, chain = 1.0, self._first, list[float]()
        for tries, stood in zip(self._tries[:most], self._stood[:most], strict=True):
            share = (stood + PRIOR_TRIES * share) / (tries + PRIOR_TRIES)
            likely *= share
            chain.append(likely)
        return chain


def cannot_pay(rows: int, best: float, line: tuple[float, float]) -> bool:
    """Whether drafts accepted at the rate ``best`` would lower the tokens a second of a step of ``rows`` rows."""
    base, slope = line
    return best * (base + slope * rows) <= slope * rows


def choose_draft_lengths(
    rows: int, chains: Sequence[Sequence[float]], line: tuple[float, float], most: int
) -> list[int]:
    """How many tokens of each draft to compute with the ``rows`` that are computed anyway; ``most`` in all.

    ``chains``: of each guess, how likely its first token stands, its first two, and so on (never growing).  Tokens a
    second are greatest when the likeliest are taken for as long as each brings more than the average so far.
    """
    base, slope = line
    tokens, seconds = float(rows), base + slope * rows
    plain = tokens / seconds if seconds > 0 else 0.0
    taken = [0] * len(chains)
    heap = [(-chain[0], index) for index, chain in enumerate(chains) if chain]
    heapify(heap)
    left = most
    while heap and left > 0:
        likely, index = -heap[0][0], heap[0][1]
        if likely * seconds <= slope * tokens:
            break
        tokens, seconds, left = tokens + likely, seconds + slope, left - 1
        taken[index] += 1
        chain = chains[index]
        if taken[index] < len(chain):
            heapreplace(heap, (-chain[taken[index]], index))
        else:
            heappop(heap)
    if seconds > 0 and tokens / seconds < MIN_GAIN * plain:
        return [0] * len(chains)
    return taken


def best_depth(
    rows: int, chain: Sequence[float], line: tuple[float, float], passes: tuple[float, float]
) -> tuple[int, float]:
    """How many tokens to guess for every row where guessing itself takes time, and how many times the tokens a second
    that promises; at least one token, whatever it promises.

    ``chain``: how likely the first guess stands, the first two, and so on; not empty.  ``passes``: seconds of the first
    guess and of each further one, all rows together.
    """
    base, slope = line
    first, further = passes
    plain = base + slope * rows
    tokens, best, depth = 1.0, 0.0, 1
    for count, likely in enumerate(chain, 1):
        tokens += likely
        seconds = base + slope * rows * (1 + count) + first + further * (count - 1)
        gain = tokens * plain / seconds if seconds > 0 else tokens
        if gain > best:
            best, depth = gain, count
    return depth, best


INITIAL_BUDGET = 3.0
"""Plain steps' time that may be lost before guessing is switched off for the first time."""

MAX_BUDGET = 15.0
"""The same after a success, however long."""

REOPEN_BUDGET = 2.0
"""What is left of it when guessing is tried again."""

BUDGET_PER_STEP = 0.004
"""Part of a plain step's time that each step adds: what may be lost by trying again, in the long run."""

MAX_LOSS = 4.0
"""The largest loss of one step in plain steps: what is beyond was not the draft's fault."""


class SpeculationBudget:
    """Open while there is something to lose.  Closed, it opens again when enough of it has been saved."""

    def __init__(self) -> None:
        self._left = INITIAL_BUDGET
        self.is_open = True

    def on_step(self) -> bool:
        """A step was computed, with guesses or without.  True if the account has just been opened again."""
        self._left = min(max(INITIAL_BUDGET, self._left), self._left + BUDGET_PER_STEP)
        if self.is_open or self._left < REOPEN_BUDGET:
            return False
        self.is_open = True
        return True

    def record(self, gained: float) -> None:
        """What a step gained, in plain steps: its tokens less the time that it took,
        guessing included; negative: less."""
        self._left = min(MAX_BUDGET, self._left + max(gained, -MAX_LOSS))
        if self._left <= 0.0:
            self.is_open = False
