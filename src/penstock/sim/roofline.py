"""A fleet computed from a model's ``config.json`` and the data sheets of devices: a first estimate, nothing measured.

Compute-bound work takes its operations over the device's bf16 peak, memory-bound work its bytes over the bandwidth,
each at a share that tuned kernels reach (Williams, Waterman, Patterson: Roofline, CACM 2009).  A worker is as
few devices as hold the model and one request of full length; they divide each layer and exchange twice in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.config.fleet_file import (
    LinkSpeeds,
    SimMemory,
    SimRankTimes,
    SimSchedulerLimits,
    SimStepTimes,
    WorkerGroup,
)
from penstock.config.mesh import TENSOR_WAYS
from penstock.errors import ConfigError
from penstock.parallel.plan import Devices, ModelSize, ParallelPlan, plan_for_tensor
from penstock.parallel.sizes import BF16, WeightFormat, model_size, weight_encoding
from penstock.sim.fleet import SimulatedFleet
from penstock.weights.architecture.decoder import AttentionConfig, DecoderConfig
from penstock.weights.architecture.mla import MlaConfig
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import ModelOutline

TERA = 1e12
PEAKS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "H100": (989 * TERA, 3.35 * TERA),
        "H100-NVL": (835 * TERA, 3.9 * TERA),
        "H200": (989 * TERA, 4.8 * TERA),
        "B200": (2250 * TERA, 8.0 * TERA),
        "A100": (312 * TERA, 2.04 * TERA),
        "A100-40": (312 * TERA, 1.56 * TERA),
        "L40S": (362 * TERA, 0.864 * TERA),
        "L4": (121 * TERA, 0.3 * TERA),
        "A10": (125 * TERA, 0.6 * TERA),
        "RTX5090": (210 * TERA, 1.79 * TERA),
        "RTX4090": (165 * TERA, 1.01 * TERA),
        "RTX3090": (71 * TERA, 0.936 * TERA),
        "MI300X": (1307 * TERA, 5.3 * TERA),
    }
)
"""By device: dense bf16 operations a second, and bytes a second of its memory.  From the makers' data sheets."""

COMPUTE_SHARE = 0.55
"""Of the peak, that prefill reaches."""

BANDWIDTH_SHARE = 0.75
"""Of the bandwidth, that decode reaches."""

LAUNCH_S = 0.0004
"""The time of a step without its arithmetic: launches, sampling, scheduling."""

EXCHANGE_S = 10e-6
"""An exchange among the devices of a stage, few rows: one-shot over NVLink on 8 x H100, pytorch/helion#245."""

LINKS = LinkSpeeds(worker_bytes_s=45e9, host_bytes_s=50e9, disk_bytes_s=6e9)
HOST_BYTES = 256 << 30


