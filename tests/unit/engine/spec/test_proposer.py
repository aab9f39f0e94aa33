"""Guessing pays where guesses stand and are cheap, and costs next to nothing where they do not, on any clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import DraftProposer, SampledTokens, ScheduledTokens
from penstock.engine.core.request import Request
from penstock.engine.spec.proposer import DraftModelProposer, NgramProposer
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams

STEPS = 4000
PLAIN_S = 1.0


class FakeDrafter:
    """Takes ``first`` and ``further`` seconds; what it says is never looked at here."""

    places = 16

    def __init__(self, first: float, further: float) -> None:
        self._costs = first, further
        self.seconds = (0.0, 0.0)

    def draft(self, rows: Sequence[ScheduledTokens], depth: int) -> list[tuple[int, ...]]:
        first, further = self._costs
        self.seconds = (first, further * (depth - 1))
        return [(0,) * depth for _ in rows]

    def set_active(self, wanted: bool) -> None:
        pass

    def remove_request(self, request: RequestId) -> None:
        pass


def request(tokens: list[int]) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=100_000)
    arrive = AddRequest(
        id=RequestId("r"),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=tokens,
        sampling=sampling,
        arrival=0,
        root=BlockHash(bytes(32)),
    )
    return Request(arrive, serial=1, max_model_len=200_000)


def simulated(
    speculator: DraftProposer,
    *,
    row_s: float,
    share: float,
    guessing: Callable[[], float] = lambda: 0.0,
    noise: float = 0.0,
) -> tuple[float, int]:
    """(seconds, tokens) of one answer of ``STEPS`` steps, each guess right with probability ``share``; every twentieth
    step is held up, some ``noise`` times."""
    random, own = Random(5), request([1, 2, 3, 4])
    seconds, tokens = 0.0, 0
    for step in range(STEPS):
        row = ScheduledTokens(own, own.known - 1, 1, True)
        (draft,) = speculator.propose([row]) or ((),)
        took = (PLAIN_S + row_s * len(draft)) * random.uniform(0.97, 1.03)
        took *= 1 + noise * (step % 20 == 7)
        stood = 0
        while stood < len(draft) and random.random() < share:
            stood += 1
        drawn = SampledTokens(tuple(random.choice((1, 2)) for _ in range(stood + 1)))
        speculator.on_step([ScheduledTokens(own, row.start, 1, True, tuple(draft))], [drawn], took)
        for token in drawn.tokens:
            own.append(token)
        seconds += took + (guessing() if draft else 0.0)
        tokens += len(drawn.tokens)
    return seconds, tokens


def plain_seconds(noise: float) -> float:
    return PLAIN_S * (1 + noise / 20)


def drafting(first: float, further: float) -> tuple[Any, Callable[[], float]]:
    drafter: Any = FakeDrafter(first, further)
    return DraftModelProposer(drafter, most_each=8, most=64), lambda: sum(drafter.seconds)


@pytest.mark.parametrize("noise", [0.0, 5.0])
@pytest.mark.parametrize(("row_s", "share", "first"), [(0.05, 0.0, 0.1), (0.9, 0.6, 0.1), (0.05, 0.6, 3.0)])
def test_a_head_that_loses_costs_less_than_a_hundredth(row_s: float, share: float, first: float, noise: float) -> None:
    """Never right; or further rows cost nearly as much as steps; or asking it takes too long."""
    speculator, guessing = drafting(first, first)
    seconds, tokens = simulated(speculator, row_s=row_s, share=share, guessing=guessing, noise=noise)
    assert tokens * plain_seconds(noise) / seconds > 0.985


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_head_that_wins_is_asked_all_the_time(noise: float) -> None:
    speculator, guessing = drafting(0.1, 0.08)
    seconds, tokens = simulated(speculator, row_s=0.04, share=0.66, guessing=guessing, noise=noise)
    best = max(
        sum(0.66**count for count in range(depth + 1)) / (PLAIN_S + 0.04 * depth + 0.1 + 0.08 * (depth - 1))
        for depth in range(1, 9)
    )
    assert tokens * plain_seconds(noise) / seconds > 0.93 * best


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_lookup_that_is_never_right_costs_less_than_a_hundredth(noise: float) -> None:
    """The tokens of the text are two, so something is always found, and never what comes next."""
    speculator = NgramProposer(most_each=8, most=64, clock=VirtualClock())
    seconds, tokens = simulated(speculator, row_s=0.1, share=0.0, noise=noise)
    assert tokens * plain_seconds(noise) / seconds > 0.985
