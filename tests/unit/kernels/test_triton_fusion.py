"""Products and what reads them in one kernel: the bits of one after another, whatever the weights and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import INTERPRETED, TRITONS, assert_same_bits, make, normal
from numpy.typing import NDArray
from quant_cases import FORMATS, matrix_of

from penstock.kernels.compressed import compress_for_gpu
from penstock.kernels.operands import SILU, SWIGLU_OAI, Activation, Gate, KvShape, StepBatch, segment_ends
from penstock.kernels.ops import DirectProgram
from penstock.kernels.triton import fusion
from penstock.kernels.triton.fusion import FusingOps
from penstock.types import SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

LONG = [pytest.mark.long] if INTERPRETED else []
K = 72


@pytest.fixture(params=[TRITONS[0], pytest.param(TRITONS[1], marks=LONG)], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which products were one kernel with what reads them."""
    seen: list[str] = []

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            seen.append(own.__name__)
            return own(*args)

        return count

    for own in (fusion.gated_product, fusion.written_product):
        monkeypatch.setattr(fusion, own.__name__, counted(own))
    return seen


def compressed(ops: Any, n: int, k: int, rows: slice | None = None) -> Any:
    """With escapes that show in a product, so that tiles of the matrix have flags; ``rows``: only in these."""
    weight = normal(1, n, k) * 0.1
    if rows is not None:  # small weights would be escapes too
        weight = np.copysign(np.maximum(abs(weight), 0.01), weight)
    weight = weight.astype(ml_dtypes.bfloat16)
    weight[slice(5, None, n // 3) if rows is None else rows, 3::29] *= ml_dtypes.bfloat16(1e6)
    matrix = compress_for_gpu(weight.view(np.uint16))
    assert matrix is not None
    return ops.pack_compressed([matrix])


# --- gates ------------------------------------------------------------------------------------------------------------


def gated_alike(ops: Any, weight: Any, kind: Gate, rows: tuple[int, ...] = (1, 70)) -> None:
    for count in rows:
        x = ops.compute(normal(count, count, weight.k))
        apart = ops.gated(ops.linear(x, weight), kind)
        own = FusingOps(ops, ops.form)
        assert_same_bits(ops.to_numpy(own.gated(own.linear(x, weight), kind)), ops.to_numpy(apart), f"{count} rows")


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        (70, SILU),
        pytest.param(64, Gate(activation=Activation.GELU_TANH), marks=LONG),
        pytest.param(90, SWIGLU_OAI, marks=LONG),
    ],
)
def test_gates(ops: Any, kernels: list[str], inner: int, kind: Gate) -> None:
    gated_alike(ops, ops.pack_linear(normal(1, 2 * inner, K) / 5), kind)
    assert kernels == ["gated_product"] * 2


def test_gates_of_compressed_weights(kernels: list[str]) -> None:
    """Tiles of gate and up have flags of their own; where a tile would lie in three of them, nothing is fused."""
    ops = make(*TRITONS[0])
    gated_alike(ops, compressed(ops, 2 * 192, 128), SILU, rows=(3,))
    gated_alike(ops, compressed(ops, 2 * 192, 64, slice(197, 198)), SILU, rows=(3,))  # gates' tile has none
    assert kernels == ["gated_product"] * 2
    gated_alike(ops, compressed(ops, 2 * 80, 128), SILU, rows=(3,))
    assert kernels == ["gated_product"] * 2


@pytest.mark.long
def test_gates_of_other_weights(kernels: list[str]) -> None:
    ops = make(*TRITONS[0])
    gated_alike(ops, compressed(ops, 2 * 192, 128), SILU, rows=(70, 257))
    assert kernels == ["gated_product"]  # more rows are multiplied from slabs
    quantized = ops.pack_quantized([matrix_of(FORMATS["4 bits, zero point"], 96, 128)[0]])
    gated_alike(ops, quantized, SILU)
    order = np.random.default_rng(5).permutation(128).astype(np.int32)
    gated_alike(ops, ops.pack_quantized([matrix_of(FORMATS["8 bits, fp16"], 96, 128, order=order)[0]]), SILU, rows=(3,))
    gated_alike(ops, ops.pack_linear(normal(1, 96, 128), segments=segment_ends(128, 8)), SILU, rows=(3,))
    assert kernels == ["gated_product"] * 3


