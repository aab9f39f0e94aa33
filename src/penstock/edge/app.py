"""The application: every path, and how a request gets from the socket to an answer.

A plain ASGI application under Starlette's router.  ``make_app`` is all that the composition root needs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.clock import Clock
from penstock.config.schema import Limits
from penstock.edge import status
from penstock.edge.answering import Answering, gather, stream
from penstock.edge.auth import Authenticated, KeyRing
from penstock.edge.door import Asked, Door
from penstock.edge.errors import Header
from penstock.edge.exchange import Exchange
from penstock.edge.openai_chat import ChatShape
from penstock.edge.openai_completions import CompletionShape
from penstock.edge.openai_shapes import Head, Shape
from penstock.edge.pool_shapes import ClassifyShape, EmbeddingShape, PoolHead, PoolShape, RerankShape
from penstock.edge.reading import read_all, written
from penstock.errors import MethodNotAllowed, NoWorkers, RequestError, UnknownPath, WrongTask
from penstock.types import ModelIdentity, RequestId
from penstock.wire.ports import Envelope, Intake, JsonObject, Pools, PoolWork, Prepared, TokenStreams

SESSION = b"x-session-affinity"
"""Names the session that a request belongs to."""

EXPLAIN = b"x-penstock-explain"
"""Asks, with any value, for ``ROUTE``."""

ROUTE = b"x-penstock-route"
"""Says which workers were chosen, and by which numbers."""

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
WRITING_PATHS = "/v1/chat/completions or /v1/completions"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Everything behind the edge."""

    streams: TokenStreams
    intake: Intake
    limits: Limits
    clock: Clock
    metrics: Callable[[], bytes]  # Prometheus' text
    metrics_type: str = "text/plain; version=0.0.4; charset=utf-8"
    keys: KeyRing = field(default_factory=KeyRing)
    pools: Pools | None = None  # None: the model writes


def make_app(behind: Behind) -> ASGIApp:
    """The ASGI application.  It makes no connections and starts no tasks of its own."""
    service = _Service(behind)
    prepare, pools = behind.intake, behind.pools
    embeddings, rerank, classify = (pools.embeddings, pools.rerank, pools.classify) if pools else (None, None, None)
    app = Starlette(
        routes=[
            _post("/v1/chat/completions", service.generation(prepare.chat, ChatShape())),
            _post("/v1/completions", service.generation(prepare.completion, CompletionShape())),
            _post("/v1/embeddings", service.reading(embeddings, EmbeddingShape())),
            *(_post(path, service.reading(rerank, RerankShape())) for path in RERANK_PATHS),
            _post("/classify", service.reading(classify, ClassifyShape())),
            _post("/tokenize", service.question(_tokenize(prepare))),
            _post("/detokenize", service.question(_detokenize(prepare))),
            _post("/v1/load_lora_adapter", service.question(prepare.load_adapter)),
            _post("/v1/unload_lora_adapter", service.question(prepare.unload_adapter)),
            *status.routes(behind.streams, prepare.cards, behind.metrics, behind.metrics_type),
        ],
        exception_handlers={HTTPException: http_error, Exception: unforeseen},
    )
    app.router.redirect_slashes = False
    return Authenticated(app, behind.keys)


class _Service:
    """What the endpoints share."""

    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self._door = Door(behind.limits, behind.clock)

    def generation(self, prepare: Callable[[JsonObject, Envelope], Awaitable[Prepared]], shape: Shape) -> ASGIApp:
        """An endpoint that answers with generated text."""

        async def work(exchange: Exchange, asked: Asked) -> None:
            prepared, head = await self._prepare(exchange, asked.body, prepare, shape)
            asked.hold.release()
            await self._answer(exchange, prepared, shape, head)

        return self._door.endpoint(work, self._door.admission.check)

    def reading(
        self, prepare: Callable[[JsonObject, Envelope], Awaitable[PoolWork]] | None, shape: PoolShape
    ) -> ASGIApp:
        """An endpoint that answers with what texts become; ``prepare`` is None where the model writes instead."""

        async def work(exchange: Exchange, door: Asked) -> None:
            if prepare is None:
                name = self._behind.intake.cards()[0].name
                raise WrongTask(name, "writes text and is read with for nothing else", WRITING_PATHS)
            envelope = self._envelope(exchange, shape.prefix)
            asked = await prepare(door.body, envelope)
            door.hold.release()
            with self._door.admission.admit([asked.tokens]) as permit:
                pooled = await read_all(self._behind.streams, asked, self._behind.limits.max_inputs_at_once)
                permit.started(0)
            head = PoolHead(id=envelope.id, created=int(time.time()), model=asked.model, tokens=asked.tokens)
            answer = await written(shape, head, asked, pooled)
            await exchange.reply(200, answer, (b"x-request-id", head.id.encode()))

        return self._door.endpoint(work, self._door.admission.check)

    def question(self, ask: Callable[[JsonObject], Awaitable[Any]]) -> ASGIApp:
        """An endpoint that answers with a small JSON object."""

        async def work(exchange: Exchange, asked: Asked) -> None:
            await exchange.reply(200, _encode(await ask(asked.body)))

        return self._door.endpoint(work)

    async def _prepare(
        self,
        exchange: Exchange,
        body: JsonObject,
        prepare: Callable[[JsonObject, Envelope], Awaitable[Prepared]],
        shape: Shape,
    ) -> tuple[Prepared, Head]:
        envelope = self._envelope(exchange, shape.prefix)
        prepared = await prepare(body, envelope)
        return prepared, _head(envelope.id, prepared, envelope.identity)

    def _envelope(self, exchange: Exchange, prefix: str) -> Envelope:
        identity = self._behind.streams.identity()
        if identity is None:
            raise NoWorkers("The server is starting: no worker is ready yet.")
        return Envelope(
            id=RequestId(prefix + secrets.token_hex(12)),
            arrival=self._behind.clock.now(),
            identity=identity,
            session=_session(exchange, self._behind.limits.max_session_chars),
        )

    async def _answer(self, exchange: Exchange, prepared: Prepared, shape: Shape, head: Head) -> None:
        reply = prepared.reply
        costs = [0 if i % reply.n else len(request.prompt) for i, request in enumerate(prepared.requests)]
        with self._door.admission.admit(costs) as permit:
            answering = Answering(self._behind.streams, prepared, permit)
            headers = partial(self._headers, head.id, explained=exchange.header(EXPLAIN) is not None)
            if reply.stream:
                await stream(exchange, answering, shape, head, headers)
            else:
                choices = await gather(answering, len(prepared.requests))
                await exchange.reply(200, shape.whole(head, choices, answering.used()), *headers())

    def _headers(self, name: str, *, explained: bool) -> list[Header]:
        """Of an answer.  To be asked for when its first choice has a worker."""
        headers = [(b"x-request-id", name.encode())]
        line = self._behind.streams.explain_in_a_line(RequestId(f"{name}/0")) if explained else None
        if line is not None:
            headers.append((ROUTE, bytes(char if 32 <= char < 127 else 63 for char in line.encode("ascii", "replace"))))
        return headers


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
        ours = UnknownPath(f"Unknown request URL: {request.method[:32]} {path}.", code="unknown_url")
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
