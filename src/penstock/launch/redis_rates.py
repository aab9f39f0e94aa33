"""Token buckets of tenants' rates in a Redis: exact over all hosts that use it.

One call of a script takes from all buckets of a request or from none, by Redis' own clock.  A bucket that Redis does
not have begins as full as this host's own share of it (``shared_rates``), and after an outage none is fuller than that:
neither lost memory nor an outage gives a tenant a second minute's worth.  A bucket expires when it would be full again.

While Redis does not answer in time, requests are charged to the shares at once and are not held up: a host's own
buckets have at most its share of what was left in Redis.  It is tried again every ``RETRY_S``.  A script that ran,
although its answer came too late, charges a request in both places.  Requests that wait too long for one of the
``MAX_CONNECTIONS`` are charged to the shares, too, and Redis stays in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from penstock.api.load_shedding import BucketCharge
from penstock.interfaces import BucketLevel
from penstock.kv.store.redis_tier import check_redis_url
from penstock.telemetry.log import log_event

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two attempts to reach a Redis that is away."""

MAX_CONNECTIONS = 16
"""To Redis, of one gateway; what needs more waits for one."""

MAX_PENDING = 1024
"""Completions whose charge is under way; more are charged to the shares only."""


_SCRIPT = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1000000
local left, enough, changed, answer = {}, true, false, {}
for i, key in ipairs(KEYS) do
  local size, amount, full = tonumber(ARGV[4*i-2]), tonumber(ARGV[4*i-1]), tonumber(ARGV[4*i])
  local known = redis.call('HMGET', key, 'left', 'at')
  left[i] = size * full
  if known[1] then
    left[i] = math.min(size, tonumber(known[1]) + math.max(0, now - tonumber(known[2])) * size / 60)
  end
  if ARGV[4*i+1] == '1' then
    left[i], changed = math.min(left[i], size * full), true
  end
  enough = enough and left[i] >= math.min(size, amount)
  answer[i] = string.format('%.6f', left[i])
end
enough = enough or ARGV[1] == '1'
if enough or changed then
  for i, key in ipairs(KEYS) do
    local size = tonumber(ARGV[4*i-2])
    local rest = left[i] - (enough and tonumber(ARGV[4*i-1]) or 0)
    redis.call('HSET', key, 'left', string.format('%.6f', rest), 'at', string.format('%.6f', now))
    redis.call('PEXPIRE', key, math.ceil((size - rest) / size * 60000) + 1000)
  end
end
return answer
"""
"""ARGV: whether to take even what is not there; of each bucket its size, the amount, how full it is here, and whether
it may be no fuller than that."""


class RedisRates:
    """``api.load_shedding.ExactRates``; of one gateway, from its event loop."""

    def __init__(self, url: str, key: bytes, *, timeout_s: float) -> None:
        """``key``: gateways with the same key name tenants alike.  Connects at the first use.

        Raises ConfigError for a bad URL, or without the library.
        """
        check_redis_url(url, "--limits-redis")
        import redis
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._failures: tuple[type[Exception], ...] = (redis.RedisError, OSError, TimeoutError, ValueError, TypeError)
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client: Any = redis.asyncio.Redis.from_pool(pool)
        self._script: Any = self._client.register_script(_SCRIPT)
        self._key = blake2b(key, digest_size=32).digest()
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._pending: set[asyncio.Task[Any]] = set()
        self._charged: set[tuple[str, str]] | None = None  # tenant and unit, since Redis was back; None: never away
        self._returning: asyncio.Task[None] | None = None  # while Redis is away

    @property
    def is_up(self) -> bool:
        """Whether requests are charged there."""
        return self._returning is None

    async def charge_buckets(
        self, tenant: str, charges: Sequence[BucketCharge], filled: Sequence[float], *, force: bool = False
    ) -> list[BucketLevel] | None:
        if not self.is_up:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:  # says nothing about Redis
            return None
        try:
            return await self._charge(tenant, charges, filled, force) if self.is_up else None
        finally:
            self._free.release()

    async def _charge(
        self, tenant: str, charges: Sequence[BucketCharge], filled: Sequence[float], force: bool
    ) -> list[BucketLevel] | None:
        """While a connection is free."""
        words: list[int | float] = [int(force)]
        for charge, part in zip(charges, filled, strict=True):
            words += [charge.size, charge.amount, part, int(self._may_be_too_full(tenant, charge.unit))]
        name = blake2b(tenant.encode(), digest_size=16, key=self._key).hexdigest()
        keys = [f"penstock:rate:1:{{{name}}}:{charge.unit}" for charge in charges]
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._script(keys=keys, args=words)
            if self._charged is not None:
                self._charged.update((tenant, charge.unit) for charge in charges)
            return [BucketLevel(float(left)) for left in answer]
        except self._failures as error:
            self._on_failure(error)
            return None

    def _may_be_too_full(self, tenant: str, unit: str) -> bool:
        """What hosts admitted while Redis was away is not counted there, until the bucket is charged again."""
        return self._charged is not None and (tenant, unit) not in self._charged

    def charge_later(self, tenant: str, charge: BucketCharge, filled: float) -> None:
        if self.is_up and len(self._pending) < MAX_PENDING:
            task = asyncio.get_running_loop().create_task(self.charge_buckets(tenant, [charge], [filled], force=True))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in (*self._pending, *([self._returning] if self._returning else ())):
            task.cancel()
        await self._client.aclose()

    def _on_failure(self, error: Exception) -> None:
        if self.is_up:
            reason = str(error) or f"no answer within {self._timeout_s:g} s"
            log_event(log, logging.WARNING, "--limits-redis is away: hosts divide rates", reason=reason)
            self._returning = asyncio.get_running_loop().create_task(self._return(), name="limits redis")

    async def _return(self) -> None:
        """Until Redis answers."""
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._client.ping()
                break
            except self._failures:
                continue
        self._charged = set()
        self._returning = None
        log_event(log, logging.INFO, "--limits-redis is back: rates are exact")
