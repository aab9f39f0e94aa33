"""Which device holds which part of a model, and how much memory is left for KV pages.  Pure arithmetic.

Tensor parallelism divides every matrix of a layer over ``tensor`` devices: 1, 2, 4 or 8, because sums are cut in eight
fixed segments and the result must not depend on the number of devices.  Pipeline stages are runs of whole layers, cut
so that the largest stage is as small as possible.  Routed experts are divided over the devices of a stage like
everything else.

Devices are named, as in 8xH100; a table has their memory.  Knows sizes in bytes; not files, families or drivers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from penstock.config.device import RUNTIME_BYTES
from penstock.config.facts import ExtraWeights, extra_weight_bytes
from penstock.config.mesh import MAX_DEVICES, TENSOR_WAYS, Mesh
from penstock.errors import ConfigError

GIB = 1 << 30

DEVICE_MEMORY_GIB: Mapping[str, float] = MappingProxyType(
    {
        "H100": 79.1,
        "H100-NVL": 93.1,
        "H200": 139.8,
        "B200": 178.3,
        "A100": 79.1,
        "A100-40": 39.4,
        "L40S": 44.4,
        "L4": 22.0,
        "A10": 22.0,
        "RTX5090": 31.4,
        "RTX4090": 23.6,
        "RTX3090": 23.6,
        "MI300X": 191.7,
    }
)
"""GiB that a program finds on a device of this name: what the driver keeps for itself is not in it."""

TOO_LITTLE_SHARED_MEMORY = ("L40S", "L4", "A10", "RTX5090", "RTX4090", "RTX3090")
"""Of compute capability 8.6, 8.9 and 12.0: a program gets 99 KiB, less than the kernels' tiles take."""

WITHOUT_CUDA = ("MI300X",)

_SPEC = re.compile(r"(?:(?P<count>\d{1,6})x)?(?P<name>[A-Za-z][\w-]*)?:?(?:(?P<size>\d+(?:\.\d+)?)(?P<unit>GiB|GB))?")


@dataclass(frozen=True, slots=True)
class Devices:
    """``count`` equal devices of one host."""

    count: int
    name: str
    memory_bytes: int  # of each
    is_cpu: bool

    @property
    def total_bytes(self) -> int:
        return self.count * self.memory_bytes


def why_not_servable(devices: Devices) -> str:
    """Why ``penstock serve`` cannot use these devices today; empty if the name gives no reason."""
    if devices.is_cpu:
        return ""
    if devices.name in WITHOUT_CUDA:
        return f"{devices.name} has no CUDA"
    if devices.name in TOO_LITTLE_SHARED_MEMORY:
        return f"{devices.name} has too little shared memory for the kernels; A100, H100, H200 and B200 have enough"
    if devices.count > 1:
        return "one model runs on one GPU"
    return ""


def parse_devices(text: str) -> Devices:
    """ "8xH100", "H200", "2x48GiB" or "cpu:64GiB".  Raises ConfigError that says what is known."""
    match = _SPEC.fullmatch(text.strip())
    if match is None or not (match["name"] or match["size"]):
        raise ConfigError(f"devices {text!r} are not understood; {_expected()}")
    count = int(match["count"] or 1)
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigError(f"devices {text!r}: 1 to {MAX_DEVICES} can be planned for, not {count}")
    name = match["name"] or f"{match['size']}{match['unit']}"
    if name.lower() == "cpu" and count > 1:
        raise ConfigError(f"devices {text!r}: the processors of one host share its memory; expected cpu or cpu:64GiB")
    known = {each.upper(): each for each in DEVICE_MEMORY_GIB}.get(name.upper(), name)
    if match["size"]:
        size = float(match["size"]) * (GIB if match["unit"] == "GiB" else 1e9)
    elif known in DEVICE_MEMORY_GIB:
        size = DEVICE_MEMORY_GIB[known] * GIB
    else:
        raise ConfigError(f"device {name!r} is not known; {_expected()}")
    return Devices(count=count, name=known, memory_bytes=int(size), is_cpu=name.lower() == "cpu")


def _expected() -> str:
    return f"expected COUNTxNAME with one of {', '.join(DEVICE_MEMORY_GIB)}, or a size: 8xH100, 2x48GiB, cpu:64GiB"


