"""A worker's heartbeat: with every turn of its loop, and before a step it says when that should be over.

The board tells as well which gateways' processes were replaced, before the new
ones can say a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns

from penstock.engine.core.plan import StepPlan
from penstock.engine.service.worker_service import WorkerService
from penstock.launch.heartbeat import Slot


class Pulse:
    """One for a worker; ``on_plan`` is the loop's."""

    def __init__(
        self,
        slot: Slot,
        gateways: Mapping[str, Slot],
        mailbox: WorkerService,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._slot = slot
        self._gateways = gateways
        self._mailbox = mailbox
        self._now_ns = now_ns
        mailbox.gateways_now = self._incarnations

    def _incarnations(self) -> Mapping[str, int]:
        return {name: slot.read().incarnation for name, slot in self._gateways.items()}

    def on_plan(self, plan: StepPlan) -> None:
        """Called once a turn, right before the plan is computed."""
        self._mailbox.on_plan(plan)
        now = self._now_ns()
        self._slot.beat(now, now + int(plan.predicted_s * 1e9), self._mailbox.reporter.steps)
