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
from penstock.wire.gateway_messages import MAX_REASON_CHARS, TokenItem
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
    door_said: bool = False  # the receiver knows where to fetch the pages
    lost: bool = False  # the peer could not be reached; a new pull brings it back
    owed_since: float | None = None  # since when the receiver owes a sign
    spoke: float = 0.0  # when something was last sent


class KvSender:
    """All transfers out of one worker's pages.  Every method returns messages to send and events for the scheduler."""

    def __init__(self, config: KvTransferConfig, carrier: KvConnector, incarnation: int) -> None:
        self._config = config
        self._carrier = carrier
        self._incarnation = incarnation
        self._legs: dict[RequestId, _OutgoingTransfer] = {}
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
        leg = self._legs.get(request)
        if leg is not None:
            if leg.epoch >= epoch:
                return turn
            self._close(leg, "replaced by a later epoch", now, turn)
        self._closed.pop(request, None)
        self._legs[request] = _OutgoingTransfer(request, epoch)
        waiting = self._pulls.pop(request, None)
        if waiting is not None:
            self._pulled(waiting.peer, waiting.pull, now, turn)
        return turn

    def offer_page(self, offer: PageOffer, now: float, *, more: bool = False) -> SenderOutput:
        """Announce a final page.  Ignored for unknown transfers and for pages offered before.

        ``more``: another page or ``finish_prefill`` follows at once, so the announcement may be batched with it.
        """
        turn = SenderOutput()
        leg = self._legs.get(offer.request)
        if leg is None or leg.epoch != offer.epoch:
            return turn
        if offer.index not in leg.frames:
            page = self._carrier.own.view(offer.page)
            leg.frames[offer.index] = PageReady(
                request=offer.request,
                epoch=offer.epoch,
                index=offer.index,
                tokens=offer.tokens,
                page=offer.page,
                generation=offer.generation,
                checksum=self._carrier.seal.checksum(page, offer.generation),
            )
            leg.waiting.append(offer.index)
            leg.gathered += page.nbytes
        if not more or leg.gathered >= leg.enough:
            leg.enough = min(2 * leg.enough, ANNOUNCED_BYTES) if more else FIRST_ANNOUNCED_BYTES
            self._pump(leg, now, turn)
        return turn

    def finish_prefill(self, first: TokenItem, blocks: int, now: float) -> SenderOutput:
        """All pages were offered; ``first`` is the first sampled token.  Fails the transfer if a page is missing."""
        turn = SenderOutput()
        leg = self._legs.get(first.request)
        if leg is None or leg.epoch != first.epoch:
            return turn
        if first.finish is None and any(block not in leg.frames for block in range(leg.acknowledged, blocks)):
            self._close(leg, "pages missing", now, turn)
            return turn
        leg.done = PrefillDone(request=first.request, epoch=first.epoch, blocks=blocks, first=first)
        self._pump(leg, now, turn)
        return turn

    def fail_transfer(self, request: RequestId, epoch: int, reason: str, now: float) -> SenderOutput:
        """Fail a transfer and notify its receiver."""
        turn = SenderOutput()
        leg = self._legs.get(request)
        if leg is not None and leg.epoch == epoch:
            self._close(leg, reason, now, turn)
        return turn

    def cancel_transfer(self, request: RequestId, epoch: int, now: float) -> SenderOutput:
        """Cancel a request in any state, unless a later epoch is open."""
        turn = SenderOutput()
        leg = self._legs.get(request)
        if leg is not None and leg.epoch <= epoch:
            self._close(leg, "cancelled", now, turn)
        waiting = self._pulls.get(request)
        if waiting is not None and waiting.pull.epoch <= epoch:
            del self._pulls[request]
            turn.sends.append(SendToReceiver(waiting.peer, _failed(waiting.pull, "cancelled")))
        if leg is None or leg.epoch <= epoch:
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
        leg = self._legs.get(message.request)
        if leg is not None and leg.epoch == message.epoch and leg.peer is not None:
            self._close(leg, TAKEN if message.moved else "received", now, turn)
        return turn

    # --- what the transport and the clock say ------------------------------------------------------------------------

    def on_send_failed(self, peer: bytes, now: float) -> None:
        """The listener could not reach this peer: hold messages back until it pulls again or its leases expire."""
        for leg in self._legs.values():
            if leg.peer == peer:
                leg.lost = True
                if leg.owed_since is None:
                    leg.owed_since = now
                self._take_back(leg)

    def tick(self, now: float) -> SenderOutput:
        """Expire leases and send heartbeats.  To be called several times a second."""
        turn = SenderOutput()
        lease = self._config.lease_s
        for leg in list(self._legs.values()):
            if leg.owed_since is not None and now - leg.owed_since >= lease:
                self._close(leg, "lease ended", now, turn)
            elif leg.peer is not None and not leg.lost and now - leg.spoke >= lease / HEARTBEATS_PER_LEASE:
                self._say(leg, HandOverAlive(request=leg.request, epoch=leg.epoch), now, turn)
        for request, waiting in list(self._pulls.items()):
            if now - waiting.since >= lease:
                del self._pulls[request]
                turn.sends.append(SendToReceiver(waiting.peer, _failed(waiting.pull, "unknown request")))
        self._closed = {request: entry for request, entry in self._closed.items() if now - entry[2] < lease}
        return turn

    def acknowledged_pages(self, request: RequestId, epoch: int) -> int:
        """Number of pages, from the first on, that the receiver is known to have."""
        leg = self._legs.get(request)
        return leg.acknowledged if leg is not None and leg.epoch == epoch else 0

    @property
    def open_transfers(self) -> frozenset[tuple[RequestId, int]]:
        """Transfers whose pages are held, as (request, epoch): for integrity checks."""
        return frozenset((leg.request, leg.epoch) for leg in self._legs.values())

    @property
    def waiting_pulls(self) -> frozenset[tuple[RequestId, int]]:
        """Pulls for requests that are not opened yet, as (request, epoch).  They hold no pages."""
        return frozenset((request, waiting.pull.epoch) for request, waiting in self._pulls.items())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pulled(self, peer: bytes, pull: PullPages, now: float, turn: SenderOutput) -> None:
        leg = self._legs.get(pull.request)
        mine = leg if leg is not None and leg.epoch == pull.epoch else None
        refusal = self._refusal(pull, leg)
        if refusal is not None:
            turn.sends.append(SendToReceiver(peer, _failed(pull, refusal)))
            if mine is not None and mine.peer is None:
                self._close(mine, refusal, now, turn)
        elif mine is None:
            self._pulls[pull.request] = _WaitingPull(peer, pull, now)
        elif mine.peer is None:
            mine.peer, mine.room = peer, (pull.tokens, pull.ahead)
            mine.acknowledged = pull.skip_blocks
            mine.spoke = now
            turn.events.append(PullGranted(mine.request, mine.epoch, pull))
            self._pump(mine, now, turn)
        elif mine.room != (pull.tokens, pull.ahead):  # another receiver, which would number the pages otherwise
            turn.sends.append(SendToReceiver(peer, _failed(pull, "granted to another receiver")))
        else:
            self._acknowledged(mine, peer, pull, now, turn)

    def _refusal(self, pull: PullPages, leg: _OutgoingTransfer | None) -> str | None:
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
        if leg is not None and pull.epoch < leg.epoch:
            return "replaced by a later epoch"
        closed = self._closed.get(pull.request)
        if closed is not None and pull.epoch <= closed[0]:
            return closed[1]
        if leg is None and pull.request not in self._pulls and len(self._pulls) >= MAX_WAITING_PULLS:
            return "too many pulls wait"
        return None

    def _acknowledged(
        self, leg: _OutgoingTransfer, peer: bytes, pull: PullPages, now: float, turn: SenderOutput
    ) -> None:
        leg.acknowledged = max(leg.acknowledged, pull.skip_blocks)
        if peer != leg.peer or leg.lost or pull.resend:
            self._take_back(leg)
            leg.peer, leg.lost, leg.done_sent = peer, False, False
        for block in [block for block in leg.flying if block < leg.acknowledged]:
            self._land(leg, block)
        leg.owed_since = now if leg.flying or leg.done_sent else None
        self._pump_all(peer, now, turn)

    def _pump_all(self, peer: bytes, now: float, turn: SenderOutput) -> None:
        for leg in self._legs.values():
            if leg.peer == peer:
                self._pump(leg, now, turn)

    def _pump(self, leg: _OutgoingTransfer, now: float, turn: SenderOutput) -> None:
        """Send announcements as far as the window allows."""
        if leg.peer is None or leg.lost:
            return
        if not leg.door_said:
            leg.door_said = True
            door = self._carrier.grant_access(leg.request, leg.epoch)
            if door is not None:
                self._say(leg, door, now, turn)
        leg.gathered, ready = 0, list[PageReady]()
        while leg.waiting:
            block = leg.waiting[0]
            if block >= leg.acknowledged:
                frame = leg.frames[block]
                self._carrier.publish_page(frame)
                payload = self._carrier.inline_payload(frame.page)
                cost = max(MIN_WINDOW_COST_BYTES, 0 if payload is None else payload.nbytes)
                used = self._window.get(leg.peer, 0)
                if used > 0 and used + cost > self._config.window_bytes:
                    break
                self._window[leg.peer] = used + cost
                leg.flying[block] = cost
                if payload is None:
                    ready.append(frame)
                else:
                    self._say(leg, frame, now, turn, payload)
            leg.waiting.popleft()
        for first in range(0, len(ready), MAX_READY_PAGES):
            self._say(leg, _announced(ready[first : first + MAX_READY_PAGES]), now, turn)
        if leg.done is not None and not leg.done_sent and not leg.waiting:
            leg.done_sent = True
            self._say(leg, leg.done, now, turn)

    def _say(
        self,
        leg: _OutgoingTransfer,
        message: FetchTicket | PageReady | PagesReady | PrefillDone | HandOverAlive,
        now: float,
        turn: SenderOutput,
        payload: memoryview | None = None,
    ) -> None:
        assert leg.peer is not None
        leg.spoke = now
        if leg.owed_since is None and not isinstance(message, HandOverAlive | FetchTicket):
            leg.owed_since = now
        turn.sends.append(SendToReceiver(leg.peer, message, payload))

    def _take_back(self, leg: _OutgoingTransfer) -> None:
        """Count pages in flight as not sent."""
        again = sorted(leg.flying)
        for block in again:
            self._land(leg, block)
        leg.waiting.extendleft(reversed(again))
        leg.done_sent = leg.door_said = False

    def _land(self, leg: _OutgoingTransfer, block: int) -> None:
        assert leg.peer is not None
        left = self._window[leg.peer] - leg.flying.pop(block)
        if left > 0:
            self._window[leg.peer] = left
        else:
            del self._window[leg.peer]

    def _close(self, leg: _OutgoingTransfer, reason: str, now: float, turn: SenderOutput) -> None:
        del self._legs[leg.request]
        self._closed[leg.request] = (leg.epoch, reason, now)
        turn.events.append(TransferReleased(leg.request, leg.epoch, reason))
        if leg.peer is None:
            return
        self._carrier.revoke_access(leg.request, leg.epoch)
        for block in list(leg.flying):
            self._land(leg, block)
        if reason not in ("received", TAKEN) and not leg.lost:
            turn.sends.append(SendToReceiver(leg.peer, _told(leg.request, leg.epoch, reason)))
        self._pump_all(leg.peer, now, turn)


def _failed(pull: PullPages, reason: str) -> HandOverFailed:
    return _told(pull.request, pull.epoch, reason)


def _told(request: RequestId, epoch: int, reason: str) -> HandOverFailed:
    return HandOverFailed(request=request, epoch=epoch, reason=reason[:MAX_REASON_CHARS])


def _announced(frames: list[PageReady]) -> PageReady | PagesReady:
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
