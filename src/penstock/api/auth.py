"""Bearer keys, and whose they are.  Only hashes are kept, and they are compared in constant time.

A ring may come from a file (``penstock keys``), which is read again when it changes: keys come and go without a
restart.  A file that cannot be read leaves the ring as it was.  Knows nothing about what tenants may ask for.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http import TENANT, HttpExchange
from penstock.clock import Clock, MonotonicClock
from penstock.config.api_keys import load_keys
from penstock.config.limits import SchedulingConfig
from penstock.errors import ConfigError, Forbidden, Unauthorized
from penstock.telemetry.log import log_event
from penstock.types import ServiceClass

log = logging.getLogger("penstock.api")

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/ready", "/version"})
"""What browsers and load balancers ask for; it tells nothing about anybody's requests."""

OPERATOR_PATHS = ("/admin/", "/debug/", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""What tells of everybody's requests, or changes what everybody has."""

ON_BEHALF_OF = b"x-penstock-for"
"""Says for whom a catalogue's front asks (``fronted``); from anybody else it means nothing."""

MAX_KEY_BYTES = 4096

MISSING_API_KEY = "missing_api_key"
"""The code of a refusal for want of a key."""

KEY_FILE_CHECK_S = 1.0
"""Between two looks whether the file of keys has changed."""

KEY_FILE_ERROR_LOG_S = 60.0
"""Between two lines that say that the file of keys cannot be read."""

AUTH_FAILURE_LOG_S = 1.0
"""Between two lines about wrong keys, however many come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who has a key."""

    id: str = ""  # a short name, not the one that people know
    weight: float = 1.0
    salt: str = ""  # tenants with different ones share no cached pages
    classes: tuple[ServiceClass, ...] = tuple(ServiceClass)  # that this key may ask for; the first unless it says
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    operator: bool = False  # may it change workers, and see everybody's requests?


NO_TENANT = Tenant(operator=True)
"""Whoever comes where keys are of nobody in particular."""


class ApiKeys(Protocol):
    """Keys that open a server."""

    @property
    def is_open(self) -> bool:
        """Is no key needed?"""
        ...

    @property
    def tenant_count(self) -> int:
        """How many there are."""
        ...

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """Whose key this is; None: nobody's.

        ``said``: the header ``ON_BEHALF_OF``.  Raises Unauthorized where it says what cannot be.
        """
        ...


class StaticApiKeys:
    """Keys that stay as they are.  An empty ring is an open door."""

    def __init__(self, owners: Mapping[bytes, Tenant] | None = None) -> None:
        """``owners`` by the SHA-256 of their keys."""
        self._owners = dict(owners or {})
        self._by_start: dict[bytes, list[bytes]] = {}
        for known in self._owners:
            self._by_start.setdefault(known[:4], []).append(known)

    @classmethod
    def of(cls, keys: Iterable[str]) -> StaticApiKeys:
        """A ring of these keys, which are nobody's in particular; they are not kept."""
        return cls({hashlib.sha256(key.encode()).digest(): NO_TENANT for key in keys})

    @property
    def is_open(self) -> bool:
        """See ``ApiKeys``."""
        return not self._owners

    @property
    def tenant_count(self) -> int:
        """See ``ApiKeys``."""
        return len({tenant.id for tenant in self._owners.values()})

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """See ``ApiKeys``.  Found by the start of the key's hash, of which the rest is compared in constant time."""
        given = hashlib.sha256(key[:MAX_KEY_BYTES]).digest()
        found = None
        for known in self._by_start.get(given[:4], ()):
            if hmac.compare_digest(given, known):
                found = self._owners[known]
        return found


class FileApiKeys:
    """The keys of a file, as it is now, and ``besides`` a key of everybody's."""

    def __init__(self, path: Path, clock: Clock, *, besides: Iterable[str] = (), max_keys: int = 1024) -> None:
        """Raises ConfigError when the file cannot be read."""
        self._path = path
        self._clock = clock
        self._max_keys = max_keys
        self._besides = {hashlib.sha256(key.encode()).digest(): NO_TENANT for key in besides}
        self._seen: object = None
        self._looked = clock.now()
        self._said: float | None = None  # when it was said last that the file cannot be read
        self._ring = StaticApiKeys()
        self._read()

    is_open = False  # also while the file has no keys: then nobody comes in

    @property
    def tenant_count(self) -> int:
        """See ``ApiKeys``."""
        return self._ring.tenant_count

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """See ``ApiKeys``."""
        now = self._clock.now()
        if now - self._looked >= KEY_FILE_CHECK_S:
            self._looked = now
            self._look()
        return self._ring.find(key)

    def _look(self) -> None:
        told_lately = self._said is None or self._looked - self._said < KEY_FILE_ERROR_LOG_S
        if _state(self._path) == self._seen and told_lately:
            return
        try:
            self._read()
            self._said = None
            log_event(log, logging.INFO, "API keys read again", tenants=self.tenant_count)
        except ConfigError as error:
            self._said = self._looked
            log.error("API keys stay as they were, those that were revoked since among them: %s", error)

    def _read(self) -> None:
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
            )
        self._ring = StaticApiKeys(owners)


