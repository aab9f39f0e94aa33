"""The composition root: from settings to a running service.

::

    penstock serve                         penstock serve --join|--members  penstock worker
    this process: supervisor, fork server  the same, without weights        the same, without a port
      |-- gateway-0                          |-- gateway-0                    |-- one worker, TCP mailbox
      |-- prefill-0, decode-0, ...

The supervisor binds the port, makes keys, KV memory and the heartbeat table, and loads the weights.  The gateway is
forked first, so that it starts meanwhile, the workers once the weights are loaded; each is forked again when it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from penstock.api.audit_log import check_audit_log
from penstock.api.response_store import create_response_store
from penstock.clock import MonotonicClock
from penstock.config.api_keys import check_key_file, load_keys
from penstock.config.base import check_endpoint, expanded_path, host_and_port
from penstock.config.device import excludes_gpu
from penstock.config.facts import ExtraWeights, GpuReport, MachineFacts, ModelFacts
from penstock.config.limits import TraceConfig
from penstock.config.load import lora_folders, weights_cache_folder
from penstock.config.mesh import WorkerPart
from penstock.config.node_registry import NodeRight
from penstock.config.resolve import ServePlan, context_length, resolve, resolve_worker, worker_nodes, worker_parts
from penstock.config.schema import (
    BACKLOG,
    EngineSettings,
    GatewayConfig,
    LoraConfig,
    NamedAdapter,
    PoolingConfig,
    RequestConfig,
    ServeConfig,
    WorkerServeConfig,
)
from penstock.errors import ConfigError, KernelError
from penstock.kernels.select import available_families, decoding_families
from penstock.kv.store.redis_tier import check_redis_url
from penstock.launch import draft_model, event_loop
from penstock.launch.draft_model import extra_weights
from penstock.launch.gpu_probe import gpu_report
from penstock.launch.heartbeat import HeartbeatSlot, HeartbeatTable
from penstock.launch.machine import machine_facts, process_start_time, usable_cores
from penstock.launch.members.interface import check_tcp_endpoint
from penstock.launch.members.registry import open_members
from penstock.launch.model_path import ModelLocation, locate_model
from penstock.launch.processes import (
    GatewayProcesses,
    HostProcesses,
    ModelSource,
    WorkerEndpoints,
    WorkerProcesses,
    incarnations_of_a_run,
    kv_layout,
)
from penstock.launch.rendezvous import MasterAddress
from penstock.launch.restart_policy import GATEWAY
from penstock.launch.run_folder import RunFolder, ServiceRecord
from penstock.launch.shared_rates import SharedRequestCounts, SharedTokenBuckets
from penstock.launch.sparse_attention import with_sparse_attention
from penstock.launch.startup_log import StartupTimer, client_lines, fleet_lines, join_lines, model_lines, worker_lines
from penstock.launch.supervisor import StoppedEarly, Supervisor
from penstock.launch.tls import checked_tls
from penstock.parallel.shard import check_supported, node_kv, node_layers, tensor_ways, token_numbers
from penstock.parallel.sizes import step_bytes
from penstock.processing.model_aliases import check_aliases
from penstock.sidecar import disable_core_dumps
from penstock.telemetry.log import configure_logging
from penstock.types import FP8_E4M3, Task, WorkerId, WorkerState
from penstock.weights.architecture.spec import ModelSpec, PoolerConfig, PoolingType
from penstock.weights.architecture.vision import VisionDecoderConfig
from penstock.weights.inspect import check_integer_weights, compute_dtype_for, inspect_model
from penstock.weights.lora import LoraFileLimits, lora_targets, named_adapter, read_lora_adapter
from penstock.weights.manifest import ManifestStore
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.node_keys import HostKeys, NodeKeys, load_host_keys

GATEWAY_MODULES = (
    "uvicorn.lifespan.on",  # uvicorn imports it by name when it starts
    "penstock.launch.gateway_process",
    "penstock.launch.worker_process",
)
"""Imported by the processes of a service."""


log = logging.getLogger(__name__)


SAFE_KEY_CHARS = 16
"""Shorter API keys are warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentLink:
    """What a service that is one model of a catalog gets from the catalog's supervisor, which forked it."""

    name: str
    listener: socket.socket
    slot: HeartbeatSlot
    event_key: str
    buckets: SharedTokenBuckets
    response_store: str | None  # file of stored responses, of all models

    def beat(self) -> None:
        """Write a heartbeat to the table of the catalog's supervisor."""
        now = time.monotonic_ns()
        self.slot.beat(now, now, 0)


