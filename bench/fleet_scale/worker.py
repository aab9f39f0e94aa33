"""A worker and the gateways that greet it: the worker's own objects but for its model, and gateways that are played."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.gateway.figures import Child, cpu_s, say
from bench.gateway.workers import IDENTITY

from penstock.clock import MonotonicClock
from penstock.config.limits import KvTransferConfig
from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.runner.null_runner import NullRunner
from penstock.engine.service.kv_transfer import TransferEnds
from penstock.engine.service.worker_service import WorkerService
from penstock.hashing import block_hashes, chain_root
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.types import RequestId, RequestStage, Role, SamplingParams, WorkerId, pack_token_ids
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Hello, Recipient, Submit, Tokens, WorkerReport
from penstock.wire.transport import Link
from penstock.wire.zeromq import ZmqTransport

STEP_S = 0.02
WARM_UP_S = 3.0


class PacedRunner(NullRunner):
    """A step takes ``STEP_S`` and no processor."""

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        time.sleep(STEP_S)
        return super().run(plan)


NAME = WorkerId("both-0")
REQUESTS, PROMPT, ANSWER = 8, 320, 64
IDLE_HELLO_S, HELLO_S = 2.0, 0.25
"""What a gateway of a fleet of 4,096 workers sends to one without, and to one with its requests."""


def run_worker(line: socket.socket, keys: CurveKeys) -> None:
    """In a child: the worker's loop, as ``launch.worker_process`` drives it."""
    transport, clock = ZmqTransport(keys), MonotonicClock()
    layout = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=2), "fp32")
    memory = KvMemory.anonymous(layout, 2048)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = WorkerConfig(
        worker=NAME,
        incarnation=1,
        role=Role.BOTH,
        endpoint=endpoint,
        connector="curve",
        vocabulary=4096,
        scheduler=SchedulerConfig(pages=2048, max_model_len=1024),
    )
    scheduler = Scheduler(config.scheduler)
    carrier = InlineConnector(memory, PageChecksum(IDENTITY, layout))
    ends = TransferEnds(
        IDENTITY,
        KvSender(KvTransferConfig(), carrier, 1),
        KvReceiver(KvTransferConfig(), carrier),
        vocabulary=4096,
    )
    service = WorkerService(config, scheduler, ends, transport, clock)
    loop = EngineLoop(service, scheduler, PacedRunner(vocab=4096), clock)
    say(line, endpoint)
    while True:
        if not loop.step() and not service.has_work:
            transport.wait(min(0.1, service.idle_timeout_s), service.sources, service.descriptors)


@dataclass
class PlayedGateway:
    """What a gateway says to one worker, and how much it is told."""

    number: int
    link: Link
    dice: random.Random
    asks: int  # requests that it has here at a time
    hello_at: float = 0.0
    sent: int = 0
    reports: int = 0
    running: set[str] = field(default_factory=set)
    serial: int = 0

    def turn(self, now: float) -> None:
        if now >= self.hello_at:
            self.hello_at = now + (HELLO_S if self.running else IDLE_HELLO_S)
            self.link.send(Hello(gateway=f"g{self.number}", incarnation=1))
            self.sent += 1
        while len(self.running) < self.asks:
            self._submit()
        while (received := self.link.recv()) is not None:
            message = received.message
            if isinstance(message, WorkerReport):
                self.reports += 1
            elif isinstance(message, Tokens):
                self.running -= {item.request for item in message.items if item.finish is not None}

    def _submit(self) -> None:
        self.serial += 1
        name = RequestId(f"r{self.number}-{self.serial}")
        self.running.add(name)
        prompt = [self.dice.randrange(4096) for _ in range(PROMPT)]
        root = chain_root(IDENTITY)
        self.link.send(
            Submit(
                recipient=Recipient(worker=NAME, incarnation=1, identity=IDENTITY),
                request=name,
                epoch=1,
                stage=RequestStage.WHOLE,
                prompt=bytes(pack_token_ids(prompt)),
                sampling=SamplingParams(seed=1, max_tokens=ANSWER),
                root=root,
                block_hashes=tuple(block_hashes(root, prompt)),
                serial=self.serial,
            )
        )


def measure(count: int, seconds: float, *, busy: bool) -> tuple[float, float, float]:
    """Per cent of a core that the worker takes; Hellos and reports a second for each gateway."""
    keys = CurveKeys.ephemeral()
    worker = Child(lambda line: run_worker(line, keys))
    try:
        endpoint, transport = worker.hear(), ZmqTransport(keys)
        players = [
            PlayedGateway(number, transport.connect(endpoint), random.Random(number), asks=0) for number in range(count)
        ]
        for number in range(REQUESTS if busy else 0):
            players[number % count].asks += 1
        for number, player in enumerate(players):
            player.hello_at = time.monotonic() + number / count * IDLE_HELLO_S
        until = time.monotonic() + WARM_UP_S + IDLE_HELLO_S
        _play(players, until)
        before, began = cpu_s(worker.pid), time.monotonic()
        counts = sum(player.sent for player in players), sum(player.reports for player in players)
        _play(players, began + seconds)
        took, used = time.monotonic() - began, cpu_s(worker.pid) - before
        hellos = sum(player.sent for player in players) - counts[0]
        told = sum(player.reports for player in players) - counts[1]
        transport.close()
    finally:
        worker.end()
    return 100 * used / took, hellos / took / count, told / took / count


def _play(players: Sequence[PlayedGateway], until: float) -> None:
    while (now := time.monotonic()) < until:
        for player in players:
            player.turn(now)
        time.sleep(0.01)
