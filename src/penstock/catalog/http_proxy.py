"""The HTTP application of a catalog's front: finds the model that a request names, waits until it is loaded, and
proxies the request to the model's own gateway, streaming the response back.

Knows nothing about memory or processes (``CatalogModels`` does), and of a body only its ``model``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock import __version__, http_client
from penstock.api import sse
from penstock.api.admin import anthropic_model, codex_model, context_fields, permissions_of
from penstock.api.admission import Admission
from penstock.api.anthropic.messages import messages_error_event
from penstock.api.app import RERANK_PATHS, http_error, internal_error
from penstock.api.audit import REFUSALS, RequestAudit
from penstock.api.audit_log import AuditSink
from penstock.api.auth import NO_TENANT, ON_BEHALF_OF, ApiKeys, AuthFailureLog, AuthMiddleware, tenant_header
from penstock.api.concurrency import ConcurrencyMiddleware, LocalRequestCounts
from penstock.api.endpoints import EXPLAIN, ROUTE
from penstock.api.errors import MESSAGES_PATH, RESPONSES_PATH, Header, error_response, logged_error_response
from penstock.api.http import EndpointFactory, FormBody, HttpExchange, JsonBody
from penstock.api.idempotency import LAST_EVENT_ID
from penstock.api.key_permissions import KeyPermissions, check_model, may_use
from penstock.api.load_shedding import CLASS_HEADER, MAX_WAIT_HEADER
from penstock.api.multipart import FORM_BYTES, encode_form
from penstock.api.openai.response_events import responses_error_event
from penstock.api.openai.stored_responses import stored_response_routes
from penstock.api.openapi import Schemas, with_api_description
from penstock.api.origins import HostCheckMiddleware, with_cors
from penstock.api.request_log import RequestLogMiddleware
from penstock.api.response_cache import CACHE_CONTROL, RESPONSE_CACHE
from penstock.api.response_store import ResponseStore
from penstock.api.tracing import TRACE_RESPONSE, trace_headers
from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.errors import BadField, NoWorkers, RequestError, UnknownModel
from penstock.http_client import Upstream
from penstock.interfaces import IDEMPOTENCY_KEY, SESSION_HEADERS, JsonObject
from penstock.processing.model_aliases import aliased_model, plain_aliases

PASSED = (
    *("/v1/chat/completions", "/v1/completions", RESPONSES_PATH, MESSAGES_PATH, f"{MESSAGES_PATH}/count_tokens"),
    *("/tokenize", "/detokenize"),
    *("/v1/embeddings", *RERANK_PATHS, "/classify"),
)
"""Paths with the model's name in a JSON body."""

PASSED_FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths with the model's name in a form."""

_PASSED = (IDEMPOTENCY_KEY, LAST_EVENT_ID, CLASS_HEADER, MAX_WAIT_HEADER, *SESSION_HEADERS, EXPLAIN)
_KEPT = frozenset(
    {
        *(
            b"content-type",
            b"cache-control",
            b"x-accel-buffering",
            b"x-request-id",
            b"request-id",
            b"retry-after",
            b"allow",
        ),
        *(ROUTE, RESPONSE_CACHE, TRACE_RESPONSE),
    }
)
_encode = msgspec.json.Encoder().encode


