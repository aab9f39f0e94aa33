"""The HTTP side of a gateway process: a uvicorn server that accepts connections fairly, writes to the heartbeat table,
listens to the supervisor and drains.  Draining means that running requests finish, then the process ends by itself.

Several processes share one listening socket, so that queued connections survive the death of a process.  Each accepts
one connection per turn of its event loop, and leaves the next to its siblings while it is ahead of them::

    ready to accept --not ahead--> accept one
          |
          +--------ahead of a ready sibling--> retry after RETRY_S; still queued after PATIENCE_S --> accept one

Ahead: more than ``LEAD`` times as many connections as the sibling with the fewest, plus ``SLACK``.  A sibling without a
recent heartbeat does not count.  A connection counts while it is open, and for at least a second.

Knows nothing about what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from penstock.clock import Clock, MonotonicClock
from penstock.config.limits import RequestLimits, TurnLimits
from penstock.config.schema import BACKLOG, TlsConfig
from penstock.errors import ProtocolError
from penstock.launch.channel import Channel
from penstock.launch.heartbeat import HeartbeatSlot
from penstock.launch.http_connection import guarded_protocol
from penstock.launch.tls import TlsCertificate
from penstock.telemetry.log import ROOT
from penstock.types import WorkerState
from penstock.wire.supervisor_messages import ServiceDraining, SupervisorMessage

LEAD, SLACK = 1.1, 2
RETRY_S = 0.005
PATIENCE_S = 0.05
"""So long a connection waits at most for a process that is behind and does not take it."""

FRESH_S = 0.5
"""A process that has not beaten for so long takes nothing now."""

COUNTED_S = 1.0
ALONE_AT_ONCE = 64
"""Connections that are taken a turn where there are no siblings."""

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_S = 1.0
"""Between two tries while this process, or the system, has no room for a connection more."""


class OnConnection(Protocol):
    """What becomes of a connection that was accepted."""

    def __call__(self, connection: socket.socket) -> None: ...


def is_ahead(own: int, others: Sequence[int]) -> bool:
    """Whether a process with ``own`` connections leads one of the ``others`` so far that it leaves them the next."""
    return bool(others) and own >= LEAD * min(others) + SLACK


class Acceptor:
    """Use: ``start`` on the running loop, ``stop``.  ``opened``: connections of this process that are open."""

    def __init__(
        self,
        listener: socket.socket,
        slots: tuple[HeartbeatSlot, Sequence[HeartbeatSlot]],
        take: OnConnection,
        opened: Callable[[], int],
        clock: Clock,
    ) -> None:
        """``slots``: this process' own, and its siblings'."""
        self._listener = listener
        self._slot, self._siblings = slots
        self._on_connection = take
        self._opened = opened
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._latest: deque[float] = deque()  # when connections were accepted within ``COUNTED_S``
        self._left_since: float | None = None  # since when the next connection is left to others
        self._left = 0.0  # when that was last so

    def start(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self.on_readable)

    def stop(self) -> None:
        """Accept nothing more; what is queued stays for others.  Harmless when said twice."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def update_count(self) -> int:
        """The number of connections of this process, published to its siblings."""
        since = self._clock.now() - COUNTED_S
        while self._latest and self._latest[0] < since:
            self._latest.popleft()
        count = max(self._opened(), len(self._latest))
        self._slot.set_connections(count)
        return count

    def on_readable(self) -> None:
        """A connection waits."""
        now = self._clock.now()
        others = [slot.connections for slot in self._siblings if self._accepts(slot, now)]
        if not others:
            for _ in range(ALONE_AT_ONCE):
                if not self._accept(now):
                    return
        elif not is_ahead(self.update_count(), others) or self._waited(now):
            self._accept(now)
            self._left_since = None
        else:
            self._rest(RETRY_S)

    def _waited(self, now: float) -> bool:
        """Whether the connection was left to other processes for long enough."""
        if self._left_since is None or now - self._left > 3 * RETRY_S:
            self._left_since = now  # another one: somebody took the one before
        self._left = now
        return now - self._left_since >= PATIENCE_S

    def _accept(self, now: float) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("no connection can be accepted: %s", error.strerror)
            self._rest(NO_ROOM_S)
            return False
        connection.setblocking(False)
        self._latest.append(now)
        self._on_connection(connection)
        self.update_count()
        return True

    def _rest(self, seconds: float) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._timer = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        if self._loop is not None:
            self._loop.add_reader(self._listener.fileno(), self.on_readable)

    def _accepts(self, slot: HeartbeatSlot, now: float) -> bool:
        heartbeat = slot.read()
        return heartbeat.state is WorkerState.READY and now - heartbeat.beat_s <= FRESH_S


log = logging.getLogger(__name__)

BEAT_S = 0.1
STALL_ALLOWED_S = 8.0
"""A loop that is blocked for longer (and ``wedge_s`` more) is given up, though that breaks every connection."""

KNOWN_S = 2.0
"""How long a process that was forked anew lets connections wait while it has not heard of any worker."""

KEEP_ALIVE_S = 65.0
"""Idle connections are kept for longer than clients and proxies usually keep theirs: they close first."""

SWITCH_S = 0.0005
"""How long a thread that tokenizes or parses may keep the interpreter from the event loop.  Python's own 5 ms showed
in other people's streams."""

