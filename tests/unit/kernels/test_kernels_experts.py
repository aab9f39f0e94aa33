"""Routed experts: values against float64, law 1, any form of weights, recorded and not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import EVERY, NATIVE, ON_GPU, TOLERANCE, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray
from quant_cases import FORMATS, matrix_of

from penstock.kernels import _native
from penstock.kernels.native import compression
from penstock.kernels.native.backend import families
from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import (
    SILU,
    SWIGLU_OAI,
    Array,
    Gate,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routing,
    Score,
    StepBatch,
    segment_ends,
)
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

ROUTINGS = {
    "mixtral": Routing(experts=8, top_k=2, normalised=True),
    "qwen": Routing(experts=60, top_k=4),
    "gpt-oss": Routing(experts=32, top_k=4, score=Score.SOFTMAX_CHOSEN),
    "llama4": Routing(experts=16, top_k=1, score=Score.SIGMOID),
    "deepseek2": Routing(experts=64, top_k=6, groups=8, groups_kept=3, factor=16.0),
    "deepseek3": Routing(
        experts=64, top_k=8, score=Score.SIGMOID, normalised=True, groups=8, groups_kept=4, pairs=True, factor=2.5
    ),
    "all": Routing(experts=3, top_k=3, factor=0.5),
}


@pytest.fixture(params=[*EVERY, *ON_GPU], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.fixture
def one_and_two_threads() -> Iterator[Any]:
    def each() -> Iterator[int]:
        for threads in (1, 2):
            _native.set_threads(threads)
            yield threads

    yield each
    _native.set_threads(1)


def plain_route(
    logits: NDArray[np.float32], how: Routing, bias: NDArray[np.float32] | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """One token in float64."""
    wide = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-wide)) if how.score is Score.SIGMOID else np.exp(wide) / np.exp(wide).sum()
    choice = scores.copy() if bias is None else scores + bias
    groups = np.sort(choice.reshape(how.groups, -1), axis=1)[:, ::-1]
    best = groups[:, :2].sum(1) if how.pairs else groups[:, 0]
    for group in np.argsort(-best, kind="stable")[how.groups_kept :]:
        choice[group * how.group_size : (group + 1) * how.group_size] = -np.inf
    ids = np.argsort(-choice, kind="stable")[: how.top_k]
    weights = scores[ids]
    if how.normalised or how.score is Score.SOFTMAX_CHOSEN:
        weights /= weights.sum()
    return ids, weights * how.factor


@pytest.mark.parametrize("name", ROUTINGS)
def test_route(ops: Any, name: str) -> None:
    how = ROUTINGS[name]
    logits = normal(1, 40, how.experts) * 2
    bias = normal(2, how.experts) * 0.2 if how.pairs else None

    def routed(some: NDArray[np.float32]) -> Any:
        return ops.routes_to_numpy(ops.route(ops.hidden(some), how, None if bias is None else ops.vector(bias)))

    ids, weights = routed(logits)
    for row in range(40):
        wanted_ids, wanted_weights = plain_route(logits[row], how, bias)
        np.testing.assert_array_equal(ids[row], wanted_ids)
        assert_close(weights[row], wanted_weights, 1e-6)
        alone = ops.routes_to_numpy(
            ops.route(ops.hidden(logits[row : row + 1]), how, bias if bias is None else ops.vector(bias))
        )
        assert_same_bits(alone[1][0], weights[row])


def test_of_equal_experts_the_lower_id_is_chosen(ops: Any) -> None:
    logits = np.zeros((1, 20), np.float32)
    logits[0, [3, 11, 17]] = 1.0
    ids, _ = ops.routes_to_numpy(ops.route(ops.hidden(logits), Routing(experts=20, top_k=5)))
    assert ids[0].tolist() == [3, 11, 17, 0, 1]
    even = Routing(experts=20, top_k=4, groups=5, groups_kept=1)
    ids, _ = ops.routes_to_numpy(ops.route(ops.hidden(logits * 0), even))
    assert ids[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"experts": 8, "top_k": 9},
        {"experts": 8, "top_k": 2, "groups": 3},
        {"experts": 8, "top_k": 5, "groups": 4, "groups_kept": 2},
        {"experts": 8, "top_k": 2, "groups": 8, "groups_kept": 4, "pairs": True},
        {"experts": 5000, "top_k": 2},
    ],
)
def test_impossible_choices_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"experts|groups"):
        Routing(**wrong)


class Shape:
    """Experts of some size with seeded weights; made for a backend by ``packed``."""

    def __init__(
        self, count: int, k: int, inner: int, n: int, *, biased: bool = False, weighs_input: bool = False
    ) -> None:
        self.count, self.k, self.inner, self.n, self.weighs_input = count, k, inner, n, weighs_input
        self.gate_up = [normal(10 + e, 2 * inner, k) / k**0.5 for e in range(count)]
        self.down = [normal(500 + e, n, inner) / inner**0.5 for e in range(count)]
        self.biases = (normal(5, count, 2 * inner), normal(6, count, n)) if biased else (None, None)

    def packed(self, ops: Any) -> PackedExperts:
        return ops.pack_experts(
            [ops.pack_linear(weight) for weight in self.gate_up],
            [ops.pack_linear(weight, segments=segment_ends(self.inner, 32)) for weight in self.down],
            gate_up_biases=None if self.biases[0] is None else [ops.vector(bias) for bias in self.biases[0]],
            down_biases=None if self.biases[1] is None else [ops.vector(bias) for bias in self.biases[1]],
            weighs_input=self.weighs_input,
        )


SMALL = Shape(8, 40, 32, 44)


def one_by_one(ops: Any, shape: Shape, x: Array, hidden: Array, how: Routing, logits: Array, gate: Gate) -> Array:
    """The same by plain operations, summed in float64."""
    ids, weights = ops.routes_to_numpy(ops.route(logits, how))
    before, sums = np.array(ops.to_numpy(hidden)), np.zeros(hidden.shape, np.float64)
    for row in range(len(ids)):
        for place in np.argsort(ids[row]):
            expert, weight = ids[row, place], weights[row, place]
            own = ops.to_numpy(x[row : row + 1]) * (weight if shape.weighs_input else 1)
            wide = ops.linear(ops.compute(own), ops.pack_linear(shape.gate_up[expert]))
            if shape.biases[0] is not None:
                ops.add_bias(wide, ops.vector(shape.biases[0][expert]))
            y = ops.linear(ops.gated(wide, gate), ops.pack_linear(shape.down[expert]))
            if shape.biases[1] is not None:
                ops.add_bias(y, ops.vector(shape.biases[1][expert]))
            sums[row] += ops.to_numpy(y)[0].astype(np.float64) * (1 if shape.weighs_input else weight)
    return before + sums


@pytest.mark.parametrize(
    ("shape", "gate"),
    [
        (SMALL, SILU),
        (Shape(8, 40, 24, 44, biased=True), SWIGLU_OAI),
        (Shape(8, 33, 17, 20, weighs_input=True), SILU),
    ],
    ids=["plain", "gpt-oss", "llama4"],
)
def test_experts_add(ops: Any, shape: Shape, gate: Gate) -> None:
    how, rows = Routing(experts=8, top_k=3, normalised=True), 13
    x, logits = ops.compute(normal(1, rows, shape.k)), ops.hidden(normal(2, rows, 8))
    hidden = ops.hidden(normal(3, rows, shape.n))
    wanted = one_by_one(ops, shape, x, hidden, how, logits, gate)
    ops.experts_add(x, ops.route(logits, how), shape.packed(ops), gate, hidden)
    assert_close(ops.to_numpy(hidden), wanted, 3e-6 if not shape.weighs_input else TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_quantized_experts(family: str, compute: str, one_and_two_threads: Any) -> None:
    """All experts' products share their items; each computes what its weights say, alone or in company."""
    ops, how = make(family, compute), Routing(experts=6, top_k=2, normalised=True)
    forms = [FORMATS["4 bits, bf16"], FORMATS["4 bits, zero point"], FORMATS["8 bits, fp16"]]
    made = [(matrix_of(forms[e % 3], 128, 64, e), matrix_of(forms[e % 2], 48, 64, 50 + e)) for e in range(6)]
    ends = segment_ends(64, 32)
    coded = ops.pack_experts(
        [ops.pack_quantized([wide[0]]) for wide, _ in made],
        [ops.pack_quantized([narrow[0]], segments=ends) for _, narrow in made],
    )
    plain = ops.pack_experts(
        [ops.pack_linear(wide[1]) for wide, _ in made],
        [ops.pack_linear(narrow[1], segments=ends) for _, narrow in made],
    )
    x = normal(4, 300, 64)
    whole = added(ops, coded, x, how)
    assert_close(whole, added(ops, plain, x, how), TOLERANCE[compute])
    for _ in one_and_two_threads():
        for start, end in ((0, 300), (3, 4), (40, 57)):
            assert_same_bits(added(ops, coded, x[start:end], how), whole[start:end], f"rows {start} to {end}")


