"""Questions that gateways of all hosts ask the same worker: the *home* of what they are about.

The home is the ready worker that rendezvous hashing picks for a digest, so gateways that see the same workers agree on
it, and a worker that comes or goes changes the homes of its own digests only.  A home that does not answer within
``ANSWER_S``, or is lost meanwhile, knows nothing: gateways go on without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from penstock.clock import Clock
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLink, WorkerLinks
from penstock.router.policy.base import splitmix64
from penstock.types import WorkerId, WorkerState
from penstock.wire.gateway_messages import ChangeAdapter, ClaimIdempotencyKey

ANSWER_S = 1.0
"""After so long without an answer, a gateway goes on without it.  Workers read messages between two steps."""

MAX_PENDING_CALLS = 8192
"""Answers of one kind that a gateway waits for.  Beyond them the home is not asked."""

HomeQuestion: TypeAlias = ClaimIdempotencyKey | ChangeAdapter


class HomeAnswer(Protocol):
    """What a home answers."""

    @property
    def serial(self) -> int:
        """The serial of the question."""
        ...


AnswerT = TypeVar("AnswerT", bound=HomeAnswer)


@dataclass(frozen=True, slots=True)
class _PendingCall(Generic[AnswerT]):
    link: WorkerLink
    until: float
    on_answer: Callable[[AnswerT | None], None]


class HomeCalls(Generic[AnswerT]):
    """Questions of one kind, of one gateway; from its event loop."""

    def __init__(self, fleet: Fleet, links: WorkerLinks, clock: Clock) -> None:
        self._fleet = fleet
        self._links = links
        self._clock = clock
        self._pending: dict[int, _PendingCall[AnswerT]] = {}  # by serial, oldest first
        self._serial = 0

    def notify(self, digest: bytes, message: HomeQuestion) -> None:
        """Sends it to the home of the digest, which does not answer."""
        link = self._link_to_home(digest)
        if link is not None:
            link.send(message)

    def call(self, digest: bytes, message: HomeQuestion, on_answer: Callable[[AnswerT | None], None]) -> None:
        """Sends it with a serial; ``on_answer`` is called once, be it now.  None: there is no home, or no answer."""
        link = self._link_to_home(digest)
        self._serial += 1
        message = msgspec.structs.replace(message, serial=self._serial)
        if link is None or len(self._pending) >= MAX_PENDING_CALLS or not link.send(message):
            on_answer(None)
            return
        self._pending[self._serial] = _PendingCall(link, self._clock.now() + ANSWER_S, on_answer)

    def on_answer(self, worker: WorkerId, incarnation: int, message: AnswerT) -> bool:
        """A worker's answer.  False: it was not asked."""
        pending = self._pending.get(message.serial)
        if pending is None or (pending.link.worker, pending.link.incarnation) != (worker, incarnation):
            return False
        del self._pending[message.serial]
        pending.on_answer(message)
        return True

    def tick(self, now: float) -> None:
        """Give up what is overdue, and what was asked of workers that are lost."""
        for serial, pending in list(self._pending.items()):
            link = pending.link
            if now >= pending.until or self._links.link_to(link.worker, link.incarnation) is not link:
                del self._pending[serial]
                pending.on_answer(None)

    def close(self) -> None:
        """No more answers will come."""
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.on_answer(None)

    def _link_to_home(self, digest: bytes) -> WorkerLink | None:
        fleet = self._fleet
        ready = np.array([slot for slot, state in enumerate(fleet.states) if state is WorkerState.READY], dtype=np.intp)
        if not len(ready):
            return None
        order = splitmix64(fleet.loads.hashes.take(ready), int.from_bytes(digest[:8], "little"))
        slot = int(ready[order.argmax()])
        return self._links.link_to(fleet.ids[slot], fleet.incarnations[slot])