App = Callable[..., Any]
"""An ASGI application."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIo:
    """What such a process has from the one that forked it."""

    listener: socket.socket
    channel: Channel
    slot: HeartbeatSlot
    siblings: tuple[HeartbeatSlot, ...] = ()  # of processes that accept connections from the same listener


class HttpServer:
    """Serves HTTP in one process; ``hear`` is called with each message of the supervisor."""

    def __init__(
        self,
        io: ProcessIo,
        limits: RequestLimits,
        hear: Callable[[SupervisorMessage], None],
        tls: TlsConfig | None = None,
        turns: TurnLimits | None = None,
    ) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._tls = None if tls is None else TlsCertificate(tls)
        self._listener = io.listener
        self._channel = io.channel
        self._slot = io.slot
        self._siblings = io.siblings
        self._limits = limits
        self._turns = turns
        self._on_message = hear
        self._draining = asyncio.Event()
        self._heartbeats = 0

    async def serve(self, app: App, known: Callable[[], bool] = lambda: True) -> None:
        """Until drained or stopped.  Connections are accepted once ``known`` returns True, or after ``KNOWN_S``; until
        then they wait, or another process accepts them."""
        server = _Server(self._uvicorn(app), self._listener, (self._slot, self._siblings))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._on_channel)
        loop.add_signal_handler(signal.SIGTERM, _stop_now, server)
        watch = [] if self._tls is None else [self._tls.watch_files()]
        side = [loop.create_task(work) for work in (self._write_heartbeats(server), self._drain(server), *watch)]
        try:
            deadline = loop.time() + KNOWN_S
            while not known() and not server.should_exit and loop.time() < deadline:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(BEAT_S / 10)
            await server.serve([])
            if server.force_exit:  # uvicorn does not end the application then
                await server.lifespan.shutdown()
        finally:
            loop.remove_reader(self._channel.fileno())
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)

    def _uvicorn(self, app: App) -> uvicorn.Config:
        _adopt_logs()
        tls = self._tls
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")  # uvicorn's own setting
        return uvicorn.Config(
            ForwardedHeaders(app, trusted),
            interface="asgi3",
            proxy_headers=False,
            http=guarded_protocol(self._limits, self._turns),
            ws="none",
            lifespan="auto",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            backlog=BACKLOG,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
        )

    def _on_channel(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._on_message(message)
                if isinstance(message, ServiceDraining):
                    self._draining.set()
        except ProtocolError as error:
            log.warning("from the supervisor: %s", error)
        except EOFError:  # the supervisor has ended, and this process ends with it (``launch.fork_server``)
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    async def _write_heartbeats(self, server: _Server) -> None:
        while True:
            now = time.monotonic_ns()
            self._heartbeats += 1
            self._slot.beat(now, now + int(STALL_ALLOWED_S * 1e9), self._heartbeats)
            if server.started:
                self._slot.set_state(WorkerState.DRAINING if self._draining.is_set() else WorkerState.READY)
            server.acceptor.update_count()
            self._channel.flush()
            await asyncio.sleep(BEAT_S)

    async def _drain(self, server: uvicorn.Server) -> None:
        """Once draining, end as soon as no request is open."""
        await self._draining.wait()
        while server.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(BEAT_S / 2)
        server.should_exit = True


class ForwardedHeaders:
    """uvicorn's ``ProxyHeadersMiddleware`` for requests that have such headers.

    Others pass it by: its coroutine would last as long as their responses, which takes 0.4 KiB.
    """

    _NAMES = (b"x-forwarded-for", b"x-forwarded-proto")

    def __init__(self, app: App, trusted: str) -> None:
        self._app = app
        self._behind_proxy = ProxyHeadersMiddleware(app, trusted)

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if any(name in self._NAMES for name, _ in scope.get("headers", ())):
            return self._behind_proxy(scope, receive, send)
        passed: Awaitable[None] = self._app(scope, receive, send)
        return passed


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, for the supervisor decides what signals mean, and with connections that
    ``Acceptor`` accepts."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, slots: tuple[HeartbeatSlot, tuple[HeartbeatSlot, ...]]
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._handed: set[asyncio.Task[Any]] = set()  # connections that have no protocol yet
        self.acceptor = Acceptor(listener, slots, self._hand, self._opened, MonotonicClock())

    def _opened(self) -> int:
        return len(self.server_state.connections) + len(self._handed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        if not self.should_exit:
            self._listener.listen(BACKLOG)
            self.acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.acceptor.stop()
        self._listener.close()
        await super().shutdown(sockets=[])

    def _hand(self, connection: socket.socket) -> None:
        """Serve this connection with the application."""
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            made: asyncio.Protocol = kind(
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )
            return made

        task = loop.create_task(self._connect(connection, protocol))
        self._handed.add(task)
        task.add_done_callback(self._handed.discard)

    async def _connect(self, connection: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)
        except OSError as error:  # it hung up, or a handshake failed
            log.debug("a connection failed: %s", error)
            connection.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_now(server: uvicorn.Server) -> None:
    server.should_exit = server.force_exit = True


_ADOPTED = {"uvicorn": logging.ERROR, "asyncio": logging.ERROR, "python_multipart": logging.CRITICAL}
"""Libraries with lines of their own: what clients do wrong, or that they have gone, is no error."""


class CancelledRequestFilter(logging.Filter):
    """Leaves out requests that were cancelled: only a process that ends does so, and clients go on elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


NOT_CANCELLED = CancelledRequestFilter()


def _adopt_logs() -> None:
    """Their errors (an exception in the application) go where our lines go, in the same form."""
    for name, level in _ADOPTED.items():
        adopted = logging.getLogger(name)
        adopted.handlers = logging.getLogger(ROOT).handlers
        adopted.setLevel(level)
        adopted.propagate = False
    logging.getLogger("uvicorn.error").addFilter(NOT_CANCELLED)
