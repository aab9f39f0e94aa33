"""Policies to compare with: each looks at one thing only, and none at what a request costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.router.policy.base import Choice, Policy, View, Weighed, by_legs, foremost, mixed, told
from penstock.router.policy.least_cost import LeastCost
from penstock.router.worker_load import Numbers, Slots
from penstock.types import RequestStage

Order = Callable[[View, Slots], tuple[str, Numbers]]
"""What candidates are ordered by, and its name: the least is best."""


class Simple:
    """The candidate of the least number; among equals, the one that the submission's luck falls on."""

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self._order = order

    def choose(self, view: View) -> Choice:
        """See ``port.Policy``."""
        return by_legs(view, lambda leg, slots: self._best(view, leg, slots))

    def writer(self, view: View) -> Choice:
        """See ``port.Policy``."""
        place, weighed = self._best(view, RequestStage.DECODE, view.decode)
        return Choice(
            ((RequestStage.DECODE, int(view.decode[place])),), (weighed,), "its worker wants to be relieved of it"
        )

    def _best(self, view: View, leg: RequestStage, slots: Slots) -> tuple[int, Weighed]:
        what, numbers = self._order(view, slots)
        equals = np.flatnonzero(numbers == numbers.min())
        place = int(equals[foremost(view, slots[equals], view.luck)])
        return place, told(leg, slots, ((what,), numbers[None, :]), numbers)


def at_random(view: View, slots: Slots) -> tuple[str, Numbers]:
    """By nothing but luck."""
    return "lot", mixed(view.columns.hashes.take(slots), view.luck).astype(np.float64)


def by_load(view: View, slots: Slots) -> tuple[str, Numbers]:
    """By the tokens that are in the worker's hands: of prompts to read, and of answers that are written."""
    load, _ = view.columns.at(slots)
    return "tokens", load.tokens + load.context


def by_prefix(view: View, slots: Slots) -> tuple[str, Numbers]:
    """By how much of the prompt is cached, whatever it has to do."""
    return "cached", -view.hits.take(slots).astype(np.float64)


def by_turn(view: View, slots: Slots) -> tuple[str, Numbers]:
    """By turns: whoever was given nothing for longest."""
    return "turn", view.columns.turns(slots)


# MERGED: The policies by name.


NAMES = ("penstock", "round-robin", "random", "least-loaded", "prefix")


def policy_named(name: str) -> Policy:
    """The policy of this name.  Raises KeyError for one that is not among ``NAMES``."""
    orders = {"round-robin": by_turn, "random": at_random, "least-loaded": by_load, "prefix": by_prefix}
    return LeastCost() if name == LeastCost.name else Simple(name, orders[name])