def serve(config: ServeConfig, nested: ParentLink | None = None) -> int:
    """Run ``penstock serve`` until it ends; returns the exit code.

    Raises ConfigError, ModelError or KernelError before any process starts, RestartLimitReached when one cannot be
    kept running.
    """
    phases = begin_service(config, nested.name if nested else "supervisor")
    tls = None if nested else checked_tls(config)  # the front of a catalog has its own, and asks over the loopback
    located = locate_model(config.model)
    spec = inspect_as_set(located.path, config)
    name = config.served_model_name or located.name
    lora = listed_adapters(config, name, spec)
    model = model_source(config, located, spec, loras=lora.adapters, drafts=not config.workers_elsewhere)
    plan = None if config.workers_elsewhere else resolve_here(config, name, spec, weights_beside(config, model))
    keys = host_keys(config, NodeRight.GATEWAY) if config.workers_elsewhere else CurveKeys.ephemeral()
    _check_members(config)
    gateways = tuple(f"gateway-{number}" for number in range(config.gateways))
    with ExitStack() as stack:
        listener = nested.listener if nested else stack.enter_context(bind_socket(config.host, config.port))
        port, slots = listener.getsockname()[1], heartbeat_slots((*gateways, *_names(plan)))
        run_folder = stack.enter_context(closing(RunFolder()))
        stored = nested.response_store if nested else prepare_response_store(config, run_folder)
        front_config = structs.replace(
            gateway_config(config, located, spec, name=name, lora=lora, plan=plan),
            name=gateway_name(keys) if config.workers_elsewhere else GATEWAY,  # workers may have several
            port=port,
            tls=tls,
            fronted=nested is not None,
            event_key=nested.event_key if nested else event_key_of(config, keys if config.workers_elsewhere else None),
            response_store=stored if spec.task.writes else None,
        )
        front = GatewayProcesses(
            config=front_config,
            listener=listener,
            keys=keys,
            slots={gateway: slots[gateway] for gateway in gateways},
            log_json=config.log_json,
            created=int(time.time()),
            buckets=nested.buckets if nested else rate_buckets(config, front_config.event_key),
            open_requests=SharedRequestCounts(config.scheduling.max_tenants, config.gateways),
        )
        workers = None
        if plan is not None:
            workers = WorkerProcesses(config, plan, model, WorkerEndpoints(keys, run_folder.endpoint), slots)
            stack.callback(workers.close)
        jobs, beat = HostProcesses(front, workers), nested.beat if nested else None
        supervisor = stack.enter_context(Supervisor(config.supervise, jobs, slots, beat, gateways=gateways))
        supervisor.on_stopping(listener.close)
        length, notes = front_config.max_model_len, plan.notes if plan else ()
        log_lines(model_lines(located, name, spec, length, notes, generation_config=config.generation_config))

        def ready() -> None:
            log_lines(fleet_lines(plan, supervisor.pid) if plan else join_lines(config.join, config.members))
            if nested:
                nested.slot.set_state(WorkerState.READY)
            else:
                publish_service(config, port, run_folder, model=name, located=located, task=spec.task)
                log_lines(talk_lines(config, name, spec, port, took=str(phases)))

        return run_supervised(supervisor, workers, plan, phases, ready)


