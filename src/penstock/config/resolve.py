"""Resolves every "auto" setting of ``penstock serve`` and ``penstock worker``, once, into a ``ServePlan``.

Pure: the facts about machine and model are arguments, so each decision can be tested for any machine.  Knows no
processes, weights or kernels.  What is less than the model offers (a shorter context, say) is explained in ``notes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from penstock.config.auto_mesh import choose_meshes
from penstock.config.base import Config, host_and_port, is_loopback
from penstock.config.cpu_cores import CoreAssignment, CoreSettings, RankCores, WorkerRoles
from penstock.config.decoded_weights import (
    DECODED_WEIGHTS_AUTO,
    DecodedWeightsBudget,
    can_copy,
    decoded_weights_budget,
    reserved_bytes,
)
from penstock.config.device import RUNTIME_BYTES, TRITON, DeviceChoice, choose_device
from penstock.config.facts import KvPageSize, MachineFacts, ModelFacts, extra_weight_bytes
from penstock.config.kv_memory import KV_CONTEXTS, KvMemoryBudget, format_size
from penstock.config.limits import NIXL, RequestLimits
from penstock.config.mesh import Mesh, NodePlace, WorkerPart, parse_mesh
from penstock.config.mixed_numerics import (
    REFERENCE,
    TORCH_FAMILIES,
    PrefillDevice,
    PrefillPlan,
    assign_fleet_cores,
    check_mixed_worker,
    choose_prefill_device,
    limit_to_host_copies,
    plan_prefill,
)
from penstock.config.schema import (
    MAX_CHUNK_TOKENS,
    MAX_STEP_TOKENS,
    CoreLoan,
    EngineSettings,
    KvStoreConfig,
    SchedulerConfig,
    ServeConfig,
    WorkerServeConfig,
    kv_store_flags,
)
from penstock.errors import ConfigError
from penstock.types import FP8_E4M3, PAGE_TOKENS, Role, WorkerId

FP8_KV_FAMILIES = (TRITON, "reference")
"""Kernel families that can keep KV pages in fp8."""

NO_GPU_LANES = (
    "--gpu-lanes is ignored: the two lanes on one GPU were removed, and one step computes prompts and answers"
)
NO_SPECULATION = (
    "--speculate is off: this model's recurrent layers keep one state, which cannot be rolled back when draft tokens "
    "are rejected"
)

NOTHING_TO_DECODE = (
    "--decoded-weights changes nothing here: compressed weights are unpacked when they are loaded, unless kernels "
    "decode them in registers (docs/compression.md)"
)

PARALLEL_AUTO = "auto"

WorkerParts = Mapping[WorkerId, WorkerPart]
"""Of the workers that are on several machines, what this one has."""

NO_PARTS: WorkerParts = MappingProxyType({})

MIN_CONTEXT = 256
"""A shorter context is never chosen automatically."""


class WorkerPlan(Config, frozen=True, kw_only=True):
    """One worker of the fleet."""

    worker: WorkerId
    role: Role
    threads: int  # its own
    cpus: tuple[int, ...]  # empty: all
    niceness: int = 0
    prefill_niceness: int = 0  # its niceness in the prefill role
    lent_cores: int = 0  # cores that others may use while it is idle
    loans: tuple[CoreLoan, ...] = ()
    mesh: Mesh = Mesh()  # how its ranks divide the model
    nodes: NodePlace = NodePlace()  # the machines that they are on, and which this is
    ranks: tuple[RankCores, ...] = ()  # of those on this machine, if there are several in all

    @property
    def shares_cores(self) -> bool:
        """Whether other workers compute on its cores, at the same time or while it is idle."""
        return bool(self.loans) or self.prefill_niceness > 0

    @property
    def crowded(self) -> bool:
        """Whether its ranks have fewer cores than there are ranks."""
        return len(self.ranks) > self.threads

    def cores_of(self, rank: int) -> RankCores:
        """The threads and cores of one of its ranks on this machine."""
        return self.ranks[rank - self.mesh.node_ranks(self.nodes).start]


class ServePlan(Config, frozen=True, kw_only=True):
    """Every setting of a host's workers, resolved."""

    workers: tuple[WorkerPlan, ...]
    connector: str  # "shm", "tcp", "tcp-sealed" or "curve", some with "nixl+" before it
    pages_port: int = 0  # where pages are fetched over sockets; 0: any free one
    device: str = "cpu"  # or "cuda"
    family: str  # kernel family
    prefill_plan: PrefillPlan | None = None  # of prefill workers, if their device or kernels differ
    mixed_with: str = ""  # numerics class of the other role's workers on other hosts; empty: the same
    dtype: str  # "bf16" or "fp32"
    kv_dtype: str  # the same, or "fp8_e4m3"
    activation_dtype: str | None = None  # inputs of quantized weights: "int8", or None: as dtype
    page_bytes: int
    decoded_weights: DecodedWeightsBudget | None = None  # None: compressed weights have no decoded copies
    scheduler: SchedulerConfig  # the same in every worker
    numa_nodes: tuple[int, ...] = ()  # NUMA nodes that the weights are interleaved over; empty: not interleaved
    notes: tuple[str, ...]  # one line each, for people
    warnings: tuple[str, ...] = ()

    @property
    def split(self) -> bool:
        """Whether prefill and decode have separate workers."""
        return all(w.role is not Role.BOTH for w in self.workers)

    @property
    def mixed_numerics(self) -> bool:
        """Whether prefill and decode have different numerics classes."""
        return self.prefill_plan is not None or bool(self.mixed_with)

    def prefill_plan_of(self, worker: WorkerPlan) -> PrefillPlan | None:
        """The worker's device and kernels, if they differ from the others'."""
        return self.prefill_plan if worker.role is Role.PREFILL else None

    def pages_on_device(self, worker: WorkerPlan) -> bool:
        """Whether its pages are not in host memory, or have another layout there than the others'."""
        prefill = self.prefill_plan_of(worker)
        if prefill is not None:
            return prefill.has_own_memory
        return self.device != "cpu" or (
            self.mixed_numerics and worker.role is Role.PREFILL and self.family in TORCH_FAMILIES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """KV pages of each worker, and the longest context that they hold."""

    pages: int
    max_model_len: int
    note: str = ""  # why that is less than the model's; empty: it is not


def resolve(config: ServeConfig, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """The plan of ``penstock serve``.  Raises ConfigError with the numbers and the flag to change."""
    if config.encode_workers and not model.multimodal:
        raise ConfigError(
            f"--encode-workers: {model.name} takes no images or audio, so there is nothing to encode; leave it out"
        )
    if config.prefill_device == "cuda" and config.device == "auto":
        choice = DeviceChoice(device="cpu")
    else:
        choice = choose_device(config, machine.gpu, _why_not_gpu(config, machine, model))
    aggregated = config.aggregated or choice.device != "cpu"
    return _plan(
        config,
        machine,
        model,
        roles=_generating_workers(config, aggregated) if model.pooling is None else _pooling_workers(config, model),
        connector={"auto": "shm", "nixl": f"{NIXL}tcp"}.get(config.transfer, config.transfer),
        cores=_core_settings(config, choice),
        choice=choice,
        prefill=choose_prefill_device(config, machine, model, _family(config, machine, choice.device)),
    )


def resolve_worker(config: WorkerServeConfig, worker: WorkerId, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """The plan of ``penstock worker``: one worker for gateways on other hosts, so pages do not move by shared memory.

    Raises ConfigError as ``resolve``.
    """
    choice = choose_device(config, machine.gpu, _why_not_gpu(config, machine, model))
    if config.role is Role.ENCODE and not model.multimodal:
        raise ConfigError(f"--role encode: {model.name} takes no images or audio, so there is nothing to encode")
    if model.pooling is not None and config.role is not Role.BOTH:
        raise ConfigError(f"--role {config.role.value}: {model.name} is a pooling model: use --role both")
    check_mixed_worker(config, model, _family(config, machine, choice.device))
    parts = worker_parts(config, worker)
    if parts:
        _check_encryption(machine)
    plan = _plan(
        config,
        machine,
        model,
        roles=((worker, config.role),),
        connector=_connector_between_hosts(config.transfer, host_and_port(config.listen)[0], machine),
        cores=CoreSettings(threads=config.threads),
        choice=choice,
        host_copies=config.mixed_with is not None and choice.gpu is not None,
        parts=parts,
    )
    return msgspec.structs.replace(plan, pages_port=config.pages_port, mixed_with=config.mixed_with or "")


def resolve_node(
    config: ServeConfig,
    workers: WorkerRoles,
    address: str,
    machine: MachineFacts,
    model: ModelFacts,
    *,
    parts: WorkerParts = NO_PARTS,
) -> ServePlan:
    """The plan of ``penstock node``: these workers, for gateways on this host and on others, that reach them at
    ``address``.  ``parts``: of those of them that are on several nodes.

    Raises ConfigError as ``resolve``.
    """
    choice = choose_device(config, machine.gpu, _why_not_gpu(config, machine, model))
    if choice.device != "cpu" and len(workers) > 1:
        raise ConfigError(f'a GPU has one worker, and this node has {len(workers)}: leave one, or set device = "cpu"')
    if parts:
        _check_encryption(machine)
    return _plan(
        config,
        machine,
        model,
        roles=workers,
        connector=_connector_between_hosts(config.transfer, address, machine),
        cores=_core_settings(config, choice),
        choice=choice,
        parts=parts,
    )


def _check_encryption(machine: MachineFacts) -> None:
    if not machine.can_encrypt_pages:
        raise ConfigError(
            "a worker on several machines encrypts what they exchange, which needs the package cryptography, and a "
            "recent one: pip install 'penstock[encryption]' on all of them"
        )


def _core_settings(config: ServeConfig, choice: DeviceChoice) -> CoreSettings:
    """What the settings say of the cores of several workers on one host."""
    return CoreSettings(
        threads=config.threads,
        prefill_cpus=config.prefill_cores,
        decode_cpus=config.decode_cores,
        lend=config.lend_cores and choice.device == "cpu" and config.kernels != REFERENCE,
    )


def _connector_between_hosts(transfer: str, host: str, machine: MachineFacts) -> str:
    """The KV connector of a worker that listens there: encrypted unless it is on the loopback or was asked not to be.

    Raises ConfigError if pages cannot be encrypted as asked.
    """
    if transfer == "nixl":
        return NIXL + _connector_between_hosts("tcp", host, machine)
    if transfer == "tcp-clear" or (transfer != "curve" and is_loopback(host)):
        return "tcp"
    if transfer == "curve" or (transfer == "auto" and not machine.can_encrypt_pages):
        return "curve"
    if not machine.can_encrypt_pages:
        raise ConfigError(
            "--transfer tcp encrypts pages between hosts, which needs the package cryptography, and a recent one: "
            "pip install 'penstock[encryption]' on all of them; or --transfer curve, which is slower, "
            "or tcp-clear on a network that you trust"
        )
    return "tcp-sealed"


def worker_nodes(config: WorkerServeConfig) -> NodePlace:
    """The machines of a worker.  Raises ConfigError for settings that do not go together."""
    nodes = NodePlace(nodes=config.nnodes, node=config.node_rank)
    if nodes.node >= nodes.nodes:
        raise ConfigError(f"--node-rank {nodes.node} of --nnodes {nodes.nodes}: 0 to {nodes.nodes - 1} are possible")
    if nodes.nodes == 1:
        if config.master_addr is not None:
            raise ConfigError("--master-addr is for a worker on several machines: add --nnodes")
        return nodes
    if config.master_addr is None:
        raise ConfigError("--nnodes: add --master-addr tcp://HOST:PORT, where machine 0 listens for the others")
    mesh = worker_mesh(config, config.role) or Mesh()
    if mesh.pipeline < nodes.nodes:
        works = Mesh(tensor=mesh.tensor, pipeline=nodes.nodes)
        raise ConfigError(
            f"--nnodes {nodes.nodes}: each machine has a stage at least, and {mesh.name} has {mesh.pipeline}; "
            f"--parallel {works.name} would work"
        )
    if config.role is not Role.BOTH:
        raise ConfigError(
            f"--role {config.role.value}: a worker on several machines transfers no KV pages, so it does "
            "both: --role both"
        )
    if kv_store_flags(config):
        raise ConfigError(f"{kv_store_flags(config)[0]}: KV pages of a worker on several machines are not stored yet")
    return nodes


def worker_parts(config: WorkerServeConfig, worker: WorkerId) -> WorkerParts:
    """What this machine has of the worker, if it is on several.  Raises ConfigError."""
    place = worker_nodes(config)
    if place.nodes == 1:
        return NO_PARTS
    return {worker: WorkerPart(mesh=worker_mesh(config, config.role) or Mesh(), place=place)}


def worker_mesh(config: EngineSettings, role: Role) -> Mesh | None:
    """How the ranks of workers of a role divide the model; a mesh of one rank unless it was asked for.  None: ``auto``.

    Raises ConfigError.
    """
    own = {Role.PREFILL: "prefill_parallel", Role.DECODE: "decode_parallel"}.get(role, "parallel")
    text = getattr(config, own, None) or config.parallel
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    if role is Role.ENCODE:
        return Mesh()
    if text == PARALLEL_AUTO:
        return None
    if text is not None and any(sizes):
        flag = "tensor" if sizes[0] else "pipeline"
        raise ConfigError(f"--{flag}-parallel-size says what --parallel {text} says: leave one of them out")
    return Mesh(tensor=sizes[0] or 1, pipeline=sizes[1] or 1) if text is None else parse_mesh(text)


def context_length(config: EngineSettings, model: ModelFacts) -> int:
    """The longest prompt and output together, memory aside.  Raises ConfigError."""
    if config.max_model_len is not None and config.max_model_len > model.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: {model.name} has {model.max_positions} positions; "
            "use that or less"
        )
    return config.max_model_len or model.max_positions


def resolve_kv_store(config: EngineSettings, device: str, *, generates: bool) -> KvStoreConfig:
    """The tiers of the KV store.  ``generates``: it is a generative model.  Raises ConfigError."""
    asked = kv_store_flags(config)
    if device != "cpu" or not generates:
        why = f"--device {device}: pages in its memory" if generates else "a pooling model: its pages"
        if asked:
            raise ConfigError(f"{asked[0]} with {why} are not stored; leave it out")
        return KvStoreConfig(peers=False)
    if config.kv_key is not None and not set(asked) - {"--kv-host"}:
        raise ConfigError(
            "--kv-key is for pages on disk or in a remote tier: add --kv-disk DIR, --kv-redis URL or "
            "--kv-mooncake HOST:PORT"
        )
    if config.kv_mooncake_size is not None and config.kv_mooncake is None:
        raise ConfigError("--kv-mooncake-size is memory for a Mooncake store: add --kv-mooncake HOST:PORT")
    return KvStoreConfig(
        **{field: getattr(config.kv_store, field) for field in config.kv_store.__struct_fields__},
        peers=config.kv_peers,
        host_bytes=config.kv_host or 0,
        disk=config.kv_disk,
        disk_bytes=config.kv_disk_size,
        redis=config.kv_redis,
        mooncake=config.kv_mooncake,
        mooncake_bytes=config.kv_mooncake_size or 0,
        key_file=config.kv_key,
    )


def _plan(
    config: EngineSettings,
    machine: MachineFacts,
    model: ModelFacts,
    *,
    roles: WorkerRoles,
    connector: str,
    cores: CoreSettings,
    choice: DeviceChoice,
    prefill: PrefillDevice | None = None,
    host_copies: bool = False,
    parts: WorkerParts = NO_PARTS,
) -> ServePlan:
    """``prefill``: where prompts are computed, if elsewhere.  ``host_copies``: pages have copies on the host."""
    dtype = model.auto_dtype if config.dtype == "auto" else config.dtype
    family = _family(config, machine, choice.device)
    recurrent = model.name if model.recurrent else ""
    kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype, family, recurrent=recurrent, note=choice.note)
    size = _page_size(config, model, kv_dtype)
    copies = can_copy(machine, family, dtype, choice)  # of compressed weights
    memory = _memory_budget(machine, model, choice, roles=roles, dtype=dtype, decoded=reserved_bytes(config) * copies)
    kv = _kv_capacity(config, memory, size)
    kv = replace(kv, pages=limit_to_host_copies(machine, size, kv.pages, kv.max_model_len)) if host_copies else kv
    prefill_plan = None if prefill is None else plan_prefill(prefill, memory, size, kv.pages, kv.max_model_len)
    kv_bytes = kv.pages * size.page_bytes
    alone = assign_fleet_cores(roles, machine.physical_cores, machine.cores, cores, prefill)
    meshes, mesh_note = _meshes(
        config, machine, model, roles, alone, parts=parts, memory=memory, kv_bytes=kv_bytes, on_cpu=prefill is None
    )
    ranks, assigned = _ranks_here(meshes, parts), alone
    if ranks:
        _check_ranks_possible(choice, prefill)
        cores = replace(cores, ranks=ranks, lend=False)
        assigned = assign_fleet_cores(roles, machine.physical_cores, machine.cores, cores, prefill)
    scheduler = msgspec.structs.replace(
        resolve_scheduler(config, model, kv),
        even_pace=any(share.loans for share in assigned.shares),
        max_draft_tokens=config.max_draft_tokens if _speculates(config, model) and not model.recurrent else 0,
    )
    ignored = _ignored_settings(config, model, copies=copies)
    notes = [choice.note, prefill.choice.note if prefill else "", kv.note, mesh_note, *ignored]
    return ServePlan(
        workers=tuple(_workers(roles, assigned, meshes, parts)),
        connector=connector,
        device=choice.device,
        family=family,
        prefill_plan=prefill_plan,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activation_dtype=resolve_activation_dtype(config.activation_dtype, family, choice.device, note=choice.note),
        page_bytes=size.page_bytes,
        decoded_weights=decoded_weights_budget(config, memory, kv_bytes) if copies else None,
        scheduler=scheduler,
        numa_nodes=assigned.numa_nodes,
        notes=tuple(filter(None, (*notes, *assigned.notes))),
        warnings=assigned.warnings,
    )


def _ranks_here(meshes: Mapping[WorkerId, Mesh], parts: WorkerParts) -> dict[WorkerId, int]:
    """How many ranks each worker has on this machine, of those that have several in all."""
    divided = {worker: mesh for worker, mesh in meshes.items() if mesh.ranks > 1}
    return {worker: len(mesh.node_ranks(_place(worker, parts))) for worker, mesh in divided.items()}


def _memory_budget(
    machine: MachineFacts, model: ModelFacts, choice: DeviceChoice, *, roles: WorkerRoles, dtype: str, decoded: int
) -> KvMemoryBudget:
    return KvMemoryBudget(
        model=model,
        workers=max(1, sum(role is not Role.ENCODE for _, role in roles)),
        number_bytes=2 if dtype == "bf16" else 4,
        host_bytes=machine.memory_bytes,
        choice=choice,
        decoded_bytes=decoded,
    )


def _ignored_settings(config: EngineSettings, model: ModelFacts, *, copies: bool) -> Iterator[str]:
    """A line for each setting that changes nothing here."""
    if config.gpu_lanes != "off":
        yield NO_GPU_LANES
    if config.decoded_weights not in (DECODED_WEIGHTS_AUTO, 0) and not copies:
        yield NOTHING_TO_DECODE
    if _speculates(config, model) and model.recurrent:
        yield NO_SPECULATION


def _meshes(
    config: EngineSettings,
    machine: MachineFacts,
    model: ModelFacts,
    roles: WorkerRoles,
    alone: CoreAssignment,
    *,
    parts: WorkerParts,
    memory: KvMemoryBudget,
    kv_bytes: int,
    on_cpu: bool,
) -> tuple[dict[WorkerId, Mesh], str]:
    """How the ranks of each worker divide the model, and why, where that was left to ``auto``.

    ``alone``: their cores as single processes.  ``kv_bytes``: of the pages of each.
    """
    asked = {worker: parts[worker].mesh if worker in parts else worker_mesh(config, role) for worker, role in roles}
    free = tuple((worker, role) for worker, role in roles if asked[worker] is None)
    meshes = {worker: mesh for worker, mesh in asked.items() if mesh is not None}
    if not free:
        return meshes, ""
    shares = tuple(share for (worker, _), share in zip(roles, alone.shares, strict=True) if asked[worker] is None)
    chosen, note = choose_meshes(
        free,
        replace(alone, shares=shares),
        machine,
        model,
        threads=config.threads,
        number_bytes=memory.number_bytes,
        room=memory.available_bytes() - memory.workers * kv_bytes,
        why_one=_why_one_process(config, model, memory.choice, on_cpu=on_cpu),
    )
    return meshes | chosen, note


def _why_one_process(config: EngineSettings, model: ModelFacts, choice: DeviceChoice, *, on_cpu: bool) -> str:
    """Why this service cannot divide a model; empty: it can."""
    if choice.device != "cpu" or not on_cpu:
        return "over GPUs a model is not divided yet"
    if _speculates(config, model) and not model.recurrent:
        return "with speculation a model is not divided yet"
    if getattr(config, "lora", ()) or getattr(config, "allow_lora_updating", False):
        return "with LoRA adapters a model is not divided yet"
    return ""


def _check_ranks_possible(choice: DeviceChoice, prefill: PrefillDevice | None) -> None:
    """Raises ConfigError where a model cannot be divided yet."""
    if choice.device != "cpu":
        raise ConfigError("--parallel divides a model over processes of a CPU; over GPUs it cannot yet: --device cpu")
    if prefill is not None:
        raise ConfigError("--parallel with another device or other kernels for prefill is not supported yet")


def _speculates(config: EngineSettings, model: ModelFacts) -> bool:
    return config.speculate != "off" and model.pooling is None


def _page_size(config: EngineSettings, model: ModelFacts, kv_dtype: str) -> KvPageSize:
    plain = model.page_bytes_bf16 * (2 if kv_dtype == "fp32" else 1)
    return KvPageSize(
        page_bytes=model.page_bytes_fp8 if kv_dtype == FP8_E4M3 else plain,
        reaches=model.reaches,
        chunk_tokens=min(config.max_chunk_tokens or MAX_CHUNK_TOKENS, MAX_STEP_TOKENS),
    )


def resolve_kv_dtype(asked: str, compute: str, family: str, *, recurrent: str = "", note: str = "") -> str:
    """The type of keys and values in KV pages: the compute type unless ``--kv-dtype`` asks for another.

    ``recurrent``: the model's name, if it has recurrent layers.  ``note``: why no GPU is used, if there is a reason.
    Raises ConfigError if the type is not available.
    """
    if asked == "auto":
        return compute
    if recurrent:
        raise ConfigError(
            f"--kv-dtype {FP8_E4M3}: {recurrent} has recurrent layers, whose states are in fp32 and lie in the same "
            "pages; leave it out"
        )
    if family not in FP8_KV_FAMILIES:
        why = f" ({note})" if note else ""
        raise ConfigError(
            f"--kv-dtype {FP8_E4M3}: the kernels of processors ({family}) keep KV pages in the compute type; it takes "
            f"a GPU{why}, or, to try it slowly, --kernels reference; else leave it out"
        )
    return asked


def resolve_activation_dtype(asked: str, family: str, device: str, *, note: str = "") -> str | None:
    """The type of the inputs of quantized weights; None: the compute type.  ``note``: why this device was chosen.

    Raises ConfigError if the type is not available.
    """
    if asked == "auto":
        return None
    if device != "cpu" or family == TRITON:
        why = f" ({note})" if note else ""
        raise ConfigError(
            f"--activation-dtype {asked}: the kernels of GPUs{why} have inputs of the compute type only; leave it out, "
            "or use --device cpu"
        )
    return asked


def resolve_scheduler(config: EngineSettings, model: ModelFacts, kv: KvCapacity) -> SchedulerConfig:
    """The configuration of every worker's scheduler, speculation and core lending aside."""
    return SchedulerConfig(
        pages=kv.pages,
        reaches=model.reaches,
        max_model_len=kv.max_model_len,
        max_running=config.max_running,
        max_chunk_tokens=config.max_chunk_tokens or MAX_CHUNK_TOKENS,
        step_budget_ms=config.scheduling.interactive_tpot_ms,
        batch_step_budget_ms=config.scheduling.batch_tpot_ms,
        long_prompt_ms=config.scheduling.interactive_ttft_ms,
        gentle_read_s=_gentle_read_s(config),
        contended_step_ms=config.scheduling.contended_step_ms,
        batch_patience_s=config.scheduling.batch_patience_s,
        output_token_weight=config.scheduling.output_token_weight,
        tenant_memory_s=config.scheduling.tenant_memory_s,
        pooling=model.pooling,
    )


def _gentle_read_s(config: EngineSettings) -> float:
    """Half of the limit on the time to the first token; ``penstock worker`` has no gateway's limits, so the default."""
    limits = config.limits if isinstance(config, ServeConfig) else RequestLimits()
    return limits.first_byte_s / 2


def _generating_workers(config: ServeConfig, aggregated: bool) -> WorkerRoles:
    counts: tuple[tuple[Role, int], ...] = ((Role.PREFILL, config.prefill or 1), (Role.DECODE, config.decode or 1))
    if aggregated:
        counts = ((Role.BOTH, 1),)
    counts += ((Role.ENCODE, config.encode_workers or 0),)
    return tuple((WorkerId(f"{role.value}-{i}"), role) for role, count in counts for i in range(count))


def _pooling_workers(config: ServeConfig, model: ModelFacts) -> WorkerRoles:
    """Workers of a pooling model, which has no decode phase: ``--prefill N`` says how many."""
    for flag in ("decode", "prefill_cores", "decode_cores"):
        if getattr(config, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: {model.name} is a pooling model without decode, so there is one kind "
                "of worker; leave it out (--prefill N starts N of them)"
            )
    return tuple((WorkerId(f"both-{i}"), Role.BOTH) for i in range(config.prefill or 1))


def _family(config: EngineSettings, machine: MachineFacts, device: str) -> str:
    if device != "cpu":
        if config.kernels not in ("auto", TRITON, REFERENCE):
            raise ConfigError(f"--kernels {config.kernels}: a GPU has {TRITON} and, to check them, {REFERENCE}")
        return TRITON if config.kernels == "auto" else config.kernels
    if config.kernels == "auto":
        if not machine.kernel_families:
            raise ConfigError("no kernel family runs on this machine; `penstock doctor` says why")
        return machine.kernel_families[0]
    if config.kernels not in machine.kernel_families:
        known = ", ".join(machine.kernel_families)
        raise ConfigError(f"--kernels {config.kernels}: this machine and build have {known}")
    return config.kernels


def _workers(
    roles: WorkerRoles, assigned: CoreAssignment, meshes: Mapping[WorkerId, Mesh], parts: WorkerParts
) -> Iterator[WorkerPlan]:
    for (name, role), share in zip(roles, assigned.shares, strict=True):
        yield WorkerPlan(
            worker=name,
            role=role,
            threads=share.threads,
            cpus=share.cpus,
            niceness=share.niceness,
            prefill_niceness=share.prefill_niceness,
            lent_cores=share.lent_cores,
            loans=share.loans,
            mesh=meshes[name],
            nodes=_place(name, parts),
            ranks=share.ranks,
        )


def _place(worker: WorkerId, parts: WorkerParts) -> NodePlace:
    return parts[worker].place if worker in parts else NodePlace()


def _kv_capacity(config: EngineSettings, memory: KvMemoryBudget, size: KvPageSize) -> KvCapacity:
    """KV pages of each worker.  At least one context of the full length fits.  Raises ConfigError."""
    asked, model = config.max_model_len, memory.model
    longest = context_length(config, model)
    needed = size.pages_for(longest) * size.page_bytes
    budget, source = memory.kv_bytes(config.kv_memory, needed)
    pages = budget // size.page_bytes
    if model.pooling is not None and model.pooling.whole_prompts:
        pages = min(pages, KV_CONTEXTS * size.pages_for(longest))  # their pages only count tokens
    if pages >= size.pages_for(longest):
        return KvCapacity(pages=pages, max_model_len=longest)
    fits = size.tokens_in(pages, longest)
    ample = f"--kv-memory {format_size(needed, up=True)}"
    if asked is not None or fits < min(MIN_CONTEXT, longest):
        raise ConfigError(
            f"one context of {longest} tokens needs {format_size(needed)} of KV pages and {source} holds {fits}: "
            f"use {ample}" + (f" or --max-model-len {fits}" if fits >= PAGE_TOKENS else "")
        )
    note = f"context cut from {longest} to {fits} tokens: {source} holds no more; {ample} would hold all"
    return KvCapacity(pages=pages, max_model_len=fits, note=note)


def _why_not_gpu(config: EngineSettings, machine: MachineFacts, model: ModelFacts) -> str:
    """Why a GPU does not suit this model; empty: it does."""
    gpu = machine.gpu.gpu
    if gpu is None:
        return ""
    if model.pooling is not None:
        return f"{model.name} is a pooling model, which GPUs compute operation by operation here"
    if model.multimodal:
        return f"{model.name} takes images or audio, which GPUs compute operation by operation here"
    number_bytes = 4 if "fp32" in (config.dtype, model.auto_dtype if config.dtype == "auto" else "") else 2
    weights = model.parameters * number_bytes + extra_weight_bytes(model.extra_weights, 1, number_bytes)
    if weights + model.activation_bytes + RUNTIME_BYTES >= gpu.free_bytes:
        return (
            f"{model.name} needs {format_size(weights)} for its weights, {format_size(gpu.free_bytes)} are free there"
        )
    return ""
