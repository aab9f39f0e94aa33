"""Decides every "auto" of ``penstock serve`` and ``penstock worker`` once, from given facts; nothing below does again.

Pure: the facts about machine and model are handed in, so each decision can be tested for machines that nobody has.
Knows no processes, weights or kernels; what it leaves out (a shorter context, a smaller memory) it says in ``notes``.
"""

from __future__ import annotations

from penstock.config.cores import Core, Places, Share, Wishes, divide
from penstock.config.schema import (
    MAX_CHUNK_TOKENS,
    MAX_STEP_TOKENS,
    Config,
    EngineSettings,
    Loan,
    PoolingConfig,
    SchedulerConfig,
    ServeConfig,
    WorkerServeConfig,
)
from penstock.errors import ConfigError
from penstock.reach import EVERYTHING, Reach, most_pages, tokens_held
from penstock.types import PAGE_TOKENS, Role, WorkerId

REFERENCE = "reference"
"""The kernel family that has no threads of ours."""

KV_SHARE = 0.10
"""Part of the available memory that the KV pages of all workers together take unless told otherwise."""

KV_CONTEXTS = 64
"""More full contexts than this in one worker are not kept room for unless told otherwise."""

MIN_CONTEXT = 256
"""A context shorter than this is never chosen on the operator's behalf."""


class MachineFacts(Config, frozen=True, kw_only=True):
    """The machine, as ``launch.facts`` found it."""

    cpus: tuple[int, ...]  # logical processors that this process may use
    cores: int  # physical cores among them, within the container's quota
    topology: tuple[Core, ...] = ()  # the physical cores; empty: each processor is one, and all are on one node
    memory_bytes: int  # that can be had now without swapping, within the container's limit
    kernel_families: tuple[str, ...]  # that this build and processor can run, best first


class ModelFacts(Config, frozen=True, kw_only=True):
    """The model, as far as memory and limits go."""

    name: str
    max_positions: int
    parameters: int
    sees: bool = False  # it reads images
    auto_dtype: str  # compute type that suits the stored weights, "bf16" or "fp32"
    page_bytes_bf16: int  # of one KV page of 16 tokens of a group of layers, with 2-byte elements
    reaches: tuple[Reach, ...] = (EVERYTHING,)  # of each such group
    pooling: PoolingConfig | None = None  # None: it writes


class PageSize(Config, frozen=True, kw_only=True):
    """What a token takes of KV memory."""

    page_bytes: int
    reaches: tuple[Reach, ...]  # of each group of layers
    ahead: int  # tokens of one request that a step computes at most

    def pages(self, tokens: int) -> int:
        """Pages that one context of so many tokens takes at most at any time."""
        return most_pages(self.reaches, tokens, ahead=self.ahead, page_tokens=PAGE_TOKENS)

    def tokens(self, pages: int, longest: int) -> int:
        """Tokens, up to ``longest``, of a context that so many pages hold."""
        return tokens_held(self.reaches, pages, longest, ahead=self.ahead, page_tokens=PAGE_TOKENS)


class WorkerPlan(Config, frozen=True, kw_only=True):
    """One worker of the fleet."""

    worker: WorkerId
    role: Role
    threads: int  # its own
    cpus: tuple[int, ...]  # empty: all
    niceness: int = 0
    lends: int = 0  # cores, while it has nothing to do
    loans: tuple[Loan, ...] = ()


class ServePlan(Config, frozen=True, kw_only=True):
    """Everything decided."""

    workers: tuple[WorkerPlan, ...]
    carrier: str  # "shm" or "tcp"
    family: str  # kernel family
    dtype: str  # "bf16" or "fp32"
    page_bytes: int
    scheduler: SchedulerConfig  # the same in every worker
    nodes: tuple[int, ...] = ()  # memory nodes that the weights are spread over; empty: wherever they are loaded
    notes: tuple[str, ...]  # one line each, for people

    @property
    def split(self) -> bool:
        return all(w.role is not Role.BOTH for w in self.workers)