def serve_worker(config: WorkerServeConfig) -> int:
    """Run ``penstock worker`` until it ends; returns the exit code.  Raises as ``serve``."""
    phases = begin_service(config)
    located = locate_model(config.model)
    spec = inspect_as_set(located.path, config)
    _check_tcp(config.listen, "--listen")
    if config.master_addr is not None:
        _check_tcp(config.master_addr, "--master-addr")
    if config.listen.endswith(":0"):
        raise ConfigError(f"--listen {config.listen}: choose a port, as gateways have to know it; 0 means any free one")
    keys = host_keys(config, NodeRight.WORKER)
    worker = WorkerId(_worker_name(config, keys))
    model = model_source(config, located, spec)
    nodes = worker_nodes(config)
    parts = worker_parts(config, worker)
    facts = model_facts(located.name, spec_here(spec, parts.values(), 1), extra_weights(config, model.draft))
    plan = resolve_worker(config, worker, this_machine(config), facts)
    if nodes.node == 0:
        check_free(config.listen, "--listen")
        if config.master_addr is not None:
            check_free(config.master_addr, "--master-addr")
    with ExitStack() as stack:
        slots = heartbeat_slots((worker,))
        masters = {} if config.master_addr is None else {worker: MasterAddress.of(config.master_addr)}
        mailboxes = WorkerEndpoints(keys, lambda worker, incarnation: config.listen, masters=masters)
        workers = WorkerProcesses(config, plan, model, mailboxes, slots)
        stack.callback(workers.close)
        jobs, run = HostProcesses(None, workers), incarnations_of_a_run()
        supervisor = stack.enter_context(Supervisor(config.supervise, jobs, slots, run=run))
        log_lines(model_lines(located, located.name, spec, plan.scheduler.max_model_len, plan.notes))

        def ready() -> None:
            log_lines(fleet_lines(plan, supervisor.pid))
            if nodes.node == 0:
                shared = config.keys if isinstance(keys, CurveKeys) else None
                log_lines(worker_lines(config.listen, config.model, shared, took=str(phases)))
            else:
                log.info("ready after %s, machine %d of the worker at %s", phases, nodes.node, config.master_addr)

        return run_supervised(supervisor, workers, plan, phases, ready)


def publish_service(
    config: ServeConfig,
    port: int,
    folder: RunFolder,
    *,
    model: str = "",
    located: ModelLocation | None = None,
    task: Task = Task.GENERATE,
) -> None:
    """Tell other commands on this host what is served; a catalog has no one model."""
    folder.publish(
        ServiceRecord(
            pid=os.getpid(),
            url=service_url(config, port),
            model=model,
            path="" if located is None else str(located.path),
            generates=task is Task.GENERATE,
            needs_key=bool(config.api_key or config.api_keys),
            stops_with_parent=config.stop_with_parent is not None,
        )
    )


def model_source(
    config: EngineSettings,
    located: ModelLocation,
    spec: ModelSpec,
    *,
    loras: Sequence[NamedAdapter] = (),
    drafts: bool = True,
) -> ModelSource:
    return ModelSource(
        path=located.path,
        spec=spec,
        manifests=manifests_of(config, located),
        draft=draft_model.find_draft(config, located.path, spec) if drafts else None,
        loras=loras,
    )


def manifests_of(config: EngineSettings, located: ModelLocation) -> ManifestStore | None:
    """The store of the weights' hashes; None: not kept.  The bundled model's may change with every release."""
    folder = weights_cache_folder(config.weights_cache)
    if folder is None or located.bundled:
        return None
    return ManifestStore(folder, accept_new=config.accept_new_weights)


def resolve_here(
    config: ServeConfig,
    name: str,
    spec: ModelSpec,
    extra_weights: tuple[ExtraWeights, ...] = (),
    report: GpuReport | None = None,
) -> ServePlan:
    """The plan for this machine.  ``extra_weights``: loaded with the model.  ``report``: of the GPU, if it was probed
    already.  Raises ConfigError, KernelError."""
    return resolve(config, this_machine(config, report), model_facts(name, spec, extra_weights))


# --- running ---------------------------------------------------------------------------------------------------------


def begin_service(config: EngineSettings, name: str = "supervisor") -> StartupTimer:
    """Prepare this process to be a service's supervisor: logs, open files, no core dumps.  Returns its timer."""
    configure_logging(name, as_json=config.log_json)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as many connections as the system allows
    disable_core_dumps()  # they would hold prompts and keys
    phases = StartupTimer(process_start_time())
    phases.end_phase("imports")
    return phases


