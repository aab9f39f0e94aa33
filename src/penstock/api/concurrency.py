"""How many requests of an API key are open at once.

A request counts from its authentication until its response has ended: a stream until its last event, or until its
client has gone.  Gateways of one host may share the counts (``launch.shared_rates``), and those of several hosts ask a
worker, too (``router.open_requests``).  Listing models does not count.
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


class FleetRequestCounts(Protocol):
    """Open requests by key, at the gateways of all hosts."""

    async def acquire(self, key: str, limit: int) -> bool:
        """Counts a request; False, without counting it, if ``limit`` are open."""
        ...

    def release(self, key: str) -> None:
        """A request that was counted has ended."""
        ...


class ConcurrencyMiddleware:
    """ASGI middleware behind ``auth.AuthMiddleware``: refuses a request beyond its key's limit with 429."""

    def __init__(
        self,
        app: ASGIApp,
        counts: RequestCounts,
        count_shed: Callable[[ServiceClass, str], None] = lambda *_: None,
        fleet: FleetRequestCounts | None = None,
    ) -> None:
        """``count_shed`` is called with class and reason of each refusal.  ``fleet``: of all hosts, if it is known."""
        self._app = app
        self._counts = counts
        self._fleet = fleet
        self._count_shed = count_shed

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        tenant: Tenant | None = scope.get(TENANT)
        if tenant is None or tenant.permissions.max_concurrency is None or route_of(scope["path"]) is None:
            return self._app(scope, receive, send)
        return self._counted(tenant, tenant.permissions.max_concurrency, (scope, receive, send))

    async def _counted(self, tenant: Tenant, limit: int, call: tuple[Scope, Receive, Send]) -> None:
        key = tenant.permissions.key
        ticket = self._counts.acquire(key, limit)
        if ticket is None:
            await self._refuse(tenant, limit, call)
            return
        try:
            await self._counted_at_all_hosts(tenant, limit, call)
        finally:
            self._counts.release(key, ticket)

    async def _counted_at_all_hosts(self, tenant: Tenant, limit: int, call: tuple[Scope, Receive, Send]) -> None:
        if self._fleet is None:
            await self._app(*call)
            return
        key = tenant.permissions.key
        if not await self._fleet.acquire(key, limit):
            await self._refuse(tenant, limit, call)
            return
        try:
            await self._app(*call)
        finally:
            self._fleet.release(key)

    async def _refuse(self, tenant: Tenant, limit: int, call: tuple[Scope, Receive, Send]) -> None:
        self._count_shed(tenant.classes[0], TooManyConcurrentRequests.reason)
        await HttpExchange(*call).send_error(TooManyConcurrentRequests(limit))
