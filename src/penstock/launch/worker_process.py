"""One worker process: everything it is made of, put together after the fork, and the loop that drives it.

Nothing is decided here: the scheduler plans, the runner computes, the service exchanges messages.  A worker has one
thread of Python and those of the kernels; it sleeps only when it has nothing to compute and nothing to copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from penstock.api.audit import PeerAudit
from penstock.clock import MonotonicClock
from penstock.config.limits import NIXL
from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.encoder_stage import EncoderStage
from penstock.engine.loop import EngineLoop, PipelinedLoop
from penstock.engine.models.interface import Model, PoolingModel, encoder_of
from penstock.engine.runner.interface import Runner
from penstock.engine.runner.lora import LoraManager
from penstock.engine.runner.model_runner import ModelRunner, RunnerServices
from penstock.engine.runner.pooling_runner import PoolingRunner
from penstock.engine.runner.sampling_state import MaskWait
from penstock.engine.service.kv_prefetch import KvPrefetcher, NoPrefetcher
from penstock.engine.service.kv_transfer import RecomputeEstimate, TransferEnds
from penstock.engine.service.load_report import ReportSources
from penstock.engine.service.peer_links import PeerLinks
from penstock.engine.service.readiness import ReadinessSources
from penstock.engine.service.remote_encoder import RemoteEncoders
from penstock.engine.service.worker_service import WorkerService
from penstock.grammar.manager import GrammarManager
from penstock.grammar.matcher import GrammarVocabulary
from penstock.kernels.core_lending import CoreLending
from penstock.kernels.operands import Array
from penstock.kernels.ops import CAPTURE_S, CapturableProgram, Ops, SharedProgram, StepProgram
from penstock.kernels.page_export import ExportsPages
from penstock.kv.checksum import PageChecksum, PageChecksums
from penstock.kv.connectors.base import KvConnector
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.connectors.nixl.connector import NixlConnector, needs_writing
from penstock.kv.connectors.shm import ShmConnector
from penstock.kv.connectors.tcp.connector import ENCRYPTED, PageSourceKey, TcpConnector
from penstock.kv.page_memory import KvMemory, KvMemoryFile
from penstock.kv.store.store import PageStore, SharedStoreMemory, StoreOwner, open_tiers
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.launch.heartbeat import HeartbeatSlot, HeartbeatWriter
from penstock.launch.rank_process import RankResources
from penstock.launch.speculation import LoadedDraft, ProposerFactory, record_step
from penstock.types import ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.node_keys import HostKeys
from penstock.wire.zeromq import ZmqTransport

log = logging.getLogger("penstock.worker")

BEATS_PER_S = 4
"""How often an idle worker turns its loop at least."""

MASK_POLL_S = 0.001
"""Between two looks whether a late mask of a grammar is there, when there is nothing else to do."""

DEVICE_STEPS_AHEAD = 2
"""Steps that a device is given at once when only answers are written: the host prepares one while the other runs."""

LINGER_S = 0.25
"""How long what a worker says in going may take to leave it.  Who stopped listening is not waited for any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """What a worker has from the process that forked it: read-only, or its own alone."""

    model: Model | PoolingModel  # by ``SchedulerConfig.pooling``
    ops: Ops
    identity: ModelIdentity
    parameters: int  # of the model, for a first guess of how long a step takes
    vocab: int
    kv: KvMemoryFile
    peers: Mapping[WorkerId, KvMemoryFile]
    neighbors: Mapping[WorkerId, str]  # endpoints of the workers of this node, which others reach over TCP
    store: SharedStoreMemory
    keys: HostKeys
    audit: PeerAudit  # of what peers are refused
    slot: HeartbeatSlot
    adapters: LoraManager  # those of the start are in memory
    cores: CoreLending
    vocabulary: Callable[[], GrammarVocabulary]  # read when the first grammar comes
    gateways: Mapping[str, HeartbeatSlot]  # of this host: a process that was replaced is known before it says a word
    drafts: LoadedDraft | None = None  # the head or model that guesses tokens ahead
    rank: RankResources | None = None  # of the leader of several ranks
    pages_on_device: bool = False  # the backend keeps KV pages where it computes
    twins: str | None = None  # the layout in which they are written to host memory and handed over; None: they are not

    @property
    def micro_batches(self) -> int:
        """Plans that are in flight at once: one for each stage of the model."""
        return 1 if self.rank is None else self.rank.shard.mesh.pipeline


