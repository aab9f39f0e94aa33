"""Least tokens in flight, this request's own included; among equals, the one that most likely has the prefix.

A request's own tokens are those that the worker would really have to compute: the prompt less what it has cached.
So a cached prefix is worth exactly the tokens it saves, a busy worker loses its followers as its queue grows, and
no weight has to be tuned.  What is still equal is settled by rendezvous hashing (Thaler and Ravishankar 1998) on the
first block, so that prompts which begin alike meet again, and others spread.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.types import PAGE_TOKENS, Leg, ValidRequest, WorkerId


class Score(NamedTuple):
    """One candidate's numbers at the moment of a decision."""

    slot: int
    in_flight: int  # tokens that it has to compute before and beside this request
    cached: int  # leading tokens of the prompt that it probably has
    compute: int  # tokens of this request that it would compute
    short: int  # KV pages that it lacks to take the request at once

    @property
    def cost(self) -> tuple[bool, int]:
        """Room first, then tokens."""
        return (self.short > 0, self.in_flight + self.compute)


class LeastTokens:
    """The policy.  Stateless: everything it knows is handed in."""

    def scores(
        self, request: ValidRequest, emitted: int, leg: Leg, slots: Sequence[int], view: tuple[Fleet, PrefixIndex]
    ) -> list[Score]:
        """The numbers of every candidate for one leg of ``request``, of which ``emitted`` tokens are written."""
        fleet, prefixes = view
        known = len(request.prompt) + emitted
        to_read = 0 if leg is Leg.DECODE else known
        to_write = 0 if leg is Leg.PREFILL else request.sampling.max_tokens - emitted
        pages = -(-known // PAGE_TOKENS)
        matches = prefixes.matches(request.block_hashes, [(slot, fleet.incarnations[slot]) for slot in slots])
        scores: list[Score] = []
        for slot, blocks in zip(slots, matches, strict=True):
            cached = blocks * PAGE_TOKENS
            # The token after the known ones is always computed from at least one of them.
            unread = max(0, to_read - min(cached, known - 1))
            report = fleet.reports[slot]
            free = report.kv_pages_free if report is not None else pages
            scores.append(Score(slot, fleet.load[slot], cached, unread + to_write, max(0, pages - free)))
        return scores

    def best(self, request: ValidRequest, scores: Sequence[Score], ids: Sequence[WorkerId]) -> Score | None:
        """The score to take, or None when there is none."""
        if not scores:
            return None
        least = min(score.cost for score in scores)
        equals = [score for score in scores if score.cost == least]
        if len(equals) == 1:
            return equals[0]
        longest = max(score.cached for score in equals)
        equals = [score for score in equals if score.cached == longest]
        if len(equals) == 1:
            return equals[0]
        key = request.block_hashes[0] if request.block_hashes else request.id.encode()
        return max(equals, key=lambda score: blake2b(key + ids[score.slot].encode(), digest_size=8).digest())
