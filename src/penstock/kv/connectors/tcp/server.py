"""The sending end of TCP fetches: a listening port, and a thread per connected receiver.

The worker's loop says which transfers may be fetched, and which of their pages (``grant_access``, ``publish_page``,
``revoke_access``).  The threads serve nothing else, and only to receivers that have the transfer's token; they continue
while the loop computes.  Pages are sent straight from memory.  One that is reallocated meanwhile is sent all the same:
it fails the receiver's check.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any

from penstock.config.limits import KvTransferConfig
from penstock.errors import ConfigError, ProtocolError
from penstock.kv.connectors.tcp import protocol as frames
from penstock.kv.connectors.tcp.protocol import TimedSocket
from penstock.kv.page_memory import KvMemory
from penstock.types import PageId, RequestId
from penstock.wire.transfer_messages import FETCH_TOKEN_BYTES, FetchTicket, PageReady

log = logging.getLogger("penstock.worker")

_NO_TOKEN = bytes(FETCH_TOKEN_BYTES)
_BACKLOG = 64
_IDLE_LEASES = 4  # times ``peer_idle_s``: its receiver closes a connection that it does not use sooner


@dataclass(slots=True, eq=False)
class _Grant:
    """A transfer that may be fetched."""

    grant_id: int
    token: bytes = field(repr=False)
    pages: set[int] = field(default_factory=set[int])  # that may be fetched
    callers: set[_ServerConnection] = field(default_factory=set)  # that have proved that they have the token


class PageServer:
    """Listens on ``host`` and ``port``; port 0 is any free one."""

    def __init__(self, own: KvMemory, host: str, port: int, config: KvTransferConfig, *, sealed: bool) -> None:
        """Raises ConfigError when it cannot listen there."""
        self.own = own
        self.config = config
        self.sealed = sealed
        self.rejected_connections = 0  # connections that proved nothing in time, or something wrong, or found no room
        self._warned = False  # that there are as many as may be
        self._grants: dict[int, _Grant] = {}
        self._grants_by_request: dict[tuple[RequestId, int], _Grant] = {}
        self._lock = threading.Lock()  # of the two below
        self._callers: set[_ServerConnection] = set()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen for fetches of pages at {host}:{port}: {error.strerror}") from None
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="pages-accept", daemon=True).start()

    # --- for the worker's loop ---------------------------------------------------------------------------------------

    def grant_access(self, request: RequestId, epoch: int) -> FetchTicket:
        grant = self._grants_by_request.get((request, epoch))
        if grant is None:
            grant = _Grant(secrets.randbits(63), secrets.token_bytes(FETCH_TOKEN_BYTES))
            self._grants_by_request[request, epoch] = self._grants[grant.grant_id] = grant
        return FetchTicket(
            request=request, epoch=epoch, port=self.port, grant_id=grant.grant_id, token=grant.token, sealed=self.sealed
        )

    def publish_page(self, frame: PageReady) -> None:
        grant = self._grants_by_request.get((frame.request, frame.epoch))
        if grant is not None:
            grant.pages.add(frame.page)

    def revoke_access(self, request: RequestId, epoch: int) -> None:
        grant = self._grants_by_request.pop((request, epoch), None)
        if grant is not None:
            del self._grants[grant.grant_id]

    def close(self) -> None:
        """Stop listening and close all connections."""
        with self._lock:
            self._closed = True
            callers = list(self._callers)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listening.close()
        for caller in callers:
            caller.wire.shut_down()

    # --- for the threads ---------------------------------------------------------------------------------------------

    def find_grant(self, grant_id: int) -> _Grant | None:
        """The transfer that may be fetched now; None if there is none."""
        return self._grants.get(grant_id)

    def on_connection_closed(self, caller: _ServerConnection) -> None:
        """A connection has ended."""
        with self._lock:
            self._callers.discard(caller)
            self.rejected_connections += not caller.authenticated

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("cannot take a connection for pages: %s", error)
                threading.Event().wait(self.config.greeting_s)  # out of descriptors: some will be free again
                continue
            try:
                self._admit(sock, address[0])
            except Exception as error:  # noqa: BLE001  (what one connection lacks must not cost all others theirs)
                log.warning("cannot serve a connection for pages: %s", str(error) or type(error).__name__)
                sock.close()

    def _admit(self, sock: socket.socket, host: str) -> None:
        with self._lock:
            if self._closed or not self._has_room():
                sock.close()
                self._turned_away()
                return
            caller = _ServerConnection(self, TimedSocket(sock, self.config.greeting_s))
            self._callers.add(caller)
        try:
            threading.Thread(target=caller.run, name=f"pages-to-{host}", daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            self.on_connection_closed(caller)
            raise

    def _turned_away(self) -> None:
        self.rejected_connections += not self._closed
        if len(self._callers) >= self.config.max_connections and not self._warned:
            self._warned = True
            log.warning(
                "%d connections fetch pages here, and no more may (max_connections): others wait or fail",
                len(self._callers),
            )

    def _has_room(self) -> bool:
        """Whether another connection may be accepted.  Closes connections that have not authenticated in time."""
        since = time.monotonic() - self.config.greeting_s
        strangers = [caller for caller in self._callers if not caller.authenticated]
        for caller in strangers:
            if caller.opened_at < since:
                caller.wire.shut_down()
        return len(self._callers) < self.config.max_connections and len(strangers) < self.config.max_strangers


class _ServerConnection:
    """One connection of a receiver, and the thread that serves it."""

    def __init__(self, server: PageServer, wire: TimedSocket) -> None:
        self.wire = wire
        self.authenticated = False  # it has proved itself
        self.opened_at = time.monotonic()
        self._server = server
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._cipher: Any = None
        self._sealed_pages = 0
        self._scratch = bytearray(server.own.layout.page_bytes + frames.TAG_BYTES if server.sealed else 0)

    def run(self) -> None:
        """Serve until the receiver disconnects, times out or violates the protocol."""
        try:
            self.wire.send([frames.pack_hello(self._nonce, sealed=self._server.sealed)])
            while True:
                self._answer()
        except (OSError, ProtocolError) as error:
            log.debug("a connection for pages ended: %s", error)
        finally:
            self.wire.close()
            self._server.on_connection_closed(self)

    def _answer(self) -> None:
        config = self._server.config
        self.wire.timeout_s = _IDLE_LEASES * config.peer_idle_s if self.authenticated else config.greeting_s
        kind, count, number, grant_id = frames.parse_head(self.wire.receive_exactly(frames.HEAD_BYTES))
        self.wire.timeout_s = config.fetch_stall_s
        if kind == frames.ATTACH:
            self._attach(grant_id)
        elif kind == frames.FETCH and self.authenticated and 0 < count <= frames.MAX_PAGES:
            self._fetch(grant_id, number, frames.parse_pages(self.wire.receive_exactly(8 * count)))
        else:
            raise ProtocolError(f"a frame of kind {kind} with {count} pages")

    def _attach(self, grant_id: int) -> None:
        raw = self.wire.receive_exactly(frames.NONCE_BYTES + frames.PROOF_BYTES)
        pair = frames.Handshake(self._nonce, bytes(raw[: frames.NONCE_BYTES]))
        grant = self._server.find_grant(grant_id)
        token = _NO_TOKEN if grant is None else grant.token
        proved = compare_digest(raw[frames.NONCE_BYTES :], pair.receiver_proof(token, grant_id))
        if grant is None or not proved:
            if not self.authenticated:
                raise ProtocolError("a stranger")
            self.wire.send([frames.pack_head(frames.REFUSED, grant_id)])
            return
        if not self.authenticated:
            self.authenticated = True
            if self._server.sealed:
                self._cipher = pair.cipher(token, grant_id)
        grant.callers.add(self)
        self.wire.send([frames.pack_head(frames.ATTACHED, grant_id), pair.sender_proof(token, grant_id)])

    def _fetch(self, grant_id: int, number: int, pages: tuple[int, ...]) -> None:
        grant = self._server.find_grant(grant_id)
        if grant is None or self not in grant.callers or not grant.pages.issuperset(pages):
            self.wire.send([frames.pack_head(frames.REFUSED, grant_id, number=number)])
            return
        own = self._server.own
        first = frames.pack_head(frames.PAGES, grant_id, count=len(pages), number=number)
        if self._cipher is None:
            self.wire.send([first, *(own.view(PageId(page)) for page in pages)])
            return
        self.wire.send([first])
        for page in pages:
            nonce = frames.page_nonce(self._sealed_pages)
            self._sealed_pages += 1
            self._cipher.encrypt_into(
                nonce, own.view(PageId(page)), frames.page_associated_data(grant_id, page), self._scratch
            )
            self.wire.send([self._scratch])
