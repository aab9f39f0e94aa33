"""The gateways that speak to this worker, the request that each of them has here, and the tokens each is sent.

Knows when a gateway has fallen silent, has a new connection or is another incarnation, and returns the requests that
this concerns.  It cancels and sends nothing itself.

The codec has checked the ranges of what a gateway submits; ``invalid_submit`` checks what depends on the model, or on
two fields at once, before anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import NewTokens
from penstock.engine.service.idempotency_claims import GatewayProcess
from penstock.types import PAGE_TOKENS, RequestId, RequestStage, SamplingParams, read_token_ids
from penstock.wire.gateway_messages import (
    MAX_ITEM_PHASES,
    MAX_NAMED_REQUESTS,
    MAX_TOKEN_ITEMS,
    ConfirmRequests,
    Hello,
    PageSource,
    PhaseTiming,
    RequestReturned,
    Submit,
    TokenItem,
    in_parts,
)

CONFIRM_INTERVAL_S = 5.0
"""A gateway is asked after so long, and again, whether it still wants what it asked for: a cancel can be lost."""

ALIVE_S = 3.0
"""A gateway that has said something within so long is there: an idle one in a large fleet greets every two seconds."""

HOST_ALIVE_S = 3.0
"""The gateways of a host that have all said nothing for so long have no share of tenants' rates any more, and one of
them computes no request with an idempotency key.  An idle one greets at least every two seconds."""

UNREACHABLE_S = 0.5
"""A gateway that has said nothing for so long, and has no connection any more, is gone: with requests it speaks more
often, and a connection that was lost is made anew sooner."""

REMEMBERED_S = 300.0
"""A gateway that went away can still learn for so long what became of its requests; by then it has failed them."""

MAX_GATEWAYS = 4096
"""Names of gateways that a worker remembers.  Beyond them, one that is away gives way to a new one, and where none is
away the new one is not answered: a stolen key of a gateway's node can say Hello under any number of names."""


@dataclass(slots=True)
class GatewayRequest:
    """One request as its gateway submitted it."""

    request: RequestId
    epoch: int
    stage: RequestStage
    gateway: ConnectedGateway
    pages_from: PageSource | None
    arrived_at: float  # monotonic seconds, here
    migrates: bool = False  # stage=decode: it is being written where its pages are
    started_at: float | None = None  # when its first token was computed here
    first_item: TokenItem | None = None  # stage=decode: the prefill worker's token, with its facts
    confirmed_at: float = 0.0  # when it came, or its gateway was last asked whether it is still wanted
    phases: list[PhaseTiming] | None = None  # that have ended and were not sent yet; None: the request is not traced
    pulled: tuple[float, int] = (0.0, 0)  # stage=decode: when it asked for its pages, and of how many tokens

    def end_phase(self, name: str, begin: float, now: float, **facts: float) -> None:
        """A phase of this leg is over, if somebody records it."""
        if self.phases is not None and len(self.phases) < MAX_ITEM_PHASES:
            self.phases.append(PhaseTiming(name, begin - self.arrived_at, now - begin, facts))

    def take_phases(self) -> tuple[PhaseTiming, ...]:
        """The timings that have not been sent yet."""
        if not self.phases:
            return ()
        phases, self.phases = tuple(self.phases), []
        return phases


def add_request_of(message: Submit, now: float, *, ahead: int) -> AddRequest:
    """What the scheduler hears of a Submit.  ``ahead``: room for what is written of a moving answer meanwhile.

    Its arrival follows from this host's clock and the request's age: gateways on hosts that run for longer or shorter
    stand in one line.
    """
    return AddRequest(
        id=message.request,
        epoch=message.epoch,
        stage=message.stage,
        prompt=read_token_ids(message.prompt),
        sampling=message.sampling,
        arrival=now - message.age_s,
        root=message.root,
        hashes=message.block_hashes,
        emitted=message.emitted,
        qos=message.qos,
        open_ended=message.open_ended,
        expected_tokens=message.expected_tokens,
        images=message.images,
        media=message.media,
        encoders=message.encoders,
        pooling=message.pooling,
        adapter=message.adapter,
        extra_tokens=ahead if message.joins else 0,
        prompt_pages_only=message.mixed,
    )


@dataclass(slots=True, eq=False)
class ConnectedGateway:
    """One gateway.  ``peer`` changes when its connection is made anew, ``incarnation`` when its process is."""

    name: str
    incarnation: int
    peer: bytes
    last_seen: float
    connection: int = 0  # the latest that it made
    serial: int = 0  # the latest of its Submits; 0: it gives no work
    follows_cache: bool = False  # it has asked what is cached here, and is sent its changes
    reported_at: float = float("-inf")  # when it was sent one, over the connection that it has now
    counters: Mapping[str, float] = field(default_factory=dict[str, float])  # that it knows by those
    counted_at: float = float("-inf")  # when it was sent all of them
    host: str = ""  # see ``Hello.host``
    away: bool = False  # silent for too long; nothing is sent until it speaks
    unsent: list[RequestReturned] = field(default_factory=list[RequestReturned])  # what it must learn when it is back


