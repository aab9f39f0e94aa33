"""A plan in the making: rows granted so far, and what is left of the step's budgets.

Knows tokens, pages' size and seconds; not who should be granted, nor whose pages they are.
"""

from __future__ import annotations

import math
from collections.abc import Set

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost import NOVICE_STEPS, StepCost, Work
from penstock.engine.core.fairness import Line
from penstock.engine.core.gentle import Beside, Bounds, piece_s
from penstock.engine.core.plan import Row
from penstock.engine.core.request import Request
from penstock.types import Leg, RequestId

LEAST_WORK = 2.0
"""A piece is kept brief for others' sake, but never below so many times what a step costs that computes nothing."""

ENDING = 2.0
"""A prompt that ends with it may take so many times as long as a piece that others should not wait for."""


class Draft:
    """Filled by the scheduler in the order of service: first rows that draw with every step, then chunks."""

    __slots__ = (
        *("_beside", "_brief_s", "_budget_s", "_config", "_cost", "_line", "_now", "admitted", "chunks", "filling"),
        *("excluded", "left_out", "preempted", "preemption_targets", "rows", "sitting_out", "steps", "work", "yielded"),
    )

    def __init__(self, config: SchedulerConfig, cost: StepCost, now: float = 0.0) -> None:
        self._config = config
        self._cost = cost
        self._budget_s = 0.0
        self._brief_s = math.inf  # with a piece of a prompt, for the sake of others who may come
        self._line: Line | None = None  # whose prompt is first in the step
        self._now = now
        self._beside: Beside | None = None  # not looked at yet
        self.sitting_out: Set[RequestId] = frozenset()  # whose next token's mask is not there
        self.excluded: Set[Request] = frozenset()  # another micro-batch waits for their pages
        self.preemption_targets: set[Request] = set()  # must give way, and one of them is in flight elsewhere
        self.rows: list[Row] = []
        self.work = Work()
        self.steps = 1
        self.chunks = 0
        self.preempted = 0
        self.yielded = 0  # of a lower class, for a request that was admitted
        self.left_out = 0  # rows of a lower class that had no place in this step
        self.filling = False  # what is granted from now on fills what is left: nothing of it must be granted
        self.admitted: list[Request] = []

    def close_decodes(self, *, batch: bool = False, contended: bool = False) -> None:
        """All rows with a single missing token are in; the rest of the budget is for chunks.

        ``batch``: of batch work alone; ``contended``: somebody else may come any moment and should not wait for long.
        """
        work, count = self.work, len(self.rows)
        for row in self.rows:
            if row.draft:
                work.add(row.start, 1 + len(row.draft), 1 + len(row.draft))
            else:
                work.add(row.start, 1, 1)
        config = self._config
        with_rows_ms = config.batch_step_budget_ms if batch else config.step_budget_ms
        self._budget_s = (with_rows_ms if count else config.prefill_step_budget_ms) / 1000
        if contended:
            rows_s = self._cost.predict(work)
            brief_s = max(config.contended_step_ms / 1000, LEAST_WORK * self._cost.rates[0])
            self._budget_s = min(self._budget_s, rows_s + ENDING * brief_s)
            self._brief_s = min(self._budget_s, rows_s + brief_s)

    @property
    def drafted(self) -> bool:
        """Does any row have draft tokens?"""
        return any(row.draft for row in self.rows)

    @property
    def only_answers(self) -> bool:
        """Is an answer written in every row, without guesses, and did nobody lose a row?"""
        return bool(self.rows) and not (self.chunks or self.preempted or self.drafted)

    def affordable_steps(self, limit: int) -> int:
        """How often the rows can be repeated within the time budget, at least once."""
        if self._config.stoppable:
            return limit
        one = self._cost.predict(self.work)
        return max(1, min(limit, int(self._budget_s / one) if one > 0 else limit))

    def can_begin(self, request: Request) -> bool:
        """Is enough left of the budgets for a first chunk that is worth it?  The first of a step always is."""
        whole = self._config.whole_prompts
        piece = request.known if whole else min(request.known, self._config.page_tokens, self._config.max_chunk_tokens)
        left = self._config.max_step_tokens - self.work.tokens
        if self.chunks == 0 and not self.filling:
            return True
        if self._brief_s == math.inf:
            return min(left, self._affordable(0)) >= piece
        if min(left, self._affordable(0)) >= request.known:
            return True
        return not self._joins(request) and min(left, self._affordable(0, self._brief_s)) >= piece

    def can_add_row(self, request: Request) -> bool:
        """Is enough left of the budgets for one token of an answer more?"""
        tokens = self.work.tokens
        return tokens < self._config.max_step_tokens and self._affordable(request.computed, draws_each=True) >= 1

    def add_row(self, request: Request) -> None:
        """Grant ``request`` the one token that it misses."""
        self.rows.append(Row(request, request.computed, 1, True))
        self.work.add(request.computed, 1, 1)

    def _affordable(self, start: int, within_s: float | None = None, *, draws_each: bool = False) -> int:
        budget_s = self._budget_s if within_s is None else min(within_s, self._budget_s)
        return self._cost.affordable(self.work, budget_s, start, draws_each=draws_each)

    def _joins(self, request: Request) -> bool:
        """Would a piece of it make another line wait that comes before it in this step?"""
        return self._brief_s < math.inf and self._line is not None and self._line != request.line

    def _piece_s(self, request: Request) -> float:
        """How long the step may be with a piece of this prompt."""
        bounds = Bounds(self._config.long_prompt_ms / 1000, self._config.gentle_read_s)
        if not bounds.target_s or not self.rows or self._cost.measured < NOVICE_STEPS:
            return math.inf
        if self._beside is None:
            answers = sum(row.count == 1 and row.request.leg is not Leg.PREFILL for row in self.rows)
            self._beside = Beside(answers, self._cost.predict(self.work), self._now)
        rest = Work()
        rest.add(request.computed, request.missing, 1)
        return self._cost.predict(self.work) + piece_s(request, self._cost.predict(rest), self._beside, bounds)

    def add_chunk(self, request: Request) -> bool:
        """Grant ``request`` as many of its missing tokens as fit.  False when it must wait for another step.

        The first chunk of a step always gets something, up to the end of a page if tokens allow: nobody starves
        behind a budget.  A chunk that is cut ends with a page when it can; whole prompts are never cut.  While others
        are there who should not wait for long, a chunk that is cut is brief, and is no part of a step that has
        another line's before it: it would keep that one waiting, and ends nothing.
        """
        config, size, start = self._config, self._config.page_tokens, request.computed
        missing = request.known - start
        left = config.max_step_tokens - self.work.tokens
        each = request.wants_prompt_logprobs
        want = missing if config.whole_prompts else min(missing, config.max_chunk_tokens)
        count = min(want, left, self._affordable(start, self._piece_s(request), draws_each=each))
        if count < missing:
            count = min(count, self._affordable(start, self._brief_s, draws_each=each))
        to_page_end = min(want, size - start % size)
        if config.whole_prompts and count < missing:
            if self.rows:
                return False
            count = missing
        elif count < missing and self._joins(request):
            return False
        elif count < to_page_end:
            if self.chunks or self.filling or left < 1:
                return False
            count = min(to_page_end, left)
        elif count < missing:
            count = max((start + count) // size * size - start, 0) or count
        samples = count == missing
        self.rows.append(Row(request, start, count, samples))
        self.work.add(start, count, count if each else int(samples))
        self.chunks += 1
        self._line = self._line or request.line
        return True
