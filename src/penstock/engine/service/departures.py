"""Pages of prompts that were read here, on their way to those who write the answers.

Where pages stand in memory that others can read they are offered at once.  Pages of a device are written to their twins
in host memory first (``kernels.page_writing``), while the next step computes; what is said of a request leaves in the
order in which it happened.

::

    final:  offers ------------------------------------> hand-over        in this worker's memory
            begin -> under way -> turn: over, offers --> hand-over        on a device

A twin is good for as long as its page is not given out anew: a page of a shared prefix is written once.  Should a
request end while its pages are under way, the hand-over knows it no more and their offers are void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from penstock.engine.core.blocks import BlockPool
from penstock.engine.core.plan import PageDone
from penstock.kernels.page_export import PageWriter, Writing
from penstock.kv.transfer.effects import Offer
from penstock.types import PageId
from penstock.wire.messages import TokenItem

LOOK_S = 0.001
"""Between two looks at what is under way, when there is nothing else to do."""


class TellOffer(Protocol):
    """Whom a page is offered to: ``hand_overs.HandOvers.offer``."""

    def __call__(self, offer: Offer, now: float, *, more: bool = False) -> None:
        """A page is final; ``more`` of the same leg follow in this turn."""
        ...


@dataclass(slots=True)
class _Batch:
    """What becomes known with a step, once its pages are written."""

    writing: Writing
    offers: list[Offer]
    ends: list[tuple[TokenItem, int]] = field(default_factory=list[tuple[TokenItem, int]])  # first token; of tokens


class Departures:
    """Of one worker.  ``offer`` and ``done`` are the hand-over's."""

    def __init__(
        self,
        pool: BlockPool,
        offer: TellOffer,
        done: Callable[[TokenItem, int, float], None],
        writer: PageWriter | None = None,
    ) -> None:
        """``writer``: of pages that stand on a device; None: all memory is the host's."""
        self._pool = pool
        self._offer = offer
        self._done = done
        self._writer = writer
        self._under_way: deque[_Batch] = deque()
        self._written: dict[PageId, tuple[int, int]] = {}  # page -> generation, tokens of its twin

    def __len__(self) -> int:
        """Steps whose pages are under way."""
        return len(self._under_way)

    def final(self, pages_done: Sequence[PageDone], now: float) -> None:
        """A step was computed, and these pages are final."""
        if not pages_done:
            return
        offers = [offer_of(done, self._pool) for done in pages_done]
        if self._writer is None:
            self._leave(offers, now)
            return
        fresh = [offer for offer in offers if self._written.get(offer.page) != (offer.generation, offer.tokens)]
        self._written.update((offer.page, (offer.generation, offer.tokens)) for offer in fresh)
        self._under_way.append(_Batch(self._writer.begin([offer.page for offer in fresh]), offers))

    def ended(self, first: TokenItem, tokens: int, now: float) -> None:
        """All pages of a prompt of ``tokens`` tokens were told of, and this is its first token."""
        if self._under_way:
            self._under_way[-1].ends.append((first, tokens))
        else:
            self._done(first, tokens, now)

    def turn(self, now: float) -> None:
        """Offer what has been written by now."""
        while self._under_way and self._under_way[0].writing.over:
            batch = self._under_way.popleft()
            self._leave(batch.offers, now)
            for first, tokens in batch.ends:
                self._done(first, tokens, now)

    def _leave(self, offers: Sequence[Offer], now: float) -> None:
        """Each prompt's pages stand one behind the other."""
        for offer, following in zip_longest(offers, offers[1:]):
            self._offer(offer, now, more=following is not None and following.request == offer.request)


def offer_of(done: PageDone, pool: BlockPool) -> Offer:
    """A page of a prompt that is read for another worker is final."""
    request, page = done.request, done.request.held[done.group].pages[done.block]
    return Offer(
        request=request.id,
        epoch=request.epoch,
        block=done.piece,
        page=page,
        tokens=done.tokens,
        generation=pool.generation(page),
    )
