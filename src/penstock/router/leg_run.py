"""One leg of a flight's current epoch: where it runs, and what has been heard of it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import Leg, WorkerId

UNHEARD_S = 1.0
"""A leg that has said nothing for so long is asked about: what was sent to it, or what it said, may have been lost."""


@dataclass(slots=True)
class LegRun:
    """A leg that was sent to a worker."""

    leg: Leg
    worker: WorkerId
    incarnation: int
    heard: float  # when it was sent, or said something, or was asked about last
    spoken: bool = False
    ended: bool = False
    joins: bool = False  # it fetches an answer that another leg still writes

    @property
    def silent(self) -> bool:
        """Is there something that it has still to say?  A prefill leg speaks once."""
        return not self.ended and not (self.spoken and self.leg is Leg.PREFILL)
