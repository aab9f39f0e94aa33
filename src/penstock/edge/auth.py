"""Bearer keys.  Only hashes are kept, and they are compared in constant time.

Knows nothing about who a key belongs to, yet.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.edge.exchange import Exchange
from penstock.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""What load balancers and Prometheus ask for; it tells nothing about anybody's requests."""

MAX_KEY_BYTES = 4096


class KeyRing:
    """The keys that open this server.  An empty ring is an open door."""

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        self._hashes = tuple(hashes)

    @classmethod
    def of(cls, keys: Iterable[str]) -> KeyRing:
        """A ring of these keys; they are not kept."""
        return cls(hashlib.sha256(key.encode()).digest() for key in keys)

    @property
    def open(self) -> bool:
        """Is no key needed?"""
        return not self._hashes

    def opens(self, key: bytes) -> bool:
        """Is this one of the keys?  Takes the same time whichever it is."""
        given = hashlib.sha256(key[:MAX_KEY_BYTES]).digest()
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(given, known)
        return found


class Authenticated:
    """An ASGI application behind a key ring.  ``OPTIONS`` and every path but ``OPEN_PATHS`` need a key."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._ring.open or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        error = self._check(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await Exchange(scope, receive, send).refuse(error)

    def _check(self, scope: Scope) -> Unauthorized | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            return Unauthorized(
                "You didn't provide an API key. Send it in a header: Authorization: Bearer YOUR_KEY.",
                code="missing_api_key",
            )
        kind, _, key = given[0].partition(b" ")
        if len(given) > 1 or kind.lower() != b"bearer" or not self._ring.opens(key.strip()):
            return Unauthorized("Incorrect API key provided.", code="invalid_api_key")
        return None