def added(ops: Any, experts: PackedExperts, x: NDArray[np.float32], how: Routing) -> NDArray[np.float32]:
    """What experts add to zero, routed by the first columns of x."""
    hidden = ops.hidden(np.zeros((len(x), experts.n), np.float32))
    routes = ops.route(ops.hidden(x[:, : how.experts]), how)
    ops.experts_add(ops.compute(x), routes, experts, SILU, hidden)
    return np.array(ops.to_numpy(hidden))


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_a_row_alone_and_in_company(family: str, compute: str, one_and_two_threads: Any) -> None:
    ops, how = make(family, compute), Routing(experts=8, top_k=3, normalised=True)
    experts, x = SMALL.packed(ops), normal(4, 120, 40)
    alone = np.concatenate([added(ops, experts, x[row : row + 1], how) for row in range(120)])
    for _ in one_and_two_threads():
        for start, end in ((0, 120), (3, 5), (40, 57), (119, 120), (20, 84)):
            assert_same_bits(added(ops, experts, x[start:end], how), alone[start:end], f"rows {start} to {end}")


@pytest.mark.parametrize(("count", "chosen", "rows"), [(4, 3, 1500), (100, 12, 500)])
@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_large_enough_for_threads_and_windows(
    family: str, compute: str, count: int, chosen: int, rows: int, one_and_two_threads: Any
) -> None:
    """More slots than one window holds, so that sums of a token's experts wait for the next: of 12, several at once."""
    ops, how = make(family, compute), Routing(experts=count, top_k=chosen)
    experts, x = Shape(count, 128, 32, 140).packed(ops), normal(4, rows, 128)
    some = [0, 1, rows // 2, rows - 1]
    alone = np.concatenate([added(ops, experts, x[row : row + 1], how) for row in some])
    for _ in one_and_two_threads():
        assert_same_bits(added(ops, experts, x, how)[some], alone)


@pytest.mark.parametrize("family", families())
def test_compressed_experts_give_the_same_bits(family: str, one_and_two_threads: Any) -> None:
    """Some experts compressed and others plain, any number of rows."""
    ops, how = make(family, "bf16"), Routing(experts=6, top_k=2)
    shape = Shape(6, 256, 128, 64)
    plain = shape.packed(ops)
    halves = [[weight.astype(ml_dtypes.bfloat16) for weight in own] for own in (shape.gate_up, shape.down)]
    ends = segment_ends(128, 32)

    def packed(index: int, expert: int) -> Any:
        weight, segments = halves[index][expert], ends if index else None
        matrix = compression.compress(weight.view(np.uint16))
        assert matrix is not None
        kept = None if expert == 2 else ops.pack_compressed([matrix], segments=segments)
        return kept or ops.pack_linear(weight, segments=segments)

    mixed = ops.pack_experts([packed(0, e) for e in range(6)], [packed(1, e) for e in range(6)])
    assert mixed.nbytes <= plain.nbytes
    x = normal(4, 90, 256)
    for _ in one_and_two_threads():
        for rows in (1, 3, 20, 90):
            assert_same_bits(added(ops, mixed, x[:rows], how), added(ops, plain, x[:rows], how), f"{rows} rows")


PAGE = mmap.PAGESIZE


def untouched(n: int, k: int) -> tuple[PackedLinear, mmap.mmap]:
    """A bf16 weight of zeros in memory that nobody has read or written."""
    count = _native.Weights.cells_needed(n, k, [k], 2)
    memory = mmap.mmap(-1, -(-count * 4 // PAGE) * PAGE)
    cells = np.frombuffer(memory, np.uint32, count=count)
    return PackedLinear(n=n, k=k, segments=(k,), data=_native.Weights(cells, n, k, [k], 2), nbytes=cells.nbytes), memory


def touched(memory: mmap.mmap) -> bool:
    """Is any of it there by now?"""
    resident = (ctypes.c_ubyte * (len(memory) // PAGE))()
    place = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
    assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(len(memory)), resident) == 0
    return any(page & 1 for page in resident)


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    ops = make(NATIVE[0][0], "bf16")
    gate_up, down = ([untouched(n, 256) for _ in range(6)] for n in (512, 128))
    experts = ops.pack_experts([weight for weight, _ in gate_up], [weight for weight, _ in down])
    assert not any(touched(memory) for _, memory in (*gate_up, *down))
    logits = np.zeros((3, 6), np.float32)
    logits[:, [1, 4]] = 5.0
    routes = ops.route(ops.hidden(logits), Routing(experts=6, top_k=2))
    ops.experts_add(ops.compute(normal(1, 3, 256)), routes, experts, SILU, ops.hidden(normal(2, 3, 128)))
    for matrices in (gate_up, down):
        assert [touched(memory) for _, memory in matrices] == [False, True, False, False, True, False]


class Routed:
    """A step with two layers of experts; routes follow from the tokens, so they are known in a run only."""

    def __init__(self, ops: Ops, shape: Shape) -> None:
        self.table, self.router = (
            ops.pack_linear(normal(1, 64, shape.k)),
            ops.pack_linear(normal(2, shape.count, shape.k)),
        )
        self.experts, self.head = shape.packed(ops), ops.pack_linear(normal(3, 99, shape.k))
        self.weight = ops.vector(np.ones(shape.k, np.float32))
        self.bias = ops.vector(normal(9, shape.count) * 0.1)
        self.how = Routing(experts=shape.count, top_k=2, score=Score.SIGMOID, normalised=True, factor=2.0)

    def block(self, ops: Ops, hidden_TD: Array) -> None:
        x_TD = ops.rms_norm(hidden_TD, self.weight, 1e-5)
        routes = ops.route(ops.linear(x_TD, self.router), self.how, self.bias)
        ops.experts_add(x_TD, routes, self.experts, SILU, hidden_TD)

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        self.block(ops, hidden_TD)
        if not len(batch.sample_rows_R):
            return None
        hidden_RD = ops.rows(hidden_TD, batch.sample_rows_R)
        self.block(ops, hidden_RD)
        return hidden_RD

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.head)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_as_run(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps, kv = Routed(ops, Shape(8, 40, 24, 40)), ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=4)
    recorded, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
    assert isinstance(recorded, RecordedProgram)
    for tokens in ([1], [5, 6, 7], list(range(40)), [9]):
        count = len(tokens)
        batch = StepBatch(*(np.array(v, np.int32) for v in (
            tokens, range(count), [0, count], [[0, 1, 2]], [0, count - 1, count // 2]
        )))  # fmt: skip
        answers = []
        for program in (recorded, direct):
            picks = GumbelRows.empty(2)
            picks.temperatures_F[1] = 1.0
            program.run(batch, 1, [], picks)
            answers.append((np.array(program.hidden()), picks.tokens_F.tolist()))
        assert_same_bits(answers[0][0], answers[1][0])
        assert answers[0][1] == answers[1][1]


def test_bad_calls_are_refused() -> None:
    ops = make(*NATIVE[0])
    experts, routes = SMALL.packed(ops), ops.route(ops.hidden(normal(1, 2, 9)), Routing(experts=9, top_k=9))
    x, hidden = ops.compute(normal(1, 2, 40)), ops.hidden(np.zeros((2, 44)))
    with pytest.raises(ValueError, match="not there"):
        ops.experts_add(x, routes, experts, SILU, hidden)
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        ops.experts_add(x[:, :39].copy(), routes, experts, SILU, hidden)
    with pytest.raises(ValueError, match="logits must be"):
        ops.route(hidden, Routing(experts=9, top_k=1))
    for backend in (ops, make("reference", "fp32")):
        weights = [backend.pack_linear(normal(1, 8, 8)), backend.pack_linear(normal(1, 8, 7))]
        with pytest.raises(ValueError, match="one shape"):
            backend.pack_experts(weights, [backend.pack_linear(normal(1, 8, 4))] * 2)
