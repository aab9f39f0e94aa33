"""Fleets whose prefill and decode workers have different numerics classes: their devices, kernels and pages.

The output equals that of neither class alone, so ``--allow-mixed-numerics`` is needed besides the flag that says where
prefill runs.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.base import Config
from penstock.config.cpu_cores import CoreAssignment, CoreSettings, CoreShare, WorkerRoles, assign_cores
from penstock.config.device import TRITON, DeviceChoice, gpu_choice
from penstock.config.facts import KvPageSize, MachineFacts, ModelFacts, PhysicalCore
from penstock.config.kv_memory import KvMemoryBudget, format_size
from penstock.config.schema import EngineSettings, ServeConfig, WorkerServeConfig, kv_store_flags
from penstock.errors import ConfigError
from penstock.types import MIXED_CLASS_SEPARATOR, Role

REFERENCE = "reference"
INTERPRETER = "triton-interpreter"
TORCH_FAMILIES = (REFERENCE, INTERPRETER)
"""Families computed by torch: their pages have another layout than the C++ kernels', and they lend no cores."""

HOST_COPY_SHARE = 0.5
"""Share of the host's memory for the host copies of a GPU's pages, in a worker of ``penstock worker``."""

LOADING_THREADS = 8
"""Threads with which a worker on a GPU loads weights."""


class PrefillPlan(Config, frozen=True, kw_only=True):
    """Device, kernels and pages of prefill workers, if they differ from the decode workers'."""

    device: str  # "cpu" or "cuda"
    family: str
    pages: int = 0  # of each prefill worker

    @property
    def has_own_memory(self) -> bool:
        """Whether its pages are not in the host memory that other workers read pages from."""
        return self.device != "cpu" or self.family in TORCH_FAMILIES


@dataclass(frozen=True, slots=True)
class PrefillDevice:
    """Device and kernels of prefill workers, if they differ from the decode workers'."""

    choice: DeviceChoice
    family: str

    @property
    def on_gpu(self) -> bool:
        return self.choice.gpu is not None


def choose_prefill_device(
    config: ServeConfig, machine: MachineFacts, model: ModelFacts, family: str
) -> PrefillDevice | None:
    """Where prefill runs, if elsewhere than decode, which ``family`` computes; None: the same.  Raises ConfigError."""
    on_gpu = config.prefill_device == "cuda"
    if not on_gpu and config.prefill_kernels in (None, family):
        return None
    flag = "--prefill-device cuda" if on_gpu else f"--prefill-kernels {config.prefill_kernels}"
    _check(config, model, flag)
    if not config.allow_mixed_numerics:
        raise ConfigError(
            f"{flag}: prefill and decode by different kernels give other output than either alone (docs/gpu.md, Mixed "
            "fleets); add --allow-mixed-numerics if that is wanted, or leave it out"
        )
    if on_gpu or config.prefill_kernels in TORCH_FAMILIES:
        _check_stores(config, flag)
    known = (TRITON, REFERENCE) if on_gpu else (*machine.kernel_families, INTERPRETER)
    named = config.prefill_kernels or TRITON
    if family in TORCH_FAMILIES and named not in (*TORCH_FAMILIES, TRITON):
        raise ConfigError(f"{flag}: these kernels cannot write pages for --kernels {family}; turn them round")
    if named not in known:
        raise ConfigError(f"--prefill-kernels {named}: prefill workers have {', '.join(known)} there")
    if not on_gpu:
        return PrefillDevice(DeviceChoice(device="cpu"), named)
    gpu = machine.gpu.gpu
    if gpu is None:
        mend = f"; {machine.gpu.remedy}" if machine.gpu.remedy else ""
        raise ConfigError(f"{flag}: {machine.gpu.reason}{mend}")
    if (config.prefill or 1) > 1:
        raise ConfigError(
            f"--prefill {config.prefill} with {flag}: two processes on one GPU take turns; use --prefill 1"
        )
    return PrefillDevice(gpu_choice(gpu, "as --prefill-device cuda says, for prompts only"), named)


def _check(config: ServeConfig, model: ModelFacts, flag: str) -> None:
    """Refuse what a mixed fleet cannot do.  Raises ConfigError."""
    if model.pooling is not None:
        raise ConfigError(f"{flag}: {model.name} is a pooling model, so there is no decode that others could do")
    if model.recurrent:
        raise ConfigError(f"{flag}: {model.name} has recurrent layers, whose states cannot pass between kernels")
    if config.kv_dtype != "auto":
        raise ConfigError(f"{flag}: processors keep KV pages in the compute type; leave out --kv-dtype")
    if config.activation_dtype != "auto":
        raise ConfigError(f"{flag}: both phases need inputs of one type; leave out --activation-dtype")
    if config.aggregated:
        raise ConfigError(f"{flag} with --aggregated: one worker does both phases; leave one of them out")
    if config.encode_workers:
        raise ConfigError(f"{flag}: images need one numerics class; leave out --encode-workers")
    if config.prefill_device == "cuda" and config.prefill_cores is not None:
        raise ConfigError(f"{flag}: --prefill-cores are for prefill workers on processors; leave it out")


