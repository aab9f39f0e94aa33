r"""The fixed orders of sums that devices will share: which parts there are, who joins whom, which rank has what.

Three sums of a layer are cut so that each of 1, 2, 4, ... ranks can compute a part of them, and the bits are those of
one rank: columns of a product (8 segments, ``operands.segment_ends``), experts of a token (64 groups), keys of a token
(8 classes of partitions).  Within a part a sum goes from low to high.  Parts are the leaves of one binary tree, whose
number of leaves is a power of two: neighbors are joined in pairs, then pairs, and so on::

    parts    0   1   2   3   4   5   6   7
              \ /     \ /     \ /     \ /
               0       1       2       3        two ranks have 0 to 3 and 4 to 7: each joins its own, one the rest
                \     /         \     /
                 \   /           \   /
                   0               1

A part in which a token has nothing is skipped: of two neighbors the other one goes up as it is.  So what a rank hands
over is a node of the one tree, whatever the number of ranks.

The kernels have this in their own words (``cpp/moe/routing.hpp``, ``cpp/attention/attention.hpp``, ``triton/moe.py``,
``triton/attention.py``); tests compare all of them with ``join``.  Pure: knows no arrays, operations or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

EXPERT_GROUPS: Final = 64
"""Leaves of the tree of a token's experts: as many ranks can have experts of their own."""

KEY_CLASSES: Final = 8
"""Leaves of the tree of a token's partitions of keys: partition p is in class p mod 8."""

Part = TypeVar("Part")


def join(parts: Sequence[Part | None], add: Callable[[Part, Part], Part]) -> Part | None:
    """What the tree makes of its leaves in order, by ``add`` (left, right); None for a part that is not there, and
    where there is none at all.  Raises ValueError unless their number is a power of two."""
    if not parts or len(parts) & (len(parts) - 1):
        raise ValueError(f"the tree has 1, 2, 4, ... leaves, not {len(parts)}")
    while len(parts) > 1:
        parts = [_both(left, right, add) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _both(left: Part | None, right: Part | None, add: Callable[[Part, Part], Part]) -> Part | None:
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def leaves_of(leaves: int, rank: int, ranks: int) -> range:
    """The leaves of one of ``ranks`` (1, 2, 4, ... up to ``leaves``): those of one node of the tree."""
    if not (0 <= rank < ranks <= leaves) or leaves % ranks:
        raise ValueError(f"rank {rank} of {ranks}: there are {leaves} leaves")
    return range(rank * leaves // ranks, (rank + 1) * leaves // ranks)


def expert_group(expert: int, experts: int) -> int:
    """The group of an expert: group i ends at floor((i + 1) experts / 64).

    Of fewer than 64 experts each has a group, and the empty ones lie evenly between them: so any number of ranks gets
    numbers of experts that differ by one at most.
    """
    return ((expert + 1) * EXPERT_GROUPS - 1) // experts


def experts_of(experts: int, rank: int, ranks: int) -> range:
    """The experts of one of ``ranks``: those whose group is one of its leaves."""
    groups = leaves_of(EXPERT_GROUPS, rank, ranks)
    return range(groups.start * experts // EXPERT_GROUPS, groups.stop * experts // EXPERT_GROUPS)


def partition_class(partition: int) -> int:
    """The class of a partition of keys, by its absolute number."""
    return partition % KEY_CLASSES