# --- queries, keys and values -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """An attention's heads, and how they are turned."""

    heads: int
    kv_heads: int
    dim: int
    values: int
    rotated: int
    interleaved: bool = False
    biased: bool = False
    scaled: bool = False

    @property
    def width(self) -> int:
        return (self.heads + self.kv_heads) * self.dim + self.kv_heads * self.values


def batch_of(ops: Any, rows: int) -> StepBatch:
    """Two sequences, the first of one token, and a token that is nobody's."""
    positions = np.array([37, *range(14, 14 + rows)], np.int32)
    table = np.array([[9, 1, 4, 0, 0, 0], [5, 2, 7, 8, 3, 6]], np.int32)
    own = (np.zeros(rows, np.int32), positions[:rows], np.array([0, 1, rows - 1], np.int32), table)
    return StepBatch(*(torch.from_numpy(array).to(ops.device) for array in own), np.zeros(1, np.int32))  # type: ignore[arg-type]


def written_alike(ops: Any, layer: Layer, weight: Any, rows: int) -> None:
    shape = KvShape(layers=2, kv_heads=layer.kv_heads, key_dim=layer.dim, value_dim=layer.values)
    rope = None
    if layer.rotated:
        angles = 10000.0 ** -(np.arange(0, layer.rotated, 2) / layer.rotated)
        rope = ops.rope_table(angles, 256, interleaved=layer.interleaved)
    bias = ops.vector(normal(3, layer.width)) if layer.biased else None
    q_scale = ops.vector(1 + 0.01 * np.arange(256)) if layer.scaled else None
    x, batch, found = ops.compute(normal(2, rows, weight.k)), batch_of(ops, rows), []
    for own in (ops, FusingOps(ops, ops.form)):
        kv = ops.new_kv(shape, pages=10)
        qkv = own.linear(x, weight)
        if bias is not None:
            own.add_bias(qkv, bias)
        q = own.rope_and_write(
            qkv, rope, kv, 1, batch, heads=layer.heads, kv_heads=layer.kv_heads, q_scale=q_scale
        )  # fmt: skip
        found.append([np.array(ops.to_numpy(array.float())) for array in (q[: rows - 1], kv.keys, kv.values)])
    for got, wanted, name in zip(found[1], found[0], ("queries", "keys", "values"), strict=True):
        assert_same_bits(got, wanted, name)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(3, 1, 24, 20, 16, biased=True),
        pytest.param(Layer(4, 2, 32, 32, 32, interleaved=True, scaled=True), marks=LONG),
        pytest.param(Layer(2, 2, 80, 80, 0), marks=LONG),
        pytest.param(Layer(2, 1, 128, 128, 128, biased=True, scaled=True), marks=LONG),
        pytest.param(Layer(1, 1, 256, 256, 64), marks=LONG),
    ],
)
def test_queries_keys_and_values(ops: Any, kernels: list[str], layer: Layer) -> None:
    weight = ops.pack_linear(normal(1, layer.width, K) / 5)
    written_alike(ops, layer, weight, 6)
    if layer.heads > 3:
        written_alike(ops, layer, weight, 70)
    assert set(kernels) == {"written_product"}


@pytest.mark.parametrize(
    "layer", [Layer(2, 1, 128, 128, 128), pytest.param(Layer(4, 2, 64, 64, 64, interleaved=True), marks=LONG)]
)
def test_queries_keys_and_values_of_compressed_weights(kernels: list[str], layer: Layer) -> None:
    ops = make(*TRITONS[0])
    written_alike(ops, layer, compressed(ops, layer.width, 64), 4)
    assert kernels == ["written_product"]


