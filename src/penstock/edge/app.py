"""The application: every path, and how a request gets from the socket to an answer.

A plain ASGI application under Starlette's router.  ``make_app`` is all that the composition root needs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.clock import Clock
from penstock.config.limits import Limits, SchedulingConfig, TurnLimits
from penstock.edge import admin, sse, status
from penstock.edge.answering import Answering, Course, gather, stream, whole
from penstock.edge.auth import EVERYBODY, Authenticated, KeyRing, Ring, WrongKeys
from penstock.edge.cross_origin import opened_to
from penstock.edge.door import Asked, Door, Sent
from penstock.edge.errors import Header
from penstock.edge.event_stream import EventOut
from penstock.edge.exchange import Exchange
from penstock.edge.feeds import Turns
from penstock.edge.forms import FORM_BYTES
from penstock.edge.gate import Gate, Rules
from penstock.edge.host_check import HostCheck
from penstock.edge.kept import Answers, KeptAnswers, Met
from penstock.edge.keyed import Keyed, keyed_of
from penstock.edge.openai_chat import ChatShape
from penstock.edge.openai_completions import CompletionShape
from penstock.edge.openai_shapes import Charge, Head, Shape, Usage
from penstock.edge.openapi import Schemas, describing
from penstock.edge.pool_shapes import ClassifyShape, EmbeddingShape, PoolHead, PoolShape, RerankShape
from penstock.edge.rates import Buckets
from penstock.edge.reading import read_all, written
from penstock.edge.request_log import RequestLog, note_usage
from penstock.edge.scraped import MetricsPage, TakeSnapshot
from penstock.edge.stored import CACHE_CONTROL, HIT, ResponseStore, StoredAnswers, repeats
from penstock.edge.traced import Traced, header_of, parts_of, told
from penstock.edge.transcribing import Transcribing
from penstock.edge.unknown_paths import hint
from penstock.errors import KeyReused, MethodNotAllowed, NoWorkers, RequestError, UnknownPath, WrongTask
from penstock.telemetry.service_levels import ServiceLevels
from penstock.telemetry.spans import NoTracer, Span, Tracer
from penstock.types import ModelIdentity, RequestId
from penstock.wire.ports import (
    Envelope,
    Hears,
    Intake,
    JsonObject,
    ModelCard,
    Pools,
    PoolWork,
    Posts,
    Prepared,
    TokenStreams,
)

SESSION = b"x-session-affinity"
"""Names the session that a request belongs to."""

EXPLAIN = b"x-penstock-explain"
"""Asks, with any value, for ``ROUTE``."""

ROUTE = b"x-penstock-route"
"""Says which workers were chosen, and by which numbers."""

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
WRITING_PATHS = "/v1/chat/completions or /v1/completions"
AUDIO_PATHS = "/v1/audio/transcriptions"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Everything behind the edge."""

    streams: TokenStreams
    intake: Intake
    limits: Limits
    clock: Clock
    metrics: TakeSnapshot  # of Prometheus' text
    metrics_type: str = "text/plain; version=0.0.4; charset=utf-8"
    keys: Ring = field(default_factory=KeyRing)
    buckets: Buckets | None = None  # of tenants' rates; None: of this process alone
    event_key: bytes = b""  # of the marks in events' ids
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    turns: TurnLimits = field(default_factory=TurnLimits)
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    pools: Pools | None = None  # None: the model writes
    posts: Posts | None = None  # None: workers cannot be told anything here
    hears: Hears | None = None  # None: it hears nothing
    met: Callable[[str], None] = lambda how: None  # counts requests with an idempotency key
    unauthorized: Callable[[str], None] = lambda code: None  # counts requests without a valid key
    stored: ResponseStore | None = None  # None: no response is stored
    tracer: Tracer = field(default_factory=NoTracer)
    schemas: Callable[[], Schemas] = dict  # of request bodies
    log_requests: bool = False  # each has a line in the log; else those that are refused
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use it
    allowed_hosts: tuple[str, ...] | None = None  # names that it answers to, beside this host's; None: to any
    waiting: Callable[[], Sequence[tuple[str, str]]] = tuple  # addresses of workers to be joined, each with the reason


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request for text that was checked."""

    prepared: Prepared
    keyed: Keyed | None  # it may be sent again
    seeded: bool  # its client has chosen the seed
    span: Span


def make_app(behind: Behind) -> ASGIApp:
    """The ASGI application.  It makes no connections and starts no tasks of its own."""
    service = _Service(behind)
    page = MetricsPage(behind.metrics, behind.clock, behind.limits.metrics_cache_s)
    prepare, pools = behind.intake, behind.pools
    embeddings, rerank, classify = (pools.embeddings, pools.rerank, pools.classify) if pools else (None, None, None)
    writing = [
        _post("/v1/chat/completions", service.generation(prepare.chat, ChatShape())),
        _post("/v1/completions", service.generation(prepare.completion, CompletionShape())),
    ]
    routes = [
        *writing,
        _post("/v1/embeddings", service.reading(embeddings, EmbeddingShape())),
        *(_post(path, service.reading(rerank, RerankShape())) for path in RERANK_PATHS),
        _post("/classify", service.reading(classify, ClassifyShape())),
        _post("/v1/audio/transcriptions", service.listening(translates=False)),
        _post("/v1/audio/translations", service.listening(translates=True)),
        _post("/tokenize", service.question(_tokenize(prepare), counted=True)),
        _post("/detokenize", service.question(_detokenize(prepare), counted=True)),
        _post("/v1/load_lora_adapter", service.question(prepare.load_adapter)),
        _post("/v1/unload_lora_adapter", service.question(prepare.unload_adapter)),
        *(admin.routes(behind.posts, service.door) if behind.posts else ()),
        *status.routes(
            behind.streams, prepare.cards, page, behind.metrics_type, waiting=behind.waiting, clock=behind.clock
        ),
    ]
    app = Starlette(
        routes=describing(routes, behind.schemas),
        exception_handlers={HTTPException: http_error, Exception: unforeseen},
    )
    app.router.redirect_slashes = False
    wrong = WrongKeys(behind.clock, behind.unauthorized)
    straight = _Straight(app, {route.path: route.endpoint for route in writing})
    opened = opened_to(Authenticated(straight, behind.keys, wrong), behind.allowed_origins)
    if behind.allowed_hosts is not None:
        opened = HostCheck(opened, behind.allowed_hosts, behind.allowed_origins)
    most = behind.limits.max_logged_refusals
    return RequestLog(opened, behind.clock, every=behind.log_requests, max_refusals=most)


class _Service:
    """What the endpoints share."""

    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self.door = Door(behind.limits, behind.clock)
        self._turns = Turns(behind.turns.answer_units_per_turn)
        self._event_key = with_defaults(behind.event_key, behind.intake.cards()[0])
        self._kept = KeptAnswers(behind.limits, behind.clock)
        self._traced = Traced(behind.tracer, behind.clock)
        rules = Rules(limits=behind.limits, scheduling=behind.scheduling, ring=behind.keys, buckets=behind.buckets)
        self._gate = Gate(rules, self.door.admission, behind.streams, behind.levels)

    def generation(self, prepare: Callable[[JsonObject, Envelope], Awaitable[Prepared]], shape: Shape) -> ASGIApp:
        """An endpoint that answers with generated text."""

        async def work(exchange: Exchange, asked: Asked) -> None:
            with self._traced.request(exchange, shape.operation, asked.body.get("model")) as span:
                answer = await accept(exchange, asked, span)
                if answer is not None:
                    await answer

        async def accept(exchange: Exchange, asked: Asked, span: Span) -> Coroutine[None, None, None] | None:
            """To be awaited when this is over: nothing of it is needed as long as the answer takes."""
            envelope = self._envelope(exchange, shape.prefix)
            body = asked.body
            seeded = body.get("seed") is not None
            keyed = self._keyed(exchange, body, envelope)
            if keyed is not None:
                if keyed.after.complete:
                    self._behind.met(Met.RESUMED)
                    await exchange.reply(200, sse.DONE, *sse.HEADERS)
                    return None
                envelope = msgspec.structs.replace(envelope, told=shape.prefix + keyed.name)
                body = keyed.body(body)
            prepared = self._traced.prepared(span, await prepare(body, envelope), envelope.arrival)
            del body
            asked.drop()
            return self._answer(exchange, _Accepted(prepared, keyed, seeded, span), shape, envelope)

        return self.door.endpoint(work, self.door.admission.check)

    def reading(
        self, prepare: Callable[[JsonObject, Envelope], Awaitable[PoolWork]] | None, shape: PoolShape
    ) -> ASGIApp:
        """An endpoint that answers with what texts become; ``prepare`` is None where the model writes instead."""

        async def work(exchange: Exchange, door: Asked) -> None:
            if prepare is None:
                name = self._behind.intake.cards()[0].name
                paths = WRITING_PATHS if self._behind.hears is None else AUDIO_PATHS
                raise WrongTask(name, "generates text; it has no embeddings, rerank or classify", paths)
            with self._traced.request(exchange, shape.operation, door.body.get("model")) as span:
                await read(exchange, (door, prepare), span)

        async def read(
            exchange: Exchange, door: tuple[Asked, Callable[[JsonObject, Envelope], Awaitable[PoolWork]]], span: Span
        ) -> None:
            sent, prepare = door
            envelope = self._envelope(exchange, shape.prefix)
            asked = await prepare(sent.body, envelope)
            sent.drop()
            used = Usage.of(prompt=asked.tokens, completion=0, cached=0)
            with self._gate.enter(exchange, asked.requests[0].claim, [asked.tokens]) as visit:
                streams = parts_of(span, self._behind.streams)
                pooled = await read_all(streams, asked, self._behind.limits.max_inputs_at_once)
                visit.started(0)
                visit.used(used)
                note_usage(exchange.note, envelope.id, used, None)
            head = PoolHead(id=envelope.id, created=int(time.time()), model=asked.model, tokens=asked.tokens)
            told(span, head.id, used, "")
            answer = await written(shape, head, asked, pooled)
            await exchange.reply(200, answer, (b"x-request-id", head.id.encode()), *header_of(span))

        return self.door.endpoint(work, self.door.admission.check)

    def listening(self, *, translates: bool) -> ASGIApp:
        """An endpoint that answers with what it hears."""
        behind = self._behind

        async def work(exchange: Exchange, sent: Sent) -> None:
            if behind.hears is None:
                paths = WRITING_PATHS if behind.pools is None else "what it is for"
                raise WrongTask(behind.intake.cards()[0].name, "does not transcribe audio", paths)
            envelope = self._envelope(exchange, "transcript-")
            listening = await behind.hears.listen(sent.take(), envelope, translates=translates)
            sent.hold.release()
            traced = self._traced.request(exchange, listening.task, listening.model)
            with closing(listening), traced as span:
                headers = [(b"x-request-id", envelope.id.encode()), *header_of(span)]
                transcribing = Transcribing(parts_of(span, behind.streams), self._gate)
                await transcribing.answer(exchange, listening, envelope.caller.claim(), headers)

        return self.door.upload(work, behind.limits.max_audio_bytes + FORM_BYTES)

    def question(self, ask: Callable[[JsonObject], Awaitable[Any]], *, counted: bool = False) -> ASGIApp:
        """An endpoint that answers with a small JSON object; ``counted`` among its tenant's requests."""

        async def work(exchange: Exchange, asked: Asked) -> None:
            if counted:
                self._gate.count(exchange)
            await exchange.reply(200, _encode(await ask(asked.body)))

        return self.door.endpoint(work)

    def _keyed(self, exchange: Exchange, body: JsonObject, envelope: Envelope) -> Keyed | None:
        try:
            return keyed_of(exchange, body, envelope, self._behind.limits, self._event_key)
        except KeyReused:
            self._behind.met(Met.REFUSED)
            raise

    def _envelope(self, exchange: Exchange, prefix: str) -> Envelope:
        identity = self._behind.streams.identity()
        if identity is None:
            raise NoWorkers("The server is starting: no worker is ready yet.")
        return Envelope(
            id=RequestId(prefix + secrets.token_hex(12)),
            arrival=self._behind.clock.now(),
            identity=identity,
            session=_session(exchange, self._behind.limits.max_session_chars),
            caller=self._gate.caller(exchange),
        )

    async def _answer(self, exchange: Exchange, asked: _Accepted, shape: Shape, envelope: Envelope) -> None:
        prepared = asked.prepared
        reply, head = prepared.reply, _head(envelope.name, prepared, envelope.identity)
        stored = self._stored(exchange, asked, envelope.identity)
        claim = prepared.requests[0].claim
        with (
            self._met(asked.keyed, stored, head.id) as (streams, course),
            self._gate.enter(exchange, claim, _costs(prepared, stored, course)) as visit,
        ):
            answering = Answering(streams, prepared, visit, course)
            more = [*header_of(asked.span), *([] if stored is None else stored.headers())]
            headers = partial(self._headers, envelope.id, more, explained=self._explains(exchange))
            try:
                if reply.stream:
                    await stream(answering, self._turns, EventOut(exchange, headers), shape, head)
                else:
                    choices = await gather(answering, self._turns, len(prepared.requests))
                    body = await whole(shape, head, choices, answering.used())
                    await exchange.reply(200, body, *headers())
            finally:
                used = answering.settle()
                note_usage(exchange.note, envelope.id, used, visit.first_token)
                told(asked.span, head.id, used, "" if stored is None else stored.word)

    def _stored(self, exchange: Exchange, asked: _Accepted, identity: ModelIdentity) -> StoredAnswers | None:
        """Stored responses, for a request that they may serve."""
        store, requests = self._behind.stored, asked.prepared.requests
        if store is None or not repeats(requests, seeded=asked.seeded, control=exchange.headers(CACHE_CONTROL)):
            return None
        return StoredAnswers(store, self._behind.streams, requests, identity)

    def _met(
        self, keyed: Keyed | None, stored: StoredAnswers | None, name: str
    ) -> AbstractContextManager[tuple[Answers, Course]]:
        """Where the tokens come from, and how they are told."""
        if keyed is not None:
            return self._met_again(keyed, stored, name)
        if stored is not None:
            stored.look()
        return nullcontext((self._behind.streams if stored is None else stored, Course()))

    @contextmanager
    def _met_again(self, keyed: Keyed, stored: StoredAnswers | None, name: str) -> Iterator[tuple[Answers, Course]]:
        """The same of a request that may have been sent before."""
        streams = self._behind.streams if stored is None else stored
        try:
            answer, met = self._kept.meet(keyed, streams)
        except KeyReused:
            self._behind.met(Met.REFUSED)
            raise
        self._behind.met(met)
        computed = met not in (Met.JOINED, Met.REPLAYED)
        if stored is not None and computed:
            stored.look()
        charge = Charge(charge_id=name, repeated=met is not Met.NEW)
        try:
            yield (
                answer,
                Course(
                    after=keyed.after,
                    marks=keyed.marks,
                    charge=charge,
                    computed=computed,
                    rated=answer.rated,
                    metered=answer.metered,
                ),
            )
        finally:
            self._kept.left(keyed, answer)

    def _explains(self, exchange: Exchange) -> bool:
        """Is it to be said how the request was routed?  That tells of others' requests, so only to operators."""
        return exchange.header(EXPLAIN) is not None and (exchange.tenant or EVERYBODY).operator

    def _headers(self, name: str, more: Sequence[Header], *, explained: bool) -> list[Header]:
        """Of an answer.  To be asked for when its first choice has a worker."""
        headers = [(b"x-request-id", name.encode()), *more]
        line = self._behind.streams.explain_in_a_line(RequestId(f"{name}/0")) if explained else None
        if line is not None:
            headers.append((ROUTE, bytes(char if 32 <= char < 127 else 63 for char in line.encode("ascii", "replace"))))
        return headers


