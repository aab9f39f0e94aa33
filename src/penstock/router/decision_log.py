"""The decisions made for the latest requests, for whoever asks why a worker was chosen.

Bounded both in requests and in decisions a request.  Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from penstock.router.decide import Decision
from penstock.types import RequestId


class DecisionLog:
    """Keeps the last ``per_request`` decisions of each of the last ``requests`` requests."""

    def __init__(self, requests: int = 1024, per_request: int = 16) -> None:
        self._requests = requests
        self._per_request = per_request
        self._decisions: OrderedDict[RequestId, deque[Decision]] = OrderedDict()

    def add(self, request: RequestId, decision: Decision) -> None:
        """Keep one more; the oldest make room."""
        kept = self._decisions.get(request)
        if kept is None:
            while len(self._decisions) >= self._requests:
                self._decisions.popitem(last=False)
            kept = self._decisions[request] = deque(maxlen=self._per_request)
        kept.append(decision)

    def of(self, request: RequestId) -> tuple[Decision, ...]:
        """The request's decisions, oldest first; none when they were forgotten or never made."""
        return tuple(self._decisions.get(request, ()))
