"""Decides every "auto" of ``penstock serve`` and ``penstock worker`` once, from given facts; nothing below does again.

Pure: the facts about machine and model are handed in, so each decision can be tested for machines that nobody has.
Knows no processes, weights or kernels; what it leaves out (a shorter context, a smaller memory) it says in ``notes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.config.base import Config, is_loopback
from penstock.config.cpu_cores import CoreSettings, CoreShare, WorkerRoles
from penstock.config.device import RUNTIME_BYTES, TRITON, DeviceChoice, choose_device
from penstock.config.facts import KvPageSize, MachineFacts, ModelFacts, PhysicalCore, extra_weight_bytes
from penstock.config.kv_memory import KV_CONTEXTS, KvMemoryBudget, format_size
from penstock.config.limits import NIXL, RequestLimits
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

if TYPE_CHECKING:
    from penstock.config.facts import ModelFacts


# MERGED: What KV pages keep keys and values in, decided from given facts: ``--kv-dtype``.  Pure.

FP8_KV_FAMILIES = (TRITON, "reference")
"""Kernel families that have codes of keys and values."""


def resolve_kv_dtype(asked: str, compute: str, family: str, *, recurrent: str = "", note: str = "") -> str:
    """The type: the compute type unless another was asked for.

    ``recurrent``: the model's name, if it has recurrent layers.  ``note``: why no GPU is used, if there is a reason.
    Raises ConfigError where the asked one cannot be had.
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


# MERGED: What an operator's settings mean for the scheduler of every worker.  Pure.


