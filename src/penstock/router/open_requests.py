"""The limit of open requests of an API key (``--max-concurrency``) over the gateways of all hosts.

::

    gateway --OpenRequestCounts: it has this many, and wants one more--> home of the key (engine.service.open_requests)
    gateway <--OpenRequestAnswer--------------------------------------- home
    gateway --OpenRequestCounts: what it has, once a second----------> homes

Only while there are other hosts: the gateways of one host count together in memory (``launch.shared_rates``).  Shares,
as rates have them, would not do: most limits are small, and a part of a request cannot be lent.  Without an answer a
limit holds for each host.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import ceil

from penstock.clock import Clock
from penstock.router.home_calls import HomeCalls, WorkerHomes
from penstock.types import WorkerId
from penstock.wire.gateway_messages import (
    KEY_DIGEST_BYTES,
    MAX_OPEN_REQUEST_COUNTS,
    OpenRequestAnswer,
    OpenRequestCounts,
)

REFRESH_S = 1.0
"""Between two messages to the home of a key with open requests."""

REFRESHED_PER_TICK = 64
"""Keys, at least, whose homes are looked for in one turn of the event loop: some milliseconds."""


class OpenRequestHomes:
    """``api.concurrency.FleetRequestCounts`` of one gateway; from its event loop."""

    def __init__(self, homes: WorkerHomes, clock: Clock, hosts: Callable[[], int], secret: bytes) -> None:
        """``hosts``: with gateways.  ``secret``: of digests, the same at all gateways."""
        self._homes = homes
        self._calls = HomeCalls[OpenRequestAnswer](homes, clock)
        self._clock = clock
        self._hosts = hosts
        self._secret = blake2b(secret, digest_size=32, person=b"penstock open").digest()
        self._open: dict[bytes, int] = {}  # here, also those that wait for an answer
        self._refreshed_at = float("-inf")
        self._due: list[bytes] = []  # whose homes are to hear of them
        self._round = 0  # how many there were at its begin
        self._ticked_at = float("-inf")

    async def acquire(self, key: str, limit: int) -> bool:
        """Counts a request; False, without counting it, if ``limit`` are open at all hosts together."""
        name = self._digest(key)
        before = self._open.get(name, 0)
        self._open[name] = before + 1
        if self._hosts() <= 1:
            return True
        try:
            admitted = await self._asked(name, before, limit)
        except BaseException:
            self.release(key)
            raise
        if not admitted:
            self.release(key)
        return admitted

    def release(self, key: str) -> None:
        """A request that was counted has ended."""
        name = self._digest(key)
        left = self._open[name] - 1
        if left:
            self._open[name] = left
        else:
            del self._open[name]
        if self._hosts() > 1:
            self._calls.notify(name, OpenRequestCounts(counts={name: left}))

    def on_answer(self, worker: WorkerId, incarnation: int, message: OpenRequestAnswer) -> None:
        """The answer of a worker.  One that was not asked is ignored."""
        self._calls.on_answer(worker, incarnation, message)

    def tick(self, now: float) -> None:
        """Give up what is overdue; refresh the counts at homes."""
        self._calls.tick(now)
        if self._hosts() <= 1:
            return
        if not self._due and now - self._refreshed_at >= REFRESH_S:
            self._due, self._refreshed_at = list(self._open), now
            self._round = len(self._due)
        # By time: turns of a busy event loop are far between, and a count that is not repeated lapses at its home.
        even = ceil(self._round * min(1.0, (now - self._ticked_at) / REFRESH_S))
        self._ticked_at = now
        size = min(max(REFRESHED_PER_TICK, even), MAX_OPEN_REQUEST_COUNTS)
        part, self._due = self._due[:size], self._due[size:]
        for names in self._homes.groups([name for name in part if name in self._open]):
            self._calls.notify(names[0], OpenRequestCounts(counts={name: self._open[name] for name in names}))

    def close(self) -> None:
        """No more answers will come."""
        self._calls.close()

    async def _asked(self, name: bytes, before: int, limit: int) -> bool:
        question = OpenRequestCounts(counts={name: before} if before else {}, wanted=name, limit=limit)
        answer = await self._calls.ask(name, question)
        return answer is None or answer.admitted

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(), digest_size=KEY_DIGEST_BYTES, key=self._secret).digest()