def resolve(config: ServeConfig, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """All decisions.  Raises ConfigError with the numbers and the flag to change."""
    if config.device != "cpu" and not config.aggregated and model.pooling is None:
        raise ConfigError(
            f"--device {config.device}: pages in its memory cannot be handed over; "
            "add --aggregated to serve from one worker"
        )
    if config.encode_workers and not model.sees:
        raise ConfigError(
            f"--encode-workers: {model.name} reads no images, so there is nothing to encode; leave it out"
        )
    wishes = Wishes(
        threads=config.threads,
        prefill=config.prefill_cores,
        decode=config.decode_cores,
        lend=config.lend_cores and config.device == "cpu" and config.kernels != REFERENCE,
    )
    carrier = "shm" if config.transfer == "auto" else config.transfer
    places = _places(config) if model.pooling is None else _readers(config, model)
    return _resolve(config, places, (carrier, wishes), machine, model)


def resolve_worker(config: WorkerServeConfig, worker: WorkerId, machine: MachineFacts, model: ModelFacts) -> ServePlan:
    """The same for one worker that is joined from other hosts, where memory cannot be shared."""
    if config.device != "cpu" and config.role is not Role.BOTH:
        raise ConfigError(f"--device {config.device}: pages in its memory cannot be handed over; use --role both")
    if config.role is Role.ENCODE and not model.sees:
        raise ConfigError(f"--role encode: {model.name} reads no images, so there is nothing to encode")
    if model.pooling is not None and config.role is not Role.BOTH:
        raise ConfigError(f"--role {config.role.value}: {model.name} only reads, in one phase; use --role both")
    return _resolve(config, ((worker, config.role),), ("tcp", Wishes(threads=config.threads)), machine, model)


def context_length(config: EngineSettings, model: ModelFacts) -> int:
    """Tokens of prompt and answer together, where no memory here limits them.  Raises ConfigError."""
    if config.max_model_len is not None and config.max_model_len > model.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: {model.name} was made for {model.max_positions} tokens; "
            "ask for that or less"
        )
    return config.max_model_len or model.max_positions


def _resolve(
    config: EngineSettings, places: Places, how: tuple[str, Wishes], machine: MachineFacts, model: ModelFacts
) -> ServePlan:
    dtype = model.auto_dtype if config.dtype == "auto" else config.dtype
    page_bytes = model.page_bytes_bf16 * (2 if dtype == "fp32" else 1)
    chunk = config.max_chunk_tokens or MAX_CHUNK_TOKENS
    size = PageSize(page_bytes=page_bytes, reaches=model.reaches, ahead=min(chunk, MAX_STEP_TOKENS))
    holders = max(1, sum(role is not Role.ENCODE for _, role in places))  # of KV pages
    pages, max_model_len, note = _memory(config, machine, model, size, holders)
    carrier, wishes = how
    cores = machine.topology or tuple(Core(cpus=(cpu,)) for cpu in machine.cpus)
    division = divide(places, cores, machine.cores, wishes)
    scheduler = SchedulerConfig(
        pages=pages,
        reaches=model.reaches,
        max_model_len=max_model_len,
        max_running=config.max_running,
        max_chunk_tokens=chunk,
        even_pace=any(share.loans for share in division.shares),
        max_draft_tokens=config.max_draft_tokens if config.speculate != "off" and model.pooling is None else 0,
        pooling=model.pooling,
    )
    return ServePlan(
        workers=tuple(_worker(*place, share) for place, share in zip(places, division.shares, strict=True)),
        carrier=carrier,
        family=_family(config, machine),
        dtype=dtype,
        page_bytes=page_bytes,
        scheduler=scheduler,
        nodes=division.nodes,
        notes=(*((note,) if note else ()), *division.notes),
    )


def _places(config: ServeConfig) -> Places:
    counts: tuple[tuple[Role, int], ...] = ((Role.PREFILL, config.prefill or 1), (Role.DECODE, config.decode or 1))
    if config.aggregated:
        counts = ((Role.BOTH, 1),)
    counts += ((Role.ENCODE, config.encode_workers or 0),)
    return tuple((WorkerId(f"{role.value}-{i}"), role) for role, count in counts for i in range(count))


