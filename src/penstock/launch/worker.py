"""One worker process: everything it is made of, put together after the fork, and the loop that drives it.

Nothing here decides anything: the scheduler plans, the runner computes, the mailbox talks.  A worker is one thread of
Python beside the kernels' own; it sleeps only when it has nothing to compute and nothing to copy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import cast

from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.engine.core.cost import StepCost, prior_for
from penstock.engine.core.plan import Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.images.stage import ImageStage
from penstock.engine.loop import EngineLoop
from penstock.engine.models.port import Model, Reader, encoder_of
from penstock.engine.runner.adapters import Adapters
from penstock.engine.runner.model_runner import Aids, ModelRunner
from penstock.engine.runner.pooling_runner import PoolingRunner
from penstock.engine.runner.port import Runner
from penstock.engine.service.encoders import Encoders
from penstock.engine.service.hand_overs import HandOver
from penstock.engine.service.held import Ready
from penstock.engine.service.mailbox import WorkerMailbox
from penstock.engine.service.peers import Peers
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.worker import Grammars
from penstock.kernels.cores import Cores
from penstock.kernels.ops import Ops
from penstock.kv.memory import KvFile, KvMemory
from penstock.kv.transfer.port import PageCarrier, PageSeal
from penstock.kv.transfer.receiver import HandOverReceiver
from penstock.kv.transfer.sender import HandOverSender
from penstock.kv.transfer.shm import ShmCarrier
from penstock.kv.transfer.tcp import TcpCarrier
from penstock.launch.board import Slot
from penstock.launch.guessing import Guessing, Loaded, record
from penstock.types import ModelIdentity, WorkerId, WorkerState
from penstock.wire.keys import Keys
from penstock.wire.zeromq import ZmqTransport

BEATS_PER_S = 4
"""How often an idle worker turns its loop at least."""

LAST_WORDS_S = 0.25
"""How long what a worker says in going may take to leave it.  Who stopped listening is not waited for any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a worker has from the process that forked it: read-only, or its own alone."""

    model: Model | Reader  # by ``SchedulerConfig.pooling``
    ops: Ops
    identity: ModelIdentity
    parameters: int  # of the model, for a first guess of how long a step takes
    vocab: int
    kv: KvFile
    peers: Mapping[WorkerId, KvFile]
    keys: Keys
    slot: Slot
    adapters: Adapters  # those of the start are in memory
    cores: Cores
    vocabulary: Callable[[], Vocabulary]  # read when the first grammar comes
    drafts: Loaded | None = None  # the head or model that guesses tokens ahead
    pages_on_device: bool = False  # the backend keeps KV pages where it computes; they cannot be handed over


def run_worker(config: WorkerConfig, inherited: Inheritance) -> int:
    """Serve until SIGTERM; returns the exit code.  Runs in the forked child."""
    stop = _StopFlag()
    os.nice(config.niceness)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    own = inherited.kv.map_own()
    own.wipe()
    peers = {worker: file.map_readonly() for worker, file in inherited.peers.items() if worker != config.worker}
    for file in (inherited.kv, *inherited.peers.values()):
        file.close()
    transport = ZmqTransport(inherited.keys)
    clock = MonotonicClock()
    grammars = Grammars(inherited.vocabulary)
    encoders = Encoders(Peers(transport, config.hand_over.peer_idle_s), inherited.identity, clock)
    images = ImageStage(
        encoder_of(inherited.model),
        inherited.ops,
        cache_bytes=config.image_cache_bytes,
        covered=lambda event: scheduler.memory.covered(event.hashes),
        elsewhere=encoders,
    )
    runner = _runner(config.scheduler, inherited, own, (grammars, images))
    guessing = Guessing(inherited.drafts, inherited.ops, inherited.vocab, clock)
    speculator = guessing.speculator(config.scheduler, runner) if isinstance(runner, ModelRunner) else None
    scheduler = Scheduler(config.scheduler, StepCost(prior_for(inherited.parameters)), speculator)
    hand_over = _hand_over(config, inherited.identity, own, peers)
    inherited.adapters.in_use = scheduler.adapters
    ready = Ready(grammars, images, inherited.adapters)
    mailbox = WorkerMailbox(config, scheduler, hand_over, transport, clock, ready=ready)
    loop = EngineLoop(mailbox, scheduler, runner, clock)
    pulse = _Pulse(inherited.slot, mailbox)
    loop.on_plan = pulse.on_plan
    inherited.slot.set_state(WorkerState.READY)
    cores = inherited.cores
    mailbox.reporter.borrowed_s, mailbox.reporter.images = cores.borrowed_s, images.counters
    while not stop.asked:
        moved = loop.step()
        if not images.work() and not moved and not mailbox.busy:
            cores.lend()
            transport.wait(min(_idle_s(scheduler, clock), mailbox.patience_s), [*mailbox.sources, *encoders.links()])
            cores.take()
    inherited.slot.set_state(WorkerState.DRAINING)
    mailbox.drain_out()
    transport.close(linger_s=LAST_WORDS_S)
    grammars.close()
    return 0


def _idle_s(scheduler: Scheduler, clock: MonotonicClock) -> float:
    """How long to wait at most when there is nothing to do now."""
    longest, until = 1 / BEATS_PER_S, scheduler.resting_until
    return longest if until is None else min(longest, max(0.0, until - clock.now()))


class _StopFlag:
    """SIGTERM asks the loop to end between two steps."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self.asked = True


class _Pulse:
    """Beats on the heartbeat board with every turn, and before a step says when it should be over."""

    def __init__(self, slot: Slot, mailbox: WorkerMailbox) -> None:
        self._slot = slot
        self._mailbox = mailbox

    def on_plan(self, plan: Plan) -> None:
        """Called once a turn, right before the plan is computed."""
        self._mailbox.planned(plan)
        now = monotonic_ns()
        self._slot.beat(now, now + int(plan.predicted_s * 1e9), self._mailbox.reporter.steps)


def _runner(
    config: SchedulerConfig, inherited: Inheritance, own: KvMemory, beside: tuple[Grammars, ImageStage]
) -> Runner:
    kv, ops = _kv_array(inherited.ops, own, inherited.pages_on_device), inherited.ops
    if config.pooling is not None:
        return PoolingRunner(cast(Reader, inherited.model), ops, kv)
    model, (grammars, images) = cast(Model, inherited.model), beside
    program = record(model, ops, kv, inherited.drafts)
    aids = Aids(matcher_of=grammars.matcher, images=images, adapters=inherited.adapters)
    return ModelRunner(model, ops, kv, program, aids)


def _hand_over(
    config: WorkerConfig, identity: ModelIdentity, own: KvMemory, peers: Mapping[WorkerId, KvMemory]
) -> HandOver:
    carrier = _carrier(config.carrier, own, peers, PageSeal(identity, own.layout))
    sender = HandOverSender(config.hand_over, carrier, config.incarnation)
    return HandOver(identity, sender, HandOverReceiver(config.hand_over, carrier))


def _carrier(name: str, own: KvMemory, peers: Mapping[WorkerId, KvMemory], seal: PageSeal) -> PageCarrier:
    return ShmCarrier(own, peers, seal) if name == "shm" else TcpCarrier(own, seal)


def _kv_array(ops: Ops, own: KvMemory, on_device: bool) -> object:
    return ops.new_kv(own.layout.shape, pages=own.pages, memory=None if on_device else own.buffer)