def preload_modules(modules: Sequence[str]) -> None:
    """Import the modules that children import, and uvloop if it is installed; called when all children are ready.

    A child that is restarted then runs the code that the service started with, even if the package on disk has changed,
    and starts sooner.  A module that cannot be imported does not end a running service: a warning is logged.
    """
    try:
        for module in modules:
            import_module(module)
        if find_spec("uvloop") is not None:
            import_module("uvloop")
    except Exception as error:  # noqa: BLE001 - modules of two versions fail in any way
        log.warning("the package on disk has changed (%s): a gateway that dies may not come back", error)


def warn_short_key(api_key: str | None) -> None:
    """Warn of an API key that can be guessed: thousands per second can be tried."""
    if api_key is not None and len(api_key) < SAFE_KEY_CHARS:
        log.warning(
            "--api-key has %d characters and can be guessed; `penstock keys add` makes keys that cannot", len(api_key)
        )


def run_supervised(
    supervisor: Supervisor,
    workers: WorkerProcesses | None,
    plan: ServePlan | None,
    phases: StartupTimer,
    announce: Callable[[], None],
    *,
    modules: Sequence[str] = GATEWAY_MODULES,
) -> int:
    """Start all processes, load the weights, and supervise until all have ended; returns the exit code.

    ``announce`` is called once, when all children are ready; then ``modules`` are preloaded for later gateways.
    """

    def ready() -> None:
        phases.end_phase("processes")
        announce()
        if supervisor.has_gateways:  # workers inherit all that they need
            preload_modules(modules)

    for line in plan.warnings if plan else ():
        log.warning("%s", line)
    try:
        supervisor.start()
        phases.end_phase("plan")
        if workers is not None:
            workers.load(supervisor.poll, usable_cores(tuple(os.sched_getaffinity(0))))
            phases.end_phase("weights")
        code = supervisor.run({w.worker: w.role for w in plan.workers} if plan else {}, ready)
    except StoppedEarly:
        supervisor.wait_until_stopped()
        code = 0
    log.info("stopped")
    return code


def log_lines(lines: Iterable[str]) -> None:
    """Log each line at level info."""
    for line in lines:
        log.info("%s", line)


def _names(plan: ServePlan | None) -> tuple[WorkerId, ...]:
    return tuple(worker.worker for worker in plan.workers) if plan else ()


def heartbeat_slots(names: tuple[str, ...]) -> dict[str, HeartbeatSlot]:
    """A new heartbeat table with a slot for each name."""
    return dict(zip(names, HeartbeatTable(len(names)).slots, strict=True))


def talk_lines(config: ServeConfig, name: str, spec: ModelSpec, port: int, *, took: str) -> Iterator[str]:
    """The last lines of a start: the URL, and commands that talk to it."""
    needs_key = bool(config.api_key or config.api_keys)
    state = "answers HTTP, ready when workers have joined," if config.workers_elsewhere else "ready"
    return client_lines(service_url(config, port), (name, spec.task), needs_key=needs_key, took=took, state=state)


def event_key_of(config: ServeConfig, shared: HostKeys | None) -> str:
    return event_key(config.api_key, config.api_keys, config.scheduling.max_tenants, shared)


def rate_buckets(config: ServeConfig, key: str) -> SharedTokenBuckets:
    """Buckets of tenants' rates, with names that hosts with the same ``key`` (in hex) share."""
    return SharedTokenBuckets(config.scheduling.max_tenants, bytes.fromhex(key))


