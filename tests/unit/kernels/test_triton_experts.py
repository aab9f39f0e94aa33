"""The GPU's experts: chosen, grouped and joined on the device, and each token as if it were alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import INTERPRETED, TRITONS, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray
from quant_cases import FORMATS, matrix_of

from penstock.kernels.compressed import compress_for_gpu
from penstock.kernels.operands import SILU, SWIGLU_OAI, Routing, Score, segment_ends
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.triton import compressed as triton_compressed
from penstock.kernels.triton import moe as grouping
from penstock.kernels.triton.moe import ExpertGroups

LONG = [pytest.mark.long] if INTERPRETED else []
ROUTINGS = {
    "softmax": Routing(experts=6, top_k=2, normalised=True),
    "of the chosen": Routing(experts=12, top_k=3, score=Score.SOFTMAX_CHOSEN),
    "groups": Routing(experts=20, top_k=4, groups=5, groups_kept=2, factor=16.0),
    "pairs": Routing(
        experts=24, top_k=5, score=Score.SIGMOID, normalised=True, groups=4, groups_kept=2, pairs=True, factor=2.5
    ),
}


@pytest.fixture(params=[pytest.param(name, marks=LONG) for name in TRITONS], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "pairs" else LONG) for name in ROUTINGS])
def test_routes_are_the_oracles(name: str) -> None:
    ops, oracle, how = make(*TRITONS[1]), ReferenceOps(compute_dtype="fp32"), ROUTINGS[name]
    logits, bias = normal(1, 6, how.experts) * 2, normal(2, how.experts) * 0.2 if how.pairs else None
    told = []
    for own in (ops, oracle):
        bias_E = None if bias is None else own.vector(bias)
        told.append(own.routes_to_numpy(own.route(own.hidden(logits), how, bias_E)))
    np.testing.assert_array_equal(told[0][0], told[1][0])
    assert_close(told[0][1], told[1][1], 1e-6)
    ties = ops.routes_to_numpy(ops.route(ops.hidden(logits * 0), how))[0]
    assert ties[0].tolist() == list(range(how.top_k))


@pytest.mark.parametrize("share", [1, 3])
def test_columns_are_put_in_order_a_slice_at_a_time(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    x = torch.from_numpy(normal(1, 30 // share, 16))
    orders_EK = torch.from_numpy(random.permuted(np.tile(np.arange(16), (4, 1)), axis=1))
    groups = ExpertGroups.of(torch.from_numpy(random.integers(0, 4, 30).astype(np.int32)), 4)
    monkeypatch.setattr(grouping, "INDEX_BYTES", 8 * 16 * 7)  # of seven pairs
    got = grouping.ordered(x, orders_EK, groups, share)
    wanted = np.stack([x[pair // share][orders_EK[expert]] for pair, expert in enumerate(groups.experts_P)])
    assert_same_bits(got.numpy(), wanted)


def assert_alone(ops: Any, experts: Any, kind: Any, how: Routing) -> np.ndarray[Any, Any]:
    """90 tokens, in which one expert has most rows and the last has none, against each of some alone."""
    logits = normal(1, 90, how.experts)
    logits[:, 0] += 3
    logits[:, -1] -= 50
    x = ops.compute(normal(2, 90, experts.k))
    whole = ops.hidden(normal(3, 90, experts.n))
    ops.experts_add(x, ops.route(ops.hidden(logits), how), experts, kind, whole)
    for row in (0, 41, 89):
        one = ops.hidden(normal(3, 90, experts.n)[row : row + 1])
        ops.experts_add(x[row : row + 1], ops.route(ops.hidden(logits[row : row + 1]), how), experts, kind, one)
        assert_same_bits(ops.to_numpy(one)[0], ops.to_numpy(whole)[row], f"row {row}")
    return np.asarray(ops.to_numpy(whole) - normal(3, 90, experts.n))


def test_a_token_is_alone_with_its_experts() -> None:
    ops = make(*TRITONS[0])
    experts = ops.pack_experts(
        [ops.pack_linear(normal(10 + e, 64, 32) / 6) for e in range(3)],
        [ops.pack_linear(normal(50 + e, 40, 32) / 6) for e in range(3)],
    )
    logits, x, how = normal(1, 9, 3), ops.compute(normal(2, 9, 32)), Routing(experts=3, top_k=2)
    whole, one = ops.hidden(normal(3, 9, 40)), ops.hidden(normal(3, 9, 40)[4:5])
    ops.experts_add(x, ops.route(ops.hidden(logits), how), experts, SILU, whole)
    ops.experts_add(x[4:5], ops.route(ops.hidden(logits[4:5]), how), experts, SILU, one)
    assert_same_bits(ops.to_numpy(one)[0], ops.to_numpy(whole)[4])


@pytest.mark.parametrize("weighs_input", [False, True])
def test_plain_experts(ops: Any, weighs_input: bool) -> None:
    how, answers = Routing(experts=5, top_k=2, normalised=True), []
    for own in (ops, ReferenceOps(compute_dtype=ops.compute_dtype)):
        experts = own.pack_experts(
            [own.pack_linear(normal(10 + e, 64, 40) / 6) for e in range(5)],
            [own.pack_linear(normal(50 + e, 44, 32) / 6, segments=segment_ends(32, 4)) for e in range(5)],
            gate_up_biases=[own.vector(normal(70 + e, 64)) for e in range(5)],
            down_biases=[own.vector(normal(80 + e, 44)) for e in range(5)],
            weighs_input=weighs_input,
        )
        answers.append(assert_alone(own, experts, SWIGLU_OAI, how))
    assert_close(answers[0], answers[1], 2e-2 if ops.compute_dtype == "bf16" else 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["4 bits, exponents", "8 bits, fp32"])
def test_quantized_experts_and_their_own_linear(name: str) -> None:
    ops, form = make(*TRITONS[0]), FORMATS[name]
    wide = [matrix_of(form, 64, 128, e) for e in range(4)]
    narrow = [matrix_of(form, 48, 32, 20 + e) for e in range(4)]
    packed = [[ops.pack_quantized([matrix]) for matrix, _ in own] for own in (wide, narrow)]
    alone = ops.to_numpy(ops.linear(ops.compute(normal(7, 3, 128)), packed[0][2]))
    experts = ops.pack_experts(*packed)
    assert len(experts.data.gate_up) == 1
    assert_same_bits(ops.to_numpy(ops.linear(ops.compute(normal(7, 3, 128)), packed[0][2])), alone)
    got = assert_alone(ops, experts, SILU, Routing(experts=4, top_k=2))
    plain = ops.pack_experts(*([ops.pack_linear(weight) for _, weight in own] for own in (wide, narrow)))
    assert_close(got, assert_alone(ops, plain, SILU, Routing(experts=4, top_k=2)), 3e-2)


def test_compressed_experts_that_are_too_many_words_together_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [(normal(e, 32, 64) * 0.1).astype(ml_dtypes.bfloat16) for e in range(2)]
    ops = make(*TRITONS[0])
    forms = [ops.pack_compressed([compress_for_gpu(weight.view(np.uint16))]).data for weight in weights]
    words = sum(len(form.operands[0].arguments[1]) for form in forms)
    monkeypatch.setattr(triton_compressed, "MAX_WORDS", words)
    assert type(forms[0]).stacked(forms) is None
    monkeypatch.setattr(triton_compressed, "MAX_WORDS", words + 1)
    assert type(forms[0]).stacked(forms) is not None


@pytest.mark.long
def test_compressed_experts_have_the_bits_of_plain_ones() -> None:
    """80 outputs: tiles of later experts begin inside of those that the flags of escapes are of."""
    ops = make(*TRITONS[0])
    wide = [(normal(e, 128, 64) * 0.1).astype(ml_dtypes.bfloat16) for e in range(4)]
    narrow = [(normal(20 + e, 80, 64) * 0.1).astype(ml_dtypes.bfloat16) for e in range(4)]
    for weight in (wide[2], narrow[1], narrow[3]):
        weight[33:40, ::9] *= ml_dtypes.bfloat16(1e-12)

    def small(weight: NDArray[Any]) -> Any:
        return ops.pack_compressed([compress_for_gpu(weight.view(np.uint16))])

    one = ops.pack_experts([small(weight) for weight in wide], [small(weight) for weight in narrow])
    other = ops.pack_experts(*([ops.pack_linear(weight) for weight in own] for own in (wide, narrow)))
    assert len(one.data.gate_up) == 1
    how = Routing(experts=4, top_k=2)
    assert_same_bits(assert_alone(ops, one, SILU, how), assert_alone(ops, other, SILU, how))
