"""Whether a GPU computes, and why not: ``--device auto`` decided from given facts.  Pure."""

from __future__ import annotations

from penstock.config.base import Config
from penstock.config.facts import GpuFacts, GpuReport
from penstock.config.schema import EngineSettings, ServeConfig, WorkerServeConfig, kv_store_flags
from penstock.errors import ConfigError
from penstock.types import Role

TRITON = "triton"
"""The kernel family of GPUs."""

RUNTIME_BYTES = 896 << 20
"""On a GPU beside weights, activations and pages: context and loaded kernels, rope tables (64 MiB for 131,072
positions), what recorded graphs keep beside their logits, and what allocators round up.  An allowance."""


class DeviceChoice(Config, frozen=True, kw_only=True):
    """Where the model is computed."""

    device: str  # "cpu" or "cuda"
    gpu: GpuFacts | None = None  # where "cuda"
    note: str = ""  # one line for people; empty when there is nothing to say


_OF_PHASES = (
    *("prefill", "decode", "prefill_device", "prefill_kernels"),
    *("prefill_cores", "decode_cores", "encode_workers"),
)


def excludes_gpu(config: EngineSettings) -> bool:
    """Whatever GPU there is, no flag lets it be used: none has to be looked for."""
    if isinstance(config, ServeConfig) and config.prefill_device == "cuda":
        return False
    if config.device == "auto":
        return bool(_wants_split(config) or _wants_cpu(config))
    return config.device == "cpu"


def choose_device(config: EngineSettings, report: GpuReport, unfit: str) -> DeviceChoice:
    """The device.  ``unfit``: why a GPU does not suit this model; empty if it does.

    Raises ConfigError where a GPU was asked for and there is none, or flags want what none gives.
    """
    if config.device == "cpu":
        return DeviceChoice(device="cpu")
    split = _wants_split(config)
    gpu = report.gpu
    if config.device == "cuda":
        if split:
            raise ConfigError(
                f"--device cuda: {split}, and a GPU's pages can be handed over to processors only, whose answers have "
                "other bits (docs/gpu.md, Mixed fleets): one worker there serves both phases; leave that flag out, or "
                "use --device cpu"
            )
        if gpu is None:
            raise ConfigError(f"--device cuda: {report.reason}" + (f"; {report.remedy}" if report.remedy else ""))
        return gpu_choice(gpu, "as --device cuda says")
    if gpu is None:
        said = f"no GPU is used: {report.reason}" + (f" ({report.remedy})" if report.remedy else "")
        return DeviceChoice(device="cpu", note=said if report.remedy else "")
    reason = split or unfit or _wants_cpu(config)
    if reason:
        return DeviceChoice(device="cpu", note=f"{gpu.name} is not used: {reason}; --device cuda would have it used")
    return gpu_choice(gpu, "found by itself; --device cpu would leave it alone")


def gpu_choice(gpu: GpuFacts, why: str) -> DeviceChoice:
    """This one, and the line that says so."""
    others = f", the first of {gpu.count}" if gpu.count > 1 else ""
    free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
    note = f"on {gpu.name}{others}: {free:,.1f} of {total:,.1f} GiB free; {why}"
    return DeviceChoice(device="cuda", gpu=gpu, note=note)


def _wants_split(config: EngineSettings) -> str:
    """What was asked for that needs workers for each phase; empty: nothing."""
    if isinstance(config, WorkerServeConfig) and config.role is Role.PREFILL and config.mixed_with is not None:
        return ""  # for workers on processors, in a layout of theirs
    if isinstance(config, WorkerServeConfig) and config.role is not Role.BOTH:
        return f"--role {config.role.value} serves one phase"
    if isinstance(config, ServeConfig):
        for name in _OF_PHASES:
            if getattr(config, name) is not None:
                return f"--{name.replace('_', '-')} asks for workers of one phase"
    return ""


def _wants_cpu(config: EngineSettings) -> str:
    """What was asked for that only processors have; empty: nothing."""
    if config.kernels not in ("auto", TRITON):
        return f"--kernels {config.kernels} are a processor's"
    flags = kv_store_flags(config) + ([] if config.threads is None else ["--threads"])
    return f"{flags[0]} is for workers on processors" if flags else ""
