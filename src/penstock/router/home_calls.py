"""Questions that gateways of all hosts ask the same worker: the *home* of what they are about.

The home is the ready worker that rendezvous hashing picks for a digest, so gateways that see the same workers agree on
it, and a worker that comes or goes changes the homes of its own digests only.  A home that does not answer within
``ANSWER_S``, or is lost meanwhile, knows nothing: gateways go on without it, and choose others until it says something.
What is to outlive a gateway's host is kept at the first worker in that order on another host (``HomesElsewhere``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from penstock.clock import Clock
from penstock.config.base import host_and_port
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLink, WorkerLinks
from penstock.router.policy.base import rendezvous_pick
from penstock.router.rate_shares import REPORT_VALID_S
from penstock.router.worker_load import Slots
from penstock.types import WorkerId
from penstock.wire.gateway_messages import ChangeAdapter, ClaimIdempotencyKey, FindTokens, OpenRequestCounts

ANSWER_S = 1.0
"""After so long without an answer, a gateway goes on without it.  Workers read messages between two steps."""

MAX_PENDING_CALLS = 8192
"""Answers of one kind that a gateway waits for.  Beyond them the home is not asked."""

_OWN_HOST = 0

HomeQuestion: TypeAlias = ClaimIdempotencyKey | ChangeAdapter | OpenRequestCounts | FindTokens


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


def host_of(endpoint: str) -> str:
    """The part of a worker's address that other workers of its host have, too."""
    return host_and_port(endpoint)[0] if endpoint.startswith("tcp://") else endpoint


@dataclass(frozen=True, slots=True)
class HomesElsewhere:
    """The homes among these workers.  The same workers: the same homes."""

    workers: tuple[tuple[WorkerId, int], ...]  # with their incarnations; empty: there is no home
    link: Callable[[bytes], WorkerLink | None]  # of a digest, where there are workers


class WorkerHomes:
    """Which worker is the home of a digest: one that is ready and has said something lately."""

    def __init__(self, fleet: Fleet, links: WorkerLinks, clock: Clock) -> None:
        self._fleet = fleet
        self._links = links
        self._clock = clock
        self._unanswered: dict[WorkerId, float] = {}  # since when; until they say something
        self._local: set[WorkerId] = set()
        self._numbered: Slots | None = None  # the ready workers as they were when hosts were numbered
        self._numbers = np.array([], dtype=np.intp)  # of the hosts, by slot

    def add_local(self, worker: WorkerId) -> None:
        """This worker is on the gateway's host, at whatever address."""
        self._local.add(worker)
        self._numbered = None

    def link(self, digest: bytes) -> WorkerLink | None:
        """The link to the home; None: there is none."""
        slots = self._slots()
        return self._link_to(self._home(digest, slots)) if len(slots) else None

    def elsewhere(self) -> HomesElsewhere:
        """The homes of digests that are not on this gateway's host, as they are now; all, if none is elsewhere."""
        slots = self._slots()
        away = slots[self._host_numbers().take(slots) != _OWN_HOST]
        chosen = away if len(away) else slots
        workers = tuple((self._fleet.ids[slot], self._fleet.incarnations[slot]) for slot in chosen)
        return HomesElsewhere(workers, lambda digest: self._link_to(self._home(digest, chosen)))

    def possible_links(self, digest: bytes) -> list[WorkerLink]:
        """What other gateways have for ``elsewhere``: the home, for those on other hosts, and the first on another host
        than that."""
        slots = self._slots()
        if not len(slots):
            return []
        first = self._home(digest, slots)
        hosts = self._host_numbers()
        away = slots[hosts.take(slots) != hosts[first]]
        places = [first, self._home(digest, away)] if len(away) else [first]
        return [link for link in map(self._link_to, places) if link is not None]

    def has(self, link: WorkerLink) -> bool:
        """Whether this is still the link to its worker."""
        return self._links.link_to(link.worker, link.incarnation) is link

    def groups(self, digests: Collection[bytes]) -> list[list[bytes]]:
        """The digests, grouped by their homes."""
        slots, found = self._slots(), dict[int, list[bytes]]()
        for digest in digests if len(slots) else ():
            found.setdefault(self._home(digest, slots), []).append(digest)
        return list(found.values())

    def on_unanswered(self, worker: WorkerId) -> None:
        """This worker has not answered.  It is no home until it says something."""
        self._unanswered[worker] = self._clock.now()

    def _slots(self) -> Slots:
        fleet, now = self._fleet, self._clock.now()
        for worker, since in list(self._unanswered.items()):
            slot = fleet.slot(worker)
            if slot is None or fleet.last_seen[slot] > since:
                del self._unanswered[worker]
        slots = fleet.loads.heard_since(fleet.all_ready_slots(), now - REPORT_VALID_S)
        if not self._unanswered:
            return slots
        return np.array([slot for slot in slots if fleet.ids[slot] not in self._unanswered], dtype=np.intp)

    def _link_to(self, slot: int) -> WorkerLink | None:
        return self._links.link_to(self._fleet.ids[slot], self._fleet.incarnations[slot])

    def _host_numbers(self) -> Slots:
        """A number for the host of each slot, the same for one host; ``_OWN_HOST``: this gateway's."""
        ready = self._fleet.all_ready_slots()
        if ready is not self._numbered:  # not for each question: there are as many as requests
            names = {"": _OWN_HOST}
            numbers = [names.setdefault(self._host(slot), len(names)) for slot in range(len(self._fleet))]
            self._numbers, self._numbered = np.array(numbers, dtype=np.intp), ready
        return self._numbers

    def _host(self, slot: int) -> str:
        """The host of a worker, as far as its address says; empty: this gateway's."""
        return "" if self._fleet.ids[slot] in self._local else host_of(self._fleet.endpoints[slot])

    def _home(self, digest: bytes, slots: Slots) -> int:
        return int(slots[rendezvous_pick(self._fleet.loads, slots, int.from_bytes(digest[:8], "little"))])


