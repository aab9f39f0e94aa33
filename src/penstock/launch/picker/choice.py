"""Which gateway gets a request: by rendezvous hashing, so that repeats meet the gateway that has stored something.

==========================  ========================================  =============================================
a request with              is chosen for by                          and meets
==========================  ========================================  =============================================
``Idempotency-Key``         the key                                   the stored response, a stream that still runs
a session header            the client's credential and the session   the session's earlier prompts
neither                     turn                                      nothing that only one gateway has
==========================  ========================================  =============================================

Prefix caches are known to every gateway, so a request without a key loses nothing anywhere.  When a gateway goes, only
its keys move, each to the next gateway of its own order.  Pure; knows headers and endpoints, and no gRPC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from penstock.interfaces import IDEMPOTENCY_KEY, SESSION_HEADERS
from penstock.router.policy.base import splitmix64

CREDENTIAL_HEADERS = (b"authorization", b"x-api-key")
AFFINITY_HEADERS = frozenset((IDEMPOTENCY_KEY, *SESSION_HEADERS, *CREDENTIAL_HEADERS))
"""All headers that count; names are in lower case, as HTTP/2 and Envoy have them."""

_HASH_BYTES = 8


class AffinityKind(StrEnum):
    """What a request is bound to a gateway by."""

    IDEMPOTENCY_KEY = "idempotency_key"
    SESSION = "session"
    NONE = "none"


class AffinityKey(NamedTuple):
    """A request's key; ``value`` has 64 bits, and no meaning if the kind is NONE."""

    kind: AffinityKind
    value: int


UNBOUND = AffinityKey(AffinityKind.NONE, 0)


def affinity_key(headers: Mapping[bytes, bytes]) -> AffinityKey:
    """The key of a request with these headers, of which those in ``AFFINITY_HEADERS`` matter.

    Any bytes will do: whether a header is valid is for the gateway to say, and every gateway says the same.  An empty
    one counts as absent.  A credential separates tenants with sessions of one name; it is not checked here.
    """
    given = headers.get(IDEMPOTENCY_KEY, b"").strip()
    if given:
        return AffinityKey(AffinityKind.IDEMPOTENCY_KEY, _hash(b"penstock idem", given))
    for name in SESSION_HEADERS:
        session = headers.get(name, b"").strip()
        if session:
            return AffinityKey(AffinityKind.SESSION, _hash(b"penstock sess", _hashed(_credential(headers)) + session))
    return UNBOUND


def _credential(headers: Mapping[bytes, bytes]) -> bytes:
    """The client's key, sent in either way."""
    for name in CREDENTIAL_HEADERS:
        given = headers.get(name, b"").strip()
        if given:
            return given.rpartition(b" ")[2]  # without the scheme: Bearer
    return b""


def _hashed(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _hash(purpose: bytes, text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=_HASH_BYTES, person=purpose).digest(), "little")


class GatewayRanking:
    """The gateways that a request may be sent to, and their order for each key.  Immutable.

    An order depends on the endpoints and the key alone, so all pickers of a fleet have the same.
    """

    def __init__(self, endpoints: Iterable[str]) -> None:
        """``endpoints``: each as HOST:PORT."""
        self.endpoints = tuple(sorted(set(endpoints)))
        hashes = [_hash(b"penstock gate", endpoint.encode()) for endpoint in self.endpoints]
        self._hashes = np.array(hashes, dtype=np.uint64)  # [gateways]

    def by_key(self, key: int, most: int) -> tuple[str, ...]:
        """Up to ``most`` endpoints, best first (rendezvous hashing: Thaler, Ravishankar 1998)."""
        order = splitmix64(self._hashes, key).argsort()[::-1]
        return tuple(self.endpoints[place] for place in order[:most])

    def in_turn(self, turn: int, most: int) -> tuple[str, ...]:
        """Up to ``most`` endpoints, from the one whose turn it is."""
        count = len(self.endpoints)
        return tuple(self.endpoints[(turn + step) % count] for step in range(min(most, count)))

    def only(self, endpoints: Collection[str]) -> GatewayRanking:
        """The ranking of those that are among ``endpoints``."""
        wanted = frozenset(endpoints)
        return GatewayRanking(endpoint for endpoint in self.endpoints if endpoint in wanted)
