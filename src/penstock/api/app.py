"""The ASGI application: every path, its endpoint, and the middleware around them.

``make_app`` is all that the composition root needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api import admin
from penstock.api.admin import MetricsPage
from penstock.api.anthropic.messages import MessagesApi
from penstock.api.audit import RequestAudit
from penstock.api.auth import AuthFailureLog, AuthMiddleware
from penstock.api.concurrency import ConcurrencyMiddleware
from penstock.api.endpoints import AppServices, Endpoints
from penstock.api.errors import MESSAGES_PATH, RESPONSES_PATH
from penstock.api.http import HttpExchange
from penstock.api.openai.chat import CHAT_API
from penstock.api.openai.completions import COMPLETION_API
from penstock.api.openai.pooling import (
    ClassifyResponseFormat,
    EmbeddingResponseFormat,
    RerankResponseFormat,
)
from penstock.api.openai.responses import ResponsesApi
from penstock.api.openai.stored_responses import stored_response_routes
from penstock.api.openapi import suggest_path, with_api_description
from penstock.api.origins import HostCheckMiddleware, with_cors
from penstock.api.request_log import RequestLogMiddleware
from penstock.errors import MethodNotAllowed, RequestError, UnknownPath
from penstock.interfaces import (
    JsonObject,
    RequestProcessor,
)

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def make_app(behind: AppServices) -> ASGIApp:
    """The ASGI application.  It makes no connections and starts no tasks of its own."""
    service = Endpoints(behind)
    page = MetricsPage(behind.metrics, behind.clock, behind.limits.metrics_cache_s)
    prepare, pools = behind.processor, behind.pooling
    embeddings, rerank, classify = (pools.embeddings, pools.rerank, pools.classify) if pools else (None, None, None)
    responses = ResponsesApi(prepare, behind.response_store, behind.limits)
    writing = [
        _post("/v1/chat/completions", service.generation(prepare.chat, CHAT_API)),
        _post("/v1/completions", service.generation(prepare.completion, COMPLETION_API)),
        _post(RESPONSES_PATH, service.generation(prepare.chat, responses)),
        _post(MESSAGES_PATH, service.generation(prepare.chat, MessagesApi(prepare))),
    ]
    routes = [
        *writing,
        *stored_response_routes(behind.response_store, service.factory),
        _post("/v1/embeddings", service.pooling(embeddings, EmbeddingResponseFormat())),
        *(_post(path, service.pooling(rerank, RerankResponseFormat())) for path in RERANK_PATHS),
        _post("/classify", service.pooling(classify, ClassifyResponseFormat())),
        _post("/v1/audio/transcriptions", service.transcription(translates=False)),
        _post("/v1/audio/translations", service.transcription(translates=True)),
        _post(f"{MESSAGES_PATH}/count_tokens", service.json_call(_count_message_tokens(prepare), counted=True)),
        _post("/tokenize", service.json_call(_tokenize(prepare), counted=True)),
        _post("/detokenize", service.json_call(_detokenize(prepare), counted=True)),
        _post("/v1/load_lora_adapter", service.json_call(prepare.load_adapter)),
        _post("/v1/unload_lora_adapter", service.json_call(prepare.unload_adapter)),
        *(admin.admin_routes(behind.admin, service.factory) if behind.admin else ()),
        admin.session_route(service.sessions, prepare, behind.clock),
        *admin.status_routes(
            behind.streams,
            prepare,
            waiting=behind.unjoined_workers,
            clock=behind.clock,
        ),
        *admin.metrics_routes(page, behind.gateway_metrics, behind.metrics_type),
    ]
    app = Starlette(
        routes=with_api_description(routes, behind.schemas),
        exception_handlers={HTTPException: http_error, Exception: internal_error},
    )
    app.router.redirect_slashes = False
    wrong = AuthFailureLog(behind.clock, behind.count_auth_failure)
    straight = _DirectRoutes(app, {route.path: route.endpoint for route in writing})
    limited = ConcurrencyMiddleware(straight, behind.request_counts, behind.levels.on_shed, behind.fleet_counts)
    opened = with_cors(AuthMiddleware(limited, behind.keys, wrong, behind.wall_time), behind.allowed_origins)
    if behind.allowed_hosts is not None:
        opened = HostCheckMiddleware(opened, behind.allowed_hosts, behind.allowed_origins)
    most = behind.limits.max_logged_refusals
    audit = RequestAudit(behind.audit, behind.count_forbidden)
    return RequestLogMiddleware(
        opened, behind.clock, every=behind.log_requests, max_refusals=most, on_ended=audit.on_ended
    )


class _DirectRoutes:
    """An ASGI application that dispatches POSTs to these paths without Starlette's router.

    They word their own refusals, and Starlette would keep its objects of a request for as long as the response takes.
    """

    def __init__(self, app: ASGIApp, posts: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._posts = posts

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self._posts.get(scope["path"])
        return (endpoint or self._app)(scope, receive, send)


def _post(path: str, endpoint: ASGIApp) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _tokenize(processor: RequestProcessor) -> Callable[[JsonObject], Awaitable[Any]]:
    return processor.tokenize


def _count_message_tokens(processor: RequestProcessor) -> Callable[[JsonObject], Awaitable[Any]]:
    async def ask(body: JsonObject) -> dict[str, int]:
        return {"input_tokens": await processor.count_message_tokens(body)}

    return ask


def _detokenize(processor: RequestProcessor) -> Callable[[JsonObject], Awaitable[Any]]:
    async def ask(body: JsonObject) -> dict[str, str]:
        return {"prompt": await processor.detokenize(body)}

    return ask


async def http_error(request: Request, error: Exception) -> Response:
    """Errors of Starlette's router, in OpenAI's format."""
    path = request.url.path[:256]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        ours: RequestError = MethodNotAllowed(request.method[:32], path, allow=allow)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        served = [route for route in request.app.routes if isinstance(route, Route)]
        message = f"Unknown request URL: {request.method[:32]} {path}. {suggest_path(request.method, path, served)}"
        ours = UnknownPath(message, code="unknown_url")
    else:
        ours = RequestError("The request cannot be served.")
    return _ErrorASGIResponse(ours)


async def internal_error(_: Request, error: Exception) -> Response:
    return _ErrorASGIResponse(error)


class _ErrorASGIResponse(Response):
    """An error as a response, which also drains an unread body."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await HttpExchange(scope, receive, send).send_error(self._error)
