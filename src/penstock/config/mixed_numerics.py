"""Fleets that read prompts in one numerics class and write answers in another: who computes where, and what is refused.

Such a fleet is asked for twice, by where its prefill workers are to compute and by ``--allow-mixed-numerics``: its bits
are those of neither class alone.  Pure: decided from given facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.base import Config
from penstock.config.cpu_cores import CoreAssignment, CoreSettings, CoreShare, WorkerRoles, assign_cores
from penstock.config.device import TRITON, DeviceChoice, gpu_choice
from penstock.config.facts import PhysicalCore
from penstock.config.kv_memory import KvMemoryBudget, format_size
from penstock.config.schema import EngineSettings, ServeConfig, WorkerServeConfig, kv_store_flags
from penstock.errors import ConfigError
from penstock.types import MIXED_CLASS_SEPARATOR, Role

if TYPE_CHECKING:
    from penstock.config.facts import KvPageSize, MachineFacts, ModelFacts

REFERENCE = "reference"
INTERPRETER = "triton-interpreter"
TORCH_FAMILIES = (REFERENCE, INTERPRETER)
"""Families whose pages do not lie as the processors' kernels have them; they have no threads of ours."""

HOST_COPY_SHARE = 0.5
"""Part of the host's memory that the twins of a GPU's pages may take, in a worker that runs by itself."""

LOADING_THREADS = 8
"""Of a worker that computes on a GPU: to load with."""


class PrefillPlan(Config, frozen=True, kw_only=True):
    """Where prompts are read, if not where answers are written."""

    device: str  # "cpu" or "cuda"
    family: str
    pages: int = 0  # of each such worker

    @property
    def has_own_memory(self) -> bool:
        """Do its pages lie in other memory than that which is handed over from?"""
        return self.device != "cpu" or self.family in TORCH_FAMILIES


@dataclass(frozen=True, slots=True)
class PrefillDevice:
    """The same before there are pages, and the device that was chosen."""

    choice: DeviceChoice
    family: str

    @property
    def on_gpu(self) -> bool:
        return self.choice.gpu is not None


def choose_prefill_device(
    config: ServeConfig, machine: MachineFacts, model: ModelFacts, family: str
) -> PrefillDevice | None:
    """Who reads prompts, where answers are written by ``family``; None: the same.  Raises ConfigError."""
    on_gpu = config.prefill_device == "cuda"
    if not on_gpu and config.prefill_kernels in (None, family):
        return None
    flag = "--prefill-device cuda" if on_gpu else f"--prefill-kernels {config.prefill_kernels}"
    _check(config, model, flag)
    if not config.allow_mixed_numerics:
        raise ConfigError(
            f"{flag}: prompts that are read by other kernels than answers are written by have other bits than those of "
            "either alone (docs/gpu.md, Mixed fleets); add --allow-mixed-numerics if that is wanted, or leave it out"
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
    """What does not go together.  Raises ConfigError."""
    if model.pooling is not None:
        raise ConfigError(f"{flag}: {model.name} only reads, so there are no answers that others could write")
    if model.recurrent:
        raise ConfigError(f"{flag}: {model.name} has recurrent layers, whose states cannot pass between kernels")
    if config.kv_dtype != "auto":
        raise ConfigError(f"{flag}: processors keep KV pages in the compute type; leave out --kv-dtype")
    if config.aggregated:
        raise ConfigError(f"{flag} with --aggregated: one worker reads and writes there; leave one of them out")
    if config.encode_workers:
        raise ConfigError(f"{flag}: prompts with images are read in one numerics class; leave out --encode-workers")
    if config.prefill_device == "cuda" and config.prefill_cores is not None:
        raise ConfigError(f"{flag}: --prefill-cores are for prefill workers on processors; leave it out")


def _check_stores(config: EngineSettings, flag: str) -> None:
    """Of whoever reads prompts otherwise than the processors' kernels do.  Raises ConfigError."""
    stores = kv_store_flags(config)
    if stores:
        raise ConfigError(
            f"{stores[0]} with {flag}: stored pages are for those who read prompts, "
            "and these keep theirs on their device; leave it out"
        )


def check_mixed_worker(config: WorkerServeConfig, model: ModelFacts, family: str) -> None:
    """The same of a worker that is joined, and computes by ``family``.  Raises ConfigError."""
    other = config.mixed_with
    if other is None:
        return
    flag = f"--mixed-with {other}"
    if config.role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"{flag}: in a mixed fleet a worker has one phase: use --role prefill or --role decode")
    if MIXED_CLASS_SEPARATOR in other or not other.isprintable() or not 0 < len(other) <= 200 or " " in other:
        raise ConfigError(f"{flag}: expected the numerics class that workers of the other role say when they start")
    if config.kv_dtype != "auto":
        raise ConfigError(f"{flag}: processors keep KV pages in the compute type; leave out --kv-dtype")
    if model.pooling is not None or model.recurrent:
        raise ConfigError(f"{flag}: {model.name} cannot be read by some kernels and written by others")
    if config.role is Role.PREFILL and family in (*TORCH_FAMILIES, TRITON):
        _check_stores(config, f"{flag} and kernels {family}")


def fleet_numerics(reads: str, writes: str) -> str:
    """The class of a fleet that reads prompts in one and writes answers in the other.  The same one, if they are."""
    return reads if reads == writes else f"{reads}{MIXED_CLASS_SEPARATOR}{writes}"


def assign_fleet_cores(
    places: WorkerRoles, cores: Sequence[PhysicalCore], usable: int, wishes: CoreSettings, reader: PrefillDevice | None
) -> CoreAssignment:
    """The cores of a host.  Who reads on a GPU has none of its own, and whose kernels are torch's lends none."""
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
    """With as many pages as those of others, whose twins they are, or as many as fit there.  Raises ConfigError."""
    if reader.on_gpu:
        room = KvMemoryBudget(memory.model, 1, memory.number_bytes, memory.host_bytes, reader.choice)
        pages = min(pages, room.available_bytes() // size.page_bytes)
        _check_longest(room.location, size, pages, longest)
    return PrefillPlan(device=reader.choice.device, family=reader.family, pages=pages)


def limit_to_host_copies(machine: MachineFacts, size: KvPageSize, pages: int, longest: int) -> int:
    """Pages of a GPU, of which as many must stand in the host's memory.  Raises ConfigError."""
    pages = min(pages, int(machine.memory_bytes * HOST_COPY_SHARE) // size.page_bytes)
    _check_longest(f"half of this machine's memory, {format_size(machine.memory_bytes // 2)},", size, pages, longest)
    return pages


def _check_longest(where: str, size: KvPageSize, pages: int, longest: int) -> None:
    if pages < size.pages_for(longest):
        fits = size.tokens_in(pages, longest)
        raise ConfigError(
            f"one context of {longest} tokens needs {format_size(size.pages_for(longest) * size.page_bytes)} of KV pages "
            f"where prompts are read, and {where} holds {fits}: use --max-model-len {max(fits, 16)} or less"
        )
