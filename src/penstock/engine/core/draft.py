"""A plan in the making: rows granted so far, and what is left of the step's budgets.

Knows tokens, pages' size and seconds; not who should be granted, nor whose pages they are.
"""

from __future__ import annotations

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost import StepCost, Work
from penstock.engine.core.plan import Row
from penstock.engine.core.request import Request


class Draft:
    """Filled by the scheduler in the order of service: first rows that draw with every step, then chunks."""

    __slots__ = ("_budget_s", "_config", "_cost", "admitted", "chunks", "preempted", "rows", "steps", "work")

    def __init__(self, config: SchedulerConfig, cost: StepCost) -> None:
        self._config = config
        self._cost = cost
        self._budget_s = 0.0
        self.rows: list[Row] = []
        self.work = Work()
        self.steps = 1
        self.chunks = 0
        self.preempted = 0
        self.admitted: list[Request] = []

    def close_decodes(self) -> None:
        """All rows with a single missing token are in; the rest of the budget is for chunks."""
        work, count = self.work, len(self.rows)
        for row in self.rows:
            if row.draft:
                work.add(row.start, 1 + len(row.draft), 1 + len(row.draft))
            else:
                work.add(row.start, 1, 1)
        budget_ms = self._config.step_budget_ms if count else self._config.prefill_step_budget_ms
        self._budget_s = budget_ms / 1000

    @property
    def drafted(self) -> bool:
        """Does any row have draft tokens?"""
        return any(row.draft for row in self.rows)

    def affordable_steps(self, limit: int) -> int:
        """How often the rows can be repeated within the time budget, at least once."""
        one = self._cost.predict(self.work)
        return max(1, min(limit, int(self._budget_s / one) if one > 0 else limit))

    def can_begin(self, request: Request) -> bool:
        """Is enough left of the budgets for a first chunk that is worth it?  The first of a step always is."""
        whole = self._config.whole_prompts
        piece = request.known if whole else min(request.known, self._config.page_tokens, self._config.max_chunk_tokens)
        left = self._config.max_step_tokens - self.work.tokens
        return self.chunks == 0 or min(left, self._affordable(0)) >= piece

    def _affordable(self, start: int, *, draws_each: bool = False) -> int:
        return self._cost.affordable(self.work, self._budget_s, start, draws_each=draws_each)

    def add_chunk(self, request: Request) -> bool:
        """Grant ``request`` as many of its missing tokens as fit.  False when it must wait for another step.

        The first chunk of a step always gets something, up to the end of a page if tokens allow: nobody starves
        behind a budget.  A chunk that is cut ends with a page when it can; whole prompts are never cut.
        """
        config, size, start = self._config, self._config.page_tokens, request.computed
        missing = request.known - start
        left = config.max_step_tokens - self.work.tokens
        each = request.wants_prompt_logprobs
        want = missing if config.whole_prompts else min(missing, config.max_chunk_tokens)
        count = min(want, left, self._affordable(start, draws_each=each))
        to_page_end = min(want, size - start % size)
        if config.whole_prompts and count < missing:
            if self.rows:
                return False
            count = missing
        elif count < to_page_end:
            if self.chunks or left < 1:
                return False
            count = min(to_page_end, left)
        elif count < missing:
            count = max((start + count) // size * size - start, 0) or count
        samples = count == missing
        self.rows.append(Row(request, start, count, samples))
        self.work.add(start, count, count if each else int(samples))
        self.chunks += 1
        return True
