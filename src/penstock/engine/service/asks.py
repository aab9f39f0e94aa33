"""Who asked for what: the gateways that speak to this worker, and the request that each of them has here.

Knows when a gateway has fallen silent, has a new connection or is another incarnation, and names the requests that
this concerns.  It cancels nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types import Leg, RequestId
from penstock.wire.messages import Hello, PageSource, Returned, Submit, TokenItem

REMEMBERED_S = 300.0
"""A gateway that went away can still learn for so long what became of its requests; by then it has failed them."""


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
    first: TokenItem | None = None  # leg=decode: the prefill worker's token, with its facts


@dataclass(slots=True, eq=False)
class Gateway:
    """One gateway.  ``peer`` changes when its connection is made anew, ``incarnation`` when its process is."""

    name: str
    incarnation: int
    peer: bytes
    heard: float
    connection: int = 0  # the latest that it made
    serial: int = 0  # the latest of its Submits; 0: it gives no work
    follows_cache: bool = False  # it has asked what is cached here, and is told of changes
    away: bool = False  # silent for too long; not told anything until it speaks
    unsent: list[Returned] = field(default_factory=list[Returned])  # what it must learn when it is back


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a Hello brought to light."""

    gateway: Gateway
    orphans: list[Ask]  # of an earlier incarnation: nobody waits for them
    cut_off: list[Ask]  # asked over an earlier connection: what was said over it last may have been lost


class Asks:
    """All requests of all gateways at this worker."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._asks: dict[RequestId, Ask] = {}
        self._gateways: dict[str, Gateway] = {}
        self._by_peer: dict[bytes, Gateway] = {}

    def hello(self, peer: bytes, message: Hello, now: float) -> Greeted:
        """A gateway is (still) there.  A process or connection that was replaced meanwhile has nothing here."""
        known = self._gateways.get(message.gateway)
        orphans: list[Ask] = []
        cut_off: list[Ask] = []
        said = (message.incarnation, message.connection)
        if known is not None and (known.incarnation, known.connection) > said:
            # What waited on a connection that is closed already must not be taken for the gateway's present one.
            return Greeted(Gateway(message.gateway, message.incarnation, peer, now), [], [])
        if known is None or known.incarnation < message.incarnation:
            if known is not None:
                orphans = self._of(known)
                self._by_peer.pop(known.peer, None)
            known = self._gateways[message.gateway] = Gateway(message.gateway, message.incarnation, peer, now)
        elif known.peer != peer:
            cut_off = self._of(known)
            self._by_peer.pop(known.peer, None)
            known.peer = peer
        known.connection = message.connection
        self._by_peer[peer] = known
        known.heard = now
        known.away = False
        return Greeted(known, orphans, cut_off)

    def knows(self, peer: bytes) -> bool:
        """Has whoever speaks over this connection said Hello?"""
        return peer in self._by_peer

    def submit(self, peer: bytes, message: Submit, now: float) -> Ask | None:
        """Take a request on.  None when it is here in this epoch or a later one.  KeyError for a peer not known."""
        gateway = self._by_peer[peer]
        gateway.serial = max(gateway.serial, message.serial)
        present = self._asks.get(message.request)
        if present is not None and present.epoch >= message.epoch:
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
        """Requests of gateways that have said nothing for too long.  Those that stay away are forgotten in the end."""
        orphans: list[Ask] = []
        for gateway in list(self._gateways.values()):
            quiet = now - gateway.heard
            if quiet > self._silence_s and not gateway.away:
                gateway.away = True
                self._by_peer.pop(gateway.peer, None)
                orphans += self._of(gateway)
            if quiet > self._silence_s + REMEMBERED_S:
                del self._gateways[gateway.name]
        return orphans

    def gateways(self) -> list[Gateway]:
        """Those that are there now."""
        return [gateway for gateway in self._gateways.values() if not gateway.away]

    def all(self) -> list[Ask]:
        """Every request that somebody waits for."""
        return list(self._asks.values())

    def __len__(self) -> int:
        return len(self._asks)

    def _of(self, gateway: Gateway) -> list[Ask]:
        return [ask for ask in self._asks.values() if ask.gateway is gateway]