def run_worker(config: WorkerConfig, inherited: WorkerResources) -> int:
    """Serve until SIGTERM; returns the exit code.  Runs in the forked child."""
    stop = _StopFlag()
    os.nice(config.niceness)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    own, peers = _memories(config, inherited)
    transport, clock = ZmqTransport(inherited.keys, inherited.audit.on_refused), MonotonicClock()
    grammars = GrammarManager(
        inherited.vocabulary, max_bytes=config.compiled_grammars_bytes, max_compiling=config.max_compiling_grammars
    )
    encoders = RemoteEncoders(PeerLinks(transport, config.hand_over.peer_idle_s), inherited.identity, clock)
    images = _encoder_stage(config, inherited, encoders, lambda event: scheduler.memory.cached_tokens(event.hashes))
    kv = _kv_array(inherited, own)
    runner = _runner(config.scheduler, inherited, kv, grammars, images)
    proposers = ProposerFactory(inherited.drafts, inherited.ops, inherited.vocab, clock)
    proposer = proposers.build_proposer(config.scheduler, runner) if isinstance(runner, ModelRunner) else None
    scheduler = Scheduler(
        config.scheduler,
        StepCostModel(cost_prior(inherited.parameters)),
        proposer,
        verifier=None if inherited.pages_on_device else PageChecksums(own),
        without_masks=runner.without_masks if isinstance(runner, ModelRunner) else frozenset,
        micro_batches=inherited.micro_batches,
        in_order=True,
    )
    hand_over = _hand_over(config, inherited, (own, kv), peers, scheduler)
    stored = _stored(config, inherited, own, peers, scheduler=scheduler, clock=clock)
    ready = ReadinessSources(grammars, images, inherited.adapters, stored)
    cores, gateways = inherited.cores, inherited.gateways
    mailbox = WorkerService(
        config,
        scheduler,
        hand_over,
        transport,
        clock,
        ready=ready,
        figures=_figures(inherited, images, stored),
        lower_tiers=stored.lower_tiers(),
        gateway_incarnations=lambda: {name: slot.read().incarnation for name, slot in gateways.items()},
        on_role=inherited.slot.assign_role,
        on_settled=_Courtesy(config).settle,
    )
    pulse = HeartbeatWriter(inherited.slot, lambda: mailbox.reporter.steps)
    loop = _loop(inherited, mailbox, scheduler, runner, pulse)
    inherited.slot.set_state(WorkerState.READY)
    while not _is_over(stop, mailbox, clock):
        moved = loop.step()
        if not images.encode_slice() and not moved and not mailbox.has_work:
            cores.lend_cores()
            idle_s = min(_idle_s(scheduler, clock), mailbox.idle_timeout_s)
            transport.wait(idle_s, [*mailbox.sources, *encoders.links()], mailbox.descriptors)
            cores.reclaim_cores()
    inherited.slot.set_state(WorkerState.DRAINING)
    mailbox.return_all()
    transport.close(linger_s=LINGER_S)
    inherited.audit.close()
    stored.close()
    grammars.close()
    return 0


def _encoder_stage(
    config: WorkerConfig, inherited: WorkerResources, encoders: RemoteEncoders, covered: Callable[[AddRequest], int]
) -> EncoderStage:
    """The encoder of images and sounds; ``covered``: tokens of a request whose pages this worker has."""
    return EncoderStage(
        encoder_of(inherited.model),
        inherited.ops,
        cache_bytes=config.image_cache_bytes,
        covered=covered,
        elsewhere=encoders,
    )


