"""The API's description, for programs (``/openapi.json``, OpenAPI 3.1) and for people (``/``, plain text).

Both are made from the routes and the schemas of their bodies on first use.  A request for an unknown path gets a
suggestion: paths of other servers and of OpenAI's other APIs are known by name, the rest is compared by spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock import __version__

Schemas = Mapping[str, Mapping[str, Any]]
"""Of request bodies, by path."""

SUMMARIES = {
    "/v1/chat/completions": "A chat, streamed or not",
    "/v1/completions": "Text or token ids to text, streamed or not",
    "/v1/responses": "A conversation as items, streamed or not, that may be continued by its id",
    "/v1/responses/{name}": "A stored response",
    "/v1/responses/{name}/input_items": "The items that a stored response was made from",
    "/v1/responses/{name}/cancel": "Always refused: responses end when their clients disconnect",
    "/v1/messages": "A chat in Anthropic's Messages API, streamed or not",
    "/v1/messages/count_tokens": "How many tokens the prompt of a message has",
    "/v1/embeddings": "Texts to vectors",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "Documents by how well they fit a query"),
    "/classify": "Labels of texts",
    "/v1/audio/transcriptions": "A recording to text",
    "/v1/audio/translations": "A recording to English text",
    "/v1/models": "The models, with their context and sampling defaults",
    "/v1/models/{name}": "One model",
    "/tokenize": "Text or a chat to token ids",
    "/detokenize": "Token ids to text",
    "/v1/load_lora_adapter": "Load a LoRA adapter",
    "/v1/unload_lora_adapter": "Unload a LoRA adapter",
    "/props": "The context and sampling defaults, as llama-server tells them",
    "/health": "Liveness: 503 when requests are open and nothing moves",
    "/ready": "Readiness: 200 when a request can be served",
    "/metrics": "Prometheus metrics of this host's gateways and of all workers",
    "/metrics/{gateway}": "Prometheus metrics of one gateway process",
    "/version": "The version",
    "/admin/workers": "The workers",
    "/debug/requests/{name}": "Why the workers of a request were chosen",
    "/debug/sessions/{name}": "Where the prompts of a session differ, and the prefix cache broke",
    "/openapi.json": "This document",
    "/": "What there is, as plain text",
}
_FORMS = "/v1/audio/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILED = {
    "description": "Refused",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_encode = msgspec.json.Encoder().encode


def with_api_description(routes: Sequence[Route], schemas: Callable[[], Schemas]) -> list[Route]:
    """The routes themselves, and the two that tell of them."""

    @cache
    def program() -> bytes:
        return _encode(openapi_document(described, schemas()))

    @cache
    def people() -> str:
        width = max(len(path) for path, _ in _listed(described))
        lines = [f"{method:4} {path:{width}}  {_summary(path)}".rstrip() for path, method in _listed(described)]
        return "\n".join((f"Penstock {__version__}", "", *lines, ""))

    async def openapi(_: Request) -> Response:
        return Response(program(), media_type="application/json")

    async def front(_: Request) -> Response:
        return PlainTextResponse(people())

    described = [*routes, Route("/openapi.json", openapi), Route("/", front)]
    return described


def openapi_document(routes: Sequence[Route], schemas: Schemas) -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for path, method in _listed(routes):
        paths.setdefault(path, {})[method.lower()] = _operation(path, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": "OpenAI's API, with vLLM's additions."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _listed(routes: Sequence[Route]) -> list[tuple[str, str]]:
    """Path, as OpenAPI writes it, and method, of each route."""
    return [
        (route.path.replace(":path}", "}"), method)
        for route in routes
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


def _summary(path: str) -> str:
    return SUMMARIES.get(path) or "For operators (docs/operations.md)"


def _operation(path: str, method: str, schemas: Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK"}, "default": _FAILED}
    operation: dict[str, Any] = {"summary": _summary(path), "responses": responses}
    if "{" in path:
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST":
        kind = "multipart/form-data" if path.startswith(_FORMS) else "application/json"
        schema = schemas.get(path, {"type": "object"})
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
        answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "stream" in schema.get("properties", {}):
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        responses["200"]["content"] = answers
    return operation


_CHAT, _TEXT, _MODELS, _VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings"

FOREIGN_PATHS = {
    "/v1/complete": _TEXT,
    "/api/chat": _CHAT,  # Ollama
    "/api/generate": _TEXT,
    "/api/tags": _MODELS,
    "/api/show": _MODELS,
    "/api/ps": _MODELS,
    "/api/embed": _VECTORS,
    "/api/embeddings": _VECTORS,
    "/api/version": "/version",
    "/completion": _TEXT,  # llama.cpp
    "/embedding": _VECTORS,
    "/generate": _TEXT,  # SGLang, TGI
    "/pooling": _VECTORS,
    "/docs": "/openapi.json",
}
"""Paths of other servers, and ours for the same."""

_NEAR = 0.75
_MAX_CHARS = 256


def suggest_path(method: str, path: str, served: Sequence[Route]) -> str:
    """A sentence: what there is instead, for this method where there is something."""
    path = path[:_MAX_CHARS]
    methods: dict[str, set[str]] = {}
    for route in served:
        methods.setdefault(route.path, set()).update(route.methods or ())
    plain = [own for own in methods if "{" not in own and own != "/"]
    callable_paths = [own for own in plain if method in methods[own]]
    meant = _meant_path(path, callable_paths) or _meant_path(path, plain)
    if meant is None:
        return "GET / lists what there is." if "/" in methods else f"There are {', '.join(plain)}."
    told = meant if meant in callable_paths else f"{' or '.join(sorted(methods[meant] - {'HEAD'}))} {meant}"
    return f"There is no {path} here; {told} is."


def _meant_path(path: str, served: Sequence[str]) -> str | None:
    """The one of ``served`` that is most like ``path``: under another server's name, prefix or spelling."""
    bare = "/" + "/".join(part for part in path.split("/") if part)
    for prefix in ("/v1", "/openai", "/api"):
        inner = bare.removeprefix(prefix)
        for candidate in (bare, FOREIGN_PATHS.get(bare), f"/v1{bare}", inner, f"/v1{inner}"):
            if candidate in served and candidate != path:
                return candidate
    return next(iter(get_close_matches(bare, served, n=1, cutoff=_NEAR)), None)
