"""Operations that go row by row: every family and both compute types against float64, alone and in company, recorded
and not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import NATIVE, SLOW_TRITONS, TOLERANCE, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import SILU, SWIGLU_OAI, Activation, Array, Gate, KvShape, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

WIDTH = 52

Wide = NDArray[np.float64]

erf = np.vectorize(math.erf)


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def plain(x: Wide, kind: Activation, alpha: float = 1.0) -> Wide:
    match kind:
        case Activation.SILU:
            return x / (1 + np.exp(-alpha * x))
        case Activation.GELU:
            return x * 0.5 * (1 + erf(x / 2**0.5))
        case Activation.GELU_TANH:
            return x * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
        case Activation.RELU:
            return np.maximum(x, 0)
        case Activation.RELU2:
            return np.maximum(x, 0) ** 2
        case Activation.NONE:
            return x


def values_of(rows: int, width: int) -> NDArray[np.float32]:
    """Small ones, large ones, and such as make exponentials overflow."""
    values = normal(7, rows, width) * np.exp(normal(8, rows, width))
    values[0, :6] = [-200, -88, 88, 200, 0, -0.0]
    return values


@pytest.mark.parametrize("kind", Activation)
def test_activate(ops: Any, kind: Activation) -> None:
    x, alpha = values_of(5, 44), 1.702 if kind is Activation.SILU else 1.0
    got = ops.to_numpy(ops.activate(ops.hidden(x), kind, alpha))
    assert_close(got, plain(x.astype(np.float64), kind, alpha), TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("gate", [SILU, SWIGLU_OAI, Gate(activation=Activation.GELU_TANH), Gate(limit=2.0)], ids=str)
def test_gated(ops: Any, gate: Gate) -> None:
    gate_up = values_of(5, 2 * 44)
    wide = gate_up.astype(np.float64)
    gates, ups = (wide[:, ::2], wide[:, 1::2]) if gate.interleaved else np.split(wide, 2, axis=1)
    wanted = plain(np.minimum(gates, gate.limit), gate.activation, gate.alpha)
    wanted *= np.clip(ups, -gate.limit, gate.limit) + gate.shift
    assert_close(ops.to_numpy(ops.gated(ops.hidden(gate_up), gate)), wanted, TOLERANCE[ops.compute_dtype])


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Gate(limit=0.0)


@pytest.mark.parametrize("width", [16, 20, 2048])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(ops: Any, width: int, biased: bool) -> None:
    hidden, weight, bias = normal(5, 7, width) * 3 + 2, normal(6, width), normal(7, width) * biased
    wide = hidden.astype(np.float64)
    apart = wide - wide.mean(1, keepdims=True)
    wanted = apart / np.sqrt((apart**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    got = ops.layer_norm(ops.hidden(hidden), ops.vector(weight), ops.vector(bias) if biased else None, 1e-5)
    assert_close(ops.to_numpy(got), wanted, TOLERANCE[ops.compute_dtype])
    array = ops.hidden(hidden)
    ops.layer_norm_in_place(array, ops.vector(weight), ops.vector(bias) if biased else None, 1e-5)
    assert_close(ops.to_numpy(array), wanted, TOLERANCE["fp32"])


def changed(ops: Any, values: NDArray[np.float32], fn: Callable[[Array], None]) -> NDArray[np.float32]:
    """What ``fn`` makes of an array in place."""
    array = ops.hidden(values)
    fn(array)
    return np.array(ops.to_numpy(array))


def test_in_place(ops: Any) -> None:
    hidden, x, vector = normal(1, 5, WIDTH), normal(2, 5, WIDTH) * 3, normal(3, WIDTH)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * vector
    got = changed(ops, hidden, lambda h: ops.norm_add(h, ops.hidden(x), ops.vector(vector), 1e-6))
    assert_close(got, hidden + normed, 2e-6)
    assert_same_bits(changed(ops, hidden, lambda h: ops.add(h, ops.hidden(x))), hidden + x)
    assert_same_bits(changed(ops, hidden, lambda h: ops.add_bias(h, ops.vector(vector))), hidden + vector)
    assert_same_bits(changed(ops, hidden, lambda h: ops.scale(h, 0.3)), hidden * np.float32(0.3))
    capped = changed(ops, values_of(5, WIDTH), lambda h: ops.softcap(h, 30.0))
    assert_close(capped, 30 * np.tanh(values_of(5, WIDTH).astype(np.float64) / 30), 1e-6)


def test_embed(ops: Any) -> None:
    table, tokens = ops.pack_linear(normal(4, 37, 45)), np.array([0, 36, 5, 5], np.int32)
    rows = ops.to_numpy(ops.embed(table, tokens))
    assert_same_bits(ops.to_numpy(ops.embed(table, tokens, 6.5)), rows * np.float32(6.5))
    hidden = normal(5, 4, 45)
    assert_same_bits(changed(ops, hidden, lambda h: ops.embed_add(table, tokens, h)), hidden + rows)


def test_rows_alone_and_in_company(ops: Any) -> None:
    x, weight, other = values_of(90, 322), ops.vector(normal(2, 322)), normal(3, 90, 322)
    cases: dict[str, Callable[[Array, Array], Array]] = {
        "layer_norm": lambda a, _: ops.layer_norm(a, weight, weight, 1e-5),
        "layer_norm_in_place": lambda a, _: ops.layer_norm_in_place(a, weight, weight, 1e-5) or a,
        "norm_add": lambda a, b: ops.norm_add(a, b, weight, 1e-5) or a,
        "softcap": lambda a, _: ops.softcap(a, 5.0) or a,
        "gated": lambda a, _: ops.gated(a, SWIGLU_OAI),
        **{kind: lambda a, _, kind=kind: ops.activate(a, kind) for kind in Activation},
    }
    for name, fn in cases.items():
        together = np.array(ops.to_numpy(fn(ops.hidden(x), ops.hidden(other))))
        for start, end in ((0, 1), (1, 4), (4, 90)):
            part = ops.to_numpy(fn(ops.hidden(x[start:end]), ops.hidden(other[start:end])))
            assert_same_bits(part, together[start:end], name)


class EveryRowOperation:
    """A step that uses all of them; its logits are a product that is scaled and capped."""

    def __init__(self, ops: Ops) -> None:
        self.table, self.positions = ops.pack_linear(normal(1, 64, WIDTH)), ops.pack_linear(normal(2, 40, WIDTH))
        self.wide, self.head = ops.pack_linear(normal(3, 2 * WIDTH, WIDTH)), ops.pack_linear(normal(5, 301, WIDTH))
        self.back = ops.pack_linear(normal(4, WIDTH, 2 * WIDTH))
        self.weight, self.bias = ops.vector(normal(6, WIDTH)), ops.vector(normal(7, 2 * WIDTH))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T, 7.5)
        ops.embed_add(self.positions, batch.positions_T, hidden_TD)
        ops.layer_norm_in_place(hidden_TD, self.weight, self.weight, 1e-12)
        for gate in (SWIGLU_OAI, Gate(activation=Activation.GELU)):
            wide_TN = ops.linear(ops.layer_norm(hidden_TD, self.weight, None, 1e-5), self.wide)
            ops.add_bias(wide_TN, self.bias)
            again_TN = ops.linear(ops.gated(wide_TN, gate), self.wide)
            ops.scale(again_TN, 0.3)
            ops.add(again_TN, wide_TN)
            ops.norm_add(hidden_TD, ops.linear(ops.activate(again_TN, Activation.SILU), self.back), self.weight, 1e-5)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        wide_RN = ops.linear(ops.layer_norm(hidden_RD, self.weight, self.weight, 1e-5), self.wide)
        narrow_RD = ops.linear(ops.activate(wide_RN, Activation.RELU2), self.back)
        logits_RV = ops.linear(ops.activate(narrow_RD, Activation.GELU_TANH), self.head)
        ops.scale(logits_RV, 0.01)
        ops.softcap(logits_RV, 1.5)
        return logits_RV


def drawn_by(program: Any, batch: StepBatch, picks: GumbelRows) -> tuple[NDArray[np.float32], list[int]]:
    """Hidden states of the wanted rows, and the tokens of the picks."""
    program.run(batch, 1, [], picks)
    return np.array(program.hidden()), picks.tokens_F.tolist()


def new_picks(count: int) -> GumbelRows:
    picks = GumbelRows.empty(count)
    picks.seeds_F[:], picks.temperatures_F[:] = np.arange(count), np.arange(count) % 3 / 2
    return picks


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_as_run(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps, kv = EveryRowOperation(ops), ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=4)
    recorded, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
    assert isinstance(recorded, RecordedProgram)
    assert recorded.step.picks
    for tokens in (1, 3, 19):
        positions = np.arange(tokens, dtype=np.int32)
        starts, table = np.array([0, tokens], np.int32), np.array([[2, 1]], np.int32)
        batch = StepBatch(positions[::-1].copy(), positions, starts, table, np.r_[0, positions].astype(np.int32))
        got, want = (drawn_by(program, batch, new_picks(tokens)) for program in (recorded, direct))
        assert_same_bits(got[0], want[0])
        assert got[1] == want[1]
    late = StepBatch(*(np.array(x, np.int32) for x in ([0], [40], [0, 1], [[0, 1, 2]], [0])))
    with pytest.raises(ValueError, match="positions must reach"):
        recorded.run(late, 1, [], GumbelRows.empty(0))
