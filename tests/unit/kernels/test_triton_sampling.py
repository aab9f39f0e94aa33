"""Drawing tokens on a GPU: the noise and the tokens of the CPU's kernels to the bit, and every rule of the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import NATIVE, TRITONS, assert_same_bits, make, normal
from test_kernels_sampling import BASE, RULES, ids_of, mask_of

from penstock.kernels.reference.sampling import candidate_ids, sample_row
from penstock.kernels.sampling import GumbelRows, SampleRow, gumbel
from penstock.kernels.triton.sampling import TritonSampler

EXTREMES = (1_459_666, 1_786_955)
"""Ids with the least and the largest noise of two million, at position 9 of seed 5."""

QUICK = ("all three",)


@pytest.fixture(scope="module")
def ops() -> Any:
    return make(*TRITONS[1])


@pytest.fixture(scope="module")
def head(ops: Any) -> TritonSampler:
    return TritonSampler(ops.form)


def columns(ops: Any, picks: GumbelRows) -> list[Any]:
    """As ``pick`` wants them."""
    bits = (picks.seeds_F.view(np.int64), picks.positions_F.view(np.int32), picks.choices_F.view(np.int32))
    return [torch.from_numpy(column).to(ops.device) for column in (*bits, picks.temperatures_F)]


def some_picks(count: int) -> GumbelRows:
    picks = GumbelRows.empty(count)
    picks.seeds_F[:] = [seed * 0x1234567890ABCDEF % 2**64 for seed in range(count)]
    picks.positions_F[:], picks.choices_F[:] = np.arange(count) + 2**31 - 2, np.arange(count) % 3
    picks.temperatures_F[:] = np.arange(count) % 3 * 0.7
    return picks


def test_noise_has_the_bits_of_the_cpu(head: TritonSampler) -> None:
    native = make(*NATIVE[0])
    for seed, position, choice, ids in (
        (0xF123456789ABCDEF, 2**32 - 1, 3, np.arange(3000, dtype=np.int32) * 77),
        (5, 9, 0, np.array(EXTREMES, np.int32)),
    ):
        got = head.gumbel(seed, position, choice, ids)
        assert_same_bits(got, native.gumbel(seed, position, choice, ids))
        np.testing.assert_allclose(got, gumbel(seed, position, choice, ids), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 33, 5003])
def test_picks_are_those_of_the_cpu(ops: Any, head: TritonSampler, vocabulary: int) -> None:
    logits, picks = normal(3, 6, vocabulary) * 2, some_picks(6)
    logits[:, ::2] = np.round(logits[:, ::2])  # ties
    tokens_R = head.pick(ops.hidden(logits), *columns(ops, picks))
    assert head.bring(tokens_R).wait().tolist() == [one.token for one in make(*NATIVE[0]).sample(logits, picks.rows())]


def test_nothing_is_drawn_that_is_no_number(ops: Any, head: TritonSampler) -> None:
    logits = np.array([[np.nan, 2, -np.inf, 2, 1], [-np.inf, np.nan, -np.inf, -3, np.nan]], np.float32)
    picks = some_picks(2)
    picks.temperatures_F[:] = (0, 1)
    assert head.pick(ops.hidden(logits), *columns(ops, picks)).tolist() == [1, 3]


@pytest.mark.parametrize("rule", [pytest.param(r, marks=[] if r in QUICK else pytest.mark.long) for r in RULES])
def test_rules_in_one_call(ops: Any, head: TritonSampler, rule: str) -> None:
    """Rows with and without a rule and a mask beside each other; none minds."""
    draws, vocabulary = 3, 101
    logits = normal(21, draws, vocabulary) * 3
    rows = [replace(BASE, position=i, **(RULES[rule] if i else {})) for i in range(draws)]
    rows[1].allowed = mask_of(vocabulary, *range(5, 100, 3))
    for got, logits_V, row in zip(head.sample(ops.hidden(logits), rows), logits, rows, strict=True):
        wanted = sample_row(logits_V, row)
        assert got.token == wanted.token
        assert got.logprob == pytest.approx(wanted.logprob, abs=2e-5)
        assert [i for i, _ in got.top] == [i for i, _ in wanted.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=2e-5)


@pytest.mark.long
def test_ties_go_to_the_lower_id(ops: Any, head: TritonSampler) -> None:
    logits = np.array([[1, 3, 3, 0, 3, 3, 2, 3]], np.float32)
    for limits in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 4, "top_p": 0.6}):
        rows = [SampleRow(seed, 3, 0, 1.0, **limits) for seed in range(12)]
        drawn = {one.token for one in head.sample(ops.hidden(np.repeat(logits, 12, axis=0)), rows)}
        assert drawn <= set(candidate_ids(logits[0].astype(np.float64), rows[0]).tolist())


def test_what_does_not_fit_is_refused(ops: Any, head: TritonSampler) -> None:
    logits_RV = ops.hidden(np.zeros((1, 65), np.float32))
    with pytest.raises(ValueError, match="from 3 to 65 are outside the vocabulary of 65"):
        head.sample(logits_RV, [replace(BASE, banned_ids=ids_of(3, 65))])
    with pytest.raises(ValueError, match="32 a word; got 2"):
        head.sample(logits_RV, [replace(BASE, allowed=np.zeros(2, np.uint32))])
    assert head.sample(logits_RV[:0], []) == []


@pytest.mark.cuda
def test_picks_are_captured_and_come_back_by_themselves() -> None:
    """One graph, other logits: the tokens of the CPU; the host waits for nothing but their arrival."""
    ops = make(*TRITONS[1])
    head, picks, logits = TritonSampler(ops.form), some_picks(32), normal(4, 2, 32, 128_256) * 3
    held_RV, device = ops.hidden(logits[0]), columns(ops, picks)
    head.pick(held_RV, *device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_R = head.pick(held_RV, *device)
    for logits_RV in logits:
        held_RV.copy_(ops.hidden(logits_RV))
        graph.replay()
        wanted = [one.token for one in make(*NATIVE[0]).sample(logits_RV, picks.rows())]
        assert head.bring(tokens_R).wait().tolist() == wanted
