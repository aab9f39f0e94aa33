"""Layers that read differently far back stand in pages of their own: the same bits, in less memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import NATIVE, SLOW_PAIRS, Heads, Story, assert_same_bits, kv_over, make, short

from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import Array, AttentionSpec, KvShape, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows
from penstock.kv_spec import FULL_ATTENTION, MOST_PADDING, KvSpec, layer_groups

HEADS = Heads(4, 2, 16)
WINDOW = KvSpec(window=51)
FULL = KvShape.plain(layers=4, kv_heads=2, head_dim=16)
GROUPED = FULL.grouped([FULL_ATTENTION, WINDOW, WINDOW, FULL_ATTENTION])
LENGTH = 200


class Layers:
    """Four layers, one after another, over a memory of their own; a step's tables are made of its pages.

    Pages that fell out of a window are given to nobody's layer: they hold NaN, and all groups share them.
    """

    def __init__(self, ops: Any, shape: KvShape, length: int = LENGTH) -> None:
        self.ops, self.shape = ops, shape
        self.back = ops.pack_linear(np.eye(HEADS.width, HEADS.query * 16, dtype=np.float32))
        self.story = Story(ops, HEADS, [length])
        groups, blocks = len(shape.reaches), -(-length // 16)
        order = np.random.default_rng(5).permutation(groups * blocks).astype(np.int32)
        self.tables = order.reshape(groups, blocks)
        self.lost = groups * blocks
        size = ops.page_bytes(shape)
        self.memory = bytearray(b"\x00" * size * self.lost + b"\xff" * size)
        self.kv = kv_over(ops, shape, self.memory)

    def batch(self, start: int, end: int) -> StepBatch:
        tables = self.tables.copy()
        for table, reach in zip(tables, self.shape.reaches, strict=True):
            table[: reach.first_read_position(start) // 16] = self.lost
        return replace(self.story.batch([(0, start, end)]), table_SP=tables.reshape(1, -1))

    def mix(self, ops: Any, qkv_TN: Any, batch: StepBatch) -> Any:
        for layer, window in enumerate((None, WINDOW.window, WINDOW.window, None)):
            sizes = {"heads": HEADS.query, "kv_heads": HEADS.kv}
            q_THC = ops.rope_and_write(qkv_TN, self.story.rope, self.kv, layer, batch, **sizes)
            mixed = ops.paged_attention(q_THC, self.kv, layer, batch, AttentionSpec(0.25, window=window))
            ops.linear_add(mixed, self.back, qkv_TN)
        return qkv_TN

    def compute(self, start: int, end: int) -> np.ndarray[Any, Any]:
        qkv_TN = self.ops.hidden(self.story.qkv[0][start:end])
        return np.array(self.ops.to_numpy(self.mix(self.ops, qkv_TN, self.batch(start, end))))


@pytest.mark.parametrize(("family", "compute"), SLOW_PAIRS)
def test_a_layer_has_the_same_bits_wherever_its_pages_are(family: str, compute: str) -> None:
    ops = make(family, compute)
    cuts = short(ops, [0, 70, 130, 131, 180, LENGTH], [0, 80, 81, 85])
    apart, together = Layers(ops, GROUPED, cuts[-1]), Layers(ops, FULL, cuts[-1])
    assert 2 * ops.page_bytes(GROUPED) == ops.page_bytes(FULL)
    wanted = together.compute(0, cuts[-1])
    got = [apart.compute(start, end) for start, end in pairwise(cuts)]
    assert_same_bits(np.concatenate(got), wanted)


class Stack:
    """The layers as a model has them: recorded, and op by op."""

    def __init__(self, layers: Layers) -> None:
        self.layers, ops = layers, layers.ops
        rng = np.random.default_rng(3)
        self.table = ops.pack_linear(rng.standard_normal((40, HEADS.width)).astype(np.float32))
        self.ones = ops.vector(np.ones(HEADS.width))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        mixed_TN = self.layers.mix(ops, ops.embed(self.table, batch.tokens_T), batch)
        return ops.rows(mixed_TN, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.ones, 1e-5), self.table)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_layers_have_the_bits_of_direct_ones(family: str, compute: str) -> None:
    ops = make(family, compute)
    hidden: list[list[np.ndarray[Any, Any]]] = [[], []]
    for index, shape in enumerate((GROUPED, FULL)):
        layers = Layers(ops, shape)
        steps = Stack(layers)
        program = DirectProgram(ops, steps, layers.kv) if index else ops.record(steps, layers.kv)
        assert index or isinstance(program, RecordedProgram)
        for start, end in ((0, 70), (70, LENGTH)):
            batch = layers.batch(start, end)
            tokens_T = (batch.positions_T * 7 % 40).astype(np.int32)
            wanted_R = np.arange(end - start, dtype=np.int32)
            program.run(replace(batch, tokens_T=tokens_T, sample_rows_R=wanted_R), end - start, [], GumbelRows.empty(0))
            hidden[index].append(np.array(ops.to_numpy(program.hidden())))
    for got, wanted in zip(*hidden, strict=True):
        assert_same_bits(got, wanted)


def test_tables_that_do_not_fit_are_refused() -> None:
    ops = make(*NATIVE[0])
    layers = Layers(ops, GROUPED)
    layers.tables = layers.tables[:, :3]
    with pytest.raises(ValueError, match="too short for the last position"):
        layers.compute(0, 60)
    layers.tables = np.full((2, 13), layers.lost + 1, np.int32)
    with pytest.raises(ValueError, match="page outside the memory"):
        layers.compute(0, 60)


@given(st.lists(st.sampled_from([FULL_ATTENTION, KvSpec(window=8), KvSpec(chunk=64)]), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own_and_little_is_left_empty(reaches: list[KvSpec]) -> None:
    shape = KvShape.plain(layers=len(reaches), kv_heads=1, head_dim=2).grouped(reaches)
    assert len(set(shape.places)) == len(reaches)
    for layer, (group, place) in enumerate(shape.places):
        assert shape.reaches[group] == reaches[layer]
        assert place < shape.page_layers
    assert shape.page_layers * len(shape.reaches) <= len(reaches) * (1 + MOST_PADDING)
    spans = [reach.span is not None for reach in shape.reaches]
    assert spans == sorted(spans), "what is held longest comes first"


@pytest.mark.parametrize(
    ("full", "windows", "layers", "groups"),
    [(26, 0, 26, 0), (13, 13, 13, 2), (12, 36, 12, 4), (5, 29, 5, 7), (10, 52, 6, 11), (0, 32, 32, 1)],
    ids=["Llama", "Gemma 2 2B", "Llama 4 Scout", "Gemma 3 4B", "Gemma 3 27B", "Mistral 7B v0.1"],
)
def test_pages_of_models_as_they_are(full: int, windows: int, layers: int, groups: int) -> None:
    found = layer_groups([FULL_ATTENTION] * full + [WINDOW] * windows)
    assert len(found) == groups
    assert max((len(group.layers) for group in found), default=full) == layers
