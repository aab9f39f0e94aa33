"""The policies by name."""

from __future__ import annotations

from penstock.router.policy.least_cost import LeastCost
from penstock.router.policy.port import Policy
from penstock.router.policy.simple import Simple, at_random, by_load, by_prefix, by_turn

NAMES = ("penstock", "round-robin", "random", "least-loaded", "prefix")


def policy_named(name: str) -> Policy:
    """The policy of this name.  Raises KeyError for one that is not among ``NAMES``."""
    orders = {"round-robin": by_turn, "random": at_random, "least-loaded": by_load, "prefix": by_prefix}
    return LeastCost() if name == LeastCost.name else Simple(name, orders[name])