class _Straight:
    """An ASGI application that calls the endpoints of these paths by itself, where they are posted to.

    They refuse what is wrong in their own words, and what Starlette keeps of a request would be there as long as its
    answer takes.
    """

    def __init__(self, app: ASGIApp, posts: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._posts = posts

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self._posts.get(scope["path"])
        return (endpoint or self._app)(scope, receive, send)


def _session(exchange: Exchange, max_chars: int) -> str:
    """What the client says in a header; a name that is too long is refused rather than cut."""
    name = (exchange.header(SESSION) or b"").strip().decode("latin-1")
    if len(name) > max_chars:
        raise RequestError(
            f"The header {SESSION.decode()} has {len(name)} characters; at most {max_chars} are allowed.",
            code="session_too_long",
        )
    return name


def _head(name: str, prepared: Prepared, identity: ModelIdentity) -> Head:
    reply = prepared.reply
    return Head(
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
    )


def _costs(prepared: Prepared, stored: StoredAnswers | None, course: Course) -> list[int]:
    """Prompt tokens of each engine request that is made for it; the choices of one prompt share it."""
    if not course.computed or (stored is not None and stored.word == HIT):
        return []
    n = prepared.reply.n
    return [0 if i % n else len(request.prompt) for i, request in enumerate(prepared.requests)]


def with_defaults(event_key: bytes, card: ModelCard) -> bytes:
    """The key of events' marks.  Streams that began with other sampling defaults, which draw other tokens, cannot go
    on here."""
    if not card.sampling:
        return event_key
    return blake2b(_encode(card.sampling), digest_size=32, key=event_key, person=b"penstock sampled").digest()


def _post(path: str, endpoint: ASGIApp) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _tokenize(intake: Intake) -> Callable[[JsonObject], Awaitable[Any]]:
    return intake.tokenize


def _detokenize(intake: Intake) -> Callable[[JsonObject], Awaitable[Any]]:
    async def ask(body: JsonObject) -> dict[str, str]:
        return {"prompt": await intake.detokenize(body)}

    return ask


async def http_error(request: Request, error: Exception) -> Response:
    """What Starlette's router refuses, in OpenAI's envelope."""
    path = request.url.path[:256]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        ours: RequestError = MethodNotAllowed(request.method[:32], path, allow=allow)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        served = [route.path for route in request.app.routes if isinstance(route, Route)]
        told = f"Unknown request URL: {request.method[:32]} {path}. {hint(path, served)}"
        ours = UnknownPath(told, code="unknown_url")
    else:
        ours = RequestError("The request cannot be served.")
    return _Refused(ours)


async def unforeseen(_: Request, error: Exception) -> Response:
    return _Refused(error)


class _Refused(Response):
    """An error as a response, which also gets rid of a body that nobody reads."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(scope, receive, send).refuse(self._error)
