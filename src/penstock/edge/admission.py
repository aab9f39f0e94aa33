"""How much may wait: requests without a first token, their prompt tokens, and bodies not yet turned into tokens.

Everything is bounded and every refusal says when to come back.  Whoever is let in holds a permit, and leaving its
scope gives back what it still holds.  Knows nothing about HTTP or what a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.clock import Clock
from penstock.config.schema import Limits
from penstock.errors import QueueFull

_MAX_RETRY_AFTER_S = 60
_SMOOTHING = 0.1


class Admission:
    """The queue as the door sees it: a count, not a list."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self.requests = 0  # without a first token
        self.tokens = 0  # prompt tokens of those
        self.body_bytes = 0  # of bodies that are being read or parsed
        self._wait_s = 1.0  # smoothed time from admission to first token

    def check(self) -> None:
        """Raises QueueFull when there is no room for anything, before anything is read."""
        if self.requests >= self._limits.max_queued_requests:
            raise self._full(f"{self.requests} requests are waiting, the limit is {self._limits.max_queued_requests}.")

    @contextmanager
    def admit(self, costs: Sequence[int]) -> Iterator[Permit]:
        """Room for one engine request a cost, in prompt tokens.

        Raises QueueFull, except when nobody waits: then even what is larger than the whole queue may try.
        """
        requests, tokens = len(costs), sum(costs)
        if self.requests:
            if self.requests + requests > self._limits.max_queued_requests:
                raise self._full(
                    f"{self.requests} requests are waiting and this one adds {requests}, "
                    f"the limit is {self._limits.max_queued_requests}."
                )
            if self.tokens + tokens > self._limits.max_queued_tokens:
                raise self._full(
                    f"{self.tokens} prompt tokens are waiting and this request adds {tokens}, "
                    f"the limit is {self._limits.max_queued_tokens}."
                )
        self.requests += requests
        self.tokens += tokens
        permit = Permit(self, costs)
        try:
            yield permit
        finally:
            permit.give_back()

    @contextmanager
    def body(self) -> Iterator[BodyHold]:
        """Room for one request's body, taken as it grows."""
        hold = BodyHold(self)
        try:
            yield hold
        finally:
            hold.release()

    def grow_body(self, size: int) -> None:
        """Raises QueueFull when all bodies together would be too much."""
        if self.body_bytes and self.body_bytes + size > self._limits.max_pending_body_bytes:
            raise self._full(
                f"{self.body_bytes} bytes of requests are being read, "
                f"the limit is {self._limits.max_pending_body_bytes}."
            )
        self.body_bytes += size

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.now()

    def leave(self, tokens: int, waited_s: float | None) -> None:
        """One engine request waits no longer; ``waited_s`` is None when it never got a token."""
        self.requests -= 1
        self.tokens -= tokens
        if waited_s is not None:
            self._wait_s += _SMOOTHING * (waited_s - self._wait_s)

    def _full(self, why: str) -> QueueFull:
        retry_after = min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._wait_s)))
        return QueueFull(f"The server is at its limit: {why} Retry in {retry_after} s.", retry_after=retry_after)


class Permit:
    """The places of one HTTP request in the queue."""

    def __init__(self, admission: Admission, costs: Sequence[int]) -> None:
        self._admission = admission
        self._waiting = dict(enumerate(costs))
        self._since = admission.now()

    def started(self, choice: int) -> None:
        """This choice has its first token.  Harmless when said twice."""
        tokens = self._waiting.pop(choice, None)
        if tokens is not None:
            self._admission.leave(tokens, self._admission.now() - self._since)

    def give_back(self) -> None:
        """Nothing of this request waits any longer."""
        while self._waiting:
            _, tokens = self._waiting.popitem()
            self._admission.leave(tokens, None)


class BodyHold:
    """The bytes of one body."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held = 0

    def grow(self, size: int) -> None:
        """Raises QueueFull."""
        self._admission.grow_body(size)
        self.held += size

    def release(self) -> None:
        """The body, and what was read out of it, is needed no more.  Harmless when said twice."""
        self._admission.body_bytes -= self.held
        self.held = 0
