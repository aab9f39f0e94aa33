"""The gateway as ``penstock serve`` runs it (``launch.processes.GatewayProcesses``), with workers without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path

import penstock
from penstock.config.limits import RequestLimits
from penstock.config.schema import BACKLOG, EventLoop, GatewayConfig
from penstock.launch.channel import Channel
from penstock.launch.heartbeat import HeartbeatTable
from penstock.launch.processes import GatewayProcesses
from penstock.launch.shared_rates import SharedRequestCounts, SharedTokenBuckets
from penstock.types import Role, WorkerId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.supervisor_messages import WorkerUp

from .figures import Child, say
from .turns import TurnWatch
from .workers import serve as serve_workers

MODEL = "storyteller"
FOLDER = Path(penstock.__file__).parent / "bundled" / "storyteller"
MAX_TOKENS = 1_000_000


def listening() -> tuple[socket.socket, int]:
    """A port of the system's choice."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    return listener, listener.getsockname()[1]


def _watched(watch: TurnWatch) -> None:
    """Every loop that asyncio makes from now on is watched."""
    make = asyncio.new_event_loop

    def made() -> asyncio.AbstractEventLoop:
        loop = make()
        watch.install(loop)
        return loop

    asyncio.new_event_loop = made


def _answer(line: socket.socket, watch: TurnWatch) -> None:
    """On a thread of the child: what the bench asks.  Asleep but then."""
    while raw := line.recv(1 << 16):
        if json.loads(raw).get("reset"):
            watch.reset()
        say(line, watch.figures())


def until_ready(port: int, seconds: float = 60.0) -> None:
    """Wait until a gateway has a worker."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the gateway is not ready")


class Service:
    """A gateway process and its workers' process."""

    def __init__(self, *, workers: int, loop: EventLoop, watched: bool = False) -> None:
        keys = CurveKeys.ephemeral()
        endpoints = [f"ipc://@bench-{os.getpid()}-{id(self):x}-{i}" for i in range(workers)]
        self.workers = Child(lambda line: serve_workers(line, keys, endpoints))
        self.workers.hear()
        listener, self.port = listening()
        self._channel, theirs = Channel.pair()
        board = HeartbeatTable(1)
        board.slots[0].reset(1, 0)
        unlimited = RequestLimits(max_queued_requests=10**6, max_queued_tokens=10**9)
        config = GatewayConfig(
            model_path=str(FOLDER), model_name=MODEL, max_model_len=2 * MAX_TOKENS, limits=unlimited, event_loop=loop
        )

        front = GatewayProcesses(
            config=config,
            listener=listener,
            keys=keys,
            slots={config.name: board.slots[0]},
            log_json=False,
            created=1,
            buckets=SharedTokenBuckets(config.scheduling.max_tenants),
            open_requests=SharedRequestCounts(config.scheduling.max_tenants, gateways=1),
        )

        def gateway(line: socket.socket) -> None:
            watch = TurnWatch()
            if watched:
                _watched(watch)
            logging.disable(logging.WARNING)
            threading.Thread(target=_answer, args=(line, watch), daemon=True).start()
            front.child_spec(config.name, 1, theirs).main()

        self.gateway = Child(gateway)
        listener.close()
        for i, endpoint in enumerate(endpoints):
            up = WorkerUp(
                worker=WorkerId(f"both-{i}"), incarnation=1, role=Role.BOTH, pid=os.getpid(), endpoint=endpoint
            )
            self._channel.send(up)
        until_ready(self.port)

    @property
    def pid(self) -> int:
        """Of the gateway."""
        return self.gateway.pid

    def end(self) -> None:
        """Of both."""
        self.gateway.end()
        self.workers.end()


def chat(tokens: int = MAX_TOKENS) -> dict[str, object]:
    """A streamed chat that goes on for so long."""
    words = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": words, "max_tokens": tokens, "stream": True, "ignore_eos": True}
