"""What goes into the audit log of an HTTP application: refused requests, and what operators do.

Every request that has ended is looked at once, which costs nothing per token.  Knows nothing about files
(``audit_log``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.types import Scope

from penstock.api.audit_log import (
    MAX_DETAIL_CHARS,
    MAX_LINE_KEYS,
    MAX_ROUTE_CHARS,
    MAX_WORD_CHARS,
    PEER_REFUSED,
    REFUSED,
    AuditEvent,
    AuditLog,
    AuditSink,
)
from penstock.api.auth import NO_TENANT, OPERATOR_PATHS, Tenant
from penstock.api.request_log import CLIENT_CLOSED_REQUEST, RequestLogEntry
from penstock.config.api_keys import KeyChanges
from penstock.config.limits import AuditLimits
from penstock.config.node_registry import NodeChanges
from penstock.wire.peer_rights import PeerRefusal

REFUSALS = frozenset({401, 403, 429})
"""Statuses that are audited."""

READ_BY_OPERATORS = "/debug/"
"""Paths below it show what other tenants sent, so that reading is audited, too."""


class RequestAudit:
    """One for an application."""

    def __init__(self, sink: AuditSink | None, count_forbidden: Callable[[str], None] = lambda code: None) -> None:
        """``sink`` None: nothing is audited.  ``count_forbidden`` is called with the code of each 403."""
        self._sink = sink
        self._count_forbidden = count_forbidden

    def on_ended(self, scope: Scope, entry: RequestLogEntry) -> None:
        """A request has ended."""
        if entry.status == 403 and entry.code:
            self._count_forbidden(entry.code)
        if self._sink is None:
            return
        if entry.status in REFUSALS:
            self._sink.put(_event(REFUSED, scope, entry))
        elif is_operator_action(scope["method"], scope["path"]):
            self._sink.put(_event("admin", scope, entry))


def is_operator_action(method: str, path: str) -> bool:
    """Whether a request changes what all tenants use, or reads what others sent."""
    changes = method not in ("GET", "HEAD", "OPTIONS") and path.startswith(OPERATOR_PATHS)
    return changes or path.startswith(READ_BY_OPERATORS)


def _text(given: str, most: int) -> str:
    """At most ``most`` characters, all of which can be encoded."""
    return given[:most].encode(errors="replace").decode()


def _event(event: str, scope: Scope, entry: RequestLogEntry) -> AuditEvent:
    tenant: Tenant = entry.tenant or NO_TENANT
    return AuditEvent(
        event=event,
        key=tenant.permissions.key,
        tenant=tenant.id,
        method=scope["method"][:16],
        route=_text(scope["path"], MAX_ROUTE_CHARS),
        detail=_text(entry.detail, MAX_DETAIL_CHARS),
        status=entry.status or CLIENT_CLOSED_REQUEST,
        reason=(entry.reason or entry.code)[:MAX_WORD_CHARS],
        remote=str((scope.get("client") or ("unknown",))[0])[:MAX_WORD_CHARS],
    )


class ProcessAudit:
    """The audit log of a process that serves, if it has one."""

    def __init__(self, log: AuditLog | None) -> None:
        self.log = log

    def on_key_changes(self, changes: KeyChanges) -> None:
        """The file of keys was read again: a line for each kind of change, more where there are many keys."""
        if self.log is None:
            return
        for event, keys in zip(("keys_added", "keys_revoked", "keys_changed"), changes, strict=True):
            for first in range(0, len(keys), MAX_LINE_KEYS):
                self.log.put(AuditEvent(event=event, keys=keys[first : first + MAX_LINE_KEYS]))

    def on_node_changes(self, changes: NodeChanges) -> None:
        """The registry of nodes was read again: a line for each kind of change."""
        if self.log is None:
            return
        kinds = (("nodes_added", changes.added), ("nodes_revoked", changes.revoked), ("nodes_changed", changes.changed))
        for event, nodes in kinds:
            for first in range(0, len(nodes), MAX_LINE_KEYS):
                self.log.put(AuditEvent(event=event, keys=nodes[first : first + MAX_LINE_KEYS]))

    def on_peer_refused(self, refusal: PeerRefusal) -> None:
        """A process was refused something because of its key."""
        if self.log is not None:
            self.log.put(peer_event(refusal))

    def lost(self) -> int:
        """Events for which there was no room."""
        return 0 if self.log is None else self.log.lost

    def close(self) -> None:
        """Write what is queued."""
        if self.log is not None:
            self.log.close()


def peer_event(refusal: PeerRefusal) -> AuditEvent:
    """The line of a refused message or connection."""
    remote = _text(refusal.address, MAX_WORD_CHARS)
    return AuditEvent(
        event=PEER_REFUSED, key=refusal.node, reason=refusal.reason, detail=refusal.message, remote=remote
    )


class PeerAudit:
    """The audit log of a worker, which has events only when peers are refused: opened with the first of them."""

    def __init__(self, path: str | None, worker: str, limits: AuditLimits) -> None:
        self._path = path
        self._worker = worker
        self._limits = limits
        self._log: AuditLog | None = None

    def on_refused(self, refusal: PeerRefusal) -> None:
        """Something was refused because of its sender's key."""
        if self._path is not None:
            if self._log is None:
                self._log = AuditLog(Path(self._path), self._worker, self._limits, role="worker")
            self._log.put(peer_event(refusal))

    def close(self) -> None:
        """Write what is queued."""
        if self._log is not None:
            self._log.close()


def open_audit_log(path: str | None, gateway: str, limits: AuditLimits) -> ProcessAudit:
    """The audit log of this process; ``path`` None: there is none."""
    return ProcessAudit(None if path is None else AuditLog(Path(path), gateway, limits))