def _loop(
    inherited: WorkerResources, mailbox: WorkerService, scheduler: Scheduler, runner: Runner, pulse: HeartbeatWriter
) -> EngineLoop:
    clock = MonotonicClock()
    if inherited.micro_batches > 1:
        return PipelinedLoop(mailbox, scheduler, cast(ModelRunner, runner), clock, heartbeat=pulse)
    max_steps = DEVICE_STEPS_AHEAD if inherited.pages_on_device else 1
    return EngineLoop(mailbox, scheduler, runner, clock, heartbeat=pulse, max_steps=max_steps)


def _figures(inherited: WorkerResources, images: EncoderStage, stored: KvPrefetcher | NoPrefetcher) -> ReportSources:
    return ReportSources(
        encoder=images.counters,
        borrowed_s=inherited.cores.borrowed_s,
        store=stored.figures(inherited.store.domain),
        ranks=inherited.rank.group.reports if inherited.rank is not None else tuple,
    )


def _memories(config: WorkerConfig, inherited: WorkerResources) -> tuple[KvMemory, dict[WorkerId, KvMemory]]:
    """This worker's own KV pages, with nothing in them, and the others' to be read."""
    own = inherited.kv.map_own(lend=_lent(config))
    own.wipe()
    peers = {name: file.map_readonly() for name, file in inherited.peers.items() if name != config.worker}
    for file in (inherited.kv, *inherited.peers.values()):
        file.close()
    return own, peers


def _idle_s(scheduler: Scheduler, clock: MonotonicClock) -> float:
    """How long to wait at most when there is nothing to do now."""
    longest, until = MASK_POLL_S if scheduler.waits_for_masks else 1 / BEATS_PER_S, scheduler.resting_until
    return longest if until is None else min(longest, max(0.0, until - clock.now()))


def _is_over(stop: _StopFlag, mailbox: WorkerService, clock: MonotonicClock) -> bool:
    """Looked at between two steps.  The first SIGTERM lets others go on with what is written here."""
    if stop.asked == 1 and not stop.heard:
        stop.heard = True
        mailbox.begin_shutdown()
    return stop.asked > 1 or mailbox.lifecycle.is_over(clock.now())


class _StopFlag:
    """SIGTERM asks the loop to end in order, a second one to end now."""

    def __init__(self) -> None:
        self.asked = 0
        self.heard = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self.asked += 1


class _Courtesy:
    """Lowers the priority of prefill where cores are shared, once the requests that the worker decodes have ended."""

    def __init__(self, config: WorkerConfig) -> None:
        self._yields = config.prefill_niceness
        self._base = os.getpriority(os.PRIO_PROCESS, 0) - config.niceness

    def settle(self, role: Role) -> None:
        """This worker has another role, and nothing else is left here."""
        if self._yields and not set_niceness(self._base + (self._yields if role is Role.PREFILL else 0)):
            log.warning("this process may not become less nice: it keeps giving way to others until it is restarted")


def set_niceness(niceness: int) -> bool:
    """Set the niceness of all threads of this process.  False: the system does not permit a lower one."""
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    except PermissionError:
        return False
    return True


def _runner(
    config: SchedulerConfig, inherited: WorkerResources, kv: Array, grammars: GrammarManager, images: EncoderStage
) -> Runner:
    ops = inherited.ops
    if config.pooling is not None:
        return PoolingRunner(cast(PoolingModel, inherited.model), ops, kv)
    model = cast(Model, inherited.model)
    patience = MaskWait(wait_s=config.mask_wait_ms / 1000)
    program = _made_ready(record_step(model, ops, kv, inherited.drafts), inherited)
    if inherited.rank is not None:
        program = inherited.rank.lead(cast(SharedProgram, program), ops, inherited.slot.refresh)
    aids = RunnerServices(matcher_of=grammars.matcher, images=images, adapters=inherited.adapters, mask_wait=patience)
    return ModelRunner(model, ops, kv, program, aids, micro_batches=inherited.micro_batches)


