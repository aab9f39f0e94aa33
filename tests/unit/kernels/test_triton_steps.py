"""Steps on a GPU that a graph could capture: nothing in them waits for the host, whatever a model has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import TRITONS, assert_same_bits, make, normal, sum_of_experts
from nobody_waits import Trapped, WaitedError, nobody_waits
from quant_cases import FORMATS, matrix_of
from torch import Tensor

from penstock.kernels.compressed import compress_for_gpu
from penstock.kernels.lora import LowRank
from penstock.kernels.operands import SILU, Routing, StepBatch, segment_ends
from penstock.kernels.ops import DirectProgram
from penstock.kernels.triton.lora import MOST_PARTS, MOST_RANK
from penstock.kernels.triton.program import DeviceProgram
from penstock.types import SamplingParams
from runner_bench import RunnerBench
from tiny_adapters import write_adapter
from tiny_models import llama_config, write_model

CONFIG = llama_config(vocab_size=67, num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16)


@pytest.fixture
def bf16() -> Any:
    return make(*TRITONS[0])


@pytest.mark.parametrize(
    "look",
    [lambda x: x.max().item(), torch.nonzero, lambda x: x[x > 1], lambda x: torch.tensor([1])],
    ids=["item", "nonzero", "mask", "numbers of the host"],
)
def test_the_trap_is_one(look: Callable[[Tensor], object]) -> None:
    x = torch.arange(3)
    with nobody_waits(), pytest.raises(WaitedError):
        look(x)


def mixed_experts(ops: Any) -> tuple[list[Any], list[Any]]:
    """Gates and ups, and downs: plain, compressed, in two parts, and with columns in an order of their own."""
    n, k, inner = 64, 128, 32
    wide, narrow = (
        (normal(seed, *shape) * 0.1).astype(ml_dtypes.bfloat16) for seed, shape in ((1, (n, k)), (2, (k, inner)))
    )
    order = np.random.default_rng(5).permutation(k).astype(np.int32)
    halves = [matrix_of(FORMATS[name], n // 2, k, 3) for name in ("8 bits, fp16", "4 bits, zero point")]
    ordered, _ = matrix_of(FORMATS["4 bits, zero point"], n, k, 4, order=order)
    gate_up = [
        ops.pack_linear(wide),
        ops.pack_compressed([compress_for_gpu(wide[::-1].copy().view(np.uint16))]),
        ops.pack_quantized([matrix for matrix, _ in halves]),
        ops.pack_quantized([ordered]),
        ops.pack_linear(wide[:, ::-1].copy()),
    ]
    return gate_up, [ops.pack_linear(narrow * ml_dtypes.bfloat16(1 + 0.5 * e)) for e in range(5)]


def test_experts_of_several_forms_are_each_their_own_product(bf16: Any) -> None:
    """Nobody waits for whom a token chose, and its bits are those of products one by one."""
    ops, rows, how = bf16, 3, Routing(experts=5, top_k=3, normalised=True)
    gate_up, down = mixed_experts(ops)
    experts = ops.pack_experts(gate_up, down)
    assert [stack.first for stack in experts.data.gate_up] == [0, 0, 0, 32, 0]
    assert len(experts.data.down) == 1
    x, hidden = ops.compute(normal(7, rows, 128)), ops.hidden(normal(8, rows, 128))
    routes = ops.route(ops.hidden(normal(9, rows, 5)), how)
    with nobody_waits():
        ops.experts_add(x, routes, experts, SILU, hidden)
    ids, weights = ops.routes_to_numpy(routes)
    each = [ops.to_numpy(ops.linear(ops.gated(ops.linear(x, a)), b)) for a, b in zip(gate_up, down, strict=True)]
    wanted = normal(8, rows, 128)
    for row in range(rows):
        wanted[row] += sum_of_experts({e: each[e][row] * w for e, w in zip(ids[row], weights[row], strict=True)}, 5)
    assert_same_bits(ops.to_numpy(hidden), wanted)


def test_adapters_come_and_go_where_nobody_waits(bf16: Any) -> None:
    """A table that a graph has captured is given another adapter; a row's bits follow its adapter alone."""
    ops, k, n = bf16, 72, 40
    site = ops.pack_linear(normal(1, n, k), segments=segment_ends(k, 8))
    table = ops.adapter_table([site], 3)
    one, other = (
        table.pack({0: [LowRank(normal(seed, rank, k), normal(seed + 1, n - 8, rank), 8, 0.5)]})
        for seed, rank in ((2, 5), (4, 40))
    )
    x, slots = ops.compute(normal(6, 4, k)), np.array([2, -1, 0, 2], np.int32)

    def added(rows: list[int], *, wanted: list[int] | None = None) -> np.ndarray[Any, Any]:
        own = slots[rows]
        batch = StepBatch(
            *(np.zeros(len(rows), np.int32),) * 2,
            torch.arange(len(rows) + 1, dtype=torch.int32, device=ops.device),  # type: ignore[arg-type]
            np.zeros((len(rows), 1), np.int32),
            torch.tensor(wanted or [0], dtype=torch.int32, device=ops.device),  # type: ignore[arg-type]
            adapters_S=torch.tensor(own, device=ops.device),  # type: ignore[arg-type]
        )
        taken = rows if wanted is None else [rows[row] for row in wanted]
        out, x_TK = ops.hidden(normal(7, 4, n)[taken]), x[taken].clone()
        with nobody_waits():
            ops.lora_add(x_TK, batch, table, 0, out, wanted=wanted is not None)
        return np.array(ops.to_numpy(out))

    assert_same_bits(added([0, 1, 2, 3]), normal(7, 4, n), "empty slots")
    table.put(2, one)
    table.put(0, other)
    together = added([0, 1, 2, 3])
    assert_same_bits(together[1], normal(7, 4, n)[1])
    assert not (together[[0, 2]] == normal(7, 4, n)[[0, 2]])[:, 8:].any()
    assert_same_bits(added([2]), together[2:3])
    assert_same_bits(added([0, 1, 2, 3], wanted=[3, 1]), together[[3, 1]])
    table.put(2, other)
    table.clear(0)
    later = added([0, 1, 2, 3])
    assert_same_bits(later[2], normal(7, 4, n)[2])
    assert (later[0] != together[0]).any()


