"""What is guessed is what pays, by what was measured; and what no longer pays is noticed."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.spec.acceptance import (
    MIN_GAIN,
    AcceptanceByDepth,
    AcceptanceByKind,
    StepTimeModel,
    best_depth,
    choose_draft_lengths,
)
from penstock.engine.spec.proposer import LONGEST_MATCH

chains = st.lists(
    st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda c: tuple(sorted(c, reverse=True))), min_size=1, max_size=4
)


def rate(rows: int, found: list[tuple[float, ...]], taken: tuple[int, ...], line: tuple[float, float]) -> float:
    tokens = rows + sum(sum(chain[:count]) for chain, count in zip(found, taken, strict=True))
    return tokens / (line[0] + line[1] * (rows + sum(taken)))


@given(chains, st.floats(0.001, 1.0), st.floats(0.0, 1.0), st.integers(0, 16))
def test_no_other_choice_promises_more_tokens_a_second(
    found: list[tuple[float, ...]], base: float, slope: float, most: int
) -> None:
    rows, line = len(found), (base, slope)
    taken = tuple(choose_draft_lengths(rows, found, line, most))
    assert sum(taken) <= most
    every = [t for t in product(*(range(len(chain) + 1) for chain in found)) if sum(t) <= most]
    best = max(rate(rows, found, choice, line) for choice in every)
    plain = rate(rows, found, (0,) * rows, line)
    if any(taken):
        assert rate(rows, found, taken, line) == pytest.approx(best, rel=1e-9)
        assert best >= MIN_GAIN * plain * (1 - 1e-9)
    else:
        assert best <= MIN_GAIN * plain * (1 + 1e-9)


def test_the_line_is_that_of_the_steps_measured() -> None:
    times = StepTimeModel()
    assert times.fit() is None
    for turn in range(400):
        rows = 1 + turn % 9
        times.record(rows, 0.030 + 0.002 * rows)
    base, slope = times.fit() or (0.0, 0.0)
    assert base == pytest.approx(0.030, rel=0.05)
    assert slope == pytest.approx(0.002, rel=0.05)


def test_a_step_that_was_held_up_once_does_not_end_guessing() -> None:
    """It is not believed to the full; and what steps with guesses take is not forgotten over steps without."""
    times = StepTimeModel()
    for _ in range(50):
        times.record(1, 0.030)
    for seconds in (3.0, 0.033, 0.033):
        times.record(2, seconds, guessed=True)
    chain = [(0.9, 0.8, 0.7, 0.6)]
    assert choose_draft_lengths(1, chain, times.fit() or (0, 0), 4) != [0]
    for _ in range(20):
        times.record(5, 0.150, guessed=True)
    assert choose_draft_lengths(1, chain, times.fit() or (0, 0), 4) == [0]
    for _ in range(200):
        times.record(1, 0.030)
    assert choose_draft_lengths(1, chain, times.fit() or (0, 0), 4) == [0]


@given(st.integers(1, 8), st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_depth_is_the_best_there_is(rows: int, shares: list[float], first: float, further: float) -> None:
    chain = [math.prod(shares[: count + 1]) for count in range(len(shares))]
    line = (1.0, 0.05)

    def gain(depth: int) -> float:
        seconds = 1.0 + 0.05 * rows * (1 + depth) + first + further * (depth - 1)
        return (1 + sum(chain[:depth])) * (1.0 + 0.05 * rows) / seconds

    depth, promised = best_depth(rows, chain, line, (first, further))
    assert promised == pytest.approx(gain(depth))
    assert promised == pytest.approx(max(gain(count) for count in range(1, len(chain) + 1)))


def test_acceptance_is_learnt_by_length_of_match() -> None:
    seen = AcceptanceByKind([match / (match + 2) for match in range(LONGEST_MATCH + 1)])
    for _ in range(300):
        seen.record(2, guessed=4, stood=0)
        seen.record(8, guessed=2, stood=2)
        seen.record(12, guessed=1, stood=0)
    assert seen.rate(2) < 0.1
    assert seen.rate(8) > 0.9
    assert seen.rate(9) > 0.9, "a token that stood makes the match of the next one longer"
    assert seen.rate(12) < 0.1
    assert seen.rate(LONGEST_MATCH + 5) == seen.rate(LONGEST_MATCH)
    shares = list(seen.chain_rates(8, 2))
    assert shares == [pytest.approx(seen.rate(8)), pytest.approx(seen.rate(8) * seen.rate(9))]


def test_a_deeper_guess_is_thought_to_be_like_the_one_before_it() -> None:
    depths = AcceptanceByDepth(0.5, 4)
    assert depths.chain_rates(3) == pytest.approx([0.5, 0.25, 0.125])
    for _ in range(300):
        depths.record(1, 1)
    assert depths.chain_rates(3) == pytest.approx([1.0, 1.0, 1.0], abs=0.15)
    for _ in range(300):
        depths.record(3, 2)
    first, second, third = depths.chain_rates(3)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.1