def gateway_config(
    config: ServeConfig, located: ModelLocation, spec: ModelSpec, *, name: str, lora: LoraConfig, plan: ServePlan | None
) -> GatewayConfig:
    """The gateways' configuration as far as the settings decide it.  ``plan`` None: all workers are on other hosts."""
    check_key_file(config.api_keys, config.scheduling.max_tenants)
    warn_short_key(config.api_key)
    if config.limits_redis is not None:
        check_redis_url(config.limits_redis, "--limits-redis")
    event_loop.event_loop_name(config.event_loop)
    split = not config.aggregated and spec.task.writes
    check_aliases(config.model_alias, (name, *(own.name for own in lora.adapters)))
    length = context_length(config, model_facts(name, spec)) if plan is None else plan.scheduler.max_model_len
    return GatewayConfig(
        name=GATEWAY,
        host=config.host,
        model_path=str(located.path),
        model_name=name,
        max_model_len=length,
        requests=RequestConfig(
            generation_config=config.generation_config,
            unknown_fields=config.unknown_fields,
            disable_additional_properties=config.disable_additional_properties,
            strip_billing_header=config.strip_billing_header,
            model_alias=config.model_alias,
            max_positions=spec.max_positions,
        ),
        split=split and (plan is None or plan.split),
        task=spec.task,
        vocabulary=spec.vocab,
        width=0 if spec.pooler is None else spec.pooler.labels or spec.hidden,
        api_key=config.api_key,
        api_keys=config.api_keys,
        audit_log=check_audit_log(config.audit_log, config.audit),
        audit=config.audit,
        limits=config.limits,
        limits_redis=config.limits_redis,
        scheduling=config.scheduling,
        failover=config.failover,
        routing=config.routing,
        turns=config.turns,
        join=config.join,
        members=config.members,
        membership=config.membership,
        allow_mixed_numerics=config.allow_mixed_numerics,
        allow_model_upgrade=config.allow_model_upgrade,
        remote_images=config.remote_images or bool(config.remote_image_host),
        remote_image_hosts=config.remote_image_host,
        lora=lora,
        response_cache=(config.response_cache or 0) // config.gateways,
        trace=trace_config(config),
        event_loop=config.event_loop,
        allowed_origins=config.allowed_origin,
        log_requests=config.log_requests,
        allowed_hosts=config.allowed_host,
    )


def prepare_response_store(config: ServeConfig, run_folder: RunFolder) -> str | None:
    """The file in which gateways keep responses: in the folder of this run, unless another is given.

    None: they keep none.  Raises ConfigError.
    """
    if not config.limits.max_stored_responses_bytes:
        return None
    given = config.response_store
    folder = run_folder.path if given is None else expanded_path(given, "--response-store").absolute()
    return str(create_response_store(folder, config.limits))


def listed_adapters(config: ServeConfig, model: str, spec: ModelSpec) -> LoraConfig:
    """The adapters of ``--lora``, read and checked.  Raises ConfigError, ModelError."""
    folders = lora_folders(config.lora)
    if folders and spec.task is not Task.GENERATE:
        raise ConfigError(f"--lora: {model} does not chat; adapters are for chat models")
    if model in folders:
        raise ConfigError(f"--lora {model}: this is the model's own name; choose another for the adapter")
    if len(folders) > config.max_loras:
        raise ConfigError(f"--lora: {len(folders)} adapters are more than --max-loras {config.max_loras}")
    limits = LoraFileLimits(max_rank=config.max_lora_rank, max_bytes=config.lora_memory)
    targets = lora_targets(spec) if folders else {}
    listed: list[NamedAdapter] = []
    for name, folder in folders.items():
        listed.append(named_adapter(name, folder, read_lora_adapter(folder, targets, limits)))
    together = sum(own.nbytes for own in listed)
    if together > config.lora_memory:
        raise ConfigError(f"--lora: the adapters have {together} bytes, more than --lora-memory {config.lora_memory}")
    return LoraConfig(
        adapters=tuple(listed),
        allow_updating=config.allow_lora_updating,
        max_adapters=config.max_loras,
        max_bytes=config.lora_memory,
        max_rank=config.max_lora_rank,
    )


def weights_beside(config: ServeConfig, model: ModelSource) -> tuple[ExtraWeights, ...]:
    return extra_weights(config, model.draft, model.loras, more_loras=config.allow_lora_updating)


# --- facts -----------------------------------------------------------------------------------------------------------