class CatalogModels(Protocol):
    """The models of a catalog, as ``ModelManager`` loads them."""

    def find_entry(self, name: str) -> str | None:
        """The entry with this name, alias or adapter; None: there is none."""
        ...

    def names(self) -> Sequence[str]:
        """Names of all entries."""
        ...

    def use(self, entry: str) -> AbstractAsyncContextManager[Upstream]:
        """Load the model if necessary and keep it loaded within the scope.  Raises NoWorkers, CapacityError."""
        ...

    def loaded_upstream(self, entry: str) -> Upstream | None:
        """Address of the model's gateway if it is loaded now."""
        ...

    async def load(self, entry: str) -> None:
        """Load the model.  Raises as ``use``."""
        ...

    async def unload(self, entry: str) -> None:
        """Unload the model when its requests have ended."""
        ...

    def rows(self) -> Sequence[dict[str, Any]]:
        """One mapping per model: state, aliases, adapters, bytes, requests, ``max_model_len`` where that is known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontServices:
    """What the front's HTTP application is built from."""

    models: CatalogModels
    limits: RequestLimits
    clock: Clock
    keys: ApiKeys
    created: int  # Unix seconds
    wall_time: Callable[[], float] = time.time  # Unix seconds, by which keys expire
    audit: AuditSink | None = None  # None: nothing is audited
    schemas: Callable[[], Schemas] = dict  # of request bodies
    allowed_origins: tuple[str, ...] = ()  # web origins that may use it
    allowed_hosts: tuple[str, ...] | None = None  # accepted Host names besides this host's; None: any
    response_store: ResponseStore | None = None  # of all models; None: they keep no responses
    model_alias: tuple[str, ...] = ()  # PATTERN=NAME: names that clients may send for a model


def make_catalog_app(store: FrontServices) -> ASGIApp:
    """The ASGI application."""
    service = _Service(store)
    posts = [
        *(Route(path, service.passing(path), methods=["POST"]) for path in PASSED),
        *(Route(path, service.passing_form(path), methods=["POST"]) for path in PASSED_FORMS),
    ]
    admin = [
        Route("/admin/load_model", service.asking(store.models.load), methods=["POST"]),
        Route("/admin/unload_model", service.asking(store.models.unload), methods=["POST"]),
    ]
    app = Starlette(
        routes=with_api_description(
            [*posts, *stored_response_routes(store.response_store, service.endpoints), *admin, *_questions(store)],
            store.schemas,
        ),
        exception_handlers={HTTPException: http_error, Exception: internal_error},
    )
    app.router.redirect_slashes = False
    limited = ConcurrencyMiddleware(app, LocalRequestCounts())
    guarded = AuthMiddleware(limited, store.keys, AuthFailureLog(store.clock), store.wall_time)
    opened = with_cors(guarded, store.allowed_origins)
    if store.allowed_hosts is not None:
        opened = HostCheckMiddleware(opened, store.allowed_hosts, store.allowed_origins)
    most = store.limits.max_logged_refusals
    audit = RequestAudit(store.audit)
    return RequestLogMiddleware(
        opened, store.clock, every=False, max_refusals=most, passes_on=True, on_ended=audit.on_ended
    )


