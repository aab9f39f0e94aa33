"""Which hosts and web origins may use the service: a host check for services without keys, and CORS.

A service without keys listens on the loopback, but any web page that is open on this host can reach it: directly, or
under a name that resolves to 127.0.0.1 (DNS rebinding).  Browsers reveal it by ``Host``, ``Origin`` and
``Sec-Fetch-Site``, which a page cannot forge.  CORS admits the origins that the operator names; the operators' paths
stay closed to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.auth import OPERATOR_PATHS
from penstock.api.http import HttpExchange
from penstock.config.base import is_loopback
from penstock.errors import Forbidden

ANY_HOST = "*"
"""As an allowed host: all of them."""

_PORT = re.compile(r":\d*$")


class HostCheckMiddleware:
    """An ASGI application for requests of this host, of ``hosts``, and of pages of ``origins``."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        why = self._why_not(scope) if scope["type"] == "http" else None
        if why is None:
            return self._app(scope, receive, send)
        return HttpExchange(scope, receive, send).send_error(why)

    def _why_not(self, scope: Scope) -> Forbidden | None:
        headers = {
            name: value.decode("latin-1").strip() for name, value in scope["headers"] if name in _CHECKED_HEADERS
        }
        host = _PORT.sub("", headers.get(b"host", "").lower())
        if host and ANY_HOST not in self._hosts and not self._is_ours(host.removeprefix("[").removesuffix("]")):
            return Forbidden(
                f"This service has no keys, so it answers to the names of this host only, and {host[:128]!r} is none: "
                "--allowed-host allows more, and with --api-key all are allowed.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", "").lower()
        if origin:
            allowed = self._is_own_page(origin, operators=scope["path"].startswith(OPERATOR_PATHS))
        else:
            visit = headers.get(b"sec-fetch-mode") == "navigate" and scope["method"] in ("GET", "HEAD")
            allowed = visit or headers.get(b"sec-fetch-site") != "cross-site"
        if allowed:
            return None
        return Forbidden(
            "This service has no keys, so it takes no requests from web pages of other hosts: --allowed-origin allows "
            "those of an origin.",
            code="origin_not_allowed",
        )

    def _is_ours(self, name: str) -> bool:
        name = name.removesuffix(".")
        return is_loopback(name) or name.endswith(".localhost") or name in self._hosts

    def _is_own_page(self, origin: str, *, operators: bool) -> bool:
        """Not of a web site: of this host, of an extension or an application, or of an origin that is named."""
        if origin in self._origins and not operators:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if parts.scheme in ("http", "https"):
            return self._is_ours(name)
        return bool(parts.scheme)


_CHECKED_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-mode", b"sec-fetch-site"})


EXPOSED_HEADERS = (
    "request-id",
    "retry-after",
    "traceresponse",
    "x-penstock-response-cache",
    "x-penstock-route",
    "x-request-id",
)
"""Headers of answers that a page may read."""

PREFLIGHT_S = 600
"""For so long a browser need not ask again what it may do."""


class CorsMiddleware:
    """An ASGI application that pages of these origins may use; ``*``: of all."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients send headers of their own (x-stainless-...)
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_S,
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        closed = scope["type"] != "http" or scope["path"].startswith(OPERATOR_PATHS)
        return (self._app if closed else self._open)(scope, receive, send)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, for pages of these origins too; without any it stays as it is."""
    return CorsMiddleware(app, origins) if origins else app
