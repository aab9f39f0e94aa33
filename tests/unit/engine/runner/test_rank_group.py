"""Followers of a worker of several ranks have the leader's batches, step for step."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.mesh import parse_mesh
from penstock.engine.runner.rank_group import PLACES, SharedStep, StepDecoder, StepEncoder, scored_pieces
from penstock.errors import GroupError
from penstock.kernels.host_ops import AdvancingPages
from penstock.kernels.host_ops_fallback import AdvancingPages as SlowAdvancingPages
from penstock.kernels.operands import StepBatch
from penstock.kernels.sampling import GumbelRows
from penstock.types import PAGE_TOKENS

PARTS = ("tokens_T", "positions_T", "starts_S1", "table_SP", "sample_rows_R")
PICKS = ("seeds_F", "positions_F", "choices_F", "temperatures_F", "tokens_F")


def step_of(counts: list[int], first: list[int], blocks: int, groups: int, seed: int) -> SharedStep:
    """Sequences with so many tokens, from these positions on; all rows are picked."""
    rng = np.random.default_rng(seed)
    starts_S1 = np.cumsum([0, *counts]).astype(np.int32)
    positions = [np.arange(begin, begin + count) for begin, count in zip(first, counts, strict=True)]
    batch = StepBatch(
        rng.integers(0, 50_000, starts_S1[-1]).astype(np.int32),
        np.concatenate(positions).astype(np.int32),
        starts_S1,
        rng.integers(0, 9000, (len(counts), groups * blocks)).astype(np.int32),
        starts_S1[1:] - 1,
    )
    picks = GumbelRows.empty(len(counts))
    picks.seeds_F[:] = rng.integers(0, 1 << 63, len(counts))
    picks.positions_F[:] = batch.positions_T[batch.sample_rows_R] + 1
    picks.temperatures_F[:] = rng.random(len(counts))
    return SharedStep(batch, 0, picks)


def move_on(step: SharedStep, groups: int, rng: np.random.Generator) -> None:
    """As ``InputBatch`` does: one token further, with new pages where a block begins."""
    batch, positions_F = step.batch, step.picks.positions_F
    positions_F += 1
    batch.positions_T[:] += 1
    batch.tokens_T[:] = rng.integers(0, 50_000, len(batch.tokens_T))
    blocks = batch.table_SP.shape[1] // groups
    for row, position in enumerate(batch.positions_T):
        if position % PAGE_TOKENS == 0:
            batch.table_SP[row, [group * blocks + position // PAGE_TOKENS for group in range(groups)]] = rng.integers(
                0, 9000, groups
            )


def assert_same(one: SharedStep, other: SharedStep) -> None:
    assert one.scored == other.scored
    for part in PARTS:
        np.testing.assert_array_equal(getattr(one.batch, part), getattr(other.batch, part))
    for part in PICKS:
        np.testing.assert_array_equal(getattr(one.picks, part), getattr(other.picks, part))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 40),
)
def test_a_follower_has_the_leaders_batches(sequences: list[tuple[int, int]], groups: int, steps: int) -> None:
    encoder, decoder, rng = StepEncoder(groups), StepDecoder(), np.random.default_rng(steps)
    prompts = step_of([count for count, _ in sequences], [first for _, first in sequences], 12, groups, steps)
    assert_same(decoder.step(encoder.record(prompts)), prompts)
    answers = step_of([1] * len(sequences), [first + count for count, first in sequences], 12, groups, steps + 1)
    followed = decoder.step(encoder.record(answers))
    for _ in range(steps):
        move_on(answers, groups, rng)
        record = encoder.record(answers)
        assert decoder.step(record) is followed
        assert len(record) <= 16 + 4 * len(sequences) * (1 + 2 * groups)
        assert_same(followed, answers)


def test_steps_that_take_turns_go_on_each_by_itself() -> None:
    encoder, decoder, rng = StepEncoder(1), StepDecoder(), np.random.default_rng(1)
    steps = [step_of([1] * count, [20] * count, 12, 1, count) for count in (1, 3, 2)]
    followed = [decoder.step(encoder.record(step)) for step in steps]
    for number in (0, 1, 2, 1, 0, 0, 2):
        move_on(steps[number], 1, rng)
        record = encoder.record(steps[number])
        assert len(record) < 40
        assert decoder.step(record) is followed[number]
        assert_same(followed[number], steps[number])
    for _ in range(PLACES):  # so many others that the first ones are forgotten
        decoder.step(encoder.record(step_of([2], [0], 12, 1, 0)))
    move_on(steps[0], 1, rng)
    assert_same(decoder.step(encoder.record(steps[0])), steps[0])


def test_64_answers_go_on_in_512_bytes() -> None:
    encoder, rng = StepEncoder(1), np.random.default_rng(0)
    batch = step_of([1] * 64, rng.integers(100, 4000, 64).tolist(), 512, 1, 0)
    assert len(encoder.record(batch)) > 64 * 512 * 4
    sizes = []
    for _ in range(PAGE_TOKENS):
        move_on(batch, 1, rng)
        sizes.append(len(encoder.record(batch)))
    assert np.mean(sizes) <= 512


def test_a_record_that_does_not_follow_is_refused() -> None:
    decoder = StepDecoder()
    with pytest.raises(GroupError, match="kind 1"):
        decoder.step(struct.pack("<3I", 1, 0, 1))
    with pytest.raises(GroupError, match="kind 2, place 3"):
        decoder.step(struct.pack("<4I", 2, 3, 1, 0))
    record = StepEncoder(1).record(step_of([3], [0], 2, 1, 0))
    with pytest.raises(GroupError, match="were expected"):
        decoder.step(record[:-4])
    decoder.step(record)
    with pytest.raises(GroupError, match="goes on from a step of 3"):
        decoder.step(struct.pack("<4I", 2, 0, 1, 0) + bytes(4))
    with pytest.raises(GroupError, match="outside of the table"):
        decoder.step(struct.pack("<9I", 2, 0, 3, 1, 7, 7, 7, 2, 5))


def test_scored_rows_come_in_the_same_pieces_everywhere() -> None:
    assert [rows_R.tolist() for rows_R in scored_pieces(130)] == [[*range(64)], [*range(64, 128)], [128, 129]]
    assert list(scored_pieces(0)) == []


def test_the_leader_has_the_logits() -> None:
    assert [parse_mesh(text).leader for text in ("tp1", "tp4", "pp3", "tp2,pp2")] == [0, 0, 2, 2]


@pytest.mark.parametrize("groups", [1, 3])
def test_pages_that_a_step_begins_are_the_same_with_and_without_the_extension(groups: int) -> None:
    dice = np.random.default_rng(groups)
    table_SP = dice.integers(0, 1 << 20, (40, 5 * groups), np.int32)
    positions_T = dice.integers(0, 4 * PAGE_TOKENS, 40).astype(np.int32)
    both = [made(positions_T, table_SP, groups, PAGE_TOKENS) for made in (AdvancingPages, SlowAdvancingPages)]
    assert [pages.begun() for pages in both] == [None, None]
    for _ in range(PAGE_TOKENS):
        positions_T += 1
        table_SP += 1
        native, slow = (pages.begun() for pages in both)
        assert native is not None
        assert native == slow
        cells = np.frombuffer(native, np.int32).reshape(-1, 2)
        assert len(cells) == groups * np.count_nonzero(positions_T % PAGE_TOKENS == 0)
        assert np.array_equal(table_SP.reshape(-1)[cells[:, 0]], cells[:, 1])
