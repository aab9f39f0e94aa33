"""How much each tenant may ask for within a minute: token buckets.

A bucket holds a minute's worth and fills at an even pace.  A request takes its place and its prompt's tokens at the
door, and its answer's tokens when they are known, which may leave the bucket empty and more: the next request waits for
that.  Knows nothing about queues, nor where buckets stand (``launch.shared_rates``: where all gateways of a host see
them).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from penstock.clock import Clock
from penstock.edge.admission import MAX_RETRY_AFTER_S
from penstock.edge.auth import Tenant
from penstock.errors import RateLimited
from penstock.wire.ports import RateLevel

MINUTE_S = 60.0


class Buckets(Protocol):
    """Where the levels of buckets stand, by tenant and unit."""

    def locked(self) -> AbstractContextManager[None]:
        """The scope in which levels are read and written."""
        ...

    def get(self, tenant: str, unit: str) -> RateLevel | None:
        """None for a bucket that nobody has used, which is full."""
        ...

    def put(self, tenant: str, unit: str, level: RateLevel) -> None:
        """It is so now."""
        ...


class OwnBuckets:
    """Of one process (``Buckets``)."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], RateLevel] = {}
        self._swept = float("-inf")

    def locked(self) -> AbstractContextManager[None]:
        """See ``Buckets``."""
        return nullcontext()

    def get(self, tenant: str, unit: str) -> RateLevel | None:
        """See ``Buckets``."""
        return self._levels.get((tenant, unit))

    def put(self, tenant: str, unit: str, level: RateLevel) -> None:
        """See ``Buckets``."""
        self._levels[tenant, unit] = level
        if level.at >= self._swept + MINUTE_S:  # what nobody has used since is full again: as good as none
            before, self._swept = level.at - MINUTE_S, level.at
            self._levels = {name: known for name, known in self._levels.items() if known.left < 0 or known.at > before}


@dataclass(frozen=True, slots=True)
class _Asked:
    unit: str
    size: int
    amount: int


class Rates:
    """One for an application."""

    def __init__(self, clock: Clock, buckets: Buckets | None = None) -> None:
        self._clock = clock
        self._buckets = OwnBuckets() if buckets is None else buckets

    def take(self, tenant: Tenant, requests: int, tokens: int) -> None:
        """Let so much in.  Raises RateLimited, and takes nothing then.

        What is larger than a whole bucket is let in when the bucket is full: it takes what will come, too.
        """
        limits = (
            ("requests", tenant.requests_per_minute, requests),
            ("prompt tokens", tenant.tokens_per_minute, tokens),
        )
        asked = [_Asked(unit, size, amount) for unit, size, amount in limits if size is not None]
        if not asked:
            return
        with self._buckets.locked():
            now = self._clock.now()
            left = [self._left(tenant, each.unit, each.size, now) for each in asked]
            for each, has in zip(asked, left, strict=True):
                lacking = min(each.amount, each.size) - has
                if lacking > 0:
                    raise _refusal(each, has, lacking)
            for each, has in zip(asked, left, strict=True):
                self._buckets.put(tenant.id, each.unit, RateLevel(has - each.amount, now))

    def used(self, tenant: Tenant, tokens: int) -> None:
        """So many tokens of an answer were written."""
        if tenant.tokens_per_minute is None or not tokens:
            return
        with self._buckets.locked():
            now = self._clock.now()
            has = self._left(tenant, "prompt tokens", tenant.tokens_per_minute, now)
            self._buckets.put(tenant.id, "prompt tokens", RateLevel(has - tokens, now))

    def _left(self, tenant: Tenant, unit: str, size: int, now: float) -> float:
        """With what has come since; the size may have changed in the file of keys."""
        level = self._buckets.get(tenant.id, unit)
        if level is None:
            return size
        return min(size, level.left + max(0.0, now - level.at) * size / MINUTE_S)


def _refusal(asked: _Asked, left: float, lacking: float) -> RateLimited:
    retry_after = min(MAX_RETRY_AFTER_S, max(1, math.ceil(lacking * MINUTE_S / asked.size)))
    kind = "tokens" if asked.unit == "prompt tokens" else asked.unit
    return RateLimited(
        f"Your key may use {asked.size} {kind} a minute. {max(0, math.floor(left))} are left now, and this "
        f"request asks for {asked.amount} {asked.unit}. Retry in {retry_after} s.",
        retry_after=retry_after,
    )