class HomeCalls(Generic[AnswerT]):
    """Questions of one kind, of one gateway; from its event loop."""

    def __init__(self, homes: WorkerHomes, clock: Clock) -> None:
        self._homes = homes
        self._clock = clock
        self._pending: dict[int, _PendingCall[AnswerT]] = {}  # by serial, oldest first
        self._serial = 0
        self._closed = False

    def notify(self, digest: bytes, message: HomeQuestion) -> None:
        """Sends it to the home of the digest, which does not answer."""
        link = self._homes.link(digest)
        if link is not None:
            link.send(message)

    def call(self, digest: bytes, message: HomeQuestion, on_answer: Callable[[AnswerT | None], None]) -> None:
        """Sends it with a serial; ``on_answer`` is called once, be it now.  None: there is no home, or no answer."""
        self.call_at(self._homes.link(digest), message, on_answer)

    def call_at(
        self, link: WorkerLink | None, message: HomeQuestion, on_answer: Callable[[AnswerT | None], None]
    ) -> None:
        """As ``call``, over this link."""
        self._serial += 1
        message = msgspec.structs.replace(message, serial=self._serial)
        if self._closed or link is None or len(self._pending) >= MAX_PENDING_CALLS or not link.send(message):
            on_answer(None)
            return
        self._pending[self._serial] = _PendingCall(link, self._clock.now() + ANSWER_S, on_answer)

    async def ask(self, digest: bytes, message: HomeQuestion) -> AnswerT | None:
        """The answer to it, as ``call`` has it."""
        answered: asyncio.Future[AnswerT | None] = asyncio.get_running_loop().create_future()

        def on_answer(answer: AnswerT | None) -> None:
            if not answered.done():  # not cancelled
                answered.set_result(answer)

        self.call(digest, message, on_answer)
        return await answered

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
            overdue = now >= pending.until
            if overdue or not self._homes.has(pending.link):
                del self._pending[serial]
                if overdue:
                    self._homes.on_unanswered(pending.link.worker)
                pending.on_answer(None)

    def close(self) -> None:
        """No more answers will come, now and later."""
        self._closed = True
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.on_answer(None)