@dataclass(frozen=True, slots=True)
class HelloResult:
    """What a Hello brought to light."""

    gateway: ConnectedGateway | None  # None: it is not the one of its name, or one too many, and is not answered
    orphans: list[GatewayRequest]  # of an earlier incarnation, which no longer waits
    cut_off: list[GatewayRequest]  # asked over an earlier connection: what was said over it last may have been lost


class GatewayRequests:
    """All requests of all gateways at this worker."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._requests: dict[RequestId, GatewayRequest] = {}
        self._gateways: dict[str, ConnectedGateway] = {}
        self._by_peer: dict[bytes, ConnectedGateway] = {}
        self._connected: tuple[ConnectedGateway, ...] | None = None  # until one comes or goes

    def on_hello(
        self, peer: bytes, message: Hello, now: float, connected: Callable[[bytes], bool] = lambda peer: False
    ) -> HelloResult:
        """A gateway is (still) there.  A process or connection that was replaced meanwhile has nothing here.

        A gateway of the same name on another connection takes its place when the earlier one is gone or has been
        silent for ``ALIVE_S``: a gateway that is alive is never displaced.  A connection speaks for one gateway: under
        another name it is another gateway, and what the earlier one has here is orphaned.
        """
        known = self._gateways.get(message.gateway)
        other = known is not None and known.peer != peer and not known.away
        if known is not None and other and now - known.last_seen < ALIVE_S and connected(known.peer):
            return HelloResult(None, [], [])
        orphans: list[GatewayRequest] = []
        cut_off: list[GatewayRequest] = []
        said = (message.incarnation, message.connection)
        if known is not None and (known.incarnation, known.connection) > said and now - known.last_seen < ALIVE_S:
            # What waited on a connection that is closed already must not be taken for the gateway's present one.
            return HelloResult(None, [], [])
        earlier = self._by_peer.get(peer)
        if earlier is not None and earlier.name != message.gateway:
            orphans = self._forget(earlier)
        if known is None and len(self._gateways) >= MAX_GATEWAYS and not self._forget_one_away():
            return HelloResult(None, orphans, [])
        if known is None or known.incarnation != message.incarnation:
            if known is not None:
                orphans += self._forget(known)
            known = self._gateways[message.gateway] = ConnectedGateway(message.gateway, message.incarnation, peer, now)
            self._connected = None
        elif known.peer != peer:
            cut_off = self._of(known)
            self._by_peer.pop(known.peer, None)
            known.peer = peer
            known.reported_at = float("-inf")
        if known.away:
            known.reported_at, self._connected = float("-inf"), None
        known.connection = message.connection
        self._by_peer[peer] = known
        known.last_seen = now
        known.host = message.host
        known.away = False
        return HelloResult(known, orphans, cut_off)

    def may_cancel(self, peer: bytes, request: RequestId) -> bool:
        """Whether this connection has said Hello, and no other gateway submitted this request."""
        gateway, ask = self._by_peer.get(peer), self._requests.get(request)
        return gateway is not None and (ask is None or ask.gateway is gateway)

    def is_connected(self, peer: bytes) -> bool:
        """Whether this connection has said Hello."""
        return peer in self._by_peer

    def submit(self, peer: bytes, message: Submit, now: float) -> GatewayRequest | None:
        """Take a request on.  None when it is here in this epoch or a later one, or is another gateway's.

        KeyError for a peer not known.
        """
        gateway = self._by_peer[peer]
        gateway.serial = max(gateway.serial, message.serial)
        present = self._requests.get(message.request)
        if present is not None and (present.epoch >= message.epoch or present.gateway.name != gateway.name):
            return None
        gateway.last_seen = now
        ask = GatewayRequest(
            message.request, message.epoch, message.stage, gateway, message.pages_from, now, message.joins
        )
        ask.confirmed_at = now
        ask.phases = [] if message.traced else None
        self._requests[message.request] = ask
        return ask

    def get(self, request: RequestId) -> GatewayRequest | None:
        """The ask for this request, if it is still wanted."""
        return self._requests.get(request)

    def remove(self, request: RequestId, epoch: int) -> GatewayRequest | None:
        """Remove this request, unless a later epoch of it is here."""
        ask = self._requests.get(request)
        if ask is None or ask.epoch > epoch:
            return None
        return self._requests.pop(request)

    def orphans_of_silent(self, now: float, connected: Callable[[bytes], bool]) -> list[GatewayRequest]:
        """Requests of gateways that have said nothing for too long.  Those that stay away are forgotten in the end.

        ``connected``: whether a connection still exists; it is asked for gateways with requests only.
        """
        orphans: list[GatewayRequest] = []
        working = {ask.gateway.name for ask in self._requests.values()} if self._requests else set[str]()
        for gateway in list(self._gateways.values()):
            quiet = now - gateway.last_seen
            doubtful = quiet > UNREACHABLE_S and gateway.name in working
            gone = quiet > self._silence_s or (doubtful and not gateway.away and not connected(gateway.peer))
            if gone and not gateway.away:
                orphans += self._lose(gateway)
            if quiet > self._silence_s + REMEMBERED_S:
                del self._gateways[gateway.name]
        return orphans

    def orphans_of_replaced(self, incarnations: Mapping[str, int]) -> list[GatewayRequest]:
        """Requests of gateways whose processes are of these incarnations by now, and have not said a word yet."""
        orphans: list[GatewayRequest] = []
        for name, incarnation in incarnations.items():
            gateway = self._gateways.get(name)
            if gateway is not None and gateway.incarnation < incarnation and not gateway.away:
                orphans += self._lose(gateway)
        return orphans

    def confirmations_due(self, now: float) -> list[tuple[ConnectedGateway, ConfirmRequests]]:
        """What gateways are to be asked about what they asked for long ago."""
        asked: dict[str, tuple[ConnectedGateway, list[tuple[RequestId, int]]]] = {}
        for ask in self._requests.values():
            if now - ask.confirmed_at >= CONFIRM_INTERVAL_S and not ask.gateway.away:
                ask.confirmed_at = now
                asked.setdefault(ask.gateway.name, (ask.gateway, []))[1].append((ask.request, ask.epoch))
        return [
            (gateway, ConfirmRequests(requests=part))
            for gateway, requests in asked.values()
            for part in in_parts(requests, MAX_NAMED_REQUESTS)
        ]

    def gateways(self) -> tuple[ConnectedGateway, ...]:
        """The gateways that are connected now.  The same object until one comes or goes."""
        if self._connected is None:
            self._connected = tuple(gateway for gateway in self._gateways.values() if not gateway.away)
        return self._connected

    def host_of(self, peer: bytes) -> str:
        """The host of the gateway with this connection; empty where it has said none."""
        gateway = self._by_peer.get(peer)
        return "" if gateway is None else gateway.host

    def process_of(self, peer: bytes) -> GatewayProcess | None:
        """The gateway with this connection."""
        gateway = self._by_peer.get(peer)
        return None if gateway is None else GatewayProcess(gateway.name, gateway.incarnation)

    def is_alive(self, process: GatewayProcess, now: float, connected: Callable[[bytes], bool]) -> bool:
        """Whether this very process has said something lately.  ``connected``: as for ``orphans_of_silent``."""
        gateway = self._gateways.get(process.name)
        if gateway is None or gateway.incarnation != process.incarnation or gateway.away:
            return False
        quiet = now - gateway.last_seen
        return quiet < HOST_ALIVE_S and (quiet <= UNREACHABLE_S or connected(gateway.peer))

    def hosts(self, now: float) -> int:
        """How many hosts have gateways that speak to this worker."""
        alive = {each.host for each in self._gateways.values() if now - each.last_seen < HOST_ALIVE_S}
        return len(alive - {""})

    def all(self) -> list[GatewayRequest]:
        """Every request that somebody waits for."""
        return list(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def _forget(self, gateway: ConnectedGateway) -> list[GatewayRequest]:
        """Its requests, for which no gateway waits any more."""
        del self._gateways[gateway.name]
        return self._lose(gateway)

    def _lose(self, gateway: ConnectedGateway) -> list[GatewayRequest]:
        """It is away; its requests."""
        gateway.away, self._connected = True, None
        if self._by_peer.get(gateway.peer) is gateway:
            del self._by_peer[gateway.peer]
        return self._of(gateway)

    def _forget_one_away(self) -> bool:
        """Whether there was one: its requests are gone already."""
        away = next((gateway for gateway in self._gateways.values() if gateway.away), None)
        if away is not None:
            self._forget(away)
        return away is not None

    def _of(self, gateway: ConnectedGateway) -> list[GatewayRequest]:
        return [ask for ask in self._requests.values() if ask.gateway is gateway]


MAX_LOGPROBS_PER_MESSAGE = 8192
"""Log-probabilities of prompt tokens and their alternatives in one message: some 120 KiB, decoded within 4 ms."""


class TokenBatches:
    """The items of one step, by the gateway that waits for them."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[ConnectedGateway, list[TokenItem]]] = {}

    def add(self, gateway: ConnectedGateway, item: TokenItem) -> None:
        """One more item for this gateway."""
        self._batches.setdefault(id(gateway), (gateway, []))[1].append(item)

    def all(self) -> list[tuple[ConnectedGateway, tuple[TokenItem, ...]]]:
        """Every gateway with its items, in order, in as many parts as messages take."""
        return [
            (gateway, part) for gateway, items in self._batches.values() for part in in_parts(items, MAX_TOKEN_ITEMS)
        ]


