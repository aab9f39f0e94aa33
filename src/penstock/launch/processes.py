"""What the child processes of one host run: gateways, workers, and the resources that workers share.

The resources are inherited over fork and have no names: descriptors, anonymous memory, keys.  Knows how each child
starts, not when (``supervisor`` does).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec import structs

from penstock.api.audit import PeerAudit
from penstock.api.audit_log import check_audit_log
from penstock.config.limits import RequestLimits
from penstock.config.mesh import Mesh, NodePlace
from penstock.config.mixed_numerics import PrefillPlan, fleet_numerics
from penstock.config.resolve import ServePlan, WorkerPlan, resolve_kv_store
from penstock.config.schema import (
    EngineSettings,
    GatewayConfig,
    KvStoreConfig,
    NamedAdapter,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    WorkerServeConfig,
)
from penstock.engine.models.interface import Model, PoolingModel
from penstock.engine.models.registry import build_model, build_pooling_model
from penstock.engine.runner.lora import LoraLimits, LoraManager
from penstock.errors import GroupError
from penstock.grammar.matcher import GrammarVocabulary
from penstock.kernels.core_lending import CoreLending, NoLending
from penstock.kernels.ops import Ops
from penstock.kernels.select import make_ops
from penstock.kv.page_memory import KvLayout, KvMemoryFile
from penstock.kv.store import store
from penstock.launch import draft_model
from penstock.launch.channel import Channel
from penstock.launch.decoded_weights import with_decoded_copies
from penstock.launch.fork_server import prefer_for_oom_kill
from penstock.launch.heartbeat import CoreLendingTable, HeartbeatSlot
from penstock.launch.machine import interleave_memory
from penstock.launch.numerics_probe import NumericsProbe, handed_over_layout
from penstock.launch.rank_process import RankEvents, RankGroup, RankIdentity, RankResources, run_follower, share_bytes
from penstock.launch.rendezvous import MasterAddress, WorkerNodes
from penstock.launch.restart_policy import GATEWAY
from penstock.launch.shared_metrics import SharedMetrics
from penstock.launch.shared_rates import SharedRequestCounts, SharedTokenBuckets
from penstock.launch.sparse_attention import sparse_numerics
from penstock.launch.startup_log import LoadProgressLog
from penstock.launch.supervisor import ChildSpec
from penstock.parallel.shard import ModelShard, check_supported, node_kv, shard_model
from penstock.processing.service import GenerationProcessor
from penstock.sidecar import drop_secrets, gateway_secrets, protect_memory
from penstock.telemetry.log import configure_logging
from penstock.types import RESTART_BITS, RUN_BITS, AdapterRef, ModelIdentity, Role, WorkerId, WorkerState
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import spec_for_length
from penstock.weights.load import LoadedModel, load_parts
from penstock.weights.manifest import ManifestStore
from penstock.wire.gateway_messages import MAX_REASON_CHARS
from penstock.wire.node_keys import HostKeys

if TYPE_CHECKING:
    from penstock.launch import speculation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerEndpoints:
    """Where the workers of this host listen, and with which keys."""

    keys: HostKeys
    endpoint: Callable[[WorkerId, int], str]  # worker, incarnation
    reached_at: Mapping[WorkerId, str] = field(default_factory=dict)  # by others, if not at ``endpoint``
    pages_ports: Mapping[WorkerId, int] = field(default_factory=dict)  # where pages are fetched, if not as planned
    masters: Mapping[WorkerId, MasterAddress] = field(default_factory=dict)  # of workers on several machines


def incarnations_of_a_run() -> int:
    """A random base for the incarnations of a new run of this supervisor.

    Gateways on other hosts may know an earlier run, and would take a worker of equal incarnation for the known one.
    Runs have no order, as the clock may have been set back in between.
    """
    return (1 + secrets.randbelow((1 << RUN_BITS) - 1)) << RESTART_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The model of a host's workers, before its weights are loaded."""

    path: Path
    spec: ModelSpec
    manifests: ManifestStore | None  # the hashes of its weights at the last load
    draft: draft_model.DraftFolder | None  # what proposes draft tokens for it
    loras: Sequence[NamedAdapter] = ()  # adapters that are loaded with it


