"""How many requests of an API key are open at once.

A request counts from its authentication until its response has ended: a stream until its last event, or until its
client has gone.  Gateways of one host may share the counts (``launch.shared_rates``).  Listing models does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.auth import Tenant
from penstock.api.http import TENANT, HttpExchange
from penstock.api.key_permissions import route_of
from penstock.errors import TooManyConcurrentRequests
from penstock.types import ServiceClass


class RequestCounts(Protocol):
    """Open requests by key."""

    def acquire(self, key: str, limit: int) -> int | None:
        """Counts a request, and returns what ``release`` takes; None, without counting, if ``limit`` are open."""
        ...

    def release(self, key: str, ticket: int) -> None:
        """A request that was counted has ended."""
        ...


class LocalRequestCounts:
    """The counts of one process."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def acquire(self, key: str, limit: int) -> int | None:
        if self._open[key] >= limit:
            return None
        self._open[key] += 1
        return 0

    def release(self, key: str, ticket: int) -> None:
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class ConcurrencyMiddleware:
    """ASGI middleware behind ``auth.AuthMiddleware``: refuses a request beyond its key's limit with 429."""

    def __init__(
        self, app: ASGIApp, counts: RequestCounts, count_shed: Callable[[ServiceClass, str], None] = lambda *_: None
    ) -> None:
        """``count_shed`` is called with class and reason of each refusal."""
        self._app = app
        self._counts = counts
        self._count_shed = count_shed

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        tenant: Tenant | None = scope.get(TENANT)
        if tenant is None or tenant.permissions.max_concurrency is None or route_of(scope["path"]) is None:
            return self._app(scope, receive, send)
        return self._counted(tenant, tenant.permissions.max_concurrency, (scope, receive, send))

    async def _counted(self, tenant: Tenant, limit: int, call: tuple[Scope, Receive, Send]) -> None:
        ticket = self._counts.acquire(tenant.permissions.key, limit)
        if ticket is None:
            self._count_shed(tenant.classes[0], TooManyConcurrentRequests.reason)
            await HttpExchange(*call).send_error(TooManyConcurrentRequests(limit))
            return
        try:
            await self._app(*call)
        finally:
            self._counts.release(tenant.permissions.key, ticket)