def _state(path: Path) -> object:
    """What changes with the file."""
    try:
        facts = os.stat(path)
    except OSError as error:
        return error.errno
    return facts.st_mtime_ns, facts.st_ino, facts.st_size


class AuthFailureLog:
    """Counts requests that had no right key, and says so: a line a second at most."""

    def __init__(self, clock: Clock, count: Callable[[str], None] = lambda code: None) -> None:
        """``count`` is told the code of each refusal."""
        self._clock = clock
        self._count = count
        self._unsaid = 0
        self._said = -AUTH_FAILURE_LOG_S

    def record(self, scope: Scope, code: str) -> None:
        """A request was refused with this code."""
        self._count(code)
        if code == MISSING_API_KEY:  # somebody who does not guess
            return
        self._unsaid += 1
        now = self._clock.now()
        if now - self._said >= AUTH_FAILURE_LOG_S:
            client = str((scope.get("client") or ("unknown",))[0])
            log_event(log, logging.WARNING, "requests refused: wrong keys", requests=self._unsaid, latest_from=client)
            self._unsaid, self._said = 0, now


class AuthMiddleware:
    """An ASGI application behind a key ring.  ``OPTIONS`` and every path but ``OPEN_PATHS`` need a key."""

    def __init__(self, app: ASGIApp, ring: ApiKeys, wrong: AuthFailureLog) -> None:
        self._app = app
        self._ring = ring
        self._wrong = wrong

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or self._ring.is_open or scope["path"] in OPEN_PATHS:
            return self._app(scope, receive, send)
        found = self._check(scope)
        if isinstance(found, Tenant) and not found.operator and scope["path"].startswith(OPERATOR_PATHS):
            return HttpExchange(scope, receive, send).send_error(
                Forbidden("This needs the key of an operator: `penstock keys add --operator`.", code="not_an_operator")
            )
        if isinstance(found, Tenant):
            return self._app({**scope, TENANT: found}, receive, send)
        self._wrong.record(scope, found.code or "")
        return HttpExchange(scope, receive, send).send_error(found)

    def _check(self, scope: Scope) -> Tenant | Unauthorized:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            return Unauthorized(
                "You didn't provide an API key. Send it in a header: Authorization: Bearer YOUR_KEY.",
                code=MISSING_API_KEY,
            )
        kind, _, key = given[0].partition(b" ")
        said = next((value for name, value in scope["headers"] if name == ON_BEHALF_OF), None)
        try:
            tenant = self._ring.find(key.strip(), said) if kind.lower() == b"bearer" and len(given) == 1 else None
        except Unauthorized as error:
            return error
        return tenant or Unauthorized("Incorrect API key provided.", code="invalid_api_key")


# MERGED: For whom the front of a catalogue asks: it says so with each request that it passes on to a model's
# MERGED: own gateway.
# MERGED:
# MERGED: A header names the tenant.  It is heeded from whoever has the front's key, which is drawn at every
# MERGED: start and known to
# MERGED: nobody else; from any other it means nothing.  Knows nothing about models.

MAX_TENANT_HEADER_BYTES = 4096


def tenant_header(tenant: Tenant) -> bytes:
    """The value of the header ``ON_BEHALF_OF``."""
    return msgspec.json.encode(tenant)


class FrontApiKey:
    """The one key of a front (``auth.Ring``)."""

    is_open = False

    def __init__(self, key: str, *, max_tenants: int = 1024) -> None:
        self._ring = StaticApiKeys.of([key])
        self._max_tenants = max_tenants
        self._met: set[str] = set()

    @property
    def tenant_count(self) -> int:
        """How many have asked so far."""
        return len(self._met)

    def find(self, key: bytes, said: bytes | None = None) -> Tenant | None:
        """See ``ApiKeys``.  Who says nothing is the front itself.  Raises Unauthorized for what cannot be."""
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


def ring_of(
    api_key: str | None, api_keys: str | None, scheduling: SchedulingConfig, *, fronted: bool = False
) -> ApiKeys:
    """The keys of a process that serves; ``fronted``: the one key is that of a catalogue's front.

    Raises ConfigError.
    """
    if fronted and api_key:
        return FrontApiKey(api_key, max_tenants=scheduling.max_tenants)
    besides = [api_key] if api_key else []
    if api_keys is None:
        return StaticApiKeys.of(besides)
    path = Path(api_keys).expanduser()
    return FileApiKeys(path, MonotonicClock(), besides=besides, max_keys=scheduling.max_tenants)