def this_machine(config: EngineSettings, report: GpuReport | None = None) -> MachineFacts:
    """Raises KernelError if neither C++ kernels nor a GPU can be used."""
    report = GpuReport() if excludes_gpu(config) else report or gpu_report()
    try:
        families = available_families()
    except KernelError:
        if report.gpu is None:
            raise
        log.warning("the C++ extension is not built: blocks are hashed and indexed in Python, slowly (docs/gpu.md)")
        families = ()
    return structs.replace(machine_facts(families), gpu=report, decoding_families=decoding_families())


def inspect_as_set(path: Path, config: EngineSettings) -> ModelSpec:
    """The model as the settings compute it.  Raises ModelError, and ConfigError if they do not suit it."""
    spec = with_sparse_attention(inspect_model(path), config)
    if config.activation_dtype != "auto":
        check_integer_weights(path, spec, f"--activation-dtype {config.activation_dtype}")
    return spec


def model_facts(name: str, spec: ModelSpec, extra_weights: tuple[ExtraWeights, ...] = ()) -> ModelFacts:
    ways, why_not = tensor_ways(spec)
    return ModelFacts(
        name=name,
        max_positions=spec.max_positions,
        parameters=spec.parameters,
        multimodal=isinstance(spec.details, VisionDecoderConfig) or spec.audio_tokens > 0,
        auto_dtype=compute_dtype_for(spec, "auto"),
        page_bytes_bf16=kv_layout(spec, "bf16").page_bytes,
        page_bytes_fp8=kv_layout(spec, FP8_E4M3).page_bytes,
        reaches=spec.kv.reaches,
        pooling=None if spec.pooler is None else _pooling(spec.pooler),
        extra_weights=extra_weights,
        activation_bytes=step_bytes(spec),
        layers=spec.layers,
        hidden=spec.hidden,
        token_numbers=token_numbers(spec),
        tensor_ways=ways,
        why_not_divided=why_not,
    )


def spec_here(spec: ModelSpec, parts: Collection[WorkerPart], workers: int) -> ModelSpec:
    """The model as far as this machine has it, if all its ``workers`` are on several: what its memory must hold.

    Their weights are in memory once, and none has larger KV pages than these.  Raises ConfigError.
    """
    if len(parts) < workers or not parts:
        return spec
    for part in parts:
        check_supported(spec, part.mesh)
    layers = [node_layers(spec, part.mesh, part.place) for part in parts]
    _, most = max(zip(layers, parts, strict=True), key=lambda each: len(each[0]))
    parameters = spec.parameters * len({layer for its in layers for layer in its}) // spec.layers
    return structs.replace(spec, kv=node_kv(spec, most.mesh, most.place), parameters=parameters)


def _pooling(pooler: PoolerConfig) -> PoolingConfig:
    return PoolingConfig(
        whole_prompts=not pooler.causal, share_prefixes=pooler.causal and pooler.pooling is PoolingType.LAST
    )


# --- addresses and keys ----------------------------------------------------------------------------------------------


