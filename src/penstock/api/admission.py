"""Admission control: bounds requests without a first token, their prompt tokens, and unparsed bodies.

Every bound is finite and every refusal says when to retry.  What may wait for workers scales with the number of
workers that are ready for prefill.  An admitted request holds a permit, and leaving its scope releases what it still
holds.  A queue key is a tenant's requests of one class.  Where there are several, none may take more of the queue than
it leaves free (dynamic thresholds: Choudhury, Hahne 1998), so there is always room for a newcomer.  Knows nothing
about HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.errors import QueueFull
from penstock.types import TOKEN_BYTES

MAX_RETRY_AFTER_S = 3600

PROMPT_TOKEN_BYTES = TOKEN_BYTES + 5
"""What a token of a prompt takes in a gateway for as long as its request is open: itself, and its part of the hash of
its block (81 bytes for ``PAGE_TOKENS``, with the object that it is)."""

_SMOOTHING = 0.1


class QueueKey(NamedTuple):
    """A tenant's requests of one class."""

    service: int = 0  # the class: lower ones are served first
    tenant: str = ""
    weight: float = 1.0


DEFAULT_QUEUE = QueueKey()
"""Of requests without a tenant."""


class _Bounds(NamedTuple):
    """The bounds of the queue."""

    requests: int
    tokens: int


@dataclass(slots=True)
class _QueueDepth:
    """What waits under one key."""

    requests: int = 0
    tokens: int = 0


class Admission:
    """Counts what waits in a gateway; it holds no requests itself."""

    def __init__(self, limits: RequestLimits, clock: Clock, prefill_workers: Callable[[], int] = lambda: 1) -> None:
        """``prefill_workers``: the number of workers that are ready for prefill."""
        self._limits = limits
        self.clock = clock
        self._prefill_workers = prefill_workers
        self.requests = 0  # without a first token
        self.tokens = 0  # prompt tokens of those
        self.body_bytes = 0  # of bodies that are being read or parsed
        self.prompt_bytes = 0  # of prompts of open requests
        self._wait_s: dict[int, float] = {}  # by class: smoothed time from admission to first token
        self._parties: dict[QueueKey, _QueueDepth] = {}  # those of whom something waits

    def _bounds(self) -> _Bounds:
        """The bounds, by the number of workers."""
        workers, limits = max(1, self._prefill_workers()), self._limits
        return _Bounds(limits.max_queued_requests * workers, limits.max_queued_tokens * workers)

    def check(self) -> None:
        """Raises QueueFull when there is no room for anything, before anything is read."""
        most = self._bounds().requests
        if self.requests >= most:
            raise self.queue_full(f"{self.requests} requests are waiting, the limit is {most}.")

    def admit(self, costs: Sequence[int], party: QueueKey = DEFAULT_QUEUE, *, bounded: bool = False) -> Permit:
        """Room for one engine request a cost, in prompt tokens, until the permit's scope is left.

        Where there are none, nothing has to wait.

        Raises QueueFull, unless the queue is empty: then even a request larger than the whole queue is admitted.
        ``bounded``: there are other parties, for whom room must be left.
        """
        requests, tokens = len(costs), sum(costs)
        if not requests:
            return Permit(self, costs, party)
        own, most = self._parties.get(party), self._bounds()
        if bounded and own is not None:
            self._leave_room(own, requests, tokens)
        if self.requests:
            if self.requests + requests > most.requests:
                raise self.queue_full(
                    f"{self.requests} requests are waiting and this one adds {requests}, the limit is {most.requests}.",
                    party.service,
                )
            if self.tokens + tokens > most.tokens:
                raise self.queue_full(
                    f"{self.tokens} prompt tokens are waiting and this request adds {tokens}, "
                    f"the limit is {most.tokens}.",
                    party.service,
                )
        prompt_bytes = self._check_memory(tokens, party)
        self.prompt_bytes += prompt_bytes
        self.requests += requests
        self.tokens += tokens
        waiting = self._parties.setdefault(party, _QueueDepth())
        waiting.requests += requests
        waiting.tokens += tokens
        return Permit(self, costs, party, prompt_bytes)

    def _check_memory(self, tokens: int, party: QueueKey) -> int:
        """The bytes of a prompt of ``tokens``.  Raises QueueFull where all prompts take too many; one alone may."""
        most, more = self._limits.max_prompt_bytes, tokens * PROMPT_TOKEN_BYTES
        if self.prompt_bytes and self.prompt_bytes + more > most:
            raise self.queue_full(
                f"the prompts of open requests take {self.prompt_bytes} bytes and this request adds {more}, "
                f"the limit is {most} (max_prompt_bytes).",
                party.service,
            )
        return more

    def reserve_body(self) -> BodyReservation:
        """Memory for one body, reserved as it grows, until its scope is left."""
        return BodyReservation(self)

    def grow_body(self, size: int) -> None:
        """Raises QueueFull when all bodies together would exceed the limit."""
        if self.body_bytes and self.body_bytes + size > self._limits.max_pending_body_bytes:
            raise self.queue_full(
                f"{self.body_bytes} bytes of requests are being read, "
                f"the limit is {self._limits.max_pending_body_bytes}."
            )
        self.body_bytes += size

    def now(self) -> float:
        """Monotonic seconds."""
        return self.clock.now()

    def on_dequeued(self, tokens: int, waited_s: float | None, party: QueueKey = DEFAULT_QUEUE) -> None:
        """One engine request waits no longer; ``waited_s`` is None when it never got a token."""
        self.requests -= 1
        self.tokens -= tokens
        waiting = self._parties[party]
        waiting.requests -= 1
        waiting.tokens -= tokens
        if not waiting.requests:
            del self._parties[party]
        if waited_s is not None:
            smoothed = self.usual_wait_s(party.service)
            self._wait_s[party.service] = smoothed + _SMOOTHING * (waited_s - smoothed)

    def usual_wait_s(self, service: int) -> float:
        """The smoothed time to first token of this class."""
        return self._wait_s.get(service, 1.0)

    def share_before(self, party: QueueKey, tokens: int) -> float:
        """The share, 0 to 1, of the prompt tokens waiting here that will go before ``tokens`` more of this party.

        By the fluid form of fair queueing (Parekh, Gallager 1993): until what the party has and these ``tokens`` are
        served, every other party of its class gets its weight's share, or all that it has.  1 when nothing waits here.
        """
        own = self._parties.get(party)
        mine = own.tokens if own is not None else 0
        until = (mine + tokens) / party.weight
        ahead, total = float(mine), mine
        for other, waiting in self._parties.items():
            if other == party or other.service > party.service:
                continue
            total += waiting.tokens
            before = other.service < party.service
            ahead += waiting.tokens if before else min(waiting.tokens, other.weight * until)
        return ahead / total if total else 1.0

    def _leave_room(self, own: _QueueDepth, requests: int, tokens: int) -> None:
        most = self._bounds()
        free = most.requests - self.requests
        if own.requests + requests > free:
            raise self.queue_full(
                f"{own.requests} requests of yours are waiting and this one adds {requests}; of the {free} places that "
                f"are free (max_queued_requests, of all workers {most.requests}), room is left for others."
            )
        free = most.tokens - self.tokens
        if own.tokens + tokens > free:
            raise self.queue_full(
                f"{own.tokens} prompt tokens of yours are waiting and this request adds {tokens}; of the {free} that "
                f"may still come (max_queued_tokens, of all workers {most.tokens}), room is left for others."
            )

    def queue_full(self, why: str, service: int = 0) -> QueueFull:
        """The error; the time to retry after follows from recent waits."""
        retry_after = min(MAX_RETRY_AFTER_S, max(1, math.ceil(self.usual_wait_s(service))))
        return QueueFull(f"The server is at its limit: {why} Retry in {retry_after} s.", retry_after=retry_after)


