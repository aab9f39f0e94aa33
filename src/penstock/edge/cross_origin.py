"""Which web pages may use the service from a browser (CORS), where the operator names any.

Paths of operators stay closed to all of them.  Knows nothing about keys: a page needs one like everybody else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.edge.auth import OPERATORS

SHOWN = ("retry-after", "traceresponse", "x-penstock-response-cache", "x-penstock-route", "x-request-id")
"""Headers of answers that a page may read."""

PREFLIGHT_S = 600
"""For so long a browser need not ask again what it may do."""


class CrossOrigin:
    """An ASGI application that pages of these origins may use; ``*``: of all."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients send headers of their own (x-stainless-...)
            expose_headers=SHOWN,
            max_age=PREFLIGHT_S,
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        closed = scope["type"] != "http" or scope["path"].startswith(OPERATORS)
        return (self._app if closed else self._open)(scope, receive, send)


def opened_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, for pages of these origins too; without any it stays as it is."""
    return CrossOrigin(app, origins) if origins else app
