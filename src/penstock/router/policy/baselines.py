"""Policies to compare with, and all policies by name.  Each baseline looks at one number only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.router.policy.base import (
    CandidateScores,
    PlacementView,
    Policy,
    PolicyChoice,
    choose_by_stage,
    rendezvous_pick,
    splitmix64,
    top_scores,
)
from penstock.router.policy.least_cost import LeastCost
from penstock.router.worker_load import Numbers, Slots
from penstock.types import RequestStage

CandidateOrder = Callable[[PlacementView, Slots], tuple[str, Numbers]]
"""What candidates are ordered by, and its name: the least is best."""


class BaselinePolicy(Policy):
    """The candidate of the least number; among equals, the one that the submission's luck falls on."""

    def __init__(self, name: str, order: CandidateOrder) -> None:
        self.name = name
        self._order = order

    def choose(self, view: PlacementView) -> PolicyChoice:
        return choose_by_stage(view, lambda leg, slots: self._best(view, leg, slots))

    def choose_decode(self, view: PlacementView) -> PolicyChoice:
        place, weighed = self._best(view, RequestStage.DECODE, view.decode)
        return PolicyChoice(
            ((RequestStage.DECODE, int(view.decode[place])),), (weighed,), "its worker wants to be relieved of it"
        )

    def _best(self, view: PlacementView, leg: RequestStage, slots: Slots) -> tuple[int, CandidateScores]:
        what, numbers = self._order(view, slots)
        equals = np.flatnonzero(numbers == numbers.min())
        place = int(equals[rendezvous_pick(view.loads, slots[equals], view.tie_break)])
        return place, top_scores(leg, slots, ((what,), numbers[None, :]), numbers)


def random_order(view: PlacementView, slots: Slots) -> tuple[str, Numbers]:
    """By nothing but luck."""
    return "lot", splitmix64(view.loads.hashes.take(slots), view.tie_break).astype(np.float64)


def load_order(view: PlacementView, slots: Slots) -> tuple[str, Numbers]:
    """By the tokens that are in the worker's hands: of prompts to read, and of answers that are written."""
    load, _ = view.loads.at_slots(slots)
    return "tokens", load.tokens + load.context


def prefix_order(view: PlacementView, slots: Slots) -> tuple[str, Numbers]:
    """By how much of the prompt is cached, whatever it has to do."""
    return "cached", -view.hits.take(slots).astype(np.float64)


def turn_order(view: PlacementView, slots: Slots) -> tuple[str, Numbers]:
    """In turns: the worker without a new request for longest first."""
    return "turn", view.loads.last_sent(slots)


NAMES = ("penstock", "round-robin", "random", "least-loaded", "prefix")


def make_policy(name: str) -> Policy:
    """The policy of this name.  Raises KeyError for one that is not among ``NAMES``."""
    orders = {"round-robin": turn_order, "random": random_order, "least-loaded": load_order, "prefix": prefix_order}
    return LeastCost() if name == LeastCost.name else BaselinePolicy(name, orders[name])
