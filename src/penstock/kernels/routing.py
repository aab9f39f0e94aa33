"""Routed experts as data: how they are chosen, what was chosen, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_EXPERTS = 4096


class Score(StrEnum):
    """What makes an expert's logit its weight."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_CHOSEN = "softmax_chosen"  # over the chosen ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How ``top_k`` of ``experts`` are chosen for a token, and what they weigh.

    Chosen are the largest logits; where there is a bias (arXiv:2408.15664) or groups count by pairs, the largest scores
    plus bias.  With groups, neighbouring experts are a group, and only the best ``groups_kept`` groups can be chosen
    from (arXiv:2405.04434, arXiv:2412.19437).  Of equal ones the lower id is better.
    """

    experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    normalised: bool = False  # weights of the chosen are divided by their sum
    groups: int = 1
    groups_kept: int = 1
    pairs: bool = False  # a group is as good as its best two experts together, else as its best
    factor: float = 1.0  # of all weights

    def __post_init__(self) -> None:
        if not 1 <= self.experts <= MAX_EXPERTS or self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"{self.experts} experts in {self.groups} groups: 1 to {MAX_EXPERTS}, in equal groups")
        if not 1 <= self.groups_kept <= self.groups or not 1 <= self.top_k <= self.groups_kept * self.group_size:
            raise ValueError(
                f"{self.top_k} experts cannot be chosen from {self.groups_kept} groups of {self.group_size}"
            )
        if self.pairs and self.group_size < 2:
            raise ValueError("groups of one expert have no best two")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups


@dataclass(frozen=True, slots=True)
class Routes:
    """Each token's experts, best first, with their weights.  Opaque to layers."""

    data: Any
    top_k: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer, all of one shape: ``gate_up`` [2 I, K] and ``down`` [D, I] each.  Read-only."""

    count: int
    k: int
    inner: int
    n: int
    data: Any
    nbytes: int