CPU_RUNTIME_BYTES = 200 << 20
"""The same for processes on a CPU: interpreter, libraries and the tokenizer, all processes together."""
CPU_WORKERS = 2
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What one layer stores per sequence."""

    bytes_per_token: int  # all heads, on one device
    heads: int  # what tensor parallelism can divide; 1 for a latent that all heads share
    window: int | None = None  # tokens after which it grows no more
    fixed: int = 0  # more bytes that any sequence takes: states of recurrent layers

    def on_device(self, tensor: int) -> int:
        """Bytes per token on each of ``tensor`` devices; heads that cannot be divided are replicated."""
        return self.bytes_per_token // self.heads * -(-self.heads // tensor)

    def fixed_on_device(self, tensor: int) -> int:
        """The fixed bytes on each of ``tensor`` devices."""
        return -(-self.fixed // self.heads) * -(-self.heads // tensor)


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of one layer's weights, by how they are distributed."""

    divided: int  # matrices that tensor parallelism cuts
    experts: int  # routed experts, divided as well
    whole: int  # norms, routers, biases: on every device of the stage
    cache: CacheSize

    def on_device(self, tensor: int) -> int:
        return -(-(self.divided + self.experts) // tensor) + self.whole


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's sizes."""

    embedding: int  # bytes
    head: int  # 0 when it is the embedding
    layers: tuple[LayerSize, ...]
    other: int  # what every stage has, vision towers among it
    activation_bytes: int  # of one step's buffers on one device that computes all of a layer
    max_positions: int
    extra_weights: tuple[ExtraWeights, ...] = ()  # what is loaded with it; every device keeps all of it

    @property
    def weight_bytes(self) -> int:
        """Each weight once."""
        return self.embedding + self.head + self.other + sum(la.divided + la.experts + la.whole for la in self.layers)


@dataclass(frozen=True, slots=True)
class StageShare:
    """The memory of each device of a stage, in bytes."""

    stage: int
    layers: range
    weights: int
    activations: int
    runtime: int
    extra: int  # draft heads, draft models, adapters
    kv: int  # what is left; below 0 is what is missing


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """A model on its devices.  Devices of a stage are equal, so there is one share per stage."""

    devices: Devices
    tensor: int
    stages: tuple[StageShare, ...]
    kv_tokens: int  # of one sequence, windows at their constant size; 0 when it does not fit

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0

    @property
    def mesh(self) -> Mesh:
        return Mesh(tensor=self.tensor, pipeline=len(self.stages))

    @property
    def weight_bytes(self) -> int:
        """Over all devices; replicated weights count once per copy."""
        return self.tensor * sum(share.weights for share in self.stages)

    @property
    def activation_bytes(self) -> int:
        return self.tensor * sum(share.activations for share in self.stages)

    @property
    def runtime_bytes(self) -> int:
        return self.tensor * sum(share.runtime for share in self.stages)

    @property
    def extra_bytes(self) -> int:
        return self.tensor * sum(share.extra for share in self.stages)

    @property
    def kv_bytes(self) -> int:
        return self.tensor * sum(max(0, share.kv) for share in self.stages)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fullest device lacks; 0 when everything fits."""
        return max(0, *(-share.kv for share in self.stages))


def make_plan(model: ModelSize, devices: Devices, *, wanted_tokens: int | None = None) -> ParallelPlan:
    """The best plan found.

    Of the plans that hold ``wanted_tokens`` (by default all positions of the model) the one with the most tensor
    parallelism, which has the lowest latency; if none does, the one that holds most tokens.
    """
    wanted = model.max_positions if wanted_tokens is None else wanted_tokens
    plans = all_plans(model, devices)
    enough = [plan for plan in plans if plan.kv_tokens >= wanted]
    if enough:
        return max(enough, key=lambda plan: plan.tensor)
    return max(plans, key=lambda plan: (plan.kv_tokens, -plan.missing_bytes))


def all_plans(model: ModelSize, devices: Devices) -> list[ParallelPlan]:
    """Every way to divide a model over these devices, those with the most tensor parallelism first."""
    ways = [tensor for tensor in reversed(TENSOR_WAYS) if _possible(model, devices, tensor)]
    return [plan_for_tensor(model, devices, tensor) for tensor in ways]


def requests_at_once(model: ModelSize, plan: ParallelPlan, tokens: int) -> int:
    """Sequences of ``tokens`` tokens that the KV memory of every stage holds at the same time."""
    fewest = None
    for share in plan.stages:
        caches = [model.layers[index].cache for index in share.layers]
        a_sequence = sum(
            cache.fixed_on_device(plan.tensor) + cache.on_device(plan.tensor) * min(tokens, cache.window or tokens)
            for cache in caches
        )
        held = max(0, share.kv) // a_sequence if a_sequence else 0
        fewest = held if fewest is None else min(fewest, held)
    return fewest or 0


def _possible(model: ModelSize, devices: Devices, tensor: int) -> bool:
    return devices.count % tensor == 0 and devices.count // tensor <= len(model.layers)


def rank_weights(model: ModelSize, mesh: Mesh, stages: Sequence[range]) -> int:
    """Bytes of the largest rank of one host, of stages with these layers.  Ranks have the whole embedding."""
    head = -(-(model.head or model.embedding) // mesh.tensor)
    largest = 0
    for layers in stages:
        own = model.other + sum(model.layers[index].on_device(mesh.tensor) for index in layers)
        own += model.embedding if layers.start == 0 else 0
        if layers.stop == len(model.layers) and (model.head or mesh.ranks > 1):
            own += head
        largest = max(largest, own)
    return largest


def plan_for_tensor(model: ModelSize, devices: Devices, tensor: int) -> ParallelPlan:
    """The plan with ``tensor`` devices a layer; ``devices.count`` is a multiple of it."""
    ends = balance_stages(model, devices.count // tensor, tensor)
    shares = []
    for stage, (begin, end) in enumerate(pairwise((0, *ends))):
        weights = _weights(model, range(begin, end), tensor)
        activations = -(-model.activation_bytes // tensor)
        runtime = CPU_RUNTIME_BYTES if devices.is_cpu else RUNTIME_BYTES
        extra = extra_weight_bytes(model.extra_weights, workers_of(devices))
        left = devices.memory_bytes - weights - activations - runtime - extra
        shares.append(StageShare(stage, range(begin, end), weights, activations, runtime, extra, left))
    tokens = min(_tokens([model.layers[i].cache for i in share.layers], share.kv, tensor) for share in shares)
    return ParallelPlan(devices, tensor, tuple(shares), tokens)


def workers_of(devices: Devices) -> int:
    """Workers that share one memory: on a CPU one for prefill and one for decode."""
    return CPU_WORKERS if devices.is_cpu else 1


def _weights(model: ModelSize, layers: range, tensor: int) -> int:
    total = model.other + sum(model.layers[index].on_device(tensor) for index in layers)
    last = layers.stop == len(model.layers)
    if layers.start == 0:
        total += -(-model.embedding // tensor)
    if last and model.head:
        total += -(-model.head // tensor)
    elif last and layers.start:  # a tied head on another device than the embedding
        total += -(-model.embedding // tensor)
    return total


def balance_stages(model: ModelSize, stages: int, tensor: int) -> tuple[int, ...]:
    """The end of each stage, such that the largest stage has the fewest bytes.  Every stage has at least one layer.

    Finds the smallest limit by bisection; under a limit, stages are filled from the first on.
    """
    layers = len(model.layers)
    low, high = 0, _weights(model, range(layers), tensor) + model.embedding
    best = (*range(1, stages), layers)
    while low <= high:
        limit = (low + high) // 2
        ends = _filled(model, stages, tensor, limit)
        if ends is None:
            low = limit + 1
        else:
            best, high = ends, limit - 1
    return best


def _filled(model: ModelSize, stages: int, tensor: int, limit: int) -> tuple[int, ...] | None:
    """Ends of stages none of which exceeds ``limit``; None if there are none."""
    layers, begin = len(model.layers), 0
    ends: list[int] = []
    for stage in range(stages):
        most = layers - (stages - stage - 1)  # every later stage needs a layer
        end = begin + 1
        while end < most and _weights(model, range(begin, end + 1), tensor) <= limit:
            end += 1
        if stage == stages - 1:
            end = layers
        if _weights(model, range(begin, end), tensor) > limit:
            return None
        ends.append(end)
        begin = end
    return tuple(ends)


def _tokens(caches: Sequence[CacheSize], room: int, tensor: int) -> int:
    """Tokens of one sequence that fit into ``room`` bytes, in whole pages."""
    room -= sum(cache.fixed_on_device(tensor) for cache in caches)
    if room <= 0:
        return 0
    windows = sorted({cache.window for cache in caches if cache.window is not None})
    tokens = 0
    for begin, end in pairwise((0, *windows, None)):
        growing = sum(c.on_device(tensor) for c in caches if c.window is None or c.window > (begin or 0))
        if growing == 0:
            return 1 << 40  # constant from here on: no length is too long
        more = room // growing
        if end is None or tokens + more < end:
            tokens += more
            break
        room -= (end - tokens) * growing
        tokens = end
    return tokens // PAGE_TOKENS * PAGE_TOKENS
