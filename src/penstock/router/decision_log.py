"""The decisions made for the latest requests, for whoever asks why a worker was chosen.

Bounded both in requests and in decisions a request.  Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from penstock.router.decide import Chosen, Decision
from penstock.types import Leg, RequestId


class DecisionLog:
    """Keeps the last ``per_request`` decisions of each of the last ``requests`` requests; none when either is 0."""

    def __init__(self, requests: int = 1024, per_request: int = 16) -> None:
        self._requests = requests if per_request else 0
        self._per_request = per_request
        self._decisions: OrderedDict[RequestId, deque[Decision]] = OrderedDict()

    def add(self, request: RequestId, decision: Decision) -> None:
        """Keep one more; the oldest make room."""
        if not self._requests:
            return
        kept = self._decisions.get(request)
        if kept is None:
            while len(self._decisions) >= self._requests:
                self._decisions.popitem(last=False)
            kept = self._decisions[request] = deque(maxlen=self._per_request)
        kept.append(decision)

    def of(self, request: RequestId) -> tuple[Decision, ...]:
        """The request's decisions, oldest first; none when they were forgotten or never made."""
        return tuple(self._decisions.get(request, ()))

    def explain(self, request: RequestId) -> list[dict[str, Any]]:
        """The same as JSON."""
        decisions = self.of(request)
        return [as_json(decision, decisions[0].at) for decision in decisions]

    def explain_in_a_line(self, request: RequestId) -> str | None:
        """The latest of them, as a header tells it."""
        decisions = self.of(request)
        return in_a_line(decisions[-1]) if decisions else None


def as_json(decision: Decision, arrival: float) -> dict[str, Any]:
    """A decision with all its numbers, as ``GET /debug/requests/{id}`` tells it; times count from ``arrival``."""
    return {
        "at_s": round(decision.at - arrival, 6),
        "policy": decision.policy,
        "identity": decision.identity.system_fingerprint if decision.identity else None,
        "because": decision.because or "nobody can serve it now",
        "legs": [
            {"leg": chosen.leg.value, "worker": chosen.worker, "incarnation": chosen.incarnation}
            | {"tokens_to_compute": chosen.due.tokens, "pages": chosen.due.pages}
            for chosen in decision.legs
        ],
        "candidates": [
            {"leg": reason.leg.value, "worker": reason.worker, "chosen": reason.chosen, "because": reason.because}
            | {name: round(value, 9) for name, value in reason.numbers.items()}
            for reason in decision.reasons()
            if reason.leg is not None
        ],
        "not_candidates": {reason.worker: reason.because for reason in decision.reasons() if reason.leg is None},
        "candidates_not_told": sum(weighed.others for weighed in decision.weighed),
    }


def in_a_line(decision: Decision) -> str:
    """A decision in the characters of a header: who, why, and the chosen ones' numbers."""
    if not decision.legs:
        return f"policy={decision.policy}; nobody"
    chosen = {(reason.leg, reason.worker): reason.numbers for reason in decision.reasons() if reason.chosen}
    parts = [f"policy={decision.policy}", f"why={decision.because}"]
    for leg in sorted(decision.legs, key=_order):
        numbers = " ".join(f"{name}={value:.6g}" for name, value in chosen.get((leg.leg, leg.worker), {}).items())
        parts.append(f"{leg.leg.value}={leg.worker} {numbers}".strip())
    return "; ".join(parts)


def _order(chosen: Chosen) -> int:
    return list(Leg).index(chosen.leg)