def _check_stores(config: EngineSettings, flag: str) -> None:
    """Refuse tiers of the KV store for workers whose pages have another layout.  Raises ConfigError."""
    stores = kv_store_flags(config)
    if stores:
        raise ConfigError(
            f"{stores[0]} with {flag}: stored pages are for prefill workers, "
            "and these keep theirs on their device; leave it out"
        )


def check_mixed_worker(config: WorkerServeConfig, model: ModelFacts, family: str) -> None:
    """Refuse what a worker of ``penstock worker`` in a mixed fleet cannot do.  Raises ConfigError."""
    other = config.mixed_with
    if other is None:
        return
    flag = f"--mixed-with {other}"
    if config.role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"{flag}: in a mixed fleet a worker has one phase: use --role prefill or --role decode")
    if MIXED_CLASS_SEPARATOR in other or not other.isprintable() or not 0 < len(other) <= 200 or " " in other:
        raise ConfigError(f"{flag}: expected the numerics class that workers of the other role log when they start")
    if config.kv_dtype != "auto":
        raise ConfigError(f"{flag}: processors keep KV pages in the compute type; leave out --kv-dtype")
    if config.activation_dtype != "auto":
        raise ConfigError(f"{flag}: both phases need inputs of one type; leave out --activation-dtype")
    if model.pooling is not None or model.recurrent:
        raise ConfigError(f"{flag}: {model.name} needs the same kernels for prefill and decode")
    if config.role is Role.PREFILL and family in (*TORCH_FAMILIES, TRITON):
        _check_stores(config, f"{flag} and kernels {family}")


def fleet_numerics(prefill: str, decode: str) -> str:
    """The numerics class of a fleet with these classes of prefill and decode."""
    return prefill if prefill == decode else f"{prefill}{MIXED_CLASS_SEPARATOR}{decode}"


def assign_fleet_cores(
    places: WorkerRoles, cores: Sequence[PhysicalCore], usable: int, wishes: CoreSettings, reader: PrefillDevice | None
) -> CoreAssignment:
    """The cores of each worker.  A prefill worker on a GPU owns none; with torch's kernels none are lent."""
    if reader is None or (not reader.on_gpu and reader.family not in TORCH_FAMILIES):
        return assign_cores(places, cores, usable, wishes)
    wishes = CoreSettings(
        threads=wishes.threads, prefill_cpus=wishes.prefill_cpus, decode_cpus=wishes.decode_cpus, lend=reader.on_gpu
    )
    if not reader.on_gpu:
        return assign_cores(places, cores, usable, wishes)
    writers = tuple(place for place in places if place[1] is not Role.PREFILL)
    division = assign_cores(writers, cores, usable, wishes)
    own = dict(zip((name for name, _ in writers), division.shares, strict=True))
    loading = CoreShare(threads=max(1, min(LOADING_THREADS, len(cores))), cpus=())
    return CoreAssignment(tuple(own.get(name, loading) for name, _ in places), division.numa_nodes, division.notes)


def plan_prefill(
    reader: PrefillDevice, memory: KvMemoryBudget, size: KvPageSize, pages: int, longest: int
) -> PrefillPlan:
    """Plan as many pages as the decode workers have, which hold the copies, or as fit on the GPU.

    Raises ConfigError.
    """
    if reader.on_gpu:
        room = KvMemoryBudget(memory.model, 1, memory.number_bytes, memory.host_bytes, reader.choice)
        pages = min(pages, room.available_bytes() // size.page_bytes)
        _check_longest(room.location, size, pages, longest)
    return PrefillPlan(device=reader.choice.device, family=reader.family, pages=pages)


def limit_to_host_copies(machine: MachineFacts, size: KvPageSize, pages: int, longest: int) -> int:
    """``pages``, or fewer, so that the host's memory holds a copy of each.  Raises ConfigError."""
    pages = min(pages, int(machine.memory_bytes * HOST_COPY_SHARE) // size.page_bytes)
    _check_longest(f"half of this machine's memory, {format_size(machine.memory_bytes // 2)},", size, pages, longest)
    return pages


def _check_longest(where: str, size: KvPageSize, pages: int, longest: int) -> None:
    if pages < size.pages_for(longest):
        fits = size.tokens_in(pages, longest)
        raise ConfigError(
            f"one context of {longest} tokens needs {format_size(size.pages_for(longest) * size.page_bytes)} of KV "
            f"pages for prefill, and {where} holds {fits}: use --max-model-len {max(fits, 16)} or less"
        )
