"""What the receiving end of hand-overs knows of one of them, and of a page that was announced.  Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.kv.transfer.effects import Pull
from penstock.kv.transfer.haste import Waiting
from penstock.reach import Pieces
from penstock.wire.messages import PageReady, TokenItem
from penstock.wire.page_doors import PagesReady


@dataclass(slots=True)
class Pulling:
    """One request whose pages may still be written."""

    pull: Pull
    pieces: Pieces  # what a "block" is in all messages: a page, in the order of travel
    missing: set[int]  # blocks that are not here
    queued: set[int]  # blocks whose frame is here
    contiguous: int  # blocks from 0 that are here
    heard: float  # when the sender last gave a sign
    moved: float  # when it last gave a frame
    spoke: float  # when we last gave a sign
    patience: float  # silence before asking again; doubles each time
    first: TokenItem | None = None
    waiting: Waiting | None = None  # since ``first`` came, for bytes alone
    told: int = -1  # tokens that were told of as computed
    acknowledged: int = 0  # blocks from 0 that the sender was told of

    def fits(self, frame: PageReady) -> bool:
        """Can there be such a page, with so many tokens?"""
        if not 0 <= frame.block < len(self.pull.pages):
            return False
        most = self.pieces.tokens_of(frame.block)
        return 0 < frame.tokens <= most and (self.pull.ahead > 0 or frame.tokens == most)


@dataclass(slots=True)
class Queued:
    """A page that is to be brought."""

    pulling: Pulling
    frame: PageReady
    payload: memoryview | None = field(repr=False)


def frames_of(several: PagesReady) -> Iterator[PageReady]:
    """Each as if it had been announced alone."""
    for each in several.pages:
        yield PageReady(
            request=several.request,
            epoch=several.epoch,
            block=each.block,
            tokens=each.tokens,
            page=each.page,
            generation=each.generation,
            checksum=each.checksum,
        )
