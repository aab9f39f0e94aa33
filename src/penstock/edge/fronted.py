"""For whom the front of a catalogue asks: it says so with each request that it passes on to a model's own gateway.

A header names the tenant.  It is heeded from whoever has the front's key, which is drawn at every start and known to
nobody else; from any other it means nothing.  Knows nothing about models.
"""

from __future__ import annotations

import msgspec

from penstock.edge.auth import EVERYBODY, FOR, KeyRing, Tenant
from penstock.errors import Unauthorized

MAX_BYTES = 4096


def saying(tenant: Tenant) -> bytes:
    """The value of the header ``FOR``."""
    return msgspec.json.encode(tenant)


class FrontedRing:
    """The one key of a front (``auth.Ring``)."""

    open = False

    def __init__(self, key: str, *, max_tenants: int = 1024) -> None:
        self._ring = KeyRing.of([key])
        self._max_tenants = max_tenants
        self._met: set[str] = set()

    @property
    def tenants(self) -> int:
        """How many have asked so far."""
        return len(self._met)

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """See ``Ring``.  Who says nothing is the front itself.  Raises Unauthorized for what cannot be."""
        if self._ring.find(key) is None:
            return None
        if said is None:
            return EVERYBODY
        try:
            tenant = msgspec.json.decode(said[:MAX_BYTES], type=Tenant)
        except msgspec.DecodeError:
            raise Unauthorized(f"The header {FOR.decode()} names no tenant.", code="invalid_tenant") from None
        if len(self._met) < self._max_tenants:
            self._met.add(tenant.id)
        return tenant