def _made_ready(program: StepProgram, inherited: WorkerResources) -> StepProgram:
    """With its most frequent steps captured, where that can be done: a start that gets on is not taken to hang.
    Those are decode steps: a worker that only prefills has none."""
    if isinstance(program, CapturableProgram):
        begun = time.monotonic()
        count = program.capture(inherited.slot.on_progress, CAPTURE_S if inherited.twins is None else 0.0)
        log.info("steps of %d sizes made ready in %.2f s", count, time.monotonic() - begun)
    return program


def _hand_over(
    config: WorkerConfig,
    inherited: WorkerResources,
    memory: tuple[KvMemory, Array],
    peers: Mapping[WorkerId, KvMemory],
    scheduler: Scheduler,
) -> TransferEnds:
    """``memory``: that others can read, and that is computed in."""
    (own, kv), identity, ops = memory, inherited.identity, inherited.ops
    neighbors = {(worker, at): peers[worker] for worker, at in inherited.neighbors.items() if worker in peers}
    carrier = _carrier(config, own, peers, PageChecksum(identity, own.layout), neighbors)
    sender = KvSender(config.hand_over, carrier, config.incarnation)
    writer = None
    if inherited.twins is not None:
        writer = cast(ExportsPages, ops).page_writer(kv, own.buffer, inherited.twins)
    receiver = KvReceiver(config.hand_over, carrier, predict=RecomputeEstimate(scheduler).predict)
    return TransferEnds(identity, sender, receiver, writer, inherited.vocab)


def _stored(
    config: WorkerConfig,
    inherited: WorkerResources,
    own: KvMemory,
    peers: Mapping[WorkerId, KvMemory],
    *,
    scheduler: Scheduler,
    clock: MonotonicClock,
) -> KvPrefetcher | NoPrefetcher:
    """The tiers of the KV store below this worker's memory."""
    place = StoreOwner(worker=config.worker, identity=inherited.identity, layout=own.layout, peers=peers)
    tiers = open_tiers(config.kv_store, inherited.store, place)
    inherited.store.close()
    if not tiers:
        return NoPrefetcher()
    store = PageStore(tiers, own, scheduler.memory.pool.generation, clock.now, config.kv_store)
    return KvPrefetcher(scheduler, store, clock)


def _carrier(
    config: WorkerConfig,
    own: KvMemory,
    peers: Mapping[WorkerId, KvMemory],
    seal: PageChecksum,
    neighbors: Mapping[PageSourceKey, KvMemory],
) -> KvConnector:
    if not config.transfers_pages:
        return InlineConnector(own, seal)  # opens no port and has no threads: no page will be requested
    match config.connector:
        case "shm":
            return ShmConnector(own, peers, seal)
        case "curve":
            return InlineConnector(own, seal)
        case name:
            sealed = name.removeprefix(NIXL) == ENCRYPTED
            tcp = TcpConnector(
                own,
                seal,
                config.hand_over,
                endpoint=config.endpoint,
                port=config.pages_port,
                sealed=sealed,
                neighbors=neighbors,
            )
            return NixlConnector(tcp, own, seal, config.hand_over) if name.startswith(NIXL) else tcp


def _lent(config: WorkerConfig) -> int | None:
    """How a process for NIXL opens this worker's pages, if there is to be one."""
    if not (config.transfers_pages and config.connector.startswith(NIXL)):
        return None
    return os.O_RDWR if needs_writing(config.hand_over.nixl_transports) else os.O_RDONLY


def _kv_array(inherited: WorkerResources, own: KvMemory) -> Array:
    shape = own.layout.shape if inherited.rank is None else inherited.rank.kv_shape
    return inherited.ops.new_kv(shape, pages=own.pages, memory=None if inherited.pages_on_device else own.buffer)