def test_what_a_slot_cannot_hold_is_refused(bf16: Any) -> None:
    table = bf16.adapter_table([bf16.pack_linear(normal(1, 40, 16))], 1)
    thin = [LowRank(normal(1, 1, 16), normal(2, 1, 1), first, 1.0) for first in range(MOST_PARTS + 1)]
    thick = [LowRank(np.zeros((MOST_RANK + 1, 16), np.float32), np.zeros((40, MOST_RANK + 1), np.float32), 0, 1.0)]
    for parts in (thin, thick):
        with pytest.raises(ValueError, match=r"does not fit: a product has at most 4 parts of rank 512 on a GPU"):
            table.pack({0: parts})


@pytest.mark.long
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
def test_nothing_waits_in_a_step_that_is_captured(tmp_path: Path, adapted: bool) -> None:
    """The program's own steps, answers of two sequences side by side; the same bits as operation by operation."""
    folder = write_model(tmp_path / "model", CONFIG, seed=3)
    told = []
    for trapped in (False, True):
        bench = RunnerBench(folder, "bf16", pages=40, family=TRITONS[0][0], device="cpu")
        own = write_adapter(tmp_path / f"adapter{trapped}", folder, ("q_proj", "o_proj"), rank=3, seed=1)
        ref = bench.load_adapter(own) if adapted else None
        model = bench.adapters.with_adapters(bench.model.model) if adapted else bench.model.model
        program: Any = DirectProgram(bench.ops, model, bench.kv)
        if trapped:
            program = bench.ops.record(model, bench.kv)
            assert isinstance(program, DeviceProgram)
            program.replays = Trapped()
        bench.runner.adapted = bench.runner.program = program
        sampling = SamplingParams(seed=1, max_tokens=4, temperature=0.7)
        requests = [bench.request(list(range(3, 3 + length)), sampling, adapter=ref) for length in (5, 18)]
        for request in requests:
            bench.read(request, 32)
        for _ in range(2):
            bench.step([(request, 1) for request in requests])
        told.append([tuple(request.output) for request in requests])
        assert not trapped or program.replays.runs == 2
    assert told[0] == told[1]
