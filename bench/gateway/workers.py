"""Workers without a model: they take every request and send a token of each at a fixed pace, in one message a step.

Nothing of the engine runs here, so that whoever measures the gateway measures nothing else.  ``pace`` (seconds a step;
0: nothing is sent) is told over the child's line, so that streams can be opened before tokens come.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence

from penstock.types import ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Cancel, Hello, StepRates, Submit, TokenItem, Tokens, WorkerReport
from penstock.wire.zeromq import ZmqTransport

from .figures import say

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="bench-1")
REPORT_S = 0.25
WORDS = tuple(range(300, 400))  # token ids of the bundled model, words and parts of words


class _Worker:
    def __init__(self, name: str, transport: ZmqTransport, endpoint: str) -> None:
        self.name = WorkerId(name)
        self.listener = transport.listen(endpoint)
        self.peers: dict[bytes, int] = {}
        self.running: dict[str, tuple[bytes, int, int]] = {}  # -> peer, epoch, next index
        self.steps = 0
        self.heard = 0
        self.reported = 0.0

    def drain(self) -> None:
        while (received := self.listener.recv()) is not None:
            message = received.message
            if isinstance(message, Hello):
                new = received.peer not in self.peers
                self.peers[received.peer] = message.incarnation
                if new:
                    self.report()
            elif isinstance(message, Submit):
                self.heard = message.serial
                self.running[message.request] = received.peer, message.epoch, len(message.emitted)
            elif isinstance(message, Cancel):
                self.running.pop(message.request, None)

    def step(self) -> int:
        """A token for every request that runs here; how many."""
        self.steps += 1
        by_peer: dict[bytes, list[TokenItem]] = {}
        for name, (peer, epoch, index) in self.running.items():
            token = WORDS[(index * 7 + len(name)) % len(WORDS)]
            by_peer.setdefault(peer, []).append(TokenItem(request=name, epoch=epoch, index=index, tokens=(token,)))  # type: ignore[arg-type]
            self.running[name] = peer, epoch, index + 1
        sent = 0
        for peer, items in by_peer.items():
            if self.listener.send(peer, Tokens(worker=self.name, incarnation=1, items=tuple(items))):
                sent += len(items)
            else:  # the gateway is this far behind: the tokens come again with the next step
                for item in items:
                    self.running[item.request] = peer, item.epoch, item.index
        return sent

    def report(self) -> None:
        self.reported = time.monotonic()
        self.steps += 1  # one that makes none for seconds is given up
        report = played_report(self.name, steps=self.steps, running=len(self.running), acked=self.heard)
        for peer in self.peers:
            self.listener.send(peer, report)


def played_report(worker: WorkerId, *, steps: int, running: int, acked: int) -> WorkerReport:
    """A ready worker's, that has room for everything."""
    return WorkerReport(
        worker=worker,
        incarnation=1,
        role=Role.BOTH,
        state=WorkerState.READY,
        pid=os.getpid(),
        identity=IDENTITY,
        max_model_len=1 << 20,
        steps=steps,
        step_s=0.05,
        running=running,
        kv_pages_free=1 << 24,
        page_bytes=1024,
        rates=StepRates(1e-3, 1e-6, 1e-12, 1e-6),
        measured=100,
        acked=acked,
    )


def serve(line: socket.socket, keys: CurveKeys, endpoints: Sequence[str]) -> None:
    """Runs in a child.  Over ``line``: {"pace": seconds}, or {}; both are answered with the tokens sent so far."""

    transport = ZmqTransport(keys)
    workers = [_Worker(f"both-{i}", transport, endpoint) for i, endpoint in enumerate(endpoints)]
    say(line, "ready")
    pace, sent, due = 0.0, 0, [0.0] * len(workers)
    while True:
        now = time.monotonic()
        for i, worker in enumerate(workers):
            worker.drain()
            if pace and now >= due[i]:
                sent += worker.step()
                due[i] = max(due[i] + pace, now - pace)
            if now - worker.reported >= REPORT_S:
                worker.report()
        rest = min((at for at in due), default=now) - time.monotonic() if pace else 0.01
        transport.wait(max(0.0, min(rest, 0.01)), [worker.listener for worker in workers], [line.fileno()])
        try:
            asked = json.loads(line.recv(1 << 16, socket.MSG_DONTWAIT) or b"null")
        except BlockingIOError:
            continue
        if asked is None:
            return
        if "pace" in asked:
            pace = float(asked["pace"])
            begin = time.monotonic()
            due = [begin + pace * i / len(workers) for i in range(len(workers))]
        say(line, {"sent": sent, "running": sum(len(worker.running) for worker in workers)})
