"""What a client that asks at an unknown path probably wants, among the paths that there are.

Paths of other servers' and of OpenAI's other APIs are known by name; the rest is compared by spelling.  Knows nothing
about what is answered where.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

_CHAT, _TEXT, _MODELS, _VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings"

ELSEWHERE = {
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,  # Anthropic
    "/v1/messages/count_tokens": "/tokenize",
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
    "/props": _MODELS,
    "/embedding": _VECTORS,
    "/generate": _TEXT,  # SGLang, TGI
    "/pooling": _VECTORS,
    "/docs": "/openapi.json",
}
"""Paths of other servers, and ours for the same."""

_NEAR = 0.75
_MAX_CHARS = 256


def hint(path: str, served: Sequence[str]) -> str:
    """A sentence: what there is instead.  ``served``: paths as their routes have them."""
    path = path[:_MAX_CHARS].rstrip("/")
    plain = [route for route in served if "{" not in route and route != "/"]
    meant = ELSEWHERE.get(path)
    if meant is None:
        meant = next((candidate for candidate in (f"/v1{path}", path.removeprefix("/v1")) if candidate in plain), None)
    if meant is None:
        meant = next(iter(get_close_matches(path, plain, n=1, cutoff=_NEAR)), None)
    if meant in plain:
        return f"There is no {path} here; {meant} is."
    return "GET / lists what there is." if "/" in served else f"There are {', '.join(plain)}."
