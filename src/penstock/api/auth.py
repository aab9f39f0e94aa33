"""API keys and their tenants.  Only hashes are stored, and they are compared in constant time.

Keys may come from a file (``penstock keys``), which is read again when it changes: keys are added and revoked without
a restart.  While the file cannot be read, the known keys remain valid.  Behind a catalogue's front, the front sends
the tenant in a header, which is accepted only with the front's own key.  Knows nothing about tenants' quotas.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http import TENANT, HttpExchange
from penstock.api.key_permissions import UNRESTRICTED, KeyPermissions, check_expiry, check_route
from penstock.api.request_log import LOG_ENTRY, RequestLogEntry
from penstock.clock import Clock, MonotonicClock
from penstock.config.api_keys import KeyChanges, KeyFile, key_changes, load_keys
from penstock.config.base import expanded_path
from penstock.config.limits import SchedulingConfig
from penstock.errors import ConfigError, Forbidden, Unauthorized
from penstock.telemetry.log import log_event
from penstock.types import ServiceClass

log = logging.getLogger("penstock.api")

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/ready", "/version"})
"""Paths for browsers and load balancers, which reveal nothing about requests."""

OPERATOR_PATHS = ("/admin/", "/debug/", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that reveal all tenants' requests, or change what all tenants use."""

API_KEY = b"x-api-key"
"""Where Anthropic's clients have their key."""

ON_BEHALF_OF = b"x-penstock-for"
"""Names the tenant for whom a catalogue's front asks; ignored without the front's key."""

MAX_KEY_BYTES = 4096

MISSING_API_KEY = "missing_api_key"
"""The code of a refusal when no key was sent."""

KEY_FILE_CHECK_S = 1.0
"""Interval of checks whether the file of keys has changed."""

KEY_FILE_ERROR_LOG_S = 60.0
"""Interval of log lines while the file of keys cannot be read."""

AUTH_FAILURE_LOG_S = 1.0
"""Interval of log lines about wrong keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The tenant of a key, and what it may use."""

    id: str = ""  # a short name, not the one that people know
    weight: float = 1.0
    salt: str = ""  # tenants with different ones share no cached pages
    classes: tuple[ServiceClass, ...] = tuple(ServiceClass)  # that this key may ask for; the first unless it says
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    operator: bool = False  # may it change workers, and see everybody's requests?
    permissions: KeyPermissions = UNRESTRICTED  # of the key


NO_TENANT = Tenant(operator=True)
"""The tenant of every request where keys have no tenants."""

SERVICE_KEY = replace(NO_TENANT, permissions=KeyPermissions(key="api-key"))
"""The same with the key of ``--api-key``, which has this id in the audit log."""


class ApiKeys(Protocol):
    """API keys, by which requests are authenticated."""

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        ...

    @property
    def tenant_count(self) -> int:
        """The number of tenants."""
        ...

    def refresh(self) -> None:
        """Read the keys again if they have changed; cheap if not.  To be called regularly."""
        ...

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """The key's tenant; None for an unknown key.

        ``said``: the header ``ON_BEHALF_OF``.  Raises Unauthorized where it says what cannot be.
        """
        ...


class StaticApiKeys:
    """A fixed set of keys.  Without any, no key is needed."""

    def __init__(self, owners: Mapping[bytes, Tenant] | None = None) -> None:
        """``owners`` by the SHA-256 of their keys."""
        self._owners = dict(owners or {})
        self._by_start: dict[bytes, list[bytes]] = {}
        for known in self._owners:
            self._by_start.setdefault(known[:4], []).append(known)

    @classmethod
    def of(cls, keys: Iterable[str]) -> StaticApiKeys:
        """These keys, without tenants; only their hashes are stored."""
        return cls({hashlib.sha256(key.encode()).digest(): SERVICE_KEY for key in keys})

    @property
    def is_open(self) -> bool:
        return not self._owners

    @property
    def tenant_count(self) -> int:
        return len({tenant.id for tenant in self._owners.values()})

    def refresh(self) -> None:
        """They never change."""

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """Found by the start of the key's hash, of which the rest is compared in constant time."""
        given = hashlib.sha256(key[:MAX_KEY_BYTES]).digest()
        found = None
        for known in self._by_start.get(given[:4], ()):
            if hmac.compare_digest(given, known):
                found = self._owners[known]
        return found


