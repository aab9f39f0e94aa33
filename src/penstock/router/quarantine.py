"""Workers that were given up and report again: excluded for a while, then probed, then admitted.

::

    serving --given up--> out --reports again--> held for quarantine_s --probe sent--> probed --answered--> serving
                                        ^                                                |
                                        +------------------ twice as long <--- no answer +

A worker that was stopped for a moment returns within a second or two; one that reports but computes nothing never
answers its probe.  A new incarnation starts anew.  Pure: time is a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.limits import FailoverConfig
from penstock.types import (
    RequestId,
    WorkerId,
)

MAX_UNANSWERED_PROBES = 3


@dataclass(slots=True)
class _Held:
    incarnation: int
    held_s: float
    until: float
    probe: RequestId | None = None  # that is out
    probe_until: float = 0.0
    unanswered: int = 0  # probes, one after the other


class Quarantine:
    """By worker."""

    def __init__(self, config: FailoverConfig, gateway: str) -> None:
        self._config = config
        self._gateway = gateway
        self._held: dict[WorkerId, _Held] = {}
        self._served: dict[WorkerId, tuple[int, float]] = {}  # -> incarnation, and how long it was held the last time
        self._probes: dict[RequestId, WorkerId] = {}
        self._sent = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, worker: WorkerId, incarnation: int, now: float) -> None:
        """It was given up.  Each time of one incarnation is twice as long as the one before."""
        known = self._held.get(worker)
        if known is not None and known.incarnation == incarnation and known.probe is None and now < known.until:
            return
        unanswered = known.unanswered if known is not None and known.incarnation == incarnation else 0
        self._forget_probe(worker)
        before = (known.incarnation, known.held_s) if known is not None else self._served.get(worker, (0, 0.0))
        first, most = self._config.quarantine_s, self._config.quarantine_max_s
        held_s = min(most, 2 * before[1]) if before[0] == incarnation else first
        self._held[worker] = _Held(incarnation, held_s, now + held_s, unanswered=unanswered)

    def contains(self, worker: WorkerId, incarnation: int) -> bool:
        """Whether this incarnation is excluded from routing."""
        held = self._held.get(worker)
        return held is not None and held.incarnation == incarnation

    def remove(self, worker: WorkerId) -> None:
        """Its process is another one, or none."""
        self._forget_probe(worker)
        self._held.pop(worker, None)
        self._served.pop(worker, None)

    def expire_probes(self, now: float) -> list[tuple[WorkerId, int]]:
        """Workers that have not answered a probe in time; they stay in quarantine for longer."""
        late = [(worker, held) for worker, held in self._held.items() if held.probe and now >= held.probe_until]
        for worker, held in late:
            self._forget_probe(worker)
            held.unanswered += 1
            held.held_s = min(self._config.quarantine_max_s, 2 * held.held_s)
            held.until = now + held.held_s
        return [(worker, held.incarnation) for worker, held in late]

    @property
    def hopeless(self) -> frozenset[WorkerId]:
        """Workers that report and never answer probes: a supervisor would have ended them by now."""
        return frozenset(worker for worker, held in self._held.items() if held.unanswered > MAX_UNANSWERED_PROBES)

    def due_for_probe(self, now: float, *, urgent: bool) -> list[tuple[WorkerId, int]]:
        """Workers to be probed now; all of them if ``urgent``, because no other worker can serve."""
        return [
            (worker, held.incarnation)
            for worker, held in self._held.items()
            if held.probe is None and (urgent or now >= held.until)
        ]

    def begin_probe(self, worker: WorkerId, now: float) -> RequestId:
        """A probe is sent to it: under this name."""
        self._sent += 1
        held = self._held[worker]
        held.probe = RequestId(f"probe-{self._gateway}-{worker}-{self._sent}")
        held.probe_until = now + self._config.probe_s
        self._probes[held.probe] = worker
        return held.probe

    def is_probe(self, request: RequestId) -> bool:
        """Whether ``request`` is a pending probe."""
        return request in self._probes

    def on_probe_answered(self, request: RequestId, worker: WorkerId, incarnation: int) -> bool:
        """A token of ``request`` came from this worker.  True when that was its probe: it is let back."""
        if self._probes.get(request) != worker or not self.contains(worker, incarnation):
            return False
        held = self._held.pop(worker)
        del self._probes[request]
        self._served[worker] = incarnation, held.held_s
        return True

    def _forget_probe(self, worker: WorkerId) -> None:
        held = self._held.get(worker)
        if held is not None and held.probe is not None:
            del self._probes[held.probe]
            held.probe = None
