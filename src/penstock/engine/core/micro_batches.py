"""Plans that are in flight at the same time, as a pipeline of several stages needs them: one micro-batch each.

::

    stage 0  | 0 | 1 | 2 | 0 | 1 | ...       a micro-batch is planned when it is free, and committed when its last
    stage 1      | 0 | 1 | 2 | 0 | ...       stage has sampled, whatever the others do meanwhile

A request takes part in one micro-batch at a time.  Where they end in the order in which they began, as in a pipeline,
the chunks of its prompt may follow each other: each micro-batch has another one.  Pages that a request gives up while
it is in flight are held until those micro-batches are committed, because they may still be written to (``memory``).  A
request that must give way to one of another micro-batch is not computed further until that one is planned again.

With one micro-batch, as in an engine without stages, none of this applies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from penstock.engine.core.cost_model import StepWork
from penstock.engine.core.kv_cache_manager import KvCacheManager
from penstock.engine.core.plan import StepPlan
from penstock.engine.core.request import Request


class MicroBatches:
    """The plans in flight, at most ``count``."""

    def __init__(self, count: int, memory: KvCacheManager, *, in_order: bool = False) -> None:
        """``in_order``: they are committed in the order in which they were planned."""
        self._count = count
        self._memory = memory
        self._chunks_follow = in_order and not memory.has_windows
        self._in_flight: dict[int, tuple[StepPlan, StepWork]] = {}
        self._preemption_targets: dict[int, Set[Request]] = {}  # of the last plan of each

    @property
    def free(self) -> Sequence[int]:
        """Micro-batches to plan now; first those that could not preempt a request in flight."""
        free = [number for number in range(self._count) if number not in self._in_flight]
        return sorted(free, key=lambda number: not self._preemption_targets.get(number))

    def excluded(self, micro_batch: int) -> Set[Request]:
        """Requests that ``micro_batch`` must not compute: others in flight will preempt them when planned next."""
        if not self.several:
            return frozenset()
        others = ((number, own) for number, own in self._preemption_targets.items() if number != micro_batch)
        return frozenset().union(*(own for number, own in others if number in self._in_flight))

    @property
    def several(self) -> bool:
        """Whether a plan computes a share of the running requests."""
        return self._count > 1

    def eligible(
        self, requests: Collection[Request], excluded: Set[Request], pageless: Set[Request]
    ) -> Collection[Request]:
        """The ``requests`` that the next plan may compute: an even share of those that are not in flight.

        ``pageless``: they need a page, and none can be taken for them now.  Others have their places in the share, or
        it would compute nothing while those who hold the pages wait for their turn.
        """
        if not self.several:
            return requests
        share = -(-len(requests) // self._count)
        left_out = excluded | pageless
        follow = self._chunks_follow
        free = [r for r in requests if r not in left_out and (not r.in_flight or (follow and r.has_more_chunks))]
        return sorted(free, key=lambda request: request.order)[:share]

    def begin(self, plan: StepPlan, work: StepWork, preemption_targets: Set[Request]) -> None:
        """``plan`` is in flight.  Its preemption targets are in flight elsewhere and give way later."""
        self._in_flight[plan.micro_batch] = (plan, work)
        if self._count > 1:
            self._preemption_targets[plan.micro_batch] = preemption_targets
            for row in plan.rows:
                row.request.in_flight += 1
                if row.samples:
                    row.request.draws_in_flight = True
                else:
                    row.request.chunks_in_flight += row.count

    def is_free(self, micro_batch: int) -> bool:
        """Whether a plan for ``micro_batch`` can be made."""
        return 0 <= micro_batch < self._count and micro_batch not in self._in_flight

    def finish(self, plan: StepPlan) -> StepWork:
        """``plan`` was computed.  Raises RuntimeError when it is not in flight."""
        flight = self._in_flight.get(plan.micro_batch)
        if flight is None or flight[0] is not plan:
            raise RuntimeError("this is not the plan in flight")
        del self._in_flight[plan.micro_batch]
        if self._count > 1:
            for row in plan.rows:
                if row.samples:
                    row.request.draws_in_flight = False
                else:
                    row.request.chunks_in_flight -= row.count
            self._memory.release_in_flight(row.request for row in plan.rows)
        return flight[1]
