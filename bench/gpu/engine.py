"""The engine's own steps: how near decode is to the memory, prefill to the multipliers, and what law 1 costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu.driving import Driver
from bench.gpu.models import Made
from bench.gpu.place import Place
from torch import Tensor

from penstock.kernels.operands import Array, PackedLinear
from penstock.kernels.ops import Ops

CONTEXT, CHUNK, PROMPT = 1024, 2048, 8192
STEPS = 40
DECODE = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: a dry run has little of everything."""

    context: int
    chunk: int
    prompt: int
    steps: int
    decode: tuple[int, ...]

    @classmethod
    def of(cls, place: Place) -> Sizes:
        """For real, or dry."""
        return cls(8, 16, 20, 1, (1, 3)) if place.dry else cls(CONTEXT, CHUNK, PROMPT, STEPS, DECODE)


def decode(driver: Driver, place: Place, sizes: Sizes, read_rate: float) -> list[dict[str, Any]]:
    """One line a batch: seconds of a step with everything that a step has, and its part of the read bandwidth."""
    made, lines = driver.made, []
    for batch in sizes.decode:
        seconds, cpu_s = step_seconds(driver, place, batch, sizes)
        read = made.weight_bytes + batch * sizes.context * driver.kv_bytes_per_token
        lines.append(
            {
                "batch": batch,
                "step_ms": seconds * 1e3,
                "tokens_per_s": batch / seconds,
                "of_read_rate": read / seconds / read_rate,
                "host_cpu_s_per_token": cpu_s / batch,
            }
        )
    return lines


def step_seconds(driver: Driver, place: Place, batch: int, sizes: Sizes) -> tuple[float, float]:
    """(seconds, seconds of CPU) of one step that writes a token of each of ``batch`` answers."""
    arrays, picks = driver.answers(batch, sizes.context)
    for _ in range(1 if place.dry else 4):  # compiled, captured, warm
        driver.program.run(arrays, 0, [], picks)
    place.wait()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(sizes.steps):
        driver.program.run(arrays, 0, [], picks)
    place.wait()
    return (time.perf_counter() - begun) / sizes.steps, (time.process_time() - cpu) / sizes.steps


def steps_beside(driver: Driver, plain: Driver, place: Place, sizes: Sizes) -> list[dict[str, Any]]:
    """Steps against those of ``plain``, by the number of answers; ``times``: how much faster."""
    lines = []
    for batch in (1, 3) if place.dry else (1, 16, 64):
        own_s, _ = step_seconds(driver, place, batch, sizes)
        plain_s, _ = step_seconds(plain, place, batch, sizes)
        lines.append({"batch": batch, "step_ms": own_s * 1e3, "plain_ms": plain_s * 1e3, "times": plain_s / own_s})
    return lines


def filled(driver: Driver, sequences: int, sizes: Sizes) -> None:
    """Real keys and values for every sequence, by reading its prompt."""
    texts = driver.texts(sequences, sizes.context)
    for sequence in range(sequences):
        driver.read(texts[sequence], sequence, sizes.chunk)


def prefill(driver: Driver, place: Place, sizes: Sizes, matmul_rate: float) -> dict[str, Any]:
    """A long prompt in chunks: seconds, tokens a second, and the part of the matmul rate."""
    text, tables = driver.texts(1, sizes.prompt)[0], driver.table_SP
    driver.as_one(sizes.prompt)
    driver.read(text, 0, sizes.chunk)
    place.wait()
    took = []
    for _ in range(1 if place.dry else 3):
        begun = time.perf_counter()
        driver.read(text, 0, sizes.chunk)
        place.wait()
        took.append(time.perf_counter() - begun)
    driver.table_SP = tables
    seconds = sorted(took)[len(took) // 2]
    kv = driver.made.spec.kv
    heads = getattr(driver.made.spec.details, "layers")[0].attention.heads  # noqa: B009 - of any decoder
    attended = 2 * 2 * kv.layers * heads * kv.key_dim * sizes.prompt * (sizes.prompt + 1) // 2
    flops = driver.made.flops_per_token * sizes.prompt + attended
    return {
        "tokens": sizes.prompt,
        "seconds": seconds,
        "tokens_per_s": sizes.prompt / seconds,
        "of_matmul_rate": flops / seconds / matmul_rate,
    }


class FreeOrders:
    """The same operations, with products by cuBLAS in whatever order it likes: what law 1 is compared with."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._weights: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """See ``Ops.linear``; other bits."""
        own = self._weights.get(id(weight))
        if own is None:
            own = torch.empty(weight.n, weight.k, dtype=torch.bfloat16, device=self._device).normal_(std=0.02)
            self._weights[id(weight)] = own
        return (x_TK.to(torch.bfloat16) @ own.T).float()

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """See ``Ops.linear_add``; other bits."""
        hidden_TN += self.linear(x_TK, weight)


def law1_cost(made: Made, ops: Ops, place: Place, sizes: Sizes, ours: Driver) -> dict[str, float]:
    """Seconds of ours over seconds with free orders: a decode step of batch 16, and a chunk of a prompt."""
    from penstock.kernels.triton.graphs import CudaGraphRunner, EagerRunner
    from penstock.kernels.triton.program import DeviceProgram

    free: Any = FreeOrders(ops, place.device)
    theirs = Driver(made, ops, max(sizes.decode), sizes.context + 16)
    replays = CudaGraphRunner(place.device) if place.cuda else EagerRunner()
    pick = getattr(ours.program, "pick", None)
    groups = made.spec.kv.layer_groups
    theirs.program = DeviceProgram(
        free, made.model, theirs.kv, device=place.device, groups=groups, replays=replays, pick=pick
    )
    batch = sizes.decode[-1] if place.dry else 16
    own_s, _ = step_seconds(ours, place, batch, sizes)
    free_s, _ = step_seconds(theirs, place, batch, sizes)
    chunk = min(sizes.chunk, sizes.context)
    text = ours.texts(1, chunk)[0]
    both = []
    for driver in (ours, theirs):
        arrays, picks = driver.prompt(text, 0, 0, draws=True)
        both.append(place.seconds(lambda d=driver, a=arrays, p=picks: d.program.run(a, 0, [], p), repeats=5))
    return {"decode": own_s / free_s, "prefill": both[0] / both[1]}
