"""The endpoints: how a request of each kind goes from a parsed body to its response.

They share one ``EndpointFactory``, load shedder, idempotency cache and tracer.  Knows nothing about paths (``app``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp

from penstock.api import sse
from penstock.api.admin import GatewayMetrics, MetricsSnapshot
from penstock.api.admission import Admission
from penstock.api.audit_log import AuditSink
from penstock.api.auth import NO_TENANT, ApiKeys, StaticApiKeys
from penstock.api.concurrency import FleetRequestCounts, LocalRequestCounts, RequestCounts
from penstock.api.errors import Header
from penstock.api.http import EndpointFactory, FormBody, HttpExchange, JsonBody, RestOfResponse
from penstock.api.idempotency import (
    IdempotencyCache,
    IdempotentRequest,
    KeyClaim,
    KeyHomes,
    KeyOutcome,
    TokenStreamSource,
    parse_idempotency,
)
from penstock.api.key_permissions import card_names, check_model, visible_cards
from penstock.api.load_shedding import ExactRates, LoadShedder, RateBuckets
from penstock.api.multipart import FORM_BYTES
from penstock.api.openai.pooling import PoolingResponseFormat, PoolingResponseHead, encode_pooling_response, pool_all
from penstock.api.openai.transcriptions import TranscriptionResponse
from penstock.api.openapi import Schemas
from penstock.api.request_log import note_usage
from penstock.api.response_cache import CACHE_CONTROL, HIT, CachedResponseStreams, ResponseCache, is_cacheable
from penstock.api.response_format import GenerationApi, ResponseFormat, ResponseHead, TokenUsage, UsageCharge
from penstock.api.response_store import ResponseStore
from penstock.api.resumed_streams import ResumedStreams, resume_keys
from penstock.api.session_prefixes import SessionPrefixes
from penstock.api.sse import EventStreamWriter
from penstock.api.stream_polling import LoopTurns
from penstock.api.streaming import ResponseStream, ResumeState, complete_body, gather_choices, stream_events
from penstock.api.tracing import RequestTracing, note_response, trace_response_header, with_span
from penstock.clock import Clock
from penstock.config.limits import RequestLimits, SchedulingConfig, TurnLimits
from penstock.errors import KeyReused, NoWorkers, RequestError, UnknownModel, WrongTask
from penstock.interfaces import (
    IDEMPOTENCY_KEY,
    SESSION_HEADERS,
    JsonObject,
    ModelCard,
    PoolingProcessor,
    PreparedGeneration,
    PreparedPooling,
    RequestContext,
    RequestProcessor,
    TokenStreams,
    TranscriptionProcessor,
    WorkerAdmin,
)
from penstock.telemetry.service_levels import ServiceLevels
from penstock.telemetry.spans import NO_SPAN, NoTracer, Span, Tracer
from penstock.types import AdapterRef, ModelIdentity, RequestId, ValidRequest
from penstock.wire.gateway_messages import MAX_CLAIMED_CHOICES

EXPLAIN = b"x-penstock-explain"
"""Asks, with any value, for ``ROUTE``."""

ROUTE = b"x-penstock-route"
"""Names the workers that were chosen, and the numbers that decided."""

GENERATION_PATHS = "/v1/chat/completions or /v1/completions"
AUDIO_PATHS = "/v1/audio/transcriptions"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AppServices:
    """The services behind the HTTP API."""

    streams: TokenStreams
    processor: RequestProcessor
    limits: RequestLimits
    clock: Clock
    metrics: MetricsSnapshot  # of Prometheus' text
    gateway_metrics: GatewayMetrics = lambda gateway: None  # of one gateway process of the host
    metrics_type: str = "text/plain; version=0.0.4; charset=utf-8"
    keys: ApiKeys = field(default_factory=StaticApiKeys)
    buckets: RateBuckets | None = None  # of tenants' rates; None: of this process alone
    exact_rates: ExactRates | None = None  # of tenants, over all hosts
    request_counts: RequestCounts = field(default_factory=LocalRequestCounts)  # of keys with a limit
    fleet_counts: FleetRequestCounts | None = None  # of those, over all hosts; None: each host counts its own
    wall_time: Callable[[], float] = time.time  # Unix seconds, by which keys expire
    audit: AuditSink | None = None  # None: nothing is audited
    event_key: bytes = b""  # of the marks in events' ids
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    turns: TurnLimits = field(default_factory=TurnLimits)
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    pooling: PoolingProcessor | None = None  # None: the model writes
    admin: WorkerAdmin | None = None  # None: workers are not administered here
    transcription: TranscriptionProcessor | None = None  # None: it hears nothing
    key_homes: KeyHomes | None = None  # of idempotency keys; None: other gateways know nothing of them
    count_key_outcome: Callable[[str], None] = lambda how: None  # counts requests with an idempotency key
    count_auth_failure: Callable[[str], None] = lambda code: None  # counts requests without a valid key
    count_forbidden: Callable[[str], None] = lambda code: None  # counts requests that their key does not allow
    count_prefix_break: Callable[[str, int], None] = lambda reason, lost: None  # counts what a changed prompt lost
    response_store: ResponseStore | None = None  # None: responses are not kept for later requests
    response_cache: ResponseCache | None = None  # None: no response is stored
    tracer: Tracer = field(default_factory=NoTracer)
    schemas: Callable[[], Schemas] = dict  # of request bodies
    log_requests: bool = False  # each has a line in the log; else those that are refused
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use it
    allowed_hosts: tuple[str, ...] | None = None  # accepted besides this host's names; None: any
    unjoined_workers: Callable[[], Sequence[tuple[str, str]]] = (
        tuple  # addresses of workers to be joined, each with the reason
    )


class _TokenSource(NamedTuple):
    """The streams of a response, and what its client has of it."""

    streams: TokenStreamSource
    resume: ResumeState


@dataclass(frozen=True, slots=True)
class _PreparedGeneration:
    """A checked generation request."""

    prepared: PreparedGeneration
    keyed: IdempotentRequest | None  # it may be sent again
    seeded: bool  # its client has chosen the seed
    span: Span


class Endpoints:
    """Makes the endpoints, and holds what they share."""

    def __init__(self, behind: AppServices) -> None:
        self._behind = behind
        admission = Admission(behind.limits, behind.clock, behind.streams.prefill_workers)
        self.factory = EndpointFactory(behind.limits, admission)
        count_resumed = (lambda tokens: None) if behind.key_homes is None else behind.key_homes.count_resumed
        self._streams = ResumedStreams(behind.streams, count_resumed)
        self._turns = LoopTurns(behind.turns.answer_units_per_turn)
        self._event_key = event_key_with_defaults(behind.event_key, behind.processor.cards()[0])
        self._idempotency = IdempotencyCache(behind.limits, behind.clock)
        self._tracing = RequestTracing(behind.tracer, behind.clock)
        self.sessions = SessionPrefixes(behind.limits, behind.clock, behind.count_prefix_break)
        self._shedder = LoadShedder(
            admission,
            behind.streams,
            behind.levels,
            limits=behind.limits,
            scheduling=behind.scheduling,
            keys=behind.keys,
            buckets=behind.buckets,
            exact=behind.exact_rates,
        )

    def generation(
        self, prepare: Callable[[JsonObject, RequestContext], Awaitable[PreparedGeneration]], api: GenerationApi
    ) -> ASGIApp:
        """An endpoint that generates text: ``prepare`` takes a body that ``api`` has translated."""

        async def work(exchange: HttpExchange, asked: JsonBody) -> RestOfResponse:
            if not self._tracing.on:
                return await accept(exchange, asked, NO_SPAN)
            with self._tracing.span(exchange, api.operation, asked.body.get("model")) as span:
                answer = await accept(exchange, asked, span)
                if answer is not None:
                    await answer
            return None

        async def accept(exchange: HttpExchange, asked: JsonBody, span: Span) -> RestOfResponse:
            self._check_model(exchange, asked.body.get("model"))
            context = await self._context(exchange, api.id_prefix, clamps_length=api.clamps_length)
            keyed = self._keyed(exchange, asked.body, context)
            body, shape = await api.translate(asked.body, context)
            if keyed is not None:
                if keyed.resume_point.complete:
                    self._behind.count_key_outcome(KeyOutcome.RESUMED)
                    await exchange.send_response(200, shape.terminator, *sse.HEADERS)
                    return None
                context = msgspec.structs.replace(context, response_id=api.id_prefix + keyed.name)
            seeded = body.get("seed") is not None
            if keyed is not None:
                body = keyed.seeded_body(body)
            prepared = self._tracing.with_processing_span(span, await prepare(body, context), context.arrival)
            if keyed is not None and keyed.adapter != _adapter_fingerprint(prepared.requests[0].adapter):
                keyed = self._keyed(exchange, asked.body, context, prepared)  # its name was given to another meanwhile
            del body
            asked.release()
            if prepared.requests[0].session:
                self.sessions.observe(prepared.requests[0])
            request = _PreparedGeneration(prepared, keyed, seeded, span)
            return self._generate(exchange, request, shape, context)

        return self.factory.json_endpoint(work, self.factory.admission.check)

    def pooling(
        self,
        prepare: Callable[[JsonObject, RequestContext], Awaitable[PreparedPooling]] | None,
        shape: PoolingResponseFormat,
    ) -> ASGIApp:
        """An endpoint that pools inputs; ``prepare`` is None for a generation model."""

        async def work(exchange: HttpExchange, body: JsonBody) -> None:
            self._check_model(exchange, body.body.get("model"))
            if prepare is None:
                name = self._behind.processor.cards()[0].name
                paths = GENERATION_PATHS if self._behind.transcription is None else AUDIO_PATHS
                raise WrongTask(name, "generates text; it has no embeddings, rerank or classify", paths)
            with self._tracing.span(exchange, shape.operation, body.body.get("model")) as span:
                context = await self._context(exchange, shape.id_prefix)
                prepared = await prepare(body.body, context)
                body.release()
                await self._pool(exchange, prepared, shape, context, span)

        return self.factory.json_endpoint(work, self.factory.admission.check)

    def transcription(self, *, translates: bool) -> ASGIApp:
        """An endpoint that transcribes audio."""
        behind = self._behind

        async def work(exchange: HttpExchange, sent: FormBody) -> None:
            form = sent.take_form()
            for name in form.fields.get("model", [None]):
                self._check_model(exchange, name)
            if behind.transcription is None:
                paths = GENERATION_PATHS if behind.pooling is None else "what it is for"
                raise WrongTask(behind.processor.cards()[0].name, "does not transcribe audio", paths)
            context = await self._context(exchange, "transcript-")
            source = await behind.transcription.prepare(form, context, translates=translates)
            del form  # files are large, and responses take long
            sent.reservation.release()
            traced = self._tracing.span(exchange, source.task, source.model)
            with closing(source), traced as span:
                headers = [*exchange.request_id_headers(context.id), *trace_response_header(span)]
                response = TranscriptionResponse(with_span(span, behind.streams), self._shedder)
                await response.send(exchange, source, context.caller.qos(), headers)

        return self.factory.form_endpoint(work, behind.limits.max_audio_bytes + FORM_BYTES)

    def json_call(self, ask: Callable[[JsonObject], Awaitable[Any]], *, counted: bool = False) -> ASGIApp:
        """An endpoint that responds with a small JSON object.

        ``counted`` in its tenant's rate, and for the models of its key; else for operators, who name an adapter.
        """

        async def work(exchange: HttpExchange, asked: JsonBody) -> None:
            if counted:
                self._check_model(exchange, asked.body.get("model"))
                await self._shedder.count_request(exchange)
            else:
                exchange.log_entry.detail = f"adapter={asked.body.get('lora_name')}"
            await exchange.send_response(200, _encode(await ask(asked.body)))

        return self.factory.json_endpoint(work)

    def _check_model(self, exchange: HttpExchange, asked: object) -> None:
        """``asked``: the request's ``model``; None is the model itself.

        Raises ModelNotAllowed where the key is not for it, UnknownModel where it is and there is none.
        """
        key, processor = (exchange.tenant or NO_TENANT).permissions, self._behind.processor
        if key.models is None:
            return
        name = processor.cards()[0].name if asked is None else asked
        if not isinstance(name, str):
            return  # what parses the body refuses it
        card = processor.card(name)
        check_model(key, name, (name,) if card is None else card_names(card))
        if card is None:
            raise UnknownModel(name, [each.name for each in visible_cards(key, processor.cards())], mappable=False)

    def _keyed(
        self,
        exchange: HttpExchange,
        body: JsonObject,
        context: RequestContext,
        prepared: PreparedGeneration | None = None,
    ) -> IdempotentRequest | None:
        """``prepared``: has the adapter that the request is computed with; None: it has the one that its model names
        now.  Raises RequestError, KeyReused."""
        fingerprint, limits = "", self._behind.limits
        if prepared is not None:
            fingerprint = _adapter_fingerprint(prepared.requests[0].adapter)
        elif exchange.header(IDEMPOTENCY_KEY) is not None:
            fingerprint = _adapter_fingerprint(self._behind.processor.adapter(body))
        try:
            return parse_idempotency(exchange, body, context, limits, self._event_key, adapter=fingerprint)
        except KeyReused:
            self._behind.count_key_outcome(KeyOutcome.REFUSED)
            raise

    async def _context(self, exchange: HttpExchange, prefix: str, *, clamps_length: bool = False) -> RequestContext:
        arrival = self._behind.clock.now()
        identity = await self._behind.streams.wait_identity()
        if identity is None:
            raise NoWorkers("The server is starting: no worker is ready yet.")
        request_id = RequestId(prefix + secrets.token_hex(12))
        exchange.log_entry.id = request_id
        return RequestContext(
            id=request_id,
            arrival=arrival,
            identity=identity,
            session=_session(exchange, self._behind.limits.max_session_chars),
            caller=self._shedder.caller(exchange),
            clamps_length=clamps_length,
        )

    async def _pool(
        self,
        exchange: HttpExchange,
        prepared: PreparedPooling,
        shape: PoolingResponseFormat,
        context: RequestContext,
        span: Span,
    ) -> None:
        used = TokenUsage.of(prompt=prepared.tokens, completion=0, cached=0)
        with await self._shedder.admit(exchange, prepared.requests[0].qos, [prepared.tokens]) as admitted:
            streams = with_span(span, self._behind.streams)
            pooled = await pool_all(streams, prepared, self._behind.limits.max_inputs_at_once)
            admitted.on_token(0)
            admitted.record_usage(used)
            note_usage(exchange.log_entry, context.id, used, None)
        head = PoolingResponseHead(
            id=context.id, created=int(time.time()), model=prepared.model, tokens=prepared.tokens
        )
        note_response(span, head.id, used, "")
        response = await encode_pooling_response(shape, head, prepared, pooled)
        headers = (*exchange.request_id_headers(head.id), *trace_response_header(span))
        await exchange.send_response(200, response, *headers)

    async def _generate(
        self,
        exchange: HttpExchange,
        request: _PreparedGeneration,
        shape: ResponseFormat,
        context: RequestContext,
    ) -> None:
        prepared, span = request.prepared, request.span
        head = _head(context.name, prepared, context.identity, request.keyed)
        cached = self._cached(exchange, request, context.identity)
        keyed, name, qos = request.keyed, context.id, prepared.requests[0].qos
        claim = None if keyed is None else await self._claim(keyed, prepared.requests, context.identity)
        del context, request
        with (
            self._source(keyed, cached, head.id, claim) as source,
            await self._shedder.admit(exchange, qos, _costs(prepared, cached, source.resume)) as admitted,
        ):
            response = ResponseStream(source.streams, prepared, admitted, source.resume)
            more = [*exchange.request_id_headers(name), *trace_response_header(span)]
            more += [] if cached is None else cached.headers()
            headers = partial(self._headers, name, more, explained=self._explains(exchange))
            try:
                if prepared.reply.stream:
                    out = EventStreamWriter(exchange, headers)
                    del headers, more  # forgotten when they are sent
                    await stream_events(response, self._turns, out, shape, head)
                else:
                    choices = await gather_choices(response, self._turns, len(prepared.requests))
                    body = await complete_body(shape, head, choices, response.usage())
                    await shape.persist()
                    await exchange.send_response(200, body, *headers())
            finally:
                used = response.record_usage()
                note_usage(exchange.log_entry, name, used, admitted.first_token)
                note_response(span, head.id, used, "" if cached is None else cached.lookup_result)

    def _cached(
        self, exchange: HttpExchange, request: _PreparedGeneration, identity: ModelIdentity
    ) -> CachedResponseStreams | None:
        """The response cache, for a cacheable request."""
        store, requests = self._behind.response_cache, request.prepared.requests
        if store is None or not is_cacheable(requests, seeded=request.seeded, control=exchange.headers(CACHE_CONTROL)):
            return None
        return CachedResponseStreams(store, self._streams, requests, identity)

    async def _claim(
        self, keyed: IdempotentRequest, requests: Sequence[ValidRequest], identity: ModelIdentity
    ) -> KeyClaim | None:
        """The claim on a key whose request is computed here.  Raises KeyReused."""
        homes = self._behind.key_homes
        if homes is None or len(requests) > MAX_CLAIMED_CHOICES or self._idempotency.has_stream(keyed):
            return None
        claim = KeyClaim(homes, keyed, resume_keys(homes, keyed, requests, identity))
        try:
            await self._idempotency.open_claim(keyed, claim)
        except KeyReused:
            self._behind.count_key_outcome(KeyOutcome.REFUSED)
            raise
        return claim

    def _source(
        self,
        keyed: IdempotentRequest | None,
        cached: CachedResponseStreams | None,
        name: str,
        claim: KeyClaim | None,
    ) -> AbstractContextManager[_TokenSource]:
        """The scope of the streams that a response is made from."""
        if keyed is not None:
            return self._shared_source(keyed, cached, name, claim)
        if cached is not None:
            cached.lookup()
        return nullcontext(_TokenSource(self._behind.streams if cached is None else cached, ResumeState()))

    @contextmanager
    def _shared_source(
        self, keyed: IdempotentRequest, cached: CachedResponseStreams | None, name: str, claim: KeyClaim | None
    ) -> Iterator[_TokenSource]:
        """The same for a request with an idempotency key."""
        streams = self._streams if cached is None else cached
        try:
            shared, outcome = self._idempotency.lookup(keyed, streams, claim)
        except KeyReused:
            self._behind.count_key_outcome(KeyOutcome.REFUSED)
            raise
        self._behind.count_key_outcome(outcome)
        # The one that an answer was begun by may be refused, or leave, before it is started: then this one starts it.
        computed = outcome not in (KeyOutcome.JOINED, KeyOutcome.REPLAYED) or not shared.is_started
        if cached is not None and computed and shared.is_from(cached):
            cached.lookup()
        charge = UsageCharge(charge_id=name, repeated=outcome is not KeyOutcome.NEW)
        try:
            yield _TokenSource(
                shared,
                ResumeState(
                    resume_point=keyed.resume_point,
                    signer=keyed.signer,
                    charge=charge,
                    computed=computed,
                    rated=shared.rated,
                    metered=shared.metered,
                    shared=shared,
                ),
            )
        finally:
            self._idempotency.release(keyed, shared)

    def _explains(self, exchange: HttpExchange) -> bool:
        """Whether the routing is explained.  It reveals other requests, so only to operators."""
        return exchange.header(EXPLAIN) is not None and (exchange.tenant or NO_TENANT).operator

    def _headers(self, name: str, more: Sequence[Header], *, explained: bool) -> list[Header]:
        """The response's headers, once its first choice has a worker."""
        headers = list(more)
        line = self._behind.streams.routing_decision_line(RequestId(f"{name}/0")) if explained else None
        if line is not None:
            headers.append((ROUTE, bytes(char if 32 <= char < 127 else 63 for char in line.encode("ascii", "replace"))))
        return headers