@contextmanager
def bind_socket(host: str, port: int, *, flag: str = "--port") -> Iterator[socket.socket]:
    """A bound, listening socket.  Raises ConfigError when the port is taken or the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is taken: stop what listens there, or choose another with {flag}"
                ) from None
            where = "; this host has no such address" if error.errno == errno.EADDRNOTAVAIL else ""
            raise ConfigError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}{where}") from None
        yield listener


def _check_members(config: ServeConfig) -> None:
    """Refuse at once what cannot be.  Raises ConfigError."""
    for endpoint in config.join:
        check_tcp_endpoint(endpoint, "--join")
    if config.members is not None:
        open_members(config.members, config.membership, MonotonicClock())


def check_free(endpoint: str, flag: str) -> None:
    """Fail in one line if the port is taken; the worker would fail at every restart."""
    with bind_socket(*host_and_port(endpoint), flag=flag):
        return


def _check_tcp(endpoint: str, flag: str) -> None:
    check_endpoint(endpoint)
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{flag} {endpoint}: expected tcp://HOST:PORT")


def event_key(api_key: str | None, api_keys: str | None, max_tenants: int, shared: HostKeys | None = None) -> str:
    """The key, in hex, that event ids are signed with, so that a client cannot make up the id of another's stream.

    All gateways of a service derive the same key, also after a restart and on other hosts: from the salt of the file
    ``api_keys`` if there is one, else from the secret that hosts or gateways share, else from ``api_key``, whose
    holders are one tenant.  Raises ConfigError.
    """
    if api_keys is not None:
        secret = load_keys(expanded_path(api_keys, "--api-keys"), max_tenants).salt.encode()
    elif shared is not None:
        secret = shared.event_secret if isinstance(shared, NodeKeys) else shared.server_secret
    else:
        secret = (api_key or "").encode()
    return blake2b(secret, digest_size=32, person=b"penstock events").hexdigest()


def host_keys(config: EngineSettings, *rights: NodeRight, node: str = "") -> HostKeys:
    """The keys of ``--keys``.  Raises ConfigError, also for those of a node without one of these rights.

    ``node``: whose they must be, unless hosts share them.
    """
    if config.keys is None:
        raise ConfigError("--keys DIR is missing")
    keys = load_host_keys(expanded_path(config.keys, "keys"), node)
    for right in rights:
        if isinstance(keys, NodeKeys) and not keys.may(right):
            raise ConfigError(
                f"the node {keys.node!r} of {config.keys} has no right to have a {right.value}; "
                f"`penstock host-keys rights DIR {keys.node} ...` gives it"
            )
    return keys


def gateway_name(keys: HostKeys, node: str = "") -> str:
    """A name that no other gateway has; with keys of a node it begins with the node's."""
    node = keys.node if isinstance(keys, NodeKeys) else node
    return "-".join(filter(None, (node, GATEWAY, secrets.token_hex(4))))


def _worker_name(config: WorkerServeConfig, keys: HostKeys) -> str:
    """As given, or a name that is most likely unique in the deployment: node or host, role and port."""
    port = config.listen.rpartition(":")[2]
    if isinstance(keys, NodeKeys):
        name = config.name or f"{keys.node}-{config.role.value}-{port}"
        owner = keys.registry.owner(name)
        if owner is None or owner.name != keys.node:
            raise ConfigError(f"--name {name}: with keys of the node {keys.node!r} it must begin with '{keys.node}-'")
        return name
    if config.name is not None:
        return config.name
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0].lower())
    return f"{config.role.value}-{host}-{port}"


def service_url(config: ServeConfig, port: int) -> str:
    """The service's URL for clients on this host."""
    return f"{'https' if config.tls_cert else 'http'}://{reachable(config.host)}:{port}"


def reachable(host: str) -> str:
    """The host as part of a URL; a wildcard address becomes the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - nothing is bound here
    return f"[{host}]" if ":" in host else host


_TRACE_MODULES = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.json.http",
    "opentelemetry.exporter.otlp.json.file",
)


def trace_config(asked: ServeConfig) -> TraceConfig:
    """The trace settings, checked before any process starts.  Raises ConfigError."""
    config = TraceConfig(
        endpoint=asked.trace_endpoint,
        file=asked.trace_file,
        sample=asked.trace_sample,
        **msgspec.structs.asdict(asked.trace),
    )
    if config.enabled:
        _check_tracing(config)
    return config


def _check_tracing(config: TraceConfig) -> None:
    if not all(map(_is_importable, _TRACE_MODULES)):
        flag = "--trace-endpoint" if config.endpoint is not None else "--trace-file"
        raise ConfigError(f"{flag} needs OpenTelemetry, which is not installed: pip install 'penstock[trace]'")
    if config.endpoint is not None:
        url = urlsplit(config.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--trace-endpoint: expected a URL such as http://127.0.0.1:4318, got {config.endpoint}")
    if config.file is not None and not expanded_path(config.file, "--trace-file").absolute().parent.is_dir():
        raise ConfigError(f"--trace-file {config.file}: there is no such folder")


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False