def test_heads_wider_than_a_tile_of_compressed_weights(kernels: list[str]) -> None:
    """What is turned with outputs of a tile without escapes may lie in one with some, for queries and for keys."""
    ops, layer = make(*TRITONS[0]), Layer(1, 1, 256, 256, 256)
    for head in (0, 256):
        written_alike(ops, layer, compressed(ops, layer.width, 64, slice(head + 133, head + 134)), 4)
    assert kernels == ["written_product"] * 2


def test_what_does_not_suit_is_left_apart(kernels: list[str]) -> None:
    """A product that two read, that a norm changes, that is added to, or that nobody reads before another is begun."""
    ops = make(*TRITONS[0])
    weight, x, ones = ops.pack_linear(normal(1, 48, K) / 5), ops.compute(normal(2, 2, K)), ops.vector(np.ones(8))
    told: list[list[NDArray[Any]]] = []
    for own in (ops, FusingOps(ops, ops.form)):
        seen = []
        twice = own.linear(x, weight)
        seen += [own.gated(twice, SILU), own.gated(twice, SILU)]
        normed = own.linear(x, weight)
        own.norm_heads(normed, ones, 1e-5, first=0, count=6)
        seen.append(own.gated(normed, SILU))
        first, second = own.linear(x, weight), own.linear(x, weight)
        seen += [own.gated(first, SILU), own.gated(second, SILU)]
        onto = own.linear(x, weight)
        own.linear_add(x, weight, onto)
        seen.append(onto if own is ops else own.made(onto))
        told.append([np.array(ops.to_numpy(array)) for array in seen])
    for got, wanted in zip(told[1], told[0], strict=True):
        assert_same_bits(got, wanted)
    assert kernels == ["gated_product"]


@pytest.mark.cuda
def test_products_of_a_model_on_a_gpu(kernels: list[str]) -> None:
    """Where tiles, warps and stages are what they are: the same bits in one kernel and in two."""
    ops, layer = make(*TRITONS[0]), Layer(32, 8, 128, 128, 128, biased=True)
    gated_alike(ops, ops.pack_linear(normal(1, 28672, 4096) / 64), SILU, rows=(1, 64, 65, 129, 257, 1100))
    gated_alike(ops, compressed(ops, 28672, 4096), SILU, rows=(1, 64, 65, 129, 256))
    for weight in (ops.pack_linear(normal(1, layer.width, 4096) / 64), compressed(ops, layer.width, 4096)):
        for rows in (4, 66, 80):
            written_alike(ops, layer, weight, rows)
    assert len(kernels) == 17


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_whole_programs_write_the_same(tmp_path: Path, kernels: list[str], dtype: str) -> None:
    """Prompts in pieces and answers side by side: log-probabilities to the bit."""
    config = llama_config(vocab_size=67, num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=16)
    folder, told = write_model(tmp_path, config, seed=3), []
    for fused in (False, True):
        bench = RunnerBench(folder, dtype, pages=40, family=TRITONS[0][0], device="cpu")
        model, ops = bench.model.model, bench.ops
        bench.runner.program = ops.record(model, bench.kv) if fused else DirectProgram(ops, model, bench.kv)
        sampling = SamplingParams(seed=1, max_tokens=3, temperature=0.7, logprobs=5)
        requests = [bench.request(list(range(3, 3 + length)), sampling) for length in (5, 18)]
        drawn = [bench.read(request, 7) for request in requests]
        for _ in range(2):
            drawn += bench.step([(request, 1) for request in requests])
        told.append(drawn)
        assert bool(kernels) == fused
    assert told[0] == told[1]
    assert kernels.count("written_product") > kernels.count("gated_product") > 0  # pieces of prompts have no last gate