@dataclass(frozen=True, slots=True)
class ModelDivision:
    """How a worker's ranks divide the model."""

    mesh: Mesh
    nodes: NodePlace
    prompts: bool  # stages are cut for chunks of prompts, which need the head once a prompt

    @classmethod
    def of(cls, worker: WorkerPlan) -> ModelDivision:
        """That of a worker: by the role that it was planned for, whichever it takes later."""
        return cls(worker.mesh, worker.nodes, worker.mesh.pipeline > 1 and worker.role is Role.PREFILL)

    def shard(self, spec: ModelSpec, rank: int) -> ModelShard:
        """The part of a rank.  Raises ConfigError."""
        return shard_model(spec, self.mesh, rank, nodes=self.nodes.nodes, prompts=self.prompts)


class WorkerProcesses:
    """The workers of this host: shared weights, one KV memory each, and how each starts."""

    def __init__(
        self,
        config: EngineSettings,
        plan: ServePlan,
        model: ModelSource,
        mailboxes: WorkerEndpoints,
        slots: Mapping[str, HeartbeatSlot],
    ) -> None:
        """Raises ConfigError if the KV memory cannot be allocated, or the model cannot be divided as planned."""
        self._config = config
        self._audit_log = check_audit_log(config.audit_log, config.audit)
        self._plan = plan
        self._model = model
        self._spec = spec_for_length(model.spec, plan.scheduler.max_model_len)
        self._mailboxes = mailboxes
        self._slots = slots
        self._places = {worker.worker: worker for worker in plan.workers}
        self._check_meshes()
        self._kv = {
            worker: KvMemoryFile.create(self._layout(place), worker_scheduler_config(place, plan).pages, label=worker)
            for worker, place in self._places.items()
        }
        self._store = resolve_kv_store(config, plan.device, generates=self._spec.pooler is None)
        store.check_store_config(self._store)
        self._mixed: tuple[str, str] | None = None  # numerics classes of prefill and decode
        holders = [own.worker for own in plan.workers if own.role is not Role.ENCODE and not self._alone(own)]
        self._share = store.SharedStoreMemory(self._store, [(worker, self._kv[worker].pages) for worker in holders])
        self._cores = CoreLendingTable({worker.worker: worker.lent_cores for worker in plan.workers})
        self._loaded: dict[tuple[ModelDivision, int], _Loaded] = {}  # by rank of each division

    def _alone(self, place: WorkerPlan) -> bool:
        """Whether the worker's pages are not in host memory, or are those of a part of the model."""
        return self._plan.pages_on_device(place) or place.nodes.nodes > 1

    def _check_meshes(self) -> None:
        lora = bool(self._model.loras) or (isinstance(self._config, ServeConfig) and self._config.allow_lora_updating)
        for division in {ModelDivision.of(worker) for worker in self._plan.workers}:
            speculates = self._plan.scheduler.max_draft_tokens > 0
            check_supported(self._spec, division.mesh, lora=lora, speculation=speculates)
            for rank in range(division.mesh.ranks):
                division.shard(self._spec, rank)

    def _layout(self, place: WorkerPlan) -> KvLayout:
        """The layout of the worker's pages on this machine."""
        if place.nodes.nodes == 1:
            return kv_layout(self._spec, self._plan.kv_dtype)
        return KvLayout.for_shape(node_kv(self._spec, place.mesh, place.nodes), self._plan.kv_dtype)

    def close(self) -> None:
        """Free the KV memory."""
        for file in self._kv.values():
            file.close()
        self._share.close()

    def load(self, keep_watch: Callable[[], None], threads: int) -> None:
        """Load the weights that all workers share.  ``keep_watch`` is called regularly and must not fork.

        Workers on a GPU load their own weights, as a process that has initialized CUDA must not fork.
        """
        # Imported now, after the gateway was forked, which does not need it, and before any worker is.
        import penstock.launch.worker_process  # noqa: F401

        reading, dtype = self._plan.prefill_plan, self._plan.dtype
        if self._plan.device != "cpu":
            return
        ops = self._ops(threads=1)
        with ExitStack() as stack:
            asked = None
            if reading is not None:
                asked = stack.enter_context(closing(NumericsProbe(reading.family, dtype, reading.device)))
            with interleave_memory(self._plan.numa_nodes):
                divisions = dict.fromkeys(ModelDivision.of(worker) for worker in self._plan.workers)
                places = [(own, rank) for own in divisions for rank in own.mesh.node_ranks(own.nodes)]
                shards = [own.shard(self._spec, rank) for own, rank in places]
                copied = partial(with_decoded_copies, plan=self._plan, threads=threads, keep_watch=keep_watch)
                parts = self._load(ops, LoadProgressLog(keep_watch), threads, shards, copied)
                self._loaded |= dict(zip(places, parts, strict=True))
            if asked is not None:
                self._mixed = (asked.result(keep_watch), ops.numerics)

    def child_spec(self, worker: WorkerId, incarnation: int, predecessor_fault: str = "") -> ChildSpec:
        """The specification of this worker."""
        place = self._places[worker]
        self._cores.reset(worker)
        role = self._slots[worker].assigned_role or place.role
        supervise = self._config.supervise
        group = self._group(place)
        own = place.cores_of(group.first) if group is not None else place
        alone = self._alone(place)
        config = WorkerConfig(
            worker=worker,
            incarnation=incarnation,
            predecessor_fault=predecessor_fault[:MAX_REASON_CHARS],
            role=role,
            endpoint=self._mailboxes.endpoint(worker, incarnation),
            connector=self._plan.connector,
            vocabulary=self._spec.vocab,
            pages_port=self._mailboxes.pages_ports.get(worker, self._plan.pages_port),
            scheduler=worker_scheduler_config(place, self._plan),
            hand_over=self._config.hand_over,
            kv_store=KvStoreConfig(peers=False) if alone else self._store,
            threads=own.threads,
            cpus=own.cpus,
            niceness=place.niceness if role is place.role else place.prefill_niceness if role is Role.PREFILL else 0,
            prefill_niceness=place.prefill_niceness,
            transfers_pages=self._hands_over(place),
            fixed_role=self._plan.mixed_numerics,
            drain_s=max(0.0, supervise.drain_s - supervise.grace_s),
            loans=place.loans,
            core_group=self._cores.name if place.shares_cores else "",
            image_cache_bytes=self._config.image_cache,
        )
        shared = (*(file.descriptor for file in self._kv.values()), *self._share.descriptors)
        main = partial(self._run, config, place, group)
        announced = self._mailboxes.reached_at.get(worker, config.endpoint)
        if group is None:
            return ChildSpec(main=main, inherited_fds=shared, endpoint=announced)
        followers = {rank: partial(self._run_follower, config, place, group, rank) for rank in group.ranks}
        return ChildSpec(
            main=main if group.first == group.leader else followers[group.first],
            rank=group.first,
            followers={rank: followers[rank] for rank in group.followers},
            inherited_fds=(*shared, *group.descriptors),
            endpoint=announced,
            on_forked=group.close_listening,
        )

    def _group(self, place: WorkerPlan) -> RankGroup | None:
        """The ranks of a new incarnation of a worker.  Raises ConfigError."""
        if not place.ranks:
            return None
        nodes = None
        if place.nodes.nodes > 1:
            nodes = WorkerNodes(place.mesh, place.nodes, self._mailboxes.masters[place.worker], self._mailboxes.keys)
        return RankGroup(place.mesh, crowded=place.crowded, nodes=nodes)

    def _hands_over(self, place: WorkerPlan) -> bool:
        """Whether the worker transfers KV pages: not those of pooling models, nor those in device memory without host
        copies, which mixed fleets have, nor those on several machines."""
        stay = self._plan.pages_on_device(place) and not self._plan.mixed_numerics
        stay = stay or place.nodes.nodes > 1  # each machine has its layers' pages only
        return not stay and self._plan.scheduler.pooling is None and place.role is not Role.ENCODE

    def _run(self, config: WorkerConfig, place: WorkerPlan, group: RankGroup | None) -> int:
        from penstock.launch.worker_process import WorkerResources, run_worker

        self._begin(config.worker)
        begun = time.monotonic()
        reading = self._plan.prefill_plan_of(place)
        ops = self._ops(config.threads, reading)
        rank = 0 if group is None else group.leader
        loaded = self._loaded.get((ModelDivision.of(place), rank)) if reading is None else None
        if loaded is None:
            log.info("kernels %s ready in %.2f s", ops.numerics, time.monotonic() - begun)
            progress = LoadingHeartbeat(self._slots[config.worker])
            (loaded,) = self._load(ops, progress, config.threads, [shard_model(self._spec, Mesh(), 0)])
        if isinstance(self._config, WorkerServeConfig):
            log.info("numerics class %s", ops.numerics)  # for --mixed-with
        numerics, twins = self._numerics(ops, place)
        own = None
        if group is not None:
            own = self._rank(config, group, loaded, ops)
            pages = own.join(self._rank_events(config.worker))
            fault = config.predecessor_fault or own.group.fault_elsewhere
            scheduler = structs.replace(config.scheduler, pages=pages)
            config = structs.replace(config, scheduler=scheduler, predecessor_fault=fault[:MAX_REASON_CHARS])
        inherited = WorkerResources(
            model=loaded.model if own is None else own.connected(),
            rank=own,
            ops=ops,
            identity=ModelIdentity(fingerprint=loaded.fingerprint, numerics=sparse_numerics(self._spec, numerics)),
            parameters=self._spec.parameters,
            vocab=self._spec.vocab,
            drafts=loaded.drafts,
            kv=self._kv[config.worker],
            peers={
                worker: file
                for worker, file in self._kv.items()
                if worker != config.worker and self._places[worker].nodes.nodes == 1
            },
            neighbors=self._mailboxes.reached_at,
            store=self._share,
            keys=self._mailboxes.keys,
            audit=PeerAudit(self._audit_log, config.worker, self._config.audit),
            slot=self._slots[config.worker],
            gateways={name: slot for name, slot in self._slots.items() if name not in self._places},
            adapters=loaded.adapters,
            cores=self._shared_cores(config, place),
            vocabulary=partial(model_vocabulary, self._model.path),
            pages_on_device=self._plan.pages_on_device(place),
            twins=twins if self._plan.pages_on_device(place) and config.transfers_pages else None,
        )
        return run_worker(config, inherited)

    def _run_follower(self, config: WorkerConfig, place: WorkerPlan, group: RankGroup, rank: int) -> int:
        self._begin(f"{config.worker}/{rank}")
        cores, slot = place.cores_of(rank), self._slots[config.worker]
        ops, events = self._ops(cores.threads), self._rank_events(config.worker)
        own = self._rank(config, group, self._loaded[ModelDivision.of(place), rank], ops)
        if rank != group.first:
            events = RankEvents(lambda: None, events.on_lost)
        try:
            return run_follower(own, ops, cores, niceness=config.niceness, events=events, close=self.close)
        except GroupError as error:
            if place.nodes.node == 0:
                raise
            log.warning("%s", error)
            slot.set_exit_reason(f"ended: {error}")
            return 0

    def _rank(self, config: WorkerConfig, group: RankGroup, loaded: _Loaded, ops: Ops) -> RankResources:
        kv = self._kv[config.worker]
        identity = RankIdentity(
            rank=loaded.shard.rank,
            weight_bytes=loaded.nbytes,
            page_bytes=share_bytes(kv.layout, loaded.shard.spec.kv),
            fingerprint=loaded.fingerprint,
            numerics=sparse_numerics(self._spec, ops.numerics),
            kv=kv_layout(self._spec, self._plan.kv_dtype).name,
            pages=config.scheduler.pages,
            max_model_len=config.scheduler.max_model_len,
            predecessor_fault=config.predecessor_fault,
        )
        return RankResources(
            group=group,
            shard=loaded.shard,
            model=cast(Model, loaded.model),  # pooling models are refused
            kv=kv,
            identity=identity,
        )

    def _rank_events(self, worker: WorkerId) -> RankEvents:
        """What the first rank on a machine does while others are waited for, and when one has gone."""
        slot = self._slots[worker]

        def on_lost(reason: str) -> None:
            log.warning("%s", reason)
            slot.set_exit_reason(f"ended: {reason}")
            logging.shutdown()
            # In a thread: others may wait for what never comes.  It is no fault of this process: if a rank has crashed
            # on the other machine, that says so when it joins again.
            os._exit(0)

        return RankEvents(slot.refresh, on_lost, partial(slot.set_state, WorkerState.READY))

    def _begin(self, name: str) -> None:
        """Prepare the process of a worker, or of one of its ranks."""
        configure_logging(name, as_json=self._config.log_json)
        prefer_for_oom_kill()
        protect_memory()
        drop_secrets()

    def _numerics(self, ops: Ops, place: WorkerPlan) -> tuple[str, str]:
        """The fleet's numerics class, and the layout in which this worker's pages are transferred."""
        own, other = ops.numerics, self._plan.mixed_with
        reads = place.role is Role.PREFILL
        classes = self._mixed or ((own, other) if reads else (other, own)) if self._plan.mixed_numerics else (own, own)
        layout = handed_over_layout(ops, *classes, twins=self._plan.pages_on_device(place)) if reads else ""
        return fleet_numerics(*classes), layout

    def _shared_cores(self, config: WorkerConfig, place: WorkerPlan) -> CoreLending:
        if not place.lent_cores and not place.loans:
            return NoLending()
        return self._cores.cores_of(config.worker, config.loans)

    def _load(
        self,
        ops: Ops,
        progress: Callable[[int, int], None],
        threads: int,
        shards: Sequence[ModelShard],
        copied: Callable[[Sequence[LoadedModel]], list[LoadedModel]] = list,
    ) -> list[_Loaded]:
        """The parts of several ranks; what they have in common is in memory once.

        ``copied``: gives compressed weights their decoded copies, before models are built of them.
        """
        begun = time.monotonic()
        parts = load_parts(
            self._model.path,
            self._spec,
            ops,
            [shard.layout if shard.mesh.ranks > 1 else None for shard in shards],
            progress,
            threads=threads,
            manifests=self._model.manifests,
        )
        sizes = " + ".join(f"{part.nbytes / 2**20:.1f}" for part in parts)
        log.info("weights loaded in %.2f s: %s MiB", time.monotonic() - begun, sizes)
        parts = copied(parts)
        return [
            self._built(ops, replace(part, spec=own.spec), own, threads)
            for part, own in zip(parts, shards, strict=True)
        ]

    def _built(self, ops: Ops, loaded: LoadedModel, shard: ModelShard, threads: int) -> _Loaded:
        divided = shard.mesh.ranks > 1
        build = build_model if self._plan.scheduler.pooling is None else build_pooling_model
        model = build(loaded, ops, self._plan.scheduler.max_model_len)
        drafts = None if divided else self._load_drafts(loaded, ops, threads)
        adapters = self._adapters(ops, loaded, divided=divided)
        return _Loaded(model, loaded.fingerprint, drafts, adapters, shard, loaded.nbytes)

    def _load_drafts(self, model: LoadedModel, ops: Ops, threads: int) -> speculation.LoadedDraft | None:
        from penstock.launch.speculation import load_draft

        return None if self._model.draft is None else load_draft(self._model.draft, model, ops, threads)

    def _adapters(self, ops: Ops, loaded: LoadedModel, *, divided: bool) -> LoraManager:
        """The loaded adapters of ``--lora``, with room for others.  Raises AdapterRefused."""
        config = self._config
        room = LoraLimits(slots=config.max_loras, nbytes=config.lora_memory, max_rank=config.max_lora_rank)
        if divided or self._plan.scheduler.pooling is not None:
            return LoraManager.disabled(ops, room)
        adapters = LoraManager.for_model(ops, loaded, room)
        for own in self._model.loras:
            adapters.load(AdapterRef(fingerprint=own.fingerprint, folder=own.folder))
        return adapters

    def _ops(self, threads: int, reading: PrefillPlan | None = None) -> Ops:
        plan = self._plan
        where, kept = reading or plan, None if plan.kv_dtype == plan.dtype else plan.kv_dtype
        return make_ops(
            family=where.family,
            compute_dtype=plan.dtype,
            device=where.device,
            threads=threads,
            kv_dtype=kept,
            activation_dtype=plan.activation_dtype,
        )


