"""Inputs and outputs of the two ends of a KV transfer: offers, pulls, messages to send, and events for the
scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.types import PageId, RequestId
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import (
    FetchTicket,
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)

# --- sending end -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOffer:
    """One final page: ``page`` of the sender's memory, with ``tokens`` tokens.  ``index`` is its place in the
    ``kv_spec.TransferOrder``, which is the block's number where all layers share pages.

    The page does not change until ``TransferReleased``.  ``generation`` counts how often the page had been allocated.
    """

    request: RequestId
    epoch: int
    index: int
    page: PageId
    tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class PullGranted:
    """The receiver has reserved all pages, so the prompt may be computed.  ``pull`` is its request."""

    request: RequestId
    epoch: int
    pull: PullPages | None = field(default=None, compare=False)


TAKEN = "taken"
"""The answer that was moving goes on at the receiver."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """The request's pages are no longer needed and may be freed.  Sent exactly once for every opened transfer."""

    request: RequestId
    epoch: int
    reason: str  # "received", TAKEN, "cancelled", "lease ended", ...


@dataclass(frozen=True, slots=True)
class SendToReceiver:
    """A message for the listener.  If sending fails, call ``KvSender.on_send_failed``."""

    peer: bytes
    message: FetchTicket | PageReady | PagesReady | PrefillDone | HandOverAlive | HandOverFailed
    payload: memoryview | None = None


@dataclass(slots=True)
class SenderOutput:
    """Messages to send, then events to apply, in this order."""

    sends: list[SendToReceiver] = field(default_factory=list[SendToReceiver])
    events: list[PullGranted | TransferReleased] = field(default_factory=list)


# --- receiving end ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePull:
    """A request's pages as the receiver wants them.

    ``pages[i]`` is the receiver's page for entry i of the ``kv_spec.TransferOrder`` of the first ``tokens`` tokens;
    entries below ``skip_blocks`` are present already.

    With ``ahead`` the request is still being decoded at the source: at least ``tokens`` are computed there, up to
    ``ahead`` more will be, and ``pages`` covers ``tokens + ahead``.
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
    """The first ``computed`` tokens are in verified pages of this worker."""

    request: RequestId
    epoch: int
    computed: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The transfer is complete; decoding continues after ``first``.  For a migrated request (``PagePull.ahead``) it
    holds all tokens sampled during the transfer.

    When ``first.finish`` is set the response is complete too, and pages may be missing.
    """

    request: RequestId
    epoch: int
    first: TokenItem


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The pull failed; no more pages will be written for this request."""

    request: RequestId
    epoch: int
    reason: str  # "corrupt", "silent", "sender gone", "protocol", or the sender's own words


@dataclass(frozen=True, slots=True)
class HedgeWon:
    """The pull is given up because recomputing the missing pages is predicted to be faster than waiting for them,
    although the source has computed all of them.  Decoding continues after ``first``."""

    request: RequestId
    epoch: int
    first: TokenItem


@dataclass(frozen=True, slots=True)
class SendToSource:
    """A message for the link to ``source``.  If sending fails nothing need be done: it is repeated."""

    source: PageSource
    message: PullPages | PagesReceived


@dataclass(slots=True)
class ReceiverOutput:
    """Messages to send, then events to apply, in this order."""

    sends: list[SendToSource] = field(default_factory=list[SendToSource])
    events: list[PagesAdvanced | TransferDone | HedgeWon | PullFailed] = field(default_factory=list)