def fleet_of(outline: ModelOutline, devices: Devices) -> SimulatedFleet:
    """A fleet with the workers that the devices give, all of role ``both``.  Raises ConfigError, ModelError."""
    spec = outline.spec
    if not isinstance(spec.details, DecoderConfig):
        raise ConfigError(f"--model {outline.name}: only models that generate text can be simulated")
    if devices.name not in PEAKS:
        raise ConfigError(f"--devices {devices.name}: no data sheet is known; known are {', '.join(PEAKS)}")
    size = model_size(spec, outline.layout, weight_encoding(WeightFormat.STORED, outline))
    plan = _worker_plan(size, devices)
    count = devices.count // plan.devices.count
    flops, bandwidth = PEAKS[devices.name]
    flops, bandwidth = flops * COMPUTE_SHARE, bandwidth * BANDWIDTH_SHARE  # of one device
    routed = _share_of_experts(spec.details)
    weights, experts = _bytes_read(model_size(spec, outline.layout, BF16))
    token_s = (weights + experts * routed) / flops  # two operations a weight, which has two bytes
    token_bytes = sum(layer.cache.on_device(plan.tensor) for layer in size.layers) * plan.tensor
    return SimulatedFleet(
        name=f"{devices.count}x{devices.name}",
        source=f"computed, not measured: {outline.name} on {devices.name}, {plan.devices.count} a worker; bf16 peak at "
        f"{COMPUTE_SHARE:.0%}, memory bandwidth at {BANDWIDTH_SHARE:.0%}",
        workers=(WorkerGroup(count=count, group=plan.mesh.name if plan.tensor > 1 else ""),),
        steps=SimStepTimes(
            step_s=sum(_bytes_read(size)) / bandwidth + LAUNCH_S,  # the rows of a busy worker choose every expert
            row_s=token_s,
            context_s=token_bytes / bandwidth,
            read_step_s=2 * LAUNCH_S,
            token_s=token_s,
            pair_s=_pair_operations(spec.details) / flops,
        ),
        ranks=SimRankTimes(layers=len(size.layers), join_s=EXCHANGE_S, send_s=EXCHANGE_S, undivided_s=LAUNCH_S),
        memory=SimMemory(token_bytes=max(1, token_bytes), device_bytes=plan.kv_bytes, host_bytes=HOST_BYTES),
        links=LINKS,
        scheduler=SimSchedulerLimits(max_model_len=min(size.max_positions, plan.kv_tokens)),
    )


def token_s(spec: ModelSpec, size: ModelSize, plan: ParallelPlan) -> float | None:
    """Predicted seconds from one token of a lone request to its next, without reading its context; None where no data
    sheet is known.  Every stage waits for the one before it."""
    if plan.devices.name not in PEAKS or not isinstance(spec.details, DecoderConfig):
        return None
    bandwidth = PEAKS[plan.devices.name][1] * BANDWIDTH_SHARE
    routed = _share_of_experts(spec.details)
    read = sum((la.divided + la.experts * routed) / plan.tensor + la.whole for la in size.layers)
    read += (size.head or size.embedding) / plan.tensor
    exchanges = 2 * len(size.layers) * (plan.tensor > 1) + len(plan.stages) - 1
    return read / bandwidth + exchanges * EXCHANGE_S + LAUNCH_S


def _worker_plan(size: ModelSize, devices: Devices) -> ParallelPlan:
    """The fewest devices that hold the model and one request of all its positions, else the model at all."""
    ways = [ways for ways in TENSOR_WAYS if devices.count % ways == 0]
    plans = [plan_for_tensor(size, Devices(n, devices.name, devices.memory_bytes, devices.is_cpu), n) for n in ways]
    for enough in (size.max_positions, 1):
        for plan in plans:
            if plan.kv_tokens >= enough:
                return plan
    raise ConfigError(f"the model does not fit on {ways[-1]} x {devices.name}: `penstock plan` says what would help")


def _bytes_read(size: ModelSize) -> tuple[int, int]:
    """Bytes of weights: those that every step reads, and all routed experts, of which a token uses some.

    Of the embedding a step reads single rows, but for a model whose head it is.
    """
    experts = sum(layer.experts for layer in size.layers)
    return size.weight_bytes - experts - (size.embedding if size.head else 0), experts


def _share_of_experts(decoder: DecoderConfig) -> float:
    """Share of the routed experts that a token uses."""
    routed = [layer.mlp.routing for layer in decoder.layers if isinstance(layer.mlp, MoeConfig)]
    return routed[0].top_k / routed[0].experts if routed else 0.0


def _pair_operations(decoder: DecoderConfig) -> float:
    """Floating-point operations of one (query, key) pair in all layers: score and weighted value."""
    total = 0.0
    for layer in decoder.layers:
        own = layer.attention
        if isinstance(own, MlaConfig):
            total += 2 * own.heads * (2 * own.rank + own.rope.columns)
        elif isinstance(own, AttentionConfig) and own.window is None and own.chunk is None:
            total += 4 * own.heads * own.head_dim
    return total