def resolve_scheduler(config: EngineSettings, model: ModelFacts, room: tuple[int, int]) -> SchedulerConfig:
    """``room``: pages, and tokens of the longest context."""
    pages, max_model_len = room
    return SchedulerConfig(
        pages=pages,
        reaches=model.reaches,
        max_model_len=max_model_len,
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
    """Half of what a first token may take.  A worker that is started by itself is told no gateway's limits."""
    limits = config.limits if isinstance(config, ServeConfig) else RequestLimits()
    return limits.first_byte_s / 2


NO_GPU_LANES = (
    "--gpu-lanes is ignored: the two lanes on one GPU were removed, and one step computes prompts and answers"
)
NO_SPECULATION = (
    "--speculate is off: this model's recurrent layers keep one state, which cannot take back tokens that were guessed "
    "wrongly"
)

MIN_CONTEXT = 256
"""A context shorter than this is never chosen on the operator's behalf."""


class WorkerPlan(Config, frozen=True, kw_only=True):
    """One worker of the fleet."""

    worker: WorkerId
    role: Role
    threads: int  # its own
    cpus: tuple[int, ...]  # empty: all
    niceness: int = 0
    prefill_niceness: int = 0  # its niceness, were it a prefill worker
    lent_cores: int = 0  # cores, while it has nothing to do
    loans: tuple[CoreLoan, ...] = ()


class ServePlan(Config, frozen=True, kw_only=True):
    """Everything decided."""

    workers: tuple[WorkerPlan, ...]
    connector: str  # "shm", "tcp", "tcp-sealed" or "curve", some with "nixl+" before it
    pages_port: int = 0  # where pages are fetched over sockets; 0: any free one
    device: str = "cpu"  # or "cuda"
    family: str  # kernel family
    prefill_plan: PrefillPlan | None = None  # of prefill workers, where they compute otherwise than the others
    mixed_with: str = ""  # numerics class of the other role's workers, on other hosts; empty: the same as here
    dtype: str  # "bf16" or "fp32"
    kv_dtype: str  # the same, or "fp8_e4m3"
    page_bytes: int
    scheduler: SchedulerConfig  # the same in every worker
    numa_nodes: tuple[int, ...] = ()  # memory nodes that the weights are spread over; empty: wherever they are loaded
    notes: tuple[str, ...]  # one line each, for people

    @property
    def split(self) -> bool:
        return all(w.role is not Role.BOTH for w in self.workers)

    @property
    def mixed_numerics(self) -> bool:
        """Are prompts read in another numerics class than answers are written in?"""
        return self.prefill_plan is not None or bool(self.mixed_with)

    def prefill_plan_of(self, place: WorkerPlan) -> PrefillPlan | None:
        """Where this worker computes, if not where the others do."""
        return self.prefill_plan if place.role is Role.PREFILL else None

    def pages_on_device(self, place: WorkerPlan) -> bool:
        """Do its pages stand elsewhere than in the host's memory, or otherwise than others' there?"""
        reading = self.prefill_plan_of(place)
        if reading is not None:
            return reading.has_own_memory
        return self.device != "cpu" or (
            self.mixed_numerics and place.role is Role.PREFILL and self.family in TORCH_FAMILIES
        )


def resolve(config: ServeConfig, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """All decisions.  Raises ConfigError with the numbers and the flag to change."""
    if config.encode_workers and not model.multimodal:
        raise ConfigError(
            f"--encode-workers: {model.name} reads no images or sounds, so there is nothing to encode; leave it out"
        )
    if config.prefill_device == "cuda" and config.device == "auto":
        choice = DeviceChoice(device="cpu")
    else:
        choice = choose_device(config, machine.gpu, _unfit(config, machine, model))
    reader = choose_prefill_device(config, machine, model, _family(config, machine, choice.device))
    wishes = CoreSettings(
        threads=config.threads,
        prefill_cpus=config.prefill_cores,
        decode_cpus=config.decode_cores,
        lend=config.lend_cores and choice.device == "cpu" and config.kernels != REFERENCE,
    )
    carrier = {"auto": "shm", "nixl": f"{NIXL}tcp"}.get(config.transfer, config.transfer)
    aggregated = config.aggregated or choice.device != "cpu"
    places = _places(config, aggregated) if model.pooling is None else _readers(config, model)
    return _resolve(config, places, (carrier, wishes, choice, reader), machine, model)


def resolve_worker(config: WorkerServeConfig, worker: WorkerId, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """The same for one worker that is joined from other hosts, where memory cannot be shared."""
    choice = choose_device(config, machine.gpu, _unfit(config, machine, model))
    if config.role is Role.ENCODE and not model.multimodal:
        raise ConfigError(f"--role encode: {model.name} reads no images or sounds, so there is nothing to encode")
    if model.pooling is not None and config.role is not Role.BOTH:
        raise ConfigError(f"--role {config.role.value}: {model.name} only reads, in one phase; use --role both")
    check_mixed_worker(config, model, _family(config, machine, choice.device))
    how = (_between_hosts(config, machine), CoreSettings(threads=config.threads), choice, None)
    plan = _resolve(config, ((worker, config.role),), how, machine, model)
    return msgspec.structs.replace(plan, pages_port=config.pages_port, mixed_with=config.mixed_with or "")


def _between_hosts(config: WorkerServeConfig, machine: MachineFacts) -> str:
    """How pages travel to and from a worker that listens there: encrypted, unless it is the loopback or was asked for.

    Raises ConfigError when they cannot be encrypted as asked.
    """
    if config.transfer == "nixl":
        return NIXL + _between_hosts(msgspec.structs.replace(config, transfer="tcp"), machine)
    host = config.listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if config.transfer == "tcp-clear" or (config.transfer != "curve" and is_loopback(host)):
        return "tcp"
    if config.transfer == "curve" or (config.transfer == "auto" and not machine.can_encrypt_pages):
        return "curve"
    if not machine.can_encrypt_pages:
        raise ConfigError(
            "--transfer tcp encrypts pages between hosts, which needs the package cryptography, and a recent one: "
            "pip install 'penstock[encryption]' on all of them; or --transfer curve, which is slower, "
            "or tcp-clear on a network that you trust"
        )
    return "tcp-sealed"


def context_length(config: EngineSettings, model: ModelFacts) -> int:
    """Tokens of prompt and answer together, where no memory here limits them.  Raises ConfigError."""
    if config.max_model_len is not None and config.max_model_len > model.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: {model.name} was made for {model.max_positions} tokens; "
            "ask for that or less"
        )
    return config.max_model_len or model.max_positions


def resolve_kv_store(config: EngineSettings, device: str, *, writes: bool) -> KvStoreConfig:
    """Where KV pages stand beside the workers' own memory; ``writes``: the model does.  Raises ConfigError."""
    asked = kv_store_flags(config)
    if device != "cpu" or not writes:
        why = f"--device {device}: pages in its memory" if writes else "a model that only reads: its pages"
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


def _resolve(
    config: EngineSettings,
    places: WorkerRoles,
    how: tuple[str, CoreSettings, DeviceChoice, PrefillDevice | None],
    machine: MachineFacts,
    model: ModelFacts,
) -> ServePlan:
    dtype = model.auto_dtype if config.dtype == "auto" else config.dtype
    carrier, wishes, choice, reader = how
    family = _family(config, machine, choice.device)
    kept, page_bytes = _kept(config, model, (dtype, family), choice)
    chunk = config.max_chunk_tokens or MAX_CHUNK_TOKENS
    size = KvPageSize(page_bytes=page_bytes, reaches=model.reaches, chunk_tokens=min(chunk, MAX_STEP_TOKENS))
    holders = max(1, sum(role is not Role.ENCODE for _, role in places))  # of KV pages
    memory = KvMemoryBudget(model, holders, 2 if dtype == "bf16" else 4, machine.memory_bytes, choice)
    pages, max_model_len, note = _pages(config, memory, size)
    if isinstance(config, WorkerServeConfig) and config.mixed_with is not None and choice.gpu is not None:
        pages = limit_to_host_copies(machine, size, pages, max_model_len)
    reading = None if reader is None else plan_prefill(reader, memory, size, pages, max_model_len)
    cores = machine.topology or tuple(PhysicalCore(cpus=(cpu,)) for cpu in machine.cpus)
    division = assign_fleet_cores(places, cores, machine.cores, wishes, reader)
    wanted = config.speculate != "off" and model.pooling is None
    silent = wanted and model.recurrent
    removed = NO_GPU_LANES if config.gpu_lanes != "off" else ""
    scheduler = msgspec.structs.replace(
        resolve_scheduler(config, model, (pages, max_model_len)),
        even_pace=any(share.loans for share in division.shares),
        max_draft_tokens=config.max_draft_tokens if wanted and not silent else 0,
    )
    told = (choice.note, "" if reader is None else reader.choice.note)
    return ServePlan(
        workers=tuple(_worker(*place, share) for place, share in zip(places, division.shares, strict=True)),
        connector=carrier,
        device=choice.device,
        family=family,
        prefill_plan=reading,
        dtype=dtype,
        kv_dtype=kept,
        page_bytes=page_bytes,
        scheduler=scheduler,
        numa_nodes=division.numa_nodes,
        notes=(*filter(None, (*told, note, removed)), *((NO_SPECULATION,) if silent else ()), *division.notes),
    )


def _kept(
    config: EngineSettings, model: ModelFacts, computed: tuple[str, str], choice: DeviceChoice
) -> tuple[str, int]:
    """What pages are in, and their bytes; ``computed``: in which type, by which family.  Raises ConfigError."""
    recurrent = model.name if model.recurrent else ""
    kept = resolve_kv_dtype(config.kv_dtype, *computed, recurrent=recurrent, note=choice.note)
    plain = model.page_bytes_bf16 * (2 if kept == "fp32" else 1)
    return kept, model.page_bytes_fp8 if kept == FP8_E4M3 else plain


def _places(config: ServeConfig, aggregated: bool) -> WorkerRoles:
    counts: tuple[tuple[Role, int], ...] = ((Role.PREFILL, config.prefill or 1), (Role.DECODE, config.decode or 1))
    if aggregated:
        counts = ((Role.BOTH, 1),)
    counts += ((Role.ENCODE, config.encode_workers or 0),)
    return tuple((WorkerId(f"{role.value}-{i}"), role) for role, count in counts for i in range(count))


def _readers(config: ServeConfig, model: ModelFacts) -> WorkerRoles:
    """Workers of a model that writes nothing: there is one phase, so ``--prefill N`` says how many."""
    for flag in ("decode", "prefill_cores", "decode_cores"):
        if getattr(config, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: {model.name} only reads, so there is nothing to decode and one kind of "
                "worker; leave it out (--prefill N starts N of them)"
            )
    return tuple((WorkerId(f"both-{i}"), Role.BOTH) for i in range(config.prefill or 1))


def _family(config: EngineSettings, machine: MachineFacts, device: str) -> str:
    if device != "cpu":
        if config.kernels not in ("auto", TRITON, REFERENCE):
            raise ConfigError(f"--kernels {config.kernels}: a GPU has {TRITON} and, to check them, {REFERENCE}")
        return TRITON if config.kernels == "auto" else config.kernels
    if config.kernels == "auto":
        if not machine.kernel_families:
            raise ConfigError("no kernel family runs on this machine; `penstock doctor` tells why")
        return machine.kernel_families[0]
    if config.kernels not in machine.kernel_families:
        known = ", ".join(machine.kernel_families)
        raise ConfigError(f"--kernels {config.kernels}: this machine and build have {known}")
    return config.kernels


def _worker(name: WorkerId, role: Role, share: CoreShare) -> WorkerPlan:
    return WorkerPlan(
        worker=name,
        role=role,
        threads=share.threads,
        cpus=share.cpus,
        niceness=share.niceness,
        prefill_niceness=share.prefill_niceness,
        lent_cores=share.lent_cores,
        loans=share.loans,
    )


def _pages(config: EngineSettings, memory: KvMemoryBudget, size: KvPageSize) -> tuple[int, int, str | None]:
    """(pages of each worker, longest context, a note if that is not the model's): one full context always fits."""
    asked, model = config.max_model_len, memory.model
    longest = context_length(config, model)
    needed = size.pages_for(longest) * size.page_bytes
    budget, source = memory.kv_bytes(config.kv_memory, needed)
    pages = budget // size.page_bytes
    if model.pooling is not None and model.pooling.whole_prompts:
        pages = min(pages, KV_CONTEXTS * size.pages_for(longest))  # they only count tokens
    if pages >= size.pages_for(longest):
        return pages, longest, None
    fits = size.tokens_in(pages, longest)
    ample = f"--kv-memory {format_size(needed, up=True)}"
    if asked is not None or fits < min(MIN_CONTEXT, longest):
        raise ConfigError(
            f"one context of {longest} tokens needs {format_size(needed)} of KV pages and {source} holds {fits}: "
            f"use {ample}" + (f" or --max-model-len {fits}" if fits >= PAGE_TOKENS else "")
        )
    note = f"context cut from {longest} to {fits} tokens: {source} holds no more; {ample} would hold all"
    return pages, fits, note


def _unfit(config: EngineSettings, machine: MachineFacts, model: ModelFacts) -> str:
    """Why a GPU is not the place for this model; empty: it is."""
    gpu = machine.gpu.gpu
    if gpu is None:
        return ""
    if model.pooling is not None:
        return f"{model.name} only reads, which GPUs do operation by operation here"
    if model.multimodal:
        return f"{model.name} reads images or sounds, which GPUs do operation by operation here"
    number_bytes = 4 if "fp32" in (config.dtype, model.auto_dtype if config.dtype == "auto" else "") else 2
    weights = model.parameters * number_bytes + extra_weight_bytes(model.extra_weights, 1, number_bytes)
    if weights + model.activation_bytes + RUNTIME_BYTES >= gpu.free_bytes:
        return (
            f"{model.name} needs {format_size(weights)} for its weights, {format_size(gpu.free_bytes)} are free there"
        )
    return ""
