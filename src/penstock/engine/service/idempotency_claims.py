"""The idempotency keys of which this worker is the home: which gateway has the request, and what of it is counted.

Gateways of several hosts have no link between them, but all of them speak to the workers.  They choose one worker for
each key (``router.idempotency_homes``).  It knows neither keys nor tenants, only keyed digests, and no tokens.  What it
keeps is lost with its process; then a key that comes again is computed and counted again.  Pure: time is a parameter.

Tenants share the room: where there is none left, keys of the tenant that has most make way, oldest first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from penstock.wire.gateway_messages import (
    ClaimIdempotencyKey,
    IdempotencyKeyState,
    IdempotencyKeyStatus,
)

MAX_CLAIMED_KEYS = 65_536
MAX_TENANT_CLAIMED_KEYS = 16_384

CLAIM_S = 600.0
"""For which a key is kept after the last message about it, and after the gateway that computes it was last there."""

MAX_RUNNING_S = 86_400.0
"""For which a key is kept at most because a gateway computes it: the message of its end may have been lost."""

CLAIMS_PER_S = 1000.0
"""Of one gateway.  Beyond that and ``CLAIMS_BURST`` its messages change nothing here."""
CLAIMS_BURST = 4000.0

EVICTED_AT_ONCE = 64
"""The tenant with the most keys is looked for that seldom."""

MAX_METERED_GATEWAYS = 4096

MAX_COMPUTING_GATEWAYS = 16
"""Of one key; beyond that the first ones are taken to compute it no more."""


class GatewayProcess(NamedTuple):
    """A gateway, as it introduces itself."""

    name: str
    incarnation: int


@dataclass(slots=True)
class _Claim:
    mark: bytes
    until: float
    runs_until: float  # that long a gateway may compute it
    first: GatewayProcess
    counted_by: GatewayProcess | None = None  # got "new" for an answer: it counts tokens as they come
    computed_by: list[GatewayProcess] = field(default_factory=list[GatewayProcess])
    sent: array[int] = field(default_factory=lambda: array("I"))  # of each choice; empty: nothing is counted

    def set_running(self, gateway: GatewayProcess, running: bool, now: float) -> None:
        """Whether this gateway computes it from now on."""
        if running:
            self.runs_until = now + MAX_RUNNING_S
            if gateway not in self.computed_by:
                self.computed_by = [*self.computed_by[1 - MAX_COMPUTING_GATEWAYS :], gateway]
            return
        if gateway in self.computed_by:
            self.computed_by.remove(gateway)
        if self.counted_by == gateway:
            self.counted_by = None


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


class IdempotencyClaims:
    """By key, least recently used first."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, OrderedDict[bytes, _Claim]] = {}
        self._owners: OrderedDict[bytes, bytes] = OrderedDict()  # key -> tenant
        self._allowances: dict[str, _Allowance] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def on_claim(
        self,
        gateway: GatewayProcess,
        message: ClaimIdempotencyKey,
        is_connected: Callable[[GatewayProcess], bool],
        now: float,
    ) -> IdempotencyKeyState:
        """Takes a gateway's message, and returns what was known before it."""
        if not self._allows(gateway.name, now):
            return _state(message, IdempotencyKeyStatus.UNTRACKED)
        self._expire(is_connected, now)
        claim = self._find(message)
        if claim is None:
            if not message.withdrawn:
                self._add(message, gateway, now)
            return _state(message, IdempotencyKeyStatus.NEW)
        if claim.mark != message.mark:
            return _state(message, IdempotencyKeyStatus.REUSED)
        counts = claim.counted_by
        elsewhere = counts is not None and counts != gateway and is_connected(counts)
        status = IdempotencyKeyStatus.RUNNING if elsewhere else IdempotencyKeyStatus.KNOWN
        state = _state(message, status, claim.sent)
        claim.set_running(gateway, message.running, now)
        if message.withdrawn and claim.first == gateway and not claim.sent and not claim.computed_by:
            self._drop(message.key)
            return state
        claim.sent = array("I", map(max, zip_longest(claim.sent, message.sent, fillvalue=0)))
        self._renew(message.key, message.tenant, now)
        return state

    def _find(self, message: ClaimIdempotencyKey) -> _Claim | None:
        """The claim of this key.  Keys are digests of tenant and key, so one under another tenant is none of ours."""
        claims = self._tenants.get(message.tenant)
        return None if claims is None else claims.get(message.key)

    def _add(self, message: ClaimIdempotencyKey, gateway: GatewayProcess, now: float) -> None:
        if message.key in self._owners:  # under another tenant
            self._drop(message.key)
        claims = self._tenants.setdefault(message.tenant, OrderedDict())
        claim = claims[message.key] = _Claim(
            message.mark, now + CLAIM_S, now + MAX_RUNNING_S, gateway, sent=array("I", message.sent)
        )
        if message.running:
            claim.counted_by = gateway
            claim.computed_by.append(gateway)
        self._owners[message.key] = message.tenant
        if len(claims) > MAX_TENANT_CLAIMED_KEYS:
            self._drop(next(iter(claims)))
        if len(self._owners) > MAX_CLAIMED_KEYS:
            largest = max(self._tenants.values(), key=len)
            for key in list(largest)[:EVICTED_AT_ONCE]:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        tenant = self._owners.pop(key)
        claims = self._tenants[tenant]
        del claims[key]
        if not claims:
            del self._tenants[tenant]

    def _renew(self, key: bytes, tenant: bytes, now: float) -> None:
        self._tenants[tenant][key].until = now + CLAIM_S
        self._owners.move_to_end(key)
        self._tenants[tenant].move_to_end(key)

    def _expire(self, is_connected: Callable[[GatewayProcess], bool], now: float) -> None:
        """Forget what is over.  A gateway says nothing of a key while it computes it, however long that takes."""
        while self._owners:
            key, tenant = next(iter(self._owners.items()))
            claim = self._tenants[tenant][key]
            if claim.until > now:
                return
            if not claim.computed_by:
                self._drop(key)
                continue
            if claim.runs_until <= now:
                claim.computed_by = []
            # For one that is gone, too, the key is kept for some time.
            claim.computed_by = [gateway for gateway in claim.computed_by if is_connected(gateway)]
            self._renew(key, tenant, now)

    def _allows(self, gateway: str, now: float) -> bool:
        """Whether this gateway may change something once more."""
        allowance = self._allowances.get(gateway)
        if allowance is None:
            if len(self._allowances) >= MAX_METERED_GATEWAYS:
                del self._allowances[next(iter(self._allowances))]
            allowance = self._allowances[gateway] = _Allowance(CLAIMS_BURST, now)
        allowance.left = min(CLAIMS_BURST, allowance.left + (now - allowance.at) * CLAIMS_PER_S)
        allowance.at = now
        if allowance.left < 1.0:
            return False
        allowance.left -= 1.0
        return True


def _state(message: ClaimIdempotencyKey, status: IdempotencyKeyStatus, sent: Sequence[int] = ()) -> IdempotencyKeyState:
    return IdempotencyKeyState(serial=message.serial, status=status, sent=tuple(sent))
