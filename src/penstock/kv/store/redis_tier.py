"""The Redis tier: for all workers of all hosts that serve the same model.

A value is ``| proof 40 | page |`` under a name that covers model, numerics class, layout and ``--kv-key``.  Redis
evicts by its own policy (``maxmemory-policy``), and values expire.  Nothing that comes back is trusted: no more is read
than a value can have, and every page is verified; one that fails is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError, PageCorrupt, TierError
from penstock.kv.store.envelope import PROOF_BYTES, AnyEnvelope, identity_digest, page_key_bytes
from penstock.kv.store.tier import FinalPage, KvTier, PageKey

_PREFIX = b"penstock:kv:1:"
_HEAD_BYTES = PROOF_BYTES
_ASKED_AT_ONCE = 512
CONNECT_S = 1.0


def check_redis_url(url: str, flag: str) -> None:
    """Raises ConfigError for a bad URL of this flag, or without the library."""
    try:
        import redis
    except ImportError:
        raise ConfigError(f"{flag} needs the package redis: pip install 'penstock[redis]'") from None
    try:
        redis.Redis.from_url(url).close()
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


class RedisTier(KvTier):
    """Thread-safe."""

    name = "redis"
    stores_copies = True
    is_remote = True
    pages = 0

    def __init__(self, url: str, seal: AnyEnvelope, *, timeout_s: float, expire_s: float) -> None:
        """Connects at the first use.  Raises ConfigError for a bad URL, or without the library."""
        check_redis_url(url, "--kv-redis")
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._failure: type[Exception] = redis.RedisError
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(CONNECT_S, timeout_s),
            retry=Retry(NoBackoff(), 0),
        )
        self._seal = seal
        self._expire_ms = int(expire_s * 1000)
        self._page_bytes = seal.layout.page_bytes
        self._names = _PREFIX + identity_digest(seal.identity, seal.layout)[:16] + seal.kind.encode()

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """False for all keys behind the first missing one."""
        found: list[bool] = []
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            part = keys[start : start + _ASKED_AT_ONCE]
            with self._failures():
                pipeline = self._client.pipeline(transaction=False)
                for key in part:
                    pipeline.exists(self._name(key))
                found += [bool(each) for each in pipeline.execute()]
            if not all(found):
                break
        return found + [False] * (len(keys) - len(found))

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        name = self._name(key)
        with self._failures():
            # One byte more than there can be: who has more is not ours.
            raw: bytes = self._client.getrange(name, 0, _HEAD_BYTES + self._page_bytes)
        if not raw:
            return False
        try:
            if len(raw) != _HEAD_BYTES + self._page_bytes:
                raise PageCorrupt(f"a value of {len(raw)} bytes in Redis, expected {_HEAD_BYTES + self._page_bytes}")
            self._seal.unseal(key, memoryview(raw)[_HEAD_BYTES:], raw[:_HEAD_BYTES], into)
        except PageCorrupt:
            with contextlib.suppress(self._failure):  # if it fails, the next reader tries again
                self._client.delete(name)
            raise
        return True

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """Renews the expiry of a page that is stored already."""
        name = self._name(final.key)
        with self._failures():
            if self._client.pexpire(name, self._expire_ms):
                return True
            stored, proof = self._seal.seal(final.key, content)
            return bool(self._client.set(name, b"".join((proof, stored)), px=self._expire_ms))

    def on_evicted(self, key: PageKey) -> None:
        """Nothing to do: the stored page is a copy."""

    def close(self) -> None:
        self._client.close()

    def _name(self, key: PageKey) -> bytes:
        return self._names + page_key_bytes(key)

    def _failures(self) -> _AsTierError:
        return _AsTierError(self._failure)


class _AsTierError:
    """Turns the library's errors into TierError."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kind):
            raise TierError(f"redis: {error}") from None