class FileApiKeys:
    """The keys of a file, in its current state, and keys without tenants (``besides``)."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        besides: Iterable[str] = (),
        max_keys: int = 1024,
        on_change: Callable[[KeyChanges], None] = lambda changes: None,
    ) -> None:
        """``on_change`` is called when a changed file was read.  Raises ConfigError when the file cannot be read."""
        self._path = path
        self._clock = clock
        self._max_keys = max_keys
        self._on_change = on_change
        self._besides = {hashlib.sha256(key.encode()).digest(): SERVICE_KEY for key in besides}
        self._seen: object = None
        self._looked = clock.now()
        self._said: float | None = None  # when it was said last that the file cannot be read
        self._ring = StaticApiKeys()
        self._file = self._read()

    is_open = False  # also while the file has no keys: then every request is refused

    @property
    def tenant_count(self) -> int:
        return self._ring.tenant_count

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        self.refresh()
        return self._ring.find(key)

    def refresh(self) -> None:
        now = self._clock.now()
        if now - self._looked >= KEY_FILE_CHECK_S:
            self._looked = now
            self._look()

    def _look(self) -> None:
        told_lately = self._said is None or self._looked - self._said < KEY_FILE_ERROR_LOG_S
        if _state(self._path) == self._seen and told_lately:
            return
        try:
            before, self._file = self._file, self._read()
            self._said = None
            log_event(log, logging.INFO, "API keys read again", tenants=self.tenant_count)
            self._on_change(key_changes(before, self._file))
        except ConfigError as error:
            self._said = self._looked
            log.error("API keys are unchanged, including those revoked since: %s", error)

    def _read(self) -> KeyFile:
        self._seen = _state(self._path)
        file = load_keys(self._path, self._max_keys)
        owners = dict(self._besides)
        for key in file.keys:
            entry, name = file.tenants[key.tenant], file.tenant_id(key.tenant)
            owners[bytes.fromhex(key.sha256)] = Tenant(
                id=name,
                weight=entry.weight,
                salt="" if file.share_prefixes else name,
                classes=tuple(ServiceClass[each.upper()] for each in key.classes),
                tokens_per_minute=entry.tokens_per_minute,
                requests_per_minute=entry.requests_per_minute,
                operator=key.operator,
                permissions=KeyPermissions(
                    key=key.id,
                    expires=key.expires,
                    models=key.models,
                    routes=key.routes,
                    max_concurrency=key.max_concurrency,
                ),
            )
        self._ring = StaticApiKeys(owners)
        return file


def _state(path: Path) -> object:
    """A value that changes when the file does."""
    try:
        facts = os.stat(path)
    except OSError as error:
        return error.errno
    return facts.st_mtime_ns, facts.st_ino, facts.st_size


class AuthFailureLog:
    """Counts requests without a valid key, and logs them, at most a line per second."""

    def __init__(self, clock: Clock, count: Callable[[str], None] = lambda code: None) -> None:
        """``count`` is called with the code of each refusal."""
        self._clock = clock
        self._count = count
        self._unsaid = 0
        self._said = -AUTH_FAILURE_LOG_S

    def record(self, scope: Scope, code: str) -> None:
        """A request was refused with this code."""
        self._count(code)
        if code == MISSING_API_KEY:  # not a guess
            return
        self._unsaid += 1
        now = self._clock.now()
        if now - self._said >= AUTH_FAILURE_LOG_S:
            client = str((scope.get("client") or ("unknown",))[0])
            log_event(log, logging.WARNING, "requests refused: wrong keys", requests=self._unsaid, latest_from=client)
            self._unsaid, self._said = 0, now


class AuthMiddleware:
    """ASGI middleware: ``OPTIONS`` and every path but ``OPEN_PATHS`` need a key, which must be for this path now."""

    def __init__(
        self, app: ASGIApp, ring: ApiKeys, wrong: AuthFailureLog, wall_time: Callable[[], float] = time.time
    ) -> None:
        """``wall_time``: Unix seconds, by which keys expire."""
        self._app = app
        self._ring = ring
        self._wrong = wrong
        self._wall_time = wall_time

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or self._ring.is_open or scope["path"] in OPEN_PATHS:
            return self._app(scope, receive, send)
        try:
            tenant = self._find(scope)
            entry: RequestLogEntry | None = scope.get(LOG_ENTRY)
            if entry is not None:
                entry.tenant = tenant
            self._check_permissions(tenant, scope["path"])
        except Unauthorized as error:
            self._wrong.record(scope, error.code or "")
            return HttpExchange(scope, receive, send).send_error(error)
        except Forbidden as error:
            return HttpExchange(scope, receive, send).send_error(error)
        return self._app({**scope, TENANT: tenant}, receive, send)

    def _check_permissions(self, tenant: Tenant, path: str) -> None:
        """Raises Unauthorized, Forbidden."""
        check_expiry(tenant.permissions, self._wall_time())
        if not path.startswith(OPERATOR_PATHS):
            check_route(tenant.permissions, path)
        elif not tenant.operator:
            raise Forbidden(
                "This needs the key of an operator: `penstock keys add --operator`.", code="not_an_operator"
            )

    def _find(self, scope: Scope) -> Tenant:
        """The tenant of the request's key.  Raises Unauthorized."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        other = [b"Bearer " + value for name, value in scope["headers"] if name == API_KEY]
        if other != given:  # some clients send the same key in both
            given += other
        if not given:
            raise Unauthorized(
                "You didn't provide an API key. Send it in a header: Authorization: Bearer YOUR_KEY, or x-api-key: "
                "YOUR_KEY.",
                code=MISSING_API_KEY,
            )
        kind, _, key = given[0].partition(b" ")
        said = next((value for name, value in scope["headers"] if name == ON_BEHALF_OF), None)
        tenant = self._ring.find(key.strip(), said) if kind.lower() == b"bearer" and len(given) == 1 else None
        if tenant is None:
            raise Unauthorized("Incorrect API key provided.", code="invalid_api_key")
        return tenant


