"""What is guessed is what pays, by what was measured; and what no longer pays is noticed."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.spec.gain import LEAST_GAIN, Acceptance, StepTimes, worthwhile
from penstock.engine.spec.lookup import LONGEST_MATCH

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
    taken = tuple(worthwhile(rows, found, line, most))
    assert sum(taken) <= most
    every = [t for t in product(*(range(len(chain) + 1) for chain in found)) if sum(t) <= most]
    best = max(rate(rows, found, choice, line) for choice in every)
    plain = rate(rows, found, (0,) * rows, line)
    if any(taken):
        assert rate(rows, found, taken, line) == pytest.approx(best, rel=1e-9)
        assert best >= LEAST_GAIN * plain * (1 - 1e-9)
    else:
        assert best <= LEAST_GAIN * plain * (1 + 1e-9)


def test_the_line_is_that_of_the_steps_measured() -> None:
    times = StepTimes()
    assert times.line() is None
    for turn in range(400):
        rows = 1 + turn % 9
        times.learn(rows, 0.030 + 0.002 * rows)
    base, slope = times.line() or (0.0, 0.0)
    assert base == pytest.approx(0.030, rel=0.05)
    assert slope == pytest.approx(0.002, rel=0.05)


def test_a_step_that_was_held_up_once_does_not_end_guessing_for_good() -> None:
    """Wide steps are tried again after a while of single rows, and then measured as they are."""
    times = StepTimes()
    for _ in range(50):
        times.learn(1, 0.030)
    times.learn(5, 3.0)
    chain = [(0.9, 0.8, 0.7, 0.6)]
    assert worthwhile(1, chain, times.line() or (0, 0), 4) == [0]
    steps = 0
    while worthwhile(1, chain, times.line() or (0, 0), 4) == [0]:
        times.learn(1, 0.030)
        steps += 1
        assert steps < 1000
    assert steps > 10


def test_acceptance_is_learnt_by_length_of_match() -> None:
    seen = Acceptance()
    for _ in range(300):
        seen.learn(2, guessed=4, stood=0)
        seen.learn(8, guessed=2, stood=2)
        seen.learn(12, guessed=1, stood=0)
    assert seen.of(2) < 0.1
    assert seen.of(8) > 0.9
    assert seen.of(9) > 0.9, "a token that stood makes the match of the next one longer"
    assert seen.of(12) < 0.1
    assert seen.of(LONGEST_MATCH + 5) == seen.of(LONGEST_MATCH)
    shares = list(seen.chain(8, 2))
    assert shares == [pytest.approx(seen.of(8)), pytest.approx(seen.of(8) * seen.of(9))]