def token_item(progress: NewTokens, ask: GatewayRequest, now: float) -> TokenItem:
    """What one request's progress is for its gateway.  A token that the prefill worker drew keeps its facts.

    Phases of a traced request are sent once.
    """
    request = progress.request
    if ask.first_item is not None and ask.first_item.index == progress.index:
        return ask.first_item
    is_first = progress.index == request.emitted
    if is_first and ask.phases is not None and ask.started_at is not None:
        computed = len(request.prompt) + request.emitted - request.cached_tokens
        ask.end_phase("prefill", ask.started_at, now, tokens=computed, cached_tokens=request.cached_tokens)
    return TokenItem(
        request=request.id,
        epoch=request.epoch,
        index=progress.index,
        tokens=progress.tokens,
        logprobs=progress.logprobs if request.sampling.logprobs is not None else None,
        prompt_logprobs=progress.prompt_logprobs or None,
        finish=progress.finish,
        cached_tokens=request.cached_tokens if is_first else 0,
        pooled=progress.pooled,
        queued_s=(ask.started_at if ask.started_at is not None else now) - ask.arrived_at if is_first else 0.0,
        phases=ask.take_phases(),
    )


def split_prompt_logprobs(item: TokenItem) -> Iterator[TokenItem]:
    """The item, with what comes before it of the prompt's log-probabilities where they are many.  The last has the
    tokens."""
    logprobs = item.prompt_logprobs or ()
    at_once = max(1, MAX_LOGPROBS_PER_MESSAGE // (1 + max((len(one.top) for one in logprobs), default=0)))
    start = 0
    while len(logprobs) - start > at_once:
        yield TokenItem(
            request=item.request,
            epoch=item.epoch,
            index=item.index,
            tokens=(),
            prompt_logprobs=logprobs[start : start + at_once],
            prompt_start=start,
            prompt_more=True,
        )
        start += at_once
    yield item if not start else msgspec.structs.replace(item, prompt_logprobs=logprobs[start:], prompt_start=start)


UNFIT = "unfit"
"""How the reason begins for which a request is given back that no gateway should have sent."""


def invalid_submit(message: Submit, vocabulary: int | None, *, mixed: bool) -> str | None:
    """Why a model with this vocabulary (None: not known) cannot compute ``message``; None where it can.

    ``mixed``: this worker's fleet reads prompts and writes answers in two numerics classes.
    """
    prompt = np.frombuffer(message.prompt, np.uint32)  # 100,000 tokens take some microseconds, one by one milliseconds
    if prompt.max() >= _unknown_from(vocabulary) or not _known(message.emitted, vocabulary):
        return f"a token that is none of the model's {vocabulary}"
    if len(message.block_hashes) > len(prompt) // PAGE_TOKENS:
        return f"{len(message.block_hashes)} hashes of blocks for {len(prompt)} tokens"
    if message.mixed and not mixed:
        return "prompt and answer in two numerics classes, of which there is one here"
    end = 0
    for image in message.images:
        if image.at < end or image.end > len(prompt):
            return "an image that is not in the prompt"
        end = image.end
    if message.media and len(message.media) != len(message.images):
        return f"{len(message.media)} pictures for {len(message.images)} places"
    if message.pooling is not None and (message.pooling.second or 0) > len(prompt):
        return "a second text that begins behind the prompt"
    return _unfit_sampling(message.sampling, vocabulary)


def _unfit_sampling(sampling: SamplingParams, vocabulary: int | None) -> str | None:
    named = (sampling.stop_token_ids, tuple(sampling.logit_bias), sampling.banned, sampling.banned_first)
    if not all(_known(tokens, vocabulary) for tokens in named):
        return f"a token in stop_token_ids, logit_bias or banned that is none of the model's {vocabulary}"
    most = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    if vocabulary is not None and most > vocabulary:
        return f"{most} alternatives of {vocabulary} tokens"
    return None


def invalid_first_token(first: TokenItem, vocabulary: int | None) -> str | None:
    """Why tokens that another worker has drawn are none of this model's."""
    return None if _known(first.tokens, vocabulary) else f"a token that is none of the model's {vocabulary}"


def _known(tokens: Sequence[int], vocabulary: int | None) -> bool:
    if not len(tokens):
        return True
    return min(tokens) >= 0 and max(tokens) < _unknown_from(vocabulary)


def _unknown_from(vocabulary: int | None) -> int:
    return 1 << 31 if vocabulary is None else vocabulary
