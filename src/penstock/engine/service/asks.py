"""Who asked for what: the gateways that speak to this worker, and the request that each of them has here.

Knows when a gateway has fallen silent or come back as another incarnation, and then names the requests that nobody
waits for any more.  It cancels nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types import Leg, RequestId
from penstock.wire.messages import Hello, PageSource, Returned, Submit


@dataclass(slots=True)
class Ask:
    """One request as its gateway submitted it."""

    request: RequestId
    epoch: int
    leg: Leg
    gateway: Gateway
    pages_from: PageSource | None
    arrived: float  # monotonic seconds, here
    started: float | None = None  # when its first token was computed here


@dataclass(slots=True, eq=False)
class Gateway:
    """One gateway.  ``peer`` changes when its connection is made anew, ``incarnation`` when its process is."""

    name: str
    incarnation: int
    peer: bytes
    heard: float
    unsent: list[Returned] = field(default_factory=list[Returned])  # what it must learn when it is back


class Asks:
    """All requests of all gateways at this worker."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._asks: dict[RequestId, Ask] = {}
        self._gateways: dict[str, Gateway] = {}
        self._by_peer: dict[bytes, Gateway] = {}

    def hello(self, peer: bytes, message: Hello, now: float) -> tuple[Gateway, list[Ask]]:
        """A gateway is (still) there.  Returns it, and what its earlier incarnation left behind."""
        known = self._gateways.get(message.gateway)
        orphans: list[Ask] = []
        if known is None or known.incarnation < message.incarnation:
            if known is not None:
                orphans = self._of(known)
                self._by_peer.pop(known.peer, None)
            known = Gateway(message.gateway, message.incarnation, peer, now)
            self._gateways[message.gateway] = known
        elif known.incarnation > message.incarnation:
            return Gateway(message.gateway, message.incarnation, peer, now), []
        if known.peer != peer:
            self._by_peer.pop(known.peer, None)
            known.peer = peer
        self._by_peer[peer] = known
        known.heard = now
        return known, orphans

    def submit(self, peer: bytes, message: Submit, now: float) -> Ask | None:
        """Take a request on.  None when the gateway has not said Hello, or the request is here in this epoch or a
        later one."""
        gateway = self._by_peer.get(peer)
        present = self._asks.get(message.request)
        if gateway is None or (present is not None and present.epoch >= message.epoch):
            return None
        gateway.heard = now
        ask = Ask(message.request, message.epoch, message.leg, gateway, message.pages_from, now)
        self._asks[message.request] = ask
        return ask

    def get(self, request: RequestId) -> Ask | None:
        """The ask for this request, if it is still wanted."""
        return self._asks.get(request)

    def drop(self, request: RequestId, epoch: int) -> Ask | None:
        """Nobody waits for this request any more, unless a later epoch of it is here."""
        ask = self._asks.get(request)
        if ask is None or ask.epoch > epoch:
            return None
        return self._asks.pop(request)

    def silent(self, now: float) -> list[Ask]:
        """Requests of gateways that have said nothing for too long; those gateways are forgotten."""
        orphans: list[Ask] = []
        for gateway in [g for g in self._gateways.values() if now - g.heard > self._silence_s]:
            orphans += self._of(gateway)
            del self._gateways[gateway.name]
            self._by_peer.pop(gateway.peer, None)
        return orphans

    def gateways(self) -> list[Gateway]:
        """Those that are there now."""
        return list(self._gateways.values())

    def all(self) -> list[Ask]:
        """Every request that somebody waits for."""
        return list(self._asks.values())

    def __len__(self) -> int:
        return len(self._asks)

    def _of(self, gateway: Gateway) -> list[Ask]:
        return [ask for ask in self._asks.values() if ask.gateway is gateway]
