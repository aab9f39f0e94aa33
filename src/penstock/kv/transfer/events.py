"""What the two ends of a hand-over ask of whoever drives them: messages to send, and news for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.types import PageId, RequestId
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import (
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PagesAt,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)

# --- sending end -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOffer:
    """One final page: ``page`` of the sender's own memory holds ``tokens`` tokens and travels as number ``block``.

    Pages are numbered in the order of ``reach.Pieces``, which is by block where all layers share pages.

    It stays as it is until ``TransferReleased``.  ``generation`` says how often the page had been given out by then.
    """

    request: RequestId
    epoch: int
    index: int
    page: PageId
    tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class PullGranted:
    """The receiver has room for all pages: the prompt may be computed.  ``pull`` is what it said."""

    request: RequestId
    epoch: int
    pull: PullPages | None = field(default=None, compare=False)


TAKEN = "taken"
"""The answer that was moving goes on at the receiver."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """Nobody will read this request's pages any more: free them.  Comes exactly once for every opened leg."""

    request: RequestId
    epoch: int
    reason: str  # "received", TAKEN, "cancelled", "lease ended", ...


@dataclass(frozen=True, slots=True)
class SendToReceiver:
    """For the listener.  When it answers False, tell ``KvSender.on_send_failed``."""

    peer: bytes
    message: PagesAt | PageReady | PagesReady | PrefillDone | HandOverAlive | HandOverFailed
    payload: memoryview | None = None


@dataclass(slots=True)
class SenderOutput:
    """In this order: send, then apply."""

    sends: list[SendToReceiver] = field(default_factory=list[SendToReceiver])
    events: list[PullGranted | TransferReleased] = field(default_factory=list)


# --- receiving end ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePull:
    """One request's pages, as the receiver wants them.

    ``pages[block]`` is the receiver's own page for each that travels (``reach.Pieces``) of the first ``tokens`` tokens;
    those below ``skip_blocks`` are there already.

    With ``ahead`` the answer is still being written at the source, where ``tokens`` are computed at least; up to so
    many more will be, and ``pages`` are those of ``tokens + ahead``.
    """

    request: RequestId
    epoch: int
    source: PageSource
    pages: Sequence[PageId]
    skip_blocks: int
    tokens: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class PagesAdvanced:
    """The first ``computed`` tokens stand in verified pages of this worker's own."""

    request: RequestId
    epoch: int
    computed: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The hand-over is complete; decoding goes on after this token.  Of an answer that moved (``PagePull.ahead``) it
    has any number of tokens: those that were written meanwhile.

    When ``first.finish`` is set the answer is complete too, and pages may be missing.
    """

    request: RequestId
    epoch: int
    first: TokenItem


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Nothing more will be written for this request."""

    request: RequestId
    epoch: int
    reason: str  # "corrupt", "silent", "sender gone", "protocol", or the sender's own words


@dataclass(frozen=True, slots=True)
class HedgeWon:
    """Nothing more will be written for this request, though all of it was computed: the bytes are too slow, and
    computing what is missing is predicted to be sooner.  Decoding goes on after this token."""

    request: RequestId
    epoch: int
    first: TokenItem


@dataclass(frozen=True, slots=True)
class SendToSource:
    """For the link to ``source``.  When it answers False nothing need be done: it is said again in time."""

    source: PageSource
    message: PullPages | PagesReceived


@dataclass(slots=True)
class ReceiverOutput:
    """In this order: send, then apply."""

    sends: list[SendToSource] = field(default_factory=list[SendToSource])
    events: list[PagesAdvanced | TransferDone | HedgeWon | PullFailed] = field(default_factory=list)