def _adapter_fingerprint(adapter: AdapterRef | None) -> str:
    return "" if adapter is None else adapter.fingerprint


def _session(exchange: HttpExchange, max_chars: int) -> str:
    """The session header; a name that is too long is refused, not truncated."""
    for header in SESSION_HEADERS:
        name = (exchange.header(header) or b"").strip().decode("latin-1")
        if len(name) > max_chars:
            raise RequestError(
                f"The header {header.decode()} has {len(name)} characters; at most {max_chars} are allowed.",
                code="session_too_long",
            )
        if name:
            return name
    return ""


def _head(
    name: str, prepared: PreparedGeneration, identity: ModelIdentity, keyed: IdempotentRequest | None
) -> ResponseHead:
    reply = prepared.reply
    return ResponseHead(
        id=name,
        created=int(time.time()),
        model=reply.model,
        system_fingerprint=identity.system_fingerprint,
        seed=reply.seed,
        logprobs=reply.logprobs,
        token_ids=reply.token_ids,
        n=reply.n,
        prompts=tuple(request.prompt for request in prepared.requests[:: reply.n]) if reply.token_ids else (),
        include_usage=reply.include_usage,
        continuous_usage=reply.continuous_usage,
        resumed=keyed is not None and bool(keyed.resume_point.positions),
        length_clamped=reply.length_clamped,
    )


def _costs(prepared: PreparedGeneration, cached: CachedResponseStreams | None, resume: ResumeState) -> list[int]:
    """Prompt tokens of each engine request; only the first choice of a prompt counts them."""
    if not resume.computed or (cached is not None and cached.lookup_result == HIT):
        return []
    n = prepared.reply.n
    return [0 if i % n else len(request.prompt) for i, request in enumerate(prepared.requests)]


def event_key_with_defaults(event_key: bytes, card: ModelCard) -> bytes:
    """The key of events' marks.  Streams that began with other sampling defaults, which draw other tokens, cannot go
    on here."""
    if not card.sampling:
        return event_key
    return blake2b(_encode(card.sampling), digest_size=32, key=event_key, person=b"penstock sampled").digest()