def _readers(config: ServeConfig, model: ModelFacts) -> Places:
    """Workers of a model that writes nothing: there is one phase, so ``--prefill N`` says how many."""
    for flag in ("decode", "prefill_cores", "decode_cores"):
        if getattr(config, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: {model.name} only reads, so there is nothing to decode and one kind of "
                "worker; leave it out (--prefill N starts N of them)"
            )
    return tuple((WorkerId(f"both-{i}"), Role.BOTH) for i in range(config.prefill or 1))


def _family(config: EngineSettings, machine: MachineFacts) -> str:
    if config.kernels == "auto":
        if not machine.kernel_families:
            raise ConfigError("no kernel family runs on this machine; `penstock doctor` tells why")
        return machine.kernel_families[0]
    if config.kernels not in machine.kernel_families:
        known = ", ".join(machine.kernel_families)
        raise ConfigError(f"--kernels {config.kernels}: this machine and build have {known}")
    return config.kernels


def _worker(name: WorkerId, role: Role, share: Share) -> WorkerPlan:
    return WorkerPlan(
        worker=name,
        role=role,
        threads=share.threads,
        cpus=share.cpus,
        niceness=share.niceness,
        lends=share.lends,
        loans=share.loans,
    )


def _memory(
    config: EngineSettings, machine: MachineFacts, model: ModelFacts, size: PageSize, workers: int
) -> tuple[int, int, str | None]:
    """(pages of each worker, longest context, a note if that is not the model's): one full context always fits."""
    asked = config.max_model_len
    longest = context_length(config, model)
    needed = size.pages(longest) * size.page_bytes
    room = _room(machine, model, 4 if size.page_bytes > model.page_bytes_bf16 else 2)
    budget, source = _budget(config, room, needed, workers)
    pages = budget // size.page_bytes
    if model.pooling is not None and model.pooling.whole_prompts:
        pages = min(pages, KV_CONTEXTS * size.pages(longest))  # they only count tokens
    if pages >= size.pages(longest):
        return pages, longest, None
    fits = size.tokens(pages, longest)
    ample = f"--kv-memory {show_bytes(needed, up=True)}"
    if asked is not None or fits < min(MIN_CONTEXT, longest):
        raise ConfigError(
            f"one context of {longest} tokens needs {show_bytes(needed)} of KV pages and {source} holds {fits}: "
            f"use {ample}" + (f" or --max-model-len {fits}" if fits >= PAGE_TOKENS else "")
        )
    note = f"context cut from {longest} to {fits} tokens: {source} holds no more; {ample} would hold all"
    return pages, fits, note


def _room(machine: MachineFacts, model: ModelFacts, weight_item_bytes: int) -> int:
    weights = model.parameters * weight_item_bytes
    if weights >= machine.memory_bytes:
        raise ConfigError(
            f"{model.name} needs {show_bytes(weights)} for its weights, "
            f"this machine has {show_bytes(machine.memory_bytes)} free: stop something or serve a smaller model"
        )
    return machine.memory_bytes - weights


def _budget(config: EngineSettings, room: int, needed: int, workers: int) -> tuple[int, str]:
    """(bytes of KV pages in each worker, where that comes from).  ``needed`` holds one full context."""
    half = room // (2 * workers)
    if config.kv_memory is None:
        share = min(int(room * KV_SHARE) // workers, KV_CONTEXTS * needed)
        budget = max(share, min(half, needed))
        return budget, f"the {show_bytes(budget)} that each worker takes by itself"
    source = f"--kv-memory {show_bytes(config.kv_memory)}"
    if config.kv_memory * workers > room:
        raise ConfigError(
            f"{source} for each of {workers} workers is more than the {show_bytes(room)} that are free "
            f"beside the weights: use --kv-memory {show_bytes(half)} or less"
        )
    return config.kv_memory, source


def show_bytes(count: int, *, up: bool = False) -> str:
    """A size that ``--kv-memory`` takes back: "512MiB".  ``up`` rounds so that nothing is lost."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * size or (count >= size and count % size == 0):
            return f"{-(-count // size) if up else count // size}{unit}"
    return str(count)
