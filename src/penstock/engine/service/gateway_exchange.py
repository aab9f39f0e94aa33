"""What gateways share through this worker: they have no links between them, but all of them speak to the workers.

Verdicts on requests and names of adapters are passed on to all other gateways, and to those that come later.  Demands
of tenants, claims on idempotency keys, counts of open requests and questions about saved tokens are for the one worker
that gateways choose for them, and answered.  Nothing is taken from a gateway that has not said Hello.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from penstock.adapter_records import AdapterRecord, AdapterRecords
from penstock.engine.service.gateways import GatewayRequests
from penstock.engine.service.idempotency_claims import IdempotencyClaims
from penstock.engine.service.open_requests import OpenRequestTotals
from penstock.engine.service.rate_totals import RateDemandTotals
from penstock.engine.service.saved_tokens import SavedTokens
from penstock.poison_verdicts import PoisonVerdicts
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import (
    AdapterChanged,
    AdapterNames,
    ChangeAdapter,
    ClaimIdempotencyKey,
    ConfirmRequests,
    FindTokens,
    FoundTokens,
    OpenRequestAnswer,
    OpenRequestCounts,
    PoisonRequests,
    RateDemands,
    SaveTokens,
)

SharedMessage: TypeAlias = (
    PoisonRequests
    | RateDemands
    | ClaimIdempotencyKey
    | SaveTokens
    | FindTokens
    | OpenRequestCounts
    | ChangeAdapter
    | AdapterNames
)


class GatewayExchange:
    """The tables of one worker.  ``claims`` and ``adapters``: those that gateways have sent here."""

    def __init__(self, requests: GatewayRequests, send: Callable[[bytes, PeerMessage], bool]) -> None:
        """``requests`` knows the gateways; ``send`` takes a connection and a message, and says whether it is sent."""
        self._requests = requests
        self._send = send
        self._verdicts = PoisonVerdicts()
        self._demands = RateDemandTotals()
        self._open_requests = OpenRequestTotals()
        self.claims = IdempotencyClaims()
        self.saved = SavedTokens()
        self.adapters = AdapterRecords()

    def is_connected(self, peer: bytes) -> bool:
        """Whether this connection still exists.  The message sent to find out has no content."""
        return self._send(peer, ConfirmRequests(requests=()))

    def send_all(self, peer: bytes, now: float) -> None:
        """Send a gateway that is new here what others have said."""
        if self._verdicts.since:
            self._send(peer, PoisonRequests(digests=self._verdicts.all(now)))
        if len(self.adapters):
            self._send(peer, AdapterNames(records=self.adapters.all()))

    def on_message(self, peer: bytes, message: SharedMessage, now: float) -> None:
        """Handle a message of the gateway with this connection."""
        if not self._requests.is_connected(peer):
            return
        match message:
            case PoisonRequests():
                new = self._verdicts.add(message.digests, now)
                if new:
                    self._pass_on(peer, PoisonRequests(digests=new))
            case RateDemands():
                self._add_demands(peer, message, now)
            case ClaimIdempotencyKey():
                self._claim_key(peer, message, now)
            case SaveTokens():
                self.saved.save(message.pieces, now)
            case FindTokens():
                self._send(peer, FoundTokens(serial=message.serial, tokens=self.saved.find(message.names, now)))
            case OpenRequestCounts():
                self._count_requests(peer, message, now)
            case ChangeAdapter():
                self._change_adapter(peer, message)
            case AdapterNames():
                self._pass_on_adapters(peer, self.adapters.add(message.records))

    def _add_demands(self, peer: bytes, message: RateDemands, now: float) -> None:
        host = self._requests.host_of(peer)
        if host:
            hosts = self._requests.hosts(now)
            self._send(peer, self._demands.on_demands(host, message.demands, hosts, now))

    def _claim_key(self, peer: bytes, message: ClaimIdempotencyKey, now: float) -> None:
        gateway = self._requests.process_of(peer)
        if gateway is not None:
            is_alive = partial(self._requests.is_alive, now=now, connected=self.is_connected)
            state = self.claims.on_claim(gateway, message, is_alive, now)
            if message.serial:
                self._send(peer, state)

    def _count_requests(self, peer: bytes, message: OpenRequestCounts, now: float) -> None:
        gateway = self._requests.process_of(peer)
        if gateway is not None:
            admitted = self._open_requests.on_counts(gateway.name, message, now)
            if message.serial:
                self._send(peer, OpenRequestAnswer(serial=message.serial, admitted=admitted))

    def _change_adapter(self, peer: bytes, message: ChangeAdapter) -> None:
        """Accept a gateway's record, as the home of its name, unless a later one is known here."""
        known = self.adapters.find(message.record.name)
        stands = self.adapters.change(message.record)
        self._send(peer, AdapterChanged(serial=message.serial, record=stands))
        if stands is not None and stands != known:
            self._pass_on_adapters(peer, (stands,))

    def _pass_on_adapters(self, peer: bytes, records: tuple[AdapterRecord, ...]) -> None:
        if records:
            self._pass_on(peer, AdapterNames(records=records))

    def _pass_on(self, peer: bytes, message: PoisonRequests | AdapterNames) -> None:
        """Send it to all gateways but the one with this connection."""
        for gateway in self._requests.gateways():
            if gateway.peer != peer:
                self._send(gateway.peer, message)
