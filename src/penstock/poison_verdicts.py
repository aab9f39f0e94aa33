"""Verdicts on requests that crash workers, as gateways share them through workers.

A gateway fails a request that has ended ``poison_deaths`` workers (``router.poison``) and tells all workers its digest.
Workers pass it on to the other gateways, and to those that come later, which refuse the same request at once: a client
that sends it again, through any gateway, ends no further workers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

from penstock.types import ValidRequest

DIGEST_BYTES = 16

MAX_VERDICTS = 256
"""Kept by a process; the oldest gives way."""

VERDICT_S = 600.0
"""For which a process keeps a verdict.  One that is learned from another process counts from then on."""


def request_digest(request: ValidRequest) -> bytes:
    """What makes two requests the same for a worker: all but their seeds.  ``DIGEST_BYTES``."""
    digest = blake3(bytes(request.prompt))
    rest = (
        msgspec.structs.replace(request.sampling, seed=0),
        request.pooling,
        request.images,
        request.adapter.fingerprint if request.adapter is not None else "",
    )
    digest.update(msgspec.msgpack.encode(rest))
    return digest.digest(length=DIGEST_BYTES)


class PoisonVerdicts:
    """The digests that this process knows.  Times are of its own monotonic clock."""

    def __init__(self) -> None:
        self.since: dict[bytes, float] = {}  # oldest first; empty nearly always

    def add(self, digests: Iterable[bytes], now: float) -> tuple[bytes, ...]:
        """Remember them; returns those that were not known."""
        self._expire(now)
        new = tuple(dict.fromkeys(digest for digest in digests if digest not in self.since))
        for digest in new:
            self.since[digest] = now
        while len(self.since) > MAX_VERDICTS:
            del self.since[next(iter(self.since))]
        return new

    def contains(self, request: ValidRequest, now: float) -> bool:
        """Whether the request is known to crash workers."""
        self._expire(now)
        return request_digest(request) in self.since

    def all(self, now: float) -> tuple[bytes, ...]:
        """All that are known."""
        self._expire(now)
        return tuple(self.since)

    def _expire(self, now: float) -> None:
        while self.since:
            oldest = next(iter(self.since))
            if now - self.since[oldest] < VERDICT_S:
                return
            del self.since[oldest]