class _Service:
    """What the endpoints share."""

    def __init__(self, store: FrontServices) -> None:
        self._models = store.models
        self._limits = store.limits
        self._model_alias = store.model_alias
        self.endpoints = EndpointFactory(store.limits, Admission(store.limits, store.clock))

    def passing(self, path: str) -> ASGIApp:
        """Proxy a JSON request to the model that it names."""

        async def work(exchange: HttpExchange, asked: JsonBody) -> None:
            entry, raw = self._addressed(exchange, asked.body, required=path.startswith("/v1/")), asked.raw
            asked.release_parsed()  # the raw bytes are proxied
            passed = _passed(exchange)
            async with (
                self._models.use(entry) as to,
                http_client.open_request(to, "POST", path, raw, more=passed) as answer,
            ):
                await _relay(exchange, answer, path)

        return self.endpoints.json_endpoint(work)

    def passing_form(self, path: str) -> ASGIApp:
        """Proxy a form with an audio file."""

        async def work(exchange: HttpExchange, sent: FormBody) -> None:
            form = sent.take_form()
            names = form.fields.get("model", [""])
            if len(names) != 1 or not names[0]:
                raise _missing()
            entry = self._entry(exchange, names[0])
            raw, kind = encode_form(form)
            passed = _passed(exchange)
            async with (
                self._models.use(entry) as to,
                http_client.open_request(to, "POST", path, raw, kind, more=passed) as answer,
            ):
                await _relay(exchange, answer, path)

        return self.endpoints.form_endpoint(work, self._limits.max_audio_bytes + FORM_BYTES)

    def asking(self, ask: Callable[[str], Awaitable[None]]) -> ASGIApp:
        """Apply ``ask`` to a model; responds with its row afterwards."""

        async def work(exchange: HttpExchange, asked: JsonBody) -> None:
            entry = self._addressed(exchange, asked.body, required=True)
            exchange.log_entry.detail = f"model={entry}"
            await ask(entry)
            row = next(row for row in self._models.rows() if row["name"] == entry)
            await exchange.send_response(200, _encode(row))

        return self.endpoints.json_endpoint(work)

    def _addressed(self, exchange: HttpExchange, body: JsonObject, *, required: bool) -> str:
        """The entry that a body names, which the key must be for.  Its gateway knows it by the same names."""
        name = body.get("model")
        if name is None:
            if not required and len(self._models.names()) == 1:
                return self._entry(exchange, self._models.names()[0])
            raise _missing()
        if not isinstance(name, str):
            raise BadField("model", got=name, want="a string", code="invalid_type")
        return self._entry(exchange, name)

    def _entry(self, exchange: HttpExchange, name: str) -> str:
        """Raises ModelNotAllowed before anything is loaded, UnknownModel."""
        key = (exchange.tenant or NO_TENANT).permissions
        check_model(key, name, _permission_names(self._models, name, self._model_alias))
        entry = _meant_entry(self._models, name, self._model_alias)
        if entry is None:
            shown = [each for each in self._models.names() if may_use(key, (each,))]
            raise UnknownModel(name[:128], shown)
        return entry


def _meant_entry(models: CatalogModels, name: str, given: tuple[str, ...]) -> str | None:
    """The entry that a client means: by name, alias or adapter, else by the first pattern that matches."""
    return models.find_entry(name) or models.find_entry(aliased_model(name, given))


def _permission_names(models: CatalogModels, name: str, given: tuple[str, ...]) -> set[str]:
    """The names under which a key may be for what a client means by ``name``: that, the name that its pattern stands
    for, and the entry's, unless the client means one of its adapters."""
    meant = name if models.find_entry(name) is not None else aliased_model(name, given)
    entry = models.find_entry(meant)
    names = {name, meant}
    if entry is not None:
        row = next(row for row in models.rows() if row["name"] == entry)
        names |= set() if meant in row["adapters"] else {entry}
    return names


def _passed(exchange: HttpExchange) -> list[Header]:
    """The headers for the model's own gateway, with the tenant."""
    passed = [(name, value) for name in _PASSED if (value := exchange.header(name)) is not None]
    control = exchange.headers(CACHE_CONTROL)
    if control is not None:
        passed.append((CACHE_CONTROL, control))
    return [*passed, *trace_headers(exchange), (ON_BEHALF_OF, tenant_header(exchange.tenant or NO_TENANT))]


def _missing() -> RequestError:
    return RequestError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")


async def _relay(exchange: HttpExchange, answer: http_client.StreamedResponse, path: str) -> None:
    """Stream the response back; if the model's gateway dies in mid-stream, an error event ends it."""
    headers: list[Header] = [header for header in answer.headers if header[0] in _KEPT]
    streams = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
    if not streams or not exchange.chunked:
        body = await answer.read()
        if answer.status in REFUSALS:
            exchange.log_entry.reason = _error_code(body)
        await exchange.send_response(answer.status, body, *headers)
        return
    await exchange.start(answer.status, *headers)
    try:
        async for chunk in answer.chunks():
            await exchange.send(chunk)
    except NoWorkers as error:
        broken = {RESPONSES_PATH: responses_error_event, MESSAGES_PATH: messages_error_event}
        await exchange.finish(broken.get(path, sse.openai_error_event)(logged_error_response(error)))
        return
    await exchange.finish()


class _Refusal(msgspec.Struct, frozen=True):
    """An error of a model's gateway, as OpenAI's and Anthropic's envelopes have it."""

    code: str | None = None