MAX_TENANT_HEADER_BYTES = 4096


def tenant_header(tenant: Tenant) -> bytes:
    """The value of the header ``ON_BEHALF_OF``: without the key's permissions, which the front has checked."""
    return msgspec.json.encode(replace(tenant, permissions=UNRESTRICTED))


class FrontApiKey:
    """The one key of a catalogue's front, which names the tenant in a header."""

    is_open = False

    def __init__(self, key: str, *, max_tenants: int = 1024) -> None:
        self._ring = StaticApiKeys.of([key])
        self._max_tenants = max_tenants
        self._met: set[str] = set()

    @property
    def tenant_count(self) -> int:
        """The number of tenants seen so far."""
        return len(self._met)

    def refresh(self) -> None:
        """It never changes."""

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """Without the header it is the front itself.  Raises Unauthorized if the header names no tenant."""
        if self._ring.find(key) is None:
            return None
        if said is None:
            return NO_TENANT
        try:
            tenant = msgspec.json.decode(said[:MAX_TENANT_HEADER_BYTES], type=Tenant)
        except msgspec.DecodeError:
            raise Unauthorized(f"The header {ON_BEHALF_OF.decode()} names no tenant.", code="invalid_tenant") from None
        if len(self._met) < self._max_tenants:
            self._met.add(tenant.id)
        return tenant


def load_api_keys(
    api_key: str | None,
    api_keys: str | None,
    scheduling: SchedulingConfig,
    *,
    fronted: bool = False,
    on_change: Callable[[KeyChanges], None] = lambda changes: None,
) -> ApiKeys:
    """The keys of a process that serves; ``fronted``: the one key is that of a catalogue's front.

    ``on_change`` is called when a changed file of keys was read.

    Raises ConfigError.
    """
    if fronted and api_key:
        return FrontApiKey(api_key, max_tenants=scheduling.max_tenants)
    besides = [api_key] if api_key else []
    if api_keys is None:
        return StaticApiKeys.of(besides)
    path = expanded_path(api_keys, "--api-keys")
    return FileApiKeys(path, MonotonicClock(), besides=besides, max_keys=scheduling.max_tenants, on_change=on_change)


async def watch_api_keys(keys: ApiKeys) -> None:
    """Notice changes of the keys also while there are no requests, until cancelled."""
    while True:
        await asyncio.sleep(KEY_FILE_CHECK_S)
        keys.refresh()
