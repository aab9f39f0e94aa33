"""``--device auto``: whether the model runs on a GPU, and why not.  Pure."""

from __future__ import annotations

from penstock.config.base import Config
from penstock.config.facts import GpuFacts, GpuReport
from penstock.config.schema import EngineSettings, ServeConfig, WorkerServeConfig, kv_store_flags
from penstock.errors import ConfigError
from penstock.types import Role

TRITON = "triton"
"""The kernel family of GPUs."""

RUNTIME_BYTES = 896 << 20
"""Allowance on a GPU besides weights, activations and pages: CUDA context, kernels, rope tables (64 MiB for 131,072
positions), captured graphs, and what allocators round up."""


class DeviceChoice(Config, frozen=True, kw_only=True):
    """The device that the model runs on."""

    device: str  # "cpu" or "cuda"
    gpu: GpuFacts | None = None  # where "cuda"
    note: str = ""  # one line for the log; empty: none


_OF_PHASES = (
    *("prefill", "decode", "prefill_device", "prefill_kernels"),
    *("prefill_cores", "decode_cores", "encode_workers"),
)


def excludes_gpu(config: EngineSettings) -> bool:
    """Whether the settings rule a GPU out, so that none needs to be probed."""
    if isinstance(config, ServeConfig) and config.prefill_device == "cuda":
        return False
    if config.device == "auto":
        return bool(_wants_split(config) or _wants_cpu(config))
    return config.device == "cpu"


def choose_device(config: EngineSettings, report: GpuReport, unfit: str) -> DeviceChoice:
    """The device.  ``unfit``: why a GPU does not suit this model; empty: it does.

    Raises ConfigError if ``--device cuda`` is set and there is no GPU, or another flag contradicts it.
    """
    if config.device == "cpu":
        return DeviceChoice(device="cpu")
    split = _wants_split(config)
    gpu = report.gpu
    if config.device == "cuda":
        if split:
            raise ConfigError(
                f"--device cuda: {split}, and a GPU can transfer KV pages to CPU workers only, whose output differs "
                "(docs/gpu.md, Mixed fleets): one worker on a GPU serves both phases; leave that flag out, or use "
                "--device cpu"
            )
        if gpu is None:
            raise ConfigError(f"--device cuda: {report.reason}" + (f"; {report.remedy}" if report.remedy else ""))
        return gpu_choice(gpu, "by --device cuda")
    if gpu is None:
        said = f"no GPU is used: {report.reason}" + (f" ({report.remedy})" if report.remedy else "")
        return DeviceChoice(device="cpu", note=said if report.remedy else "")
    reason = split or unfit or _wants_cpu(config)
    if reason:
        return DeviceChoice(device="cpu", note=f"{gpu.name} is not used: {reason}; to use it add --device cuda")
    return gpu_choice(gpu, "chosen automatically; --device cpu leaves it unused")


def gpu_choice(gpu: GpuFacts, why: str) -> DeviceChoice:
    """The choice of this GPU, with the line for the log."""
    others = f", the first of {gpu.count}" if gpu.count > 1 else ""
    free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
    note = f"on {gpu.name}{others}: {free:,.1f} of {total:,.1f} GiB free; {why}"
    return DeviceChoice(device="cuda", gpu=gpu, note=note)


def _wants_split(config: EngineSettings) -> str:
    """The flag that asks for separate workers, in words; empty: none."""
    if isinstance(config, WorkerServeConfig) and config.role is Role.PREFILL and config.mixed_with is not None:
        return ""  # its pages are transferred in the layout of CPU workers
    if isinstance(config, WorkerServeConfig) and config.role is not Role.BOTH:
        return f"--role {config.role.value} serves one phase"
    if isinstance(config, ServeConfig):
        for name in _OF_PHASES:
            if getattr(config, name) is not None:
                return f"--{name.replace('_', '-')} asks for workers of one phase"
    return ""


def _wants_cpu(config: EngineSettings) -> str:
    """The flag that needs CPU workers, in words; empty: none."""
    if config.kernels not in ("auto", TRITON):
        return f"--kernels {config.kernels} are for CPUs"
    flags = kv_store_flags(config) + ([] if config.threads is None else ["--threads"])
    return f"{flags[0]} is for CPU workers" if flags else ""
