"""Who is granted what in the next step: running rows first, then prompt chunks, then new requests.

There are no phases, only counts: ``known - computed`` of a request is what a step may grant it, whether those are
prompt tokens, tokens to recompute after a preemption, or the one token that was drawn last.
"""

from __future__ import annotations

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost import StepCost
from penstock.engine.core.draft import Draft
from penstock.engine.core.plan import Row
from penstock.engine.core.request import OrderKey, Request, Status
from penstock.engine.core.speculation import Speculator
from penstock.engine.core.table import RequestTable
from penstock.types import Leg


def order(request: Request) -> OrderKey:
    """First served first."""
    return request.order


def grows(request: Request) -> bool:
    """Will need more pages than it has."""
    return request.room < request.last and request.leg is not Leg.PREFILL


class Planner:
    """Drafts steps from the table, and moves requests in it by admission and preemption."""

    def __init__(
        self, config: SchedulerConfig, cost: StepCost, table: RequestTable, speculator: Speculator | None = None
    ) -> None:
        self._config = config
        self._cost = cost
        self._table = table
        self._memory = table.memory
        self._speculator = speculator
        # Each running request gets at least one token of a step, so a long prompt never starves behind many answers.
        self._max_active = min(config.max_running, config.max_step_tokens)

    def may_rest(self) -> bool:
        """Is there nothing to compute but answers that go on?"""
        head = self._table.queue.head()
        return (head is None or head.leg is Leg.DECODE) and all(r.missing == 1 for r in self._table.running.values())

    def draft(self, max_steps: int, *, resting: bool = False) -> Draft:
        """The next step, or up to ``max_steps`` equal ones when only answers are written and nobody waits.

        No one is admitted in a step that preempted: the room is for those who needed it.  ``resting``: nothing is
        computed, but room is given to those who wait for pages from elsewhere.
        """
        draft = Draft(self._config, self._cost)
        if resting:
            self._admit(draft, resting=True)
            return draft
        chunked = sorted(self._grant_single_tokens(draft), key=order)
        table = self._table
        only_answers = bool(draft.rows) and not chunked and not table.queue
        if self._speculator is not None and only_answers and not draft.preempted:
            self._speculate(draft, self._speculator)
        draft.close_decodes()
        if max_steps > 1 and only_answers and not table.reserved and not draft.drafted:
            self._grant_several(draft, max_steps)
        granted = [draft.add_chunk(request) for request in chunked]
        if all(granted) and not draft.preempted:
            self._admit(draft)
        return draft

    def _grant_single_tokens(self, draft: Draft) -> list[Request]:
        """A row for every running request with one missing token, and a page if it needs one; returns the others."""
        rows, others, needy = draft.rows, list[Request](), list[Request]()
        for request in self._table.running.values():
            computed = request.computed
            if request.known - computed != 1:
                others.append(request)
                continue
            if computed >= request.room:
                needy.append(request)
            rows.append(Row(request, computed, 1, True))
        if needy and self._make_room(needy, draft):
            rows[:] = [row for row in rows if row.start < row.request.room]  # the preempted have no room at all
            others = [request for request in others if request.status is Status.RUNNING]
        return others

    def _make_room(self, needy: list[Request], draft: Draft) -> bool:
        """A block for each of ``needy``, oldest first, taken from the youngest when none is left.

        True when somebody lost a row by it.  Prefill legs never give way: a receiver may be copying from them, they
        need no further page, and they end by themselves.  Who could take from nobody but itself misses a step.
        """
        disturbed = False
        table = self._table
        for request in sorted(needy, key=order):
            while request.status is Status.RUNNING and not self._memory.grow(request, request.computed + 1):
                disturbed = True
                victims = [r for r in (*table.running.values(), *table.reserved.values()) if r.leg is not Leg.PREFILL]
                if len(victims) == 1:
                    break
                table.preempt(max(victims, key=order))
                draft.preempted += 1
        return disturbed

    def _speculate(self, draft: Draft, speculator: Speculator) -> None:
        """Draft tokens behind the rows, within the step's tokens and without taking a page from anybody."""
        rows = draft.rows
        if any(row.request.leg is Leg.PREFILL for row in rows):
            return  # the first token is all that is drawn there
        left = self._config.max_step_tokens - len(rows)
        for index, tokens in enumerate(speculator.propose(rows)):
            row = rows[index]
            most = min(len(tokens), left)
            if most and row.start + 1 + most > row.request.room:
                self._memory.grow(row.request, row.start + 1 + most)
                most = min(most, row.request.room - row.start - 1)
            if most > 0:
                rows[index] = Row(row.request, row.start, 1, True, tokens[:most])
                left -= most

    def _grant_several(self, draft: Draft, limit: int) -> None:
        """Repeat the rows: until the first could end by its length, as time allows, while pages last."""
        if any(row.request.leg is Leg.PREFILL for row in draft.rows):
            return
        limit = min(limit, *(row.request.last - row.request.known for row in draft.rows))
        steps = draft.affordable_steps(limit)
        fresh = sum(self._memory.missing_pages(row.request, row.start + steps) for row in draft.rows)
        if steps > 1 and fresh <= self._memory.pool.available:
            draft.steps = steps
            for row in draft.rows:
                self._memory.grow(row.request, row.start + steps)

    def _admit(self, draft: Draft, *, resting: bool = False) -> None:
        """Let in whoever waits, strictly in order, while there is room, and work left to grant in this step.

        A block for each request that still grows stays free: who is admitted into the last one is preempted at once.
        """
        table, groups = self._table, self._memory.groups
        if not table.queue:
            return
        growing = sum(map(grows, table.running.values())) + sum(map(grows, table.reserved.values()))
        while (request := table.queue.head()) is not None:
            elsewhere = request.leg is Leg.DECODE
            if table.active >= self._max_active or not (elsewhere or (not resting and draft.can_begin(request))):
                return
            if self._memory.admit(request, spare=growing * groups) is not None:
                return
            growing += grows(request)
            table.admit(request)
            draft.admitted.append(request)
            if not elsewhere and not draft.add_chunk(request):
                return
