"""How many requests of an API key are open at the gateways of all hosts, as far as gateways send it to this worker.

Gateways choose one worker for each key (``router.open_requests``), and ask it before they begin a request of a key that
has a limit.  Each message says how many a gateway has open, so what is lost with a message or with an earlier worker is
made up for by the next one.  It knows keyed digests only.  Pure: time is a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.gateway_messages import OpenRequestCounts

COUNT_VALID_S = 3.0
"""A gateway's count is valid for so long after it came; the next one is due after a second."""

MAX_COUNTED_KEYS = 16_384
"""With open requests.  Of others nothing is counted here: their limits hold for each host."""

SWEEP_S = 1.0


@dataclass(slots=True)
class _GatewayCount:
    open: int
    at: float


class OpenRequestTotals:
    """Open requests, by key and gateway."""

    def __init__(self) -> None:
        self._keys: dict[bytes, dict[str, _GatewayCount]] = {}
        self._swept_at = float("-inf")

    def __len__(self) -> int:
        return len(self._keys)

    def on_counts(self, gateway: str, message: OpenRequestCounts, now: float) -> bool:
        """Takes a gateway's counts; whether it may begin one more request of the key that it wants one of."""
        if now - self._swept_at >= SWEEP_S:
            self._sweep(now)
        for key, count in message.counts.items():
            self._set(key, gateway, count, now)
        if message.wanted is None:
            return True
        own = message.counts.get(message.wanted, 0)
        others = sum(
            each.open
            for name, each in self._keys.get(message.wanted, {}).items()
            if name != gateway and now - each.at < COUNT_VALID_S
        )
        if others + own >= message.limit:
            return False
        self._set(message.wanted, gateway, own + 1, now)
        return True

    def _set(self, key: bytes, gateway: str, count: int, now: float) -> None:
        known = self._keys.get(key)
        if count:
            if known is None:
                if len(self._keys) >= MAX_COUNTED_KEYS:
                    return
                known = self._keys[key] = {}
            known[gateway] = _GatewayCount(count, now)
        elif known is not None and known.pop(gateway, None) is not None and not known:
            del self._keys[key]

    def _sweep(self, now: float) -> None:
        """Forgets the counts of gateways that are silent."""
        self._swept_at = now
        for key, known in list(self._keys.items()):
            for gateway in [name for name, each in known.items() if now - each.at >= COUNT_VALID_S]:
                del known[gateway]
            if not known:
                del self._keys[key]
