"""Three rules that slow something down for the sake of others.

Even pacing: while prompts are processed by a worker that borrows this one's cores, a few answers decoded at full speed
take a core to read weights that many could share.  So after a step of decode rows this worker rests for as long as the
same step would have taken longer with the requests that wait for their prompts, and lends its cores meanwhile.  No
answer becomes slower than it is about to be anyway, nor than half its speed, nor than the step's budget.

Long prompts: a prompt that fills steps up to their budget makes every answer that slow for as long as it is processed.
So a prompt whose prefill takes ``2 * r`` targets for a first token (``SchedulerConfig.long_prompt_ms``) with r > 1,
alone on the worker, is stretched.  The factor is the smallest of r^3, ``MAX_STRETCH`` and 1 + decode rows; the time is
capped by ``SchedulerConfig.gentle_read_s`` and half the remaining deadline.  A response that has begun is recomputed at
full speed.  Later requests are not delayed: the pieces of a long prompt leave most of each step to others.  If it
falls behind, or no answer is decoded, it has as much of a step as there is.

Starvation: work of lower classes fills what the first one leaves, which may be nothing.  Once nothing of a class was
computed for ``patience_s``, one request of it is promoted to the first class for good: the first that runs, or else
the first that waits.  So every request ends, and only one promoted request of a class runs at a time.

Pure.  Knows no cores, no pages and no queue but the order of its heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.config.limits import VERY_LONG_PROMPT_TARGETS
from penstock.engine.core.cost_model import StepCostModel, StepWork
from penstock.engine.core.request import Request
from penstock.engine.core.request_table import RequestTable
from penstock.types import RequestStage

MAX_REST_RATIO = 2.0
"""The longest step and rest together, in lengths of the step."""

MIN_REST_S = 0.002
"""A shorter rest is not worth waking other workers for."""


class EvenPacing:
    """Decides when the next step of decode rows may begin."""

    def __init__(self, cost: StepCostModel, budget_s: float) -> None:
        self._cost = cost
        self._budget_s = budget_s
        self.until = 0.0

    def on_step(self, work: StepWork, awaiting: int, seconds: float, now: float) -> None:
        """A step of answers alone, ``work``, ended now, and ``awaiting`` more answers could not be in it yet."""
        self.until = 0.0
        if awaiting == 0 or work.tokens == 0:
            return
        rows = work.tokens + awaiting
        together = StepWork(tokens=rows, pairs=work.pairs * rows // work.tokens, draws=work.draws + awaiting)
        pace = min(self._cost.predict(together), MAX_REST_RATIO * self._cost.predict(work), self._budget_s)
        rest = pace - seconds  # none after a step that somebody else has held up
        if rest >= MIN_REST_S:
            self.until = now + rest


MAX_STRETCH = 8.0
"""The largest factor by which a prompt is stretched; responses then take a seventh longer meanwhile."""


class StepSoFar(NamedTuple):
    """The step so far, and when it begins."""

    decode_rows: int
    decode_s: float  # predicted seconds of a step with them alone
    now: float


class LongPromptLimits(NamedTuple):
    """Which prompts are long, and how long they may take."""

    target_s: float  # for a first token
    most_s: float  # nothing takes longer for being read gently


def long_prompt_share_s(request: Request, left_s: float, so_far: StepSoFar, bounds: LongPromptLimits) -> float:
    """Seconds of a step that may go to this prompt; ``left_s``: the time of the rest of its prefill.  May be inf.

    The first call with decode rows in the step sets ``Request.paced_until``.
    """
    if not so_far.decode_rows or not bounds.target_s or request.rank or request.output:
        return math.inf
    if request.paced_until is None:
        times = min((left_s / (VERY_LONG_PROMPT_TARGETS * bounds.target_s)) ** 3, MAX_STRETCH, 1.0 + so_far.decode_rows)
        may_s = bounds.most_s
        if request.deadline is not None:
            may_s = min(may_s, (request.deadline - so_far.now) / 2)
        request.paced_until = so_far.now + min(left_s * times, may_s) if times > 1.0 else 0.0
    over_s = request.paced_until - so_far.now
    return so_far.decode_s * left_s / (over_s - left_s) if over_s > left_s else math.inf


class StarvationGuard:
    """Promotes requests of classes that were left out for too long."""

    def __init__(self, table: RequestTable, patience_s: float) -> None:
        self._table = table
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # rank -> when something of it was computed last, or could first have been

    def promote_overdue(self, now: float) -> int | None:
        """Promote overdue requests.  Returns the rank of the first class with anything to do; None: there is none."""
        table = self._table
        ranks = {request.rank for request in table.running.values()} | table.queue.ranks()
        first = min(ranks, default=None)
        if len(ranks) < 2:
            self._since.clear()
            return first
        self._since = {rank: self._since.get(rank, now) for rank in sorted(ranks) if rank != first}
        for rank, since in self._since.items():
            if now - since >= self._patience_s:
                self._promote(rank)
                self._since[rank] = now
                first = 0
        return first

    def on_served(self, ranks: set[int], now: float) -> None:
        """Requests of these classes are computed now."""
        for rank in ranks & self._since.keys():
            self._since[rank] = now

    def _promote(self, rank: int) -> None:
        table = self._table
        runs = [each for each in table.running.values() if each.rank == rank]
        if runs:
            min(runs, key=_order).promote()
            return
        table.queue.promote(next(each for each in table.queue.heads() if each.rank == rank))


def _order(request: Request) -> tuple[bool, tuple[int, float, int]]:
    """Requests for which a receiver holds pages come first: two workers' memory waits for them."""
    return request.stage is not RequestStage.PREFILL, request.order
