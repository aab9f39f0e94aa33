"""How much each tenant may ask for within a minute: token buckets.

A bucket holds a minute's worth and fills at an even pace.  A request takes its place and its prompt's tokens at the
door, and its answer's tokens when they are known, which may leave the bucket empty and more: the next request waits for
that.  Knows nothing about queues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.edge.admission import MAX_RETRY_AFTER_S
from penstock.edge.auth import Tenant
from penstock.errors import RateLimited

MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    size: int
    left: float
    at: float

    def fill(self, size: int, now: float) -> None:
        """What has come since; the size may have changed in the file of keys."""
        self.left = min(size, self.left + (now - self.at) * size / MINUTE_S)
        self.size, self.at = size, now


class Rates:
    """One for an application."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # (tenant, unit)

    def take(self, tenant: Tenant, requests: int, tokens: int) -> None:
        """Let so much in.  Raises RateLimited, and takes nothing then.

        What is larger than a whole bucket is let in when the bucket is full: it takes what will come, too.
        """
        asked = (
            ("requests", tenant.requests_per_minute, requests),
            ("prompt tokens", tenant.tokens_per_minute, tokens),
        )
        buckets: list[tuple[_Bucket, int]] = []
        for unit, size, amount in asked:
            if size is None:
                continue
            bucket = self._bucket(tenant, unit, size)
            lacking = min(amount, size) - bucket.left
            if lacking > 0:
                raise self._refusal(unit, amount, bucket, lacking)
            buckets.append((bucket, amount))
        for bucket, amount in buckets:
            bucket.left -= amount

    def used(self, tenant: Tenant, tokens: int) -> None:
        """So many tokens of an answer were written."""
        if tenant.tokens_per_minute is not None:
            self._bucket(tenant, "prompt tokens", tenant.tokens_per_minute).left -= tokens

    def _bucket(self, tenant: Tenant, unit: str, size: int) -> _Bucket:
        now = self._clock.now()
        bucket = self._buckets.setdefault((tenant.id, unit), _Bucket(size, size, now))
        bucket.fill(size, now)
        return bucket

    def _refusal(self, unit: str, amount: int, bucket: _Bucket, lacking: float) -> RateLimited:
        retry_after = min(MAX_RETRY_AFTER_S, max(1, math.ceil(lacking * MINUTE_S / bucket.size)))
        kind = "tokens" if unit == "prompt tokens" else unit
        return RateLimited(
            f"Your key may use {bucket.size} {kind} a minute. {max(0, math.floor(bucket.left))} are left now, and this "
            f"request asks for {amount} {unit}. Retry in {retry_after} s.",
            retry_after=retry_after,
        )