class _RefusalBody(msgspec.Struct, frozen=True):
    error: _Refusal = _Refusal()


def _error_code(body: bytes) -> str:
    """The code of an error that a model's gateway sent, for the audit log."""
    try:
        return msgspec.json.decode(body, type=_RefusalBody).error.code or ""
    except msgspec.DecodeError:
        return ""


def _model_list(store: FrontServices, key: KeyPermissions) -> dict[str, Any]:
    """The models that the key is for, their adapters, and those aliases of the command line that can be listed."""
    models = store.models
    aliases = [alias for alias, _ in plain_aliases(store.model_alias) if models.find_entry(alias) is None]
    shown: list[dict[str, Any]] = []
    described: list[dict[str, Any]] = []
    for row in models.rows():
        own = [alias for alias in aliases if _meant_entry(models, alias, store.model_alias) == row["name"]]
        for name in ("", *row["adapters"], *own):
            if not may_use(key, _permission_names(models, name or row["name"], store.model_alias)):
                continue
            shown.append(_model_object(row, store.created, name))
            described.append(codex_model(name or row["name"], row.get("max_model_len"), vision=False))
    return {"object": "list", "data": shown, "models": described}


def _model_object(row: dict[str, Any], created: int, name: str = "") -> dict[str, Any]:
    """A model, or, under another ``name``, its adapter or alias."""
    shown = {
        "id": name or row["name"],
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "aliases": [] if name else row["aliases"],
        "state": row["state"],
        "pinned": row["pinned"],
        **context_fields(row.get("max_model_len")),
        **anthropic_model(name or row["name"], created),
    }
    return shown | ({"parent": row["name"]} if name else {})


def _questions(store: FrontServices) -> list[Route]:
    """The GET routes."""
    models = store.models

    async def all_models(request: Request) -> Response:
        return _json(_model_list(store, permissions_of(request)))

    async def one_model(request: Request) -> Response:
        name, key = request.path_params["name"], permissions_of(request)
        entry = _meant_entry(models, name, store.model_alias)
        if entry is None or not may_use(key, _permission_names(models, name, store.model_alias)):
            shown = [each for each in models.names() if may_use(key, (each,))]
            answer = error_response(UnknownModel(name[:128], shown))
            return Response(answer.body, answer.status, media_type="application/json")
        row = next(row for row in models.rows() if row["name"] == entry)
        return _json(_model_object(row, store.created, "" if name == entry else name))

    async def ok(_: Request) -> Response:
        return _json({"status": "ok"})

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def workers(_: Request) -> Response:
        return _json({"workers": await _all_workers(models), "models": list(models.rows())})

    async def metrics(request: Request) -> Response:
        entry = models.find_entry(request.query_params.get("model", ""))
        to = None if entry is None else models.loaded_upstream(entry)
        if to is None:
            known = "\n".join(f"# /metrics?model={quote(row['name'])}  {row['state']}" for row in models.rows())
            return Response(f"# a page for each loaded model:\n{known}\n", media_type="text/plain; version=0.0.4")
        async with http_client.open_request(to, "GET", "/metrics") as answer:
            return Response(await answer.read(), answer.status, media_type="text/plain; version=0.0.4")

    return [
        Route("/v1/models", all_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", ok),
        Route("/ready", ok),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/admin/workers", workers),
    ]


async def _all_workers(models: CatalogModels) -> list[dict[str, Any]]:
    """Workers of all loaded models; a gateway that does not respond is skipped."""
    rows: list[dict[str, Any]] = []
    for name in models.names():
        to = models.loaded_upstream(name)
        if to is None:
            continue
        try:
            async with (
                asyncio.timeout(http_client.CONNECT_TIMEOUT_S),
                http_client.open_request(to, "GET", "/admin/workers") as answer,
            ):
                found = msgspec.json.decode(await answer.read())["workers"]
        except (NoWorkers, TimeoutError, msgspec.DecodeError, KeyError):
            continue
        rows += [row | {"id": f"{name}/{row['id']}"} for row in found]
    return rows


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")
