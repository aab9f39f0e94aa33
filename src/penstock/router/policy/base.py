"""What a policy is given and what it answers, and the parts that several policies share.

A policy is a pure function with a name.  It compares candidates by numbers alone, and settles ties by the hashes of
their ids: which of two workers comes first in the fleet never matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.router.worker_load import LoadTable, Numbers, Slots
from penstock.types import PAGE_TOKENS, RequestStage

MAX_SCORED = 16
"""Candidates of a leg whose numbers are kept: the best ones."""

_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """One request and the workers that may be given it.  Arrays of slots may be empty; the others are by slot."""

    loads: LoadTable
    known_tokens: int  # tokens of the prompt, and of the answer so far
    expected_output: int  # tokens that will probably be written
    single_token: bool  # exactly one token is wanted: the prefill worker samples it
    hits: NDArray[np.int32]  # leading blocks of the prompt that each slot has, or will have soon
    reachable_hits: NDArray[np.int32]  # the same with what it can take out of others' caches
    tier_hits: tuple[NDArray[np.int32], ...] = ()  # the same with what its own lower tiers have: of one, of two...
    prefix_sharers: int  # open requests that begin as this one does, as far as the best of ``hits`` goes
    affinity_key: int  # 64 bits: of the session, or of how the prompt begins
    tie_break: int  # 64 bits: of this very submission
    has_session: bool  # ``key`` is a session's: it belongs to one worker, if that costs little
    prefill: Slots
    decode: Slots
    aggregated: Slots
    interactive: bool = True  # it goes before batch work
    always_split: bool = False  # wherever there are workers for both legs
    page_tokens: int = PAGE_TOKENS


class CandidateScores(NamedTuple):
    """The numbers of a leg's best candidates, best first: ``numbers[name, candidate]``."""

    stage: RequestStage
    slots: Slots
    names: tuple[str, ...]
    numbers: Numbers
    omitted: int  # candidates without scores here


class PolicyChoice(NamedTuple):
    """The chosen workers: none, one for both stages, or one for decode and one for prefill."""

    stages: tuple[tuple[RequestStage, int], ...] = ()
    scores: tuple[CandidateScores, ...] = ()
    explanation: str = ""  # why it is split, or is not


class Policy(Protocol):
    """A way to choose.  Stateless."""

    name: str

    def choose(self, view: PlacementView) -> PolicyChoice:
        """Choose workers for a request; none if a stage has no worker."""
        ...

    def choose_decode(self, view: PlacementView) -> PolicyChoice:
        """Choose the worker of ``view.decode``, which is not empty, that continues a response."""
        ...


def splitmix64(hashes: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Hashes of (id, key): splitmix64's finisher (Steele, Lea, Flood 2014)."""
    x = hashes ^ np.uint64(key)
    x = (x ^ (x >> _S30)) * _ONE
    x = (x ^ (x >> _S27)) * _TWO
    return x ^ (x >> _S31)


def rendezvous_pick(loads: LoadTable, slots: Slots, key: int) -> int:
    """The place in ``slots`` of the worker that ``key`` belongs to (rendezvous hashing: Thaler, Ravishankar 1998)."""
    return int(splitmix64(loads.hashes.take(slots), key).argmax())


def top_scores(
    leg: RequestStage, slots: Slots, table: tuple[tuple[str, ...], Numbers], order: Numbers
) -> CandidateScores:
    """The numbers of the best, by ``order``: the least is best."""
    names, numbers = table
    if len(slots) > MAX_SCORED:
        best = np.argpartition(order, MAX_SCORED)[:MAX_SCORED]
        best = best[np.argsort(order[best], kind="stable")]
    else:
        best = np.argsort(order, kind="stable")
    return CandidateScores(leg, slots[best], names, numbers[:, best], len(slots) - len(best))


def choose_by_stage(
    view: PlacementView, best: Callable[[RequestStage, Slots], tuple[int, CandidateScores]]
) -> PolicyChoice:
    """Split wherever there are workers for both legs, whole otherwise; ``best`` finds a place among candidates."""
    ways: list[tuple[tuple[RequestStage, Slots], ...]]
    if view.single_token and len(view.prefill):
        ways = [((RequestStage.WHOLE, view.prefill),), ((RequestStage.WHOLE, view.aggregated),)]
    else:
        ways = [
            ((RequestStage.DECODE, view.decode), (RequestStage.PREFILL, view.prefill)),
            ((RequestStage.WHOLE, view.aggregated),),
        ]
    for way in ways:
        if all(len(slots) for _, slots in way):
            found = [(leg, slots, *best(leg, slots)) for leg, slots in way]
            legs = tuple((leg, int(slots[place])) for leg, slots, place, _ in found)
            return PolicyChoice(legs, tuple(weighed for *_, weighed in found), "split" if len(legs) > 1 else "whole")
    return PolicyChoice()
