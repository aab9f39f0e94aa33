"""The gateway process: HTTP in front, the router behind, one event loop for both.

Told by the supervisor which workers there are; beats on the board like a worker.  Draining means: the router takes
nothing new, what runs is finished, then the process ends by itself with exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from penstock.clock import MonotonicClock
from penstock.config.schema import BACKLOG, GatewayConfig
from penstock.errors import ProtocolError
from penstock.launch.board import Slot
from penstock.launch.channel import Channel
from penstock.launch.connections import guarded_protocol
from penstock.launch.joined import JoinedWorkers
from penstock.router.service import Outside, RouterService
from penstock.telemetry.log import ROOT
from penstock.telemetry.registry import Metrics
from penstock.types import WorkerState
from penstock.wire.keys import Keys
from penstock.wire.messages import Draining, Hello
from penstock.wire.zeromq import ZmqTransport

log = logging.getLogger(__name__)

BEAT_S = 0.1
STALL_ALLOWED_S = 8.0
"""A loop that is blocked for longer (and ``wedge_s`` more) is given up, though that breaks every connection."""

KEEP_ALIVE_S = 65.0
"""Idle connections are kept for longer than clients and proxies usually keep theirs: they close first."""

SWITCH_S = 0.0005
"""How long a thread that tokenizes or parses may keep the interpreter from the event loop.  Python's own 5 ms showed
in other people's streams."""

App = Callable[..., Any]
"""An ASGI application."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayInheritance:
    """What the gateway has from the process that forked it."""

    listener: socket.socket
    channel: Channel
    keys: Keys
    slot: Slot
    make_app: Callable[[GatewayConfig, RouterService, Metrics], App]


def run_gateway(config: GatewayConfig, inherited: GatewayInheritance) -> int:
    """Serve until drained or told to stop; returns the exit code.  Runs in the forked child."""
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(_Gateway(config, inherited).run())


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the supervisor decides what signals mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Gateway:
    def __init__(self, config: GatewayConfig, inherited: GatewayInheritance) -> None:
        self._config = config
        self._inherited = inherited
        self._channel = inherited.channel
        self._slot = inherited.slot
        self._draining = asyncio.Event()
        self._beats = 0

    async def run(self) -> int:
        transport = ZmqTransport(self._inherited.keys)
        metrics = Metrics(model_name=self._config.model_name)
        outside = Outside(connect=transport.connect_async, clock=MonotonicClock(), suspect=self._channel.send)
        self._router = RouterService(self._config, outside, metrics)
        server = _Server(self._http(self._inherited.make_app(self._config, self._router, metrics)))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._on_channel)
        loop.add_signal_handler(signal.SIGTERM, _stop_now, server)
        self._router.start()
        joined = self._join(transport)
        joined.start()
        side = [loop.create_task(work) for work in (self._beat(server), self._drain(server))]
        try:
            await server.serve([self._inherited.listener])
            if server.force_exit:  # uvicorn does not end the application then
                await server.lifespan.shutdown()
        finally:
            loop.remove_reader(self._channel.fileno())
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            await joined.close()
            await self._router.close()
            transport.close()
        return 0

    def _join(self, transport: ZmqTransport) -> JoinedWorkers:
        hello = Hello(gateway=f"{self._config.name}-join", incarnation=self._config.incarnation)
        tell = self._router.on_supervisor
        beat_s = self._config.failover.beat_s
        return JoinedWorkers(
            self._config.join, transport.connect_async, tell, hello, clock=MonotonicClock(), beat_s=beat_s
        )

    def _http(self, app: App) -> uvicorn.Config:
        _adopt_logs()
        return uvicorn.Config(
            app,
            http=guarded_protocol(self._config.limits),
            ws="none",
            lifespan="auto",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            backlog=BACKLOG,
        )

    def _on_channel(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._router.on_supervisor(message)
                if isinstance(message, Draining):
                    self._draining.set()
        except ProtocolError as error:
            log.warning("from the supervisor: %s", error)
        except EOFError:  # the supervisor has ended, and we with it (see zygote)
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    async def _beat(self, server: uvicorn.Server) -> None:
        while True:
            now = time.monotonic_ns()
            self._beats += 1
            self._slot.beat(now, now + int(STALL_ALLOWED_S * 1e9), self._beats)
            if server.started:
                self._slot.set_state(WorkerState.DRAINING if self._draining.is_set() else WorkerState.READY)
            self._channel.flush()
            await asyncio.sleep(BEAT_S)

    async def _drain(self, server: uvicorn.Server) -> None:
        """Once draining, end as soon as no request is open."""
        await self._draining.wait()
        while server.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(BEAT_S / 2)
        server.should_exit = True


def _stop_now(server: uvicorn.Server) -> None:
    server.should_exit = server.force_exit = True


def _adopt_logs() -> None:
    """uvicorn's errors (an exception in the application) go where our lines go; what clients do wrong is no error."""
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.handlers = logging.getLogger(ROOT).handlers
    uvicorn_log.setLevel(logging.ERROR)
    uvicorn_log.propagate = False