class Permit:
    """The queue entries and prompt memory of one HTTP request: a scope."""

    __slots__ = ("_admission", "_party", "_prompt_bytes", "_since", "_waiting")

    def __init__(self, admission: Admission, costs: Sequence[int], party: QueueKey, prompt_bytes: int = 0) -> None:
        self._admission = admission
        self._party = party
        self._waiting: dict[int, int] | None = dict(enumerate(costs))  # None: nothing waits, and nothing will
        self._since = admission.now()
        self._prompt_bytes = prompt_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases everything of the request.  Idempotent."""
        self.release()
        self._admission.prompt_bytes -= self._prompt_bytes
        self._prompt_bytes = 0

    def on_first_token(self, choice: int) -> None:
        """This choice has its first token.  Idempotent."""
        tokens = self._dequeue(choice)
        if tokens is not None:
            self._admission.on_dequeued(tokens, self._admission.now() - self._since, self._party)

    def on_finished(self, choice: int) -> None:
        """This choice is finished; it may never have waited."""
        tokens = self._dequeue(choice)
        if tokens is not None:
            self._admission.on_dequeued(tokens, None, self._party)

    def release(self) -> None:
        """Releases all queue entries of the request."""
        while self._waiting:
            _, tokens = self._waiting.popitem()
            self._admission.on_dequeued(tokens, None, self._party)

    def _dequeue(self, choice: int) -> int | None:
        """The cost of a choice that waits no longer; None if it did not wait."""
        if self._waiting is None:
            return None
        tokens = self._waiting.pop(choice, None)
        if not self._waiting:
            self._waiting = None
        return tokens


class BodyReservation:
    """The bytes of one body: a scope."""

    __slots__ = ("_admission", "held")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, size: int) -> None:
        """Raises QueueFull."""
        self._admission.grow_body(size)
        self.held += size

    def shrink(self, size: int) -> None:
        """At most ``size`` bytes are still held."""
        given_back = max(0, self.held - size)
        self._admission.body_bytes -= given_back
        self.held -= given_back

    def release(self) -> None:
        """Releases the body and what was parsed from it.  Idempotent."""
        self._admission.body_bytes -= self.held
        self.held = 0
