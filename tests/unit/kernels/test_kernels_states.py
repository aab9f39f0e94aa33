"""Recurrent layers: every backend computes what is written here token by token, in any cut, company and pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kernel_cases import EVERY, INTERPRETED, NATIVE, TOLERANCE, TRITONS, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import Array, KvShape, StateShape, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

WITH_TRITON = [*EVERY, *(pytest.param(*pair, marks=pytest.mark.long) for pair in TRITONS if INTERPRETED)]
"""On a GPU memory is not the host's: there ``test_triton_states`` asks."""

CELL = 32
STATES = StateShape(layers=2, key_heads=2, heads=4, key_dim=12, value_dim=16, taps=4, cell=CELL)
WIDE = StateShape(layers=1, key_heads=1, heads=2, key_dim=16, value_dim=80, taps=3, cell=CELL)
SHAPE = KvShape(layers=1, kv_heads=1, key_dim=16, value_dim=16, states=STATES)
LENGTHS = (70, 33)
CUTS = ((0, 70), tuple(range(71)), (0, 31, 32, 33, 64, 70), (0, 1, 70))


@dataclass
class Delta:
    """A recurrent layer's inputs, and two sequences whose states lie in a memory that is full of NaN."""

    ops: Any
    states: StateShape
    layer: int

    def __post_init__(self) -> None:
        own, ops = self.states, self.ops
        self.shape = replace(SHAPE, states=own)
        self.width = own.channels + own.heads * own.value_dim + 2 * own.heads
        self.x = [normal(length, length, self.width) for length in LENGTHS]
        self.taps = normal(5, own.taps, own.channels)
        self.rates = np.exp(0.3 * normal(6, own.heads))
        self.shifts = normal(7, own.heads)
        parts, cells = self.shape.state_parts, -(-max(LENGTHS) // CELL)
        order = np.random.default_rng(9).permutation(len(LENGTHS) * cells * parts).astype(np.int32)
        self.pages = order.reshape(len(LENGTHS), cells, parts)
        self.memory = bytearray(b"\xff" * ops.page_bytes(self.shape) * order.size)
        self.kv = ops.new_kv(self.shape, pages=order.size, memory=memoryview(self.memory))
        self.vectors = ops.vector(self.taps), ops.vector(self.rates), ops.vector(self.shifts)

    def batch(self, pieces: list[tuple[int, int, int]]) -> StepBatch:
        """Tokens [start, end) of each named sequence together."""
        positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in pieces])
        starts = np.cumsum([0, *(end - start for _, start, end in pieces)]).astype(np.int32)
        rows = [
            self.pages[s, self.states.first_cell(start) : (end - 1) // CELL + 1].flatten() for s, start, end in pieces
        ]
        states_SW = np.zeros((len(pieces), max(map(len, rows))), np.int32)
        for row, pages in zip(states_SW, rows, strict=True):
            row[: len(pages)] = pages
        table_SP = np.zeros((len(pieces), 8), np.int32)
        return StepBatch(positions, positions, starts, table_SP, starts[1:] - 1, states_SW=states_SW)

    def mix(self, ops: Any, x_TN: Any, batch: StepBatch) -> tuple[Any, Any]:
        """Convolved queries, keys and values, and what is read of the state."""
        taps, rates, shifts = self.vectors
        qkv_TC = ops.causal_conv(x_TN, taps, self.kv, self.layer, batch)
        first = self.width - 2 * self.states.heads
        gates = {"rates_H": rates, "shifts_H": shifts, "beta": first, "decay": first + self.states.heads}
        return qkv_TC, ops.delta_rule(qkv_TC, x_TN, self.kv, self.layer, batch, **gates)

    def step(self, pieces: list[tuple[int, int, int]]) -> list[NDArray[np.float32]]:
        x_TN = self.ops.hidden(np.concatenate([self.x[s][start:end] for s, start, end in pieces]))
        batch = self.batch(pieces)
        both = np.concatenate([self.ops.to_numpy(part) for part in self.mix(self.ops, x_TN, batch)], axis=1)
        return [both[first:last] for first, last in pairwise(batch.starts_S1)]

    def cut(self, sequence: int, cuts: tuple[int, ...]) -> NDArray[np.float32]:
        return np.concatenate([self.step([(sequence, start, end)])[0] for start, end in pairwise(cuts)])


def wanted(delta: Delta, x_TN: NDArray[np.float32]) -> NDArray[np.float64]:
    """As ``Ops`` says it, in float64."""
    own, x = delta.states, x_TN.astype(np.float64)
    padded = np.concatenate([np.zeros((own.taps - 1, own.channels)), x[:, : own.channels]])
    windows = np.stack([padded[j : j + len(x)] for j in range(own.taps)])
    sums = (windows * delta.taps[:, None]).sum(axis=0)
    qkv = sums / (1 + np.exp(-sums))
    keys, first = own.key_heads * own.key_dim, delta.width - 2 * own.heads
    out = np.zeros((len(x), own.heads, own.value_dim))
    for head in range(own.heads):
        at = head // (own.heads // own.key_heads) * own.key_dim
        state = np.zeros((own.key_dim, own.value_dim))
        for t in range(len(x)):
            q, k = qkv[t, at : at + own.key_dim], qkv[t, keys + at : keys + at + own.key_dim]
            v = qkv[t, 2 * keys + head * own.value_dim :][: own.value_dim]
            q, k = (part / np.sqrt((part**2).sum() + 1e-6) for part in (q, k))
            change, decay = x[t, first + head], x[t, first + own.heads + head] + delta.shifts[head]
            state *= np.exp(-delta.rates[head] * np.log1p(np.exp(decay)))
            state += np.outer(k, (v - state.T @ k) / (1 + np.exp(-change)))
            out[t, head] = state.T @ q / np.sqrt(own.key_dim)
    return np.concatenate([qkv, out.reshape(len(x), -1)], axis=1)


@pytest.mark.parametrize("states", [STATES, WIDE], ids=["two key heads", "wide values"])
@pytest.mark.parametrize(("family", "compute"), WITH_TRITON)
def test_states_take_in_token_after_token(family: str, compute: str, states: StateShape) -> None:
    delta = Delta(make(family, compute), states, states.layers - 1)
    for sequence in range(len(LENGTHS)):
        got = delta.cut(sequence, (0, LENGTHS[sequence]))
        assert_close(got, wanted(delta, delta.x[sequence]), 2e-5)


@pytest.mark.parametrize(("family", "compute"), WITH_TRITON)
def test_no_bit_depends_on_cut_or_company(family: str, compute: str) -> None:
    delta = Delta(make(family, compute), STATES, 1)
    want = [delta.cut(sequence, (0, length)) for sequence, length in enumerate(LENGTHS)]
    for cuts in CUTS[1:]:
        assert_same_bits(delta.cut(0, cuts), want[0], f"cuts {cuts}")
    first = delta.step([(0, 0, 40), (1, 0, 33)])
    second = delta.step([(0, 40, 70)])
    assert_same_bits(np.concatenate([first[0], second[0]]), want[0])
    assert_same_bits(first[1], want[1])


@pytest.mark.parametrize(("family", "compute"), WITH_TRITON)
def test_a_full_cell_is_final_and_shared(family: str, compute: str) -> None:
    """Who begins behind a cell that another computed goes on with its page, and does not change it."""
    delta = Delta(make(family, compute), STATES, 0)
    want = delta.cut(0, (0, 70))
    before = bytes(delta.memory)
    delta.pages[0, 1:] = delta.pages[1, 1:]
    assert_same_bits(delta.cut(0, (32, 50, 70)), want[32:])
    size = delta.ops.page_bytes(delta.shape)
    for page in delta.pages[0, 0]:
        assert delta.memory[page * size : (page + 1) * size] == before[page * size : (page + 1) * size]


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_gates(family: str, compute: str) -> None:
    ops = make(family, compute)
    x_TN, gate_TM, weight = normal(1, 7, 36), normal(2, 7, 50), normal(3, 12)
    groups = x_TN.reshape(7, 3, 12)
    normed = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    gate = gate_TM[:, 5:41]
    made = ops.gated_norm(ops.hidden(x_TN), ops.hidden(gate_TM), ops.vector(weight), 1e-6, first=5)
    assert_close(ops.to_numpy(made), normed.reshape(7, 36) * gate * sigmoid(gate), TOLERANCE[compute])
    narrow = ops.compute(x_TN)
    made = ops.sigmoid_gated(narrow, ops.hidden(gate_TM[:, :36]))
    assert_close(ops.to_numpy(made), ops.to_numpy(narrow) * sigmoid(gate_TM[:, :36]), TOLERANCE[compute])
    hidden = ops.hidden(gate_TM[:, :36])
    ops.gated_add(hidden, ops.hidden(x_TN), ops.hidden(gate_TM[:, 40:41]))
    assert_close(ops.to_numpy(hidden), gate_TM[:, :36] + x_TN * sigmoid(gate_TM[:, 40:41]), 2e-5)
    alone = ops.gated_norm(ops.hidden(x_TN[3:4]), ops.hidden(gate_TM[3:4]), ops.vector(weight), 1e-6, first=5)
    whole = ops.gated_norm(ops.hidden(x_TN), ops.hidden(gate_TM), ops.vector(weight), 1e-6, first=5)
    assert_same_bits(ops.to_numpy(alone)[0], ops.to_numpy(whole)[3])


class Stack:
    """The operations as a model has them."""

    def __init__(self, delta: Delta) -> None:
        self.delta, own, ops = delta, delta.states, delta.ops
        self.values = own.heads * own.value_dim
        self.table = ops.pack_linear(normal(1, 40, delta.width))
        self.back = ops.pack_linear(normal(2, delta.width, self.values))
        self.gate, self.one = (
            ops.pack_linear(normal(3, self.values, self.values)),
            ops.pack_linear(normal(4, 1, self.values)),
        )
        self.norm, self.ones = ops.vector(normal(5, own.value_dim)), ops.vector(np.ones(delta.width))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        wide_TN = ops.embed(self.table, batch.tokens_T)
        _, read_TV = self.delta.mix(ops, wide_TN, batch)
        x_TV = ops.gated_norm(read_TV, wide_TN, self.norm, 1e-6, first=self.delta.states.channels)
        x_TV = ops.sigmoid_gated(x_TV, ops.linear(x_TV, self.gate))
        ops.gated_add(wide_TN, ops.linear(x_TV, self.back), ops.linear(x_TV, self.one))
        return ops.rows(wide_TN, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.ones, 1e-5), self.table)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_steps_have_the_bits_of_direct_ones(family: str, compute: str) -> None:
    """Also of a piece of which no row is wanted: its state is kept all the same."""
    ops = make(family, compute)
    hidden: list[NDArray[np.float32]] = []
    for recorded in (True, False):
        delta = Delta(ops, STATES, 1)
        steps = Stack(delta)
        program = ops.record(steps, delta.kv) if recorded else DirectProgram(ops, steps, delta.kv)
        assert not recorded or isinstance(program, RecordedProgram)
        for start, end in ((0, 40), (40, 70)):
            batch = delta.batch([(0, start, end)])
            tokens_T = (batch.positions_T * 7 % 40).astype(np.int32)
            wanted_R = np.arange(end - start if start else 0, dtype=np.int32)
            program.run(
                replace(batch, tokens_T=tokens_T, sample_rows_R=wanted_R), len(wanted_R), [], GumbelRows.empty(0)
            )
        hidden.append(np.array(ops.to_numpy(program.hidden())))
    assert_same_bits(*hidden)


def test_what_does_not_fit_is_refused() -> None:
    ops = make(*NATIVE[0])
    delta = Delta(ops, STATES, 1)
    delta.pages = delta.pages[:, :, :-1]
    with pytest.raises(ValueError, match="the pages of all states"):
        delta.step([(0, 0, 40)])
    delta.pages = np.full((2, 3, delta.shape.state_parts), 10**6, np.int32)
    with pytest.raises(ValueError, match="page outside the memory"):
        delta.step([(0, 0, 40)])
    with pytest.raises(ValueError, match="multiples of 16"):
        ops.new_kv(replace(SHAPE, states=replace(STATES, value_dim=24)), pages=1)
    with pytest.raises(ValueError, match="no state of this layer"):
        replace(Delta(ops, STATES, 1), layer=2).step([(0, 0, 1)])
