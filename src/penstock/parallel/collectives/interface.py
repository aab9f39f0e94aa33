"""What ranks of one group say to one another.

Every rank of a group calls the same operations in the same order.  An implementation moves bytes and computes nothing,
so no result depends on how many ranks there are, on how they are connected, or on who is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.kernels.operands import Array


class PointToPoint(Protocol):
    """One rank's connection to the others of a group.  Arrays that are returned belong to the caller, who may write
    into them; arrays that were given may be overwritten as soon as the call returns.

    Every method raises GroupError when ranks disagree or one of them has ended; the group cannot be used afterwards.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def send(self, array: Array, to: int) -> None:
        """To another rank, which receives what one rank sends it in this order."""
        ...

    def recv(self, source: int, shape: tuple[int, ...]) -> Array:
        """The next array that a rank sent to this one, of this shape."""
        ...


class Collectives(PointToPoint, Protocol):
    """The same, with operations that all ranks take part in."""

    def all_gather(self, own: Array) -> list[Array]:
        """The arrays that all ranks gave, by rank; they may differ in their columns, not in rows."""
        ...

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """``parts[r]`` goes to rank r; returns what each rank had for this one, by rank."""
        ...
