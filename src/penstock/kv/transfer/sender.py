"""The sending end of KV transfers: one worker that has pages, many receivers.

::

    open_transfer  on_pull   offer_page…     finish_prefill   on_received
          |           |          |                 |               |
          v           v          v                 v               v
       opened ---> granted -> pages in flight -> all announced -> released
          |           |          |                 |
          +-----------+-- cancel, fail, lease expired -+---------> released

``open_transfer`` and the pull come in either order.  A receiver acknowledges pages by pulling again with a higher
``skip_blocks``; unacknowledged bytes per receiver stay below the window.  A receiver's lease runs only while a message
from it is due: after ``lease_s`` of silence everything held for it is released.  A pull for an unknown request is kept
for the same time.  A migrating request (a pull with ``ahead``) takes the same steps.

Pure: no sockets, no clock, owns no pages; it says when they may be freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config.limits import KvTransferConfig
from penstock.kv.connectors.base import KvConnector
from penstock.kv.transfer.events import (
    TAKEN,
    PageOffer,
    PullGranted,
    SenderOutput,
    SendToReceiver,
    TransferReleased,
)
from penstock.types import RequestId
from penstock.wire.gateway_messages import MAX_REASON_CHARS, TokenItem, in_parts
from penstock.wire.transfer_messages import (
    MAX_READY_PAGES,
    FetchTicket,
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
    ReadyPage,
)
from penstock.wire.transport import Listener

HEARTBEATS_PER_LEASE = 4
"""How often an idle end says that it is still there."""

MIN_WINDOW_COST_BYTES = 4096
"""What one announcement takes of the window at least: bounds the queue to a receiver when pages have no payload."""

FIRST_ANNOUNCED_BYTES, ANNOUNCED_BYTES = 512 << 10, 8 << 20
"""Of pages that are offered in one go, in one announcement: the first few at once, so that they travel while the next
are hashed; then twice as many each time, since an announcement takes both ends as long as some 100 KiB."""

MAX_WAITING_PULLS = 4096
"""Pulls kept for requests that are not opened yet."""


@dataclass(slots=True)
class _WaitingPull:
    peer: bytes
    pull: PullPages
    since: float


@dataclass(slots=True)
class _OutgoingTransfer:
    request: RequestId
    epoch: int
    peer: bytes | None = None  # set when granted
    room: tuple[int, int] = (0, 0)  # tokens and ahead of the pull that it was granted to: pages are numbered by them
    acknowledged: int = 0  # blocks below are the receiver's own
    frames: dict[int, PageReady] = field(default_factory=dict[int, PageReady])  # offered, by block
    waiting: deque[int] = field(default_factory=deque[int])  # blocks that the window holds back, or more come with
    gathered: int = 0  # bytes of those that more come with
    enough: int = FIRST_ANNOUNCED_BYTES  # of them, to be announced
    flying: dict[int, int] = field(default_factory=dict[int, int])  # block -> its part of the window
    done: PrefillDone | None = None
    done_sent: bool = False
    ticket_sent: bool = False  # the receiver knows where to fetch the pages
    lost: bool = False  # the peer could not be reached; a new pull brings it back
    owed_since: float | None = None  # since when the receiver owes a sign
    last_sent_at: float = 0.0  # when something was last sent


class KvSender:
    """All transfers out of one worker's pages.  Every method returns messages to send and events for the scheduler."""

    def __init__(self, config: KvTransferConfig, carrier: KvConnector, incarnation: int) -> None:
        self._config = config
        self._carrier = carrier
        self._incarnation = incarnation
        self._transfers: dict[RequestId, _OutgoingTransfer] = {}
        self._pulls: dict[RequestId, _WaitingPull] = {}
        self._closed: dict[RequestId, tuple[int, str, float]] = {}  # epoch, reason, when: to refuse late pulls at once
        self._window: dict[bytes, int] = {}  # peer -> bytes under way

    @property
    def rejected_connections(self) -> int:
        """Connections for pages that were rejected since the start: unauthenticated ones and those over the limit."""
        return self._carrier.rejected_connections

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def open_transfer(self, request: RequestId, epoch: int, now: float) -> SenderOutput:
        """Open the transfer of a prefill request.  Replaces one of an earlier epoch; an equal or later epoch stays."""
        turn = SenderOutput()
        transfer = self._transfers.get(request)
        if transfer is not None:
            if transfer.epoch >= epoch:
                return turn
            self._close(transfer, "replaced by a later epoch", now, turn)
        self._closed.pop(request, None)
        self._transfers[request] = _OutgoingTransfer(request, epoch)
        waiting = self._pulls.pop(request, None)
        if waiting is not None:
            self._pulled(waiting.peer, waiting.pull, now, turn)
        return turn

    def offer_page(self, offer: PageOffer, now: float, *, more: bool = False) -> SenderOutput:
        """Announce a final page.  Ignored for unknown transfers and for pages offered before.

        ``more``: another page or ``finish_prefill`` follows at once, so the announcement may be batched with it.
        """
        turn = SenderOutput()
        transfer = self._transfers.get(offer.request)
        if transfer is None or transfer.epoch != offer.epoch:
            return turn
        if offer.index not in transfer.frames:
            page = self._carrier.own.view(offer.page)
            transfer.frames[offer.index] = PageReady(
                request=offer.request,
                epoch=offer.epoch,
                index=offer.index,
                tokens=offer.tokens,
                page=offer.page,
                generation=offer.generation,
                checksum=self._carrier.seal.checksum(page, offer.generation),
            )
            transfer.waiting.append(offer.index)
            transfer.gathered += page.nbytes
        if not more or transfer.gathered >= transfer.enough:
            transfer.enough = min(2 * transfer.enough, ANNOUNCED_BYTES) if more else FIRST_ANNOUNCED_BYTES
            self._pump(transfer, now, turn)
        return turn

    def finish_prefill(self, first: TokenItem, blocks: int, now: float) -> SenderOutput:
        """All pages were offered; ``first`` is the first sampled token.  Fails the transfer if a page is missing."""
        turn = SenderOutput()
        transfer = self._transfers.get(first.request)
        if transfer is None or transfer.epoch != first.epoch:
            return turn
        if first.finish is None and any(block not in transfer.frames for block in range(transfer.acknowledged, blocks)):
            self._close(transfer, "pages missing", now, turn)
            return turn
        transfer.done = PrefillDone(request=first.request, epoch=first.epoch, blocks=blocks, first=first)
        self._pump(transfer, now, turn)
        return turn

    def fail_transfer(self, request: RequestId, epoch: int, reason: str, now: float) -> SenderOutput:
        """Fail a transfer and notify its receiver."""
        turn = SenderOutput()
        transfer = self._transfers.get(request)
        if transfer is not None and transfer.epoch == epoch:
            self._close(transfer, reason, now, turn)
        return turn

    def cancel_transfer(self, request: RequestId, epoch: int, now: float) -> SenderOutput:
        """Cancel a request in any state, unless a later epoch is open."""
        turn = SenderOutput()
        transfer = self._transfers.get(request)
        if transfer is not None and transfer.epoch <= epoch:
            self._close(transfer, "cancelled", now, turn)
        waiting = self._pulls.get(request)
        if waiting is not None and waiting.pull.epoch <= epoch:
            del self._pulls[request]
            turn.sends.append(SendToReceiver(waiting.peer, _failed(waiting.pull, "cancelled")))
        if transfer is None or transfer.epoch <= epoch:
            self._closed[request] = (epoch, "cancelled", now)
        return turn

    # --- what receivers say ------------------------------------------------------------------------------------------

    def on_pull(self, peer: bytes, message: PullPages, now: float) -> SenderOutput:
        """Handle a pull: a grant, an acknowledgment or a request to resend.  From a new peer: the receiver has
        reconnected."""
        turn = SenderOutput()
        self._pulled(peer, message, now, turn)
        return turn

    def on_received(self, message: PagesReceived, now: float) -> SenderOutput:
        """The receiver has all pages or wants no more."""
        turn = SenderOutput()
        waiting = self._pulls.get(message.request)
        if waiting is not None and waiting.pull.epoch <= message.epoch:
            del self._pulls[message.request]
        transfer = self._transfers.get(message.request)
        if transfer is not None and transfer.epoch == message.epoch and transfer.peer is not None:
            self._close(transfer, TAKEN if message.moved else "received", now, turn)
        return turn

    # --- what the transport and the clock say ------------------------------------------------------------------------

    def on_send_failed(self, peer: bytes, now: float) -> None:
        """The listener could not reach this peer: hold messages back until it pulls again or its leases expire."""
        for transfer in self._transfers.values():
            if transfer.peer == peer:
                transfer.lost = True
                if transfer.owed_since is None:
                    transfer.owed_since = now
                self._mark_unsent(transfer)

    def tick(self, now: float) -> SenderOutput:
        """Expire leases and send heartbeats.  To be called several times a second."""
        turn = SenderOutput()
        lease = self._config.lease_s
        for transfer in list(self._transfers.values()):
            if transfer.owed_since is not None and now - transfer.owed_since >= lease:
                self._close(transfer, "lease ended", now, turn)
            elif (
                transfer.peer is not None
                and not transfer.lost
                and now - transfer.last_sent_at >= lease / HEARTBEATS_PER_LEASE
            ):
                self._send(transfer, HandOverAlive(request=transfer.request, epoch=transfer.epoch), now, turn)
        for request, waiting in list(self._pulls.items()):
            if now - waiting.since >= lease:
                del self._pulls[request]
                turn.sends.append(SendToReceiver(waiting.peer, _failed(waiting.pull, "unknown request")))
        self._closed = {request: entry for request, entry in self._closed.items() if now - entry[2] < lease}
        return turn

    def acknowledged_pages(self, request: RequestId, epoch: int) -> int:
        """Number of pages, from the first on, that the receiver is known to have."""
        transfer = self._transfers.get(request)
        return transfer.acknowledged if transfer is not None and transfer.epoch == epoch else 0

    @property
    def open_transfers(self) -> frozenset[tuple[RequestId, int]]:
        """Transfers whose pages are held, as (request, epoch): for integrity checks."""
        return frozenset((transfer.request, transfer.epoch) for transfer in self._transfers.values())

    @property
    def waiting_pulls(self) -> frozenset[tuple[RequestId, int]]:
        """Pulls for requests that are not opened yet, as (request, epoch).  They hold no pages."""
        return frozenset((request, waiting.pull.epoch) for request, waiting in self._pulls.items())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pulled(self, peer: bytes, pull: PullPages, now: float, turn: SenderOutput) -> None:
        transfer = self._transfers.get(pull.request)
        mine = transfer if transfer is not None and transfer.epoch == pull.epoch else None
        refusal = self._refusal(pull, transfer)
        if refusal is not None:
            turn.sends.append(SendToReceiver(peer, _failed(pull, refusal)))
            if mine is not None and mine.peer is None:
                self._close(mine, refusal, now, turn)
        elif mine is None:
            self._pulls[pull.request] = _WaitingPull(peer, pull, now)
        elif mine.peer is None:
            mine.peer, mine.room = peer, (pull.tokens, pull.ahead)
            mine.acknowledged = pull.skip_blocks
            mine.last_sent_at = now
            turn.events.append(PullGranted(mine.request, mine.epoch, pull))
            self._pump(mine, now, turn)
        elif mine.room != (pull.tokens, pull.ahead):  # another receiver, which would number the pages otherwise
            turn.sends.append(SendToReceiver(peer, _failed(pull, "granted to another receiver")))
        else:
            self._acknowledged(mine, peer, pull, now, turn)

    def _refusal(self, pull: PullPages, transfer: _OutgoingTransfer | None) -> str | None:
        seal = self._carrier.seal
        checks = (
            ("model", pull.identity.fingerprint, seal.identity.fingerprint),
            ("numerics class", pull.identity.numerics, seal.identity.numerics),
            ("page layout", pull.layout, seal.layout.name),
            ("carrier", pull.carrier, self._carrier.name),
            ("incarnation", pull.incarnation, self._incarnation),
        )
        for what, theirs, ours in checks:
            if theirs != ours:
                return f"refused: {what} {theirs} does not fit {ours}"
        if transfer is not None and pull.epoch < transfer.epoch:
            return "replaced by a later epoch"
        closed = self._closed.get(pull.request)
        if closed is not None and pull.epoch <= closed[0]:
            return closed[1]
        if transfer is None and pull.request not in self._pulls and len(self._pulls) >= MAX_WAITING_PULLS:
            return "too many pulls wait"
        return None

    def _acknowledged(
        self, transfer: _OutgoingTransfer, peer: bytes, pull: PullPages, now: float, turn: SenderOutput
    ) -> None:
        transfer.acknowledged = max(transfer.acknowledged, pull.skip_blocks)
        if peer != transfer.peer or transfer.lost or pull.resend:
            self._mark_unsent(transfer)
            transfer.peer, transfer.lost, transfer.done_sent = peer, False, False
        for block in [block for block in transfer.flying if block < transfer.acknowledged]:
            self._land(transfer, block)
        transfer.owed_since = now if transfer.flying or transfer.done_sent else None
        self._pump_all(peer, now, turn)

    def _pump_all(self, peer: bytes, now: float, turn: SenderOutput) -> None:
        for transfer in self._transfers.values():
            if transfer.peer == peer:
                self._pump(transfer, now, turn)

    def _pump(self, transfer: _OutgoingTransfer, now: float, turn: SenderOutput) -> None:
        """Send announcements as far as the window allows."""
        if transfer.peer is None or transfer.lost:
            return
        if not transfer.ticket_sent:
            transfer.ticket_sent = True
            ticket = self._carrier.grant_access(transfer.request, transfer.epoch)
            if ticket is not None:
                self._send(transfer, ticket, now, turn)
        transfer.gathered, ready = 0, list[PageReady]()
        while transfer.waiting:
            block = transfer.waiting[0]
            if block >= transfer.acknowledged:
                frame = transfer.frames[block]
                self._carrier.publish_page(frame)
                payload = self._carrier.inline_payload(frame.page)
                cost = max(MIN_WINDOW_COST_BYTES, 0 if payload is None else payload.nbytes)
                used = self._window.get(transfer.peer, 0)
                if used > 0 and used + cost > self._config.window_bytes:
                    break
                self._window[transfer.peer] = used + cost
                transfer.flying[block] = cost
                if payload is None:
                    ready.append(frame)
                else:
                    self._send(transfer, frame, now, turn, payload)
            transfer.waiting.popleft()
        for frames in in_parts(ready, MAX_READY_PAGES):
            self._send(transfer, _announced(frames), now, turn)
        if transfer.done is not None and not transfer.done_sent and not transfer.waiting:
            transfer.done_sent = True
            self._send(transfer, transfer.done, now, turn)

    def _send(
        self,
        transfer: _OutgoingTransfer,
        message: FetchTicket | PageReady | PagesReady | PrefillDone | HandOverAlive,
        now: float,
        turn: SenderOutput,
        payload: memoryview | None = None,
    ) -> None:
        assert transfer.peer is not None
        transfer.last_sent_at = now
        if transfer.owed_since is None and not isinstance(message, HandOverAlive | FetchTicket):
            transfer.owed_since = now
        turn.sends.append(SendToReceiver(transfer.peer, message, payload))

    def _mark_unsent(self, transfer: _OutgoingTransfer) -> None:
        """Count pages in flight as not sent."""
        again = sorted(transfer.flying)
        for block in again:
            self._land(transfer, block)
        transfer.waiting.extendleft(reversed(again))
        transfer.done_sent = transfer.ticket_sent = False

    def _land(self, transfer: _OutgoingTransfer, block: int) -> None:
        assert transfer.peer is not None
        left = self._window[transfer.peer] - transfer.flying.pop(block)
        if left > 0:
            self._window[transfer.peer] = left
        else:
            del self._window[transfer.peer]

    def _close(self, transfer: _OutgoingTransfer, reason: str, now: float, turn: SenderOutput) -> None:
        del self._transfers[transfer.request]
        self._closed[transfer.request] = (transfer.epoch, reason, now)
        turn.events.append(TransferReleased(transfer.request, transfer.epoch, reason))
        if transfer.peer is None:
            return
        self._carrier.revoke_access(transfer.request, transfer.epoch)
        for block in list(transfer.flying):
            self._land(transfer, block)
        if reason not in ("received", TAKEN) and not transfer.lost:
            turn.sends.append(SendToReceiver(transfer.peer, _told(transfer.request, transfer.epoch, reason)))
        self._pump_all(transfer.peer, now, turn)


def _failed(pull: PullPages, reason: str) -> HandOverFailed:
    return _told(pull.request, pull.epoch, reason)


def _told(request: RequestId, epoch: int, reason: str) -> HandOverFailed:
    return HandOverFailed(request=request, epoch=epoch, reason=reason[:MAX_REASON_CHARS])


def _announced(frames: Sequence[PageReady]) -> PageReady | PagesReady:
    """One message that announces all these pages of one transfer."""
    if len(frames) == 1:
        return frames[0]
    pages = tuple(ReadyPage(each.index, each.tokens, each.page, each.generation, each.checksum) for each in frames)
    return PagesReady(request=frames[0].request, epoch=frames[0].epoch, pages=pages)


def send_messages(
    turn: SenderOutput, listener: Listener, sender: KvSender, now: float
) -> list[PullGranted | TransferReleased]:
    """Send the sender's messages and return the events for the scheduler."""
    for send in turn.sends:
        if not listener.send(send.peer, send.message, send.payload):
            sender.on_send_failed(send.peer, now)
    return turn.events
