"""Which node may send what: to a worker by the rights of its key, to a gateway under the names that are its own.

Every message is judged by the key that its connection proved, so a revoked node, or a key that was replaced, is ignored
from its next message on.  Knows nothing about sockets.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol, get_args

from penstock.config.node_registry import NodeEntry, NodeRight
from penstock.telemetry.metrics import PEER_REFUSAL_REASONS
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import (
    AdapterNames,
    AssignRole,
    Cancel,
    ChangeAdapter,
    ClaimIdempotencyKey,
    FindTokens,
    Hello,
    KvEvents,
    OpenRequestCounts,
    PoisonRequests,
    RateDemands,
    SaveTokens,
    Submit,
    Tokens,
    WorkerReport,
)
from penstock.wire.node_keys import NodeKeys
from penstock.wire.transfer_messages import EncodeImage, PagesReceived, PullPages

log = logging.getLogger("penstock.wire")

UNKNOWN_KEY, REVOKED, NO_RIGHT, FOREIGN_NAME = PEER_REFUSAL_REASONS

NEEDED: dict[type[PeerMessage], tuple[NodeRight, ...]] = {
    Hello: (NodeRight.GATEWAY,),
    Submit: (NodeRight.GATEWAY,),
    Cancel: (NodeRight.GATEWAY,),
    AssignRole: (NodeRight.GATEWAY,),
    PoisonRequests: (NodeRight.GATEWAY,),
    RateDemands: (NodeRight.GATEWAY,),
    ClaimIdempotencyKey: (NodeRight.GATEWAY,),
    SaveTokens: (NodeRight.GATEWAY,),
    FindTokens: (NodeRight.GATEWAY,),
    OpenRequestCounts: (NodeRight.GATEWAY,),
    ChangeAdapter: (NodeRight.GATEWAY,),
    AdapterNames: (NodeRight.GATEWAY,),
    PullPages: (NodeRight.WORKER,),
    EncodeImage: (NodeRight.WORKER,),
    PagesReceived: (NodeRight.WORKER, NodeRight.GATEWAY),
}
"""Messages to a worker, and the rights of which its sender needs one.  Others are for no worker."""

_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(PeerMessage)}


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """Something was refused because of its sender's key."""

    reason: str  # one of those above
    node: str = ""  # empty: the key is no node's
    message: str = ""  # its kind; empty: the connection was refused
    address: str = ""  # of a refused connection


class RefusalHandler(Protocol):
    """Called for each; must not wait or raise."""

    def __call__(self, refusal: PeerRefusal) -> None: ...


REFUSAL_LOG_S = 60.0
"""Between two log lines about the same refusal."""

REFUSAL_KINDS = 256
"""Different ones that are logged in that time."""


class RefusalLog:
    """Logs each kind of refusal once in a while, and passes all on."""

    def __init__(self, on_refused: RefusalHandler | None) -> None:
        self._next = on_refused
        self._logged: dict[PeerRefusal, float] = {}

    def __call__(self, refusal: PeerRefusal) -> None:
        now = time.monotonic()
        if now - self._logged.get(refusal, float("-inf")) >= REFUSAL_LOG_S:
            self._logged = {kind: at for kind, at in self._logged.items() if now - at < REFUSAL_LOG_S}
            if len(self._logged) < REFUSAL_KINDS:
                self._logged[refusal] = now
                what = f"a {refusal.message}" if refusal.message else f"a connection from {refusal.address or 'a peer'}"
                whose = f" of the node {refusal.node}" if refusal.node else ""
                log.warning("refused %s%s: %s", what, whose, refusal.reason.replace("_", " "))
        if self._next is not None:
            self._next(refusal)


def kind_refusal(tag: str, public: bytes, keys: NodeKeys) -> PeerRefusal | None:
    """Why a worker of this node need not decode a message of this tag from the holder of this key; None: it must.

    What has another tag, or none, is decoded to the tag.
    """
    return _right_refusal(_KINDS.get(tag), public, keys)


def request_refusal(message: PeerMessage, public: bytes, keys: NodeKeys) -> PeerRefusal | None:
    """Why a worker of this node must not handle a message from the holder of this key; None: it may.

    A node may always ask its own workers how they are, as ``penstock probe`` does.
    """
    refusal, node = _right_refusal(type(message), public, keys), keys.sender(public)
    if refusal is not None or node is None:
        return refusal
    kind = type(message).__name__
    if isinstance(message, Hello):
        probes = message.discovery and node.name == keys.node
        if not probes and not node.may(NodeRight.GATEWAY):
            return PeerRefusal(NO_RIGHT, node.name, kind)
        if not keys.owns(node, message.gateway):
            return PeerRefusal(FOREIGN_NAME, node.name, kind)
    if isinstance(message, AssignRole) and node.name != keys.node and not node.may(NodeRight.OPERATOR):
        return PeerRefusal(NO_RIGHT, node.name, kind)
    return None


def response_refusal(message: PeerMessage, public: bytes, keys: NodeKeys) -> PeerRefusal | None:
    """Why a message from the listener that has this key must not be handled; None: it may."""
    kind, node = type(message).__name__, keys.sender(public)
    if node is None:
        return _no_sender(public, keys, kind)
    if not node.may(NodeRight.WORKER):
        return PeerRefusal(NO_RIGHT, node.name, kind)
    if isinstance(message, Tokens | WorkerReport | KvEvents) and not keys.owns(node, message.worker):
        return PeerRefusal(FOREIGN_NAME, node.name, kind)
    return None


def connection_refusal(public: bytes, keys: NodeKeys, address: str) -> PeerRefusal | None:
    """Why the holder of this key may not connect; None: it may."""
    if keys.sender(public) is not None:
        return None
    node = keys.registry.holder(public)
    return PeerRefusal(UNKNOWN_KEY if node is None else REVOKED, "" if node is None else node.name, address=address)


def _right_refusal(kind: type[PeerMessage] | None, public: bytes, keys: NodeKeys) -> PeerRefusal | None:
    """Why the holder of this key may say nothing of this kind to a worker.  Of a Hello that depends on what it says."""
    node = keys.sender(public)
    if node is None:
        return _no_sender(public, keys, "message" if kind is None else kind.__name__)
    if kind is None or kind is Hello or any(node.may(right) for right in NEEDED.get(kind, ())):
        return None
    return PeerRefusal(NO_RIGHT, node.name, kind.__name__)


def _no_sender(public: bytes, keys: NodeKeys, kind: str) -> PeerRefusal:
    node: NodeEntry | None = keys.registry.holder(public)
    return PeerRefusal(UNKNOWN_KEY if node is None else REVOKED, "" if node is None else node.name, kind)