class LoadingHeartbeat:
    """Beats for a worker that loads its own weights, as long as the loading progresses."""

    def __init__(self, slot: HeartbeatSlot) -> None:
        self._slot = slot
        self._seen = (0, 0)

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` are loaded."""
        if (done, total) != self._seen:
            self._seen = (done, total)
            self._slot.on_progress()


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: Model | PoolingModel
    fingerprint: str
    drafts: speculation.LoadedDraft | None
    adapters: LoraManager
    shard: ModelShard
    nbytes: int  # of its matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcesses:
    """The gateways of this host.  ``config`` is that of the first gateway's first incarnation."""

    config: GatewayConfig
    listener: socket.socket  # shared by all of them (``http_server``)
    keys: HostKeys
    slots: Mapping[str, HeartbeatSlot]  # of the gateways
    log_json: bool
    created: int  # Unix seconds, as /v1/models tells
    buckets: SharedTokenBuckets  # of tenants' rates
    open_requests: SharedRequestCounts  # of keys with a limit
    metrics: SharedMetrics = field(init=False)  # what each of them counts

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", SharedMetrics(tuple(self.slots)))

    def child_spec(self, name: str, incarnation: int, channel: Channel) -> ChildSpec:
        """The specification of a gateway."""
        body = partial(self._run, name, incarnation, channel)
        shared = (self.buckets.descriptor, self.open_requests.descriptor, self.metrics.descriptor)
        return ChildSpec(main=body, inherited_fds=(self.listener.fileno(), channel.fileno(), *shared))

    def _run(self, name: str, incarnation: int, channel: Channel) -> int:
        configure_logging(name, as_json=self.log_json)
        protect_memory()
        drop_secrets(keep=gateway_secrets(self.config.members))
        # Imported here, in the child, while the supervisor loads weights.
        from penstock.launch.gateway_process import GatewayResources, make_http_app, run_gateway
        from penstock.launch.http_server import ProcessIo

        inherited = GatewayResources(
            io=ProcessIo(
                listener=self.listener,
                channel=channel,
                slot=self.slots[name],
                siblings=tuple(slot for other, slot in self.slots.items() if other != name),
            ),
            keys=self.keys,
            rates=self.buckets,
            metrics=self.metrics,
            slot_name=name,
            make_app=partial(
                make_http_app,
                created=self.created,
                buckets=self.buckets,
                request_counts=self.open_requests.of_gateway(list(self.slots).index(name)),
            ),
        )
        own = self.config.name.replace(GATEWAY, name, 1)
        config = structs.replace(self.config, name=own, incarnation=incarnation, rate_host=self.buckets.host)
        return run_gateway(config, inherited)


@dataclass(frozen=True, slots=True)
class HostProcesses:
    """``supervisor.ChildSpecs`` of a host."""

    front: GatewayProcesses | None
    workers: WorkerProcesses | None

    def gateway_spec(self, name: str, incarnation: int, channel: Channel) -> ChildSpec:
        if self.front is None:
            raise LookupError("there is no gateway here")
        return self.front.child_spec(name, incarnation, channel)

    def worker_spec(self, worker: WorkerId, incarnation: int, predecessor_fault: str) -> ChildSpec:
        if self.workers is None:
            raise LookupError("there are no workers here")
        return self.workers.child_spec(worker, incarnation, predecessor_fault)


def model_vocabulary(path: Path) -> GrammarVocabulary:
    """The model's vocabulary for grammars.  Raises ModelError."""
    intake = GenerationProcessor(path, name="", max_model_len=1, limits=RequestLimits(), created=0)
    try:
        return intake.vocabulary()
    finally:
        intake.close()


def worker_scheduler_config(place: WorkerPlan, plan: ServePlan) -> SchedulerConfig:
    """A worker's scheduler: an encode worker needs no KV pages, a prefill worker may have fewer."""
    scheduler, reading = plan.scheduler, plan.prefill_plan_of(place)
    if place.role is not Role.ENCODE:
        return scheduler if reading is None else structs.replace(scheduler, pages=reading.pages)
    return structs.replace(scheduler, pages=1, max_model_len=scheduler.page_tokens)


def kv_layout(spec: ModelSpec, dtype: str) -> KvLayout:
    """The memory layout of this model's KV pages."""
    return KvLayout.for_shape(spec.kv, dtype)
