"""A worker's heartbeat: with every turn of its loop, and before a step it says when that should be over.

Of two lanes the later one says until when; and while one of them is overdue there is no beat, so that a lane that hangs
is seen, however well the other does.  The board tells as well which gateways' processes were replaced, before the new
ones can say a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns

from penstock.engine.core.plan import Lane, Plan
from penstock.engine.service.mailbox import WorkerMailbox
from penstock.launch.board import Slot


class Pulse:
    """One for a worker; ``on_plan`` is the loop's."""

    def __init__(
        self,
        slot: Slot,
        gateways: Mapping[str, Slot],
        mailbox: WorkerMailbox,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._slot = slot
        self._gateways = gateways
        self._mailbox = mailbox
        self._now_ns = now_ns
        self._due: dict[Lane, int] = {}  # of lanes that something is under way in
        mailbox.gateways_now = self._incarnations

    def _incarnations(self) -> Mapping[str, int]:
        return {name: slot.read().incarnation for name, slot in self._gateways.items()}

    def on_plan(self, plan: Plan) -> None:
        """Called once a turn, right before the plan is computed; of lanes, for each that is planned."""
        self._mailbox.planned(plan)
        now = self._now_ns()
        due = now + int(plan.predicted_s * 1e9)
        if plan.lane is not None:
            self._due.pop(plan.lane, None)
            overdue = any(other < now for other in self._due.values())
            if plan.rows:
                self._due[plan.lane] = due
            if overdue:
                return
            due = max(self._due.values(), default=now)
        self._slot.beat(now, due, self._mailbox.reporter.steps)
