"""This worker's hand-overs: both ends of them (``kv.transfer``), and the connections to other workers.

Carries what the ends say to other workers and what those answer; what the ends say to the scheduler and the gateways
is told to whoever made this object.  Knows nothing of gateways, and nothing about when a request is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.clock import Clock
from penstock.engine.core.request import Request
from penstock.engine.service.fitness import unfit_first
from penstock.engine.service.peers import Peers
from penstock.kernels.page_export import PageWriter
from penstock.kv.transfer.drive import post, post_pulls
from penstock.kv.transfer.effects import (
    FirstToken,
    Granted,
    Offer,
    Outrun,
    PagesAdvanced,
    Pull,
    PullFailed,
    ReceiverTurn,
    Released,
    SenderTurn,
)
from penstock.kv.transfer.receiver import HandOverReceiver, SenderMessage
from penstock.kv.transfer.sender import HandOverSender
from penstock.types import ModelIdentity, RequestId
from penstock.wire.messages import (
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PageSource,
    PagesReceived,
    PrefillDone,
    PullPages,
    TokenItem,
)
from penstock.wire.page_doors import OfFetching
from penstock.wire.transport import Link, Listener

News = PagesAdvanced | FirstToken | Outrun | PullFailed | Granted | Released
"""What an end says that is not for another worker."""

log = logging.getLogger("penstock.worker")

_TOLD = OfFetching | PageReady | PrefillDone | HandOverAlive | HandOverFailed


@dataclass(frozen=True, slots=True)
class HandOver:
    """Both ends of this worker's hand-overs, and whose pages pass through them."""

    identity: ModelIdentity
    sender: HandOverSender
    receiver: HandOverReceiver
    writer: PageWriter | None = None  # of pages that stand on a device
    vocabulary: int | None = None  # of the model; None: tokens that others drew are not compared with it


class HandOvers:
    """The ends, and a way to say what they want said.  ``tell`` hears their news, in order, and may call back."""

    def __init__(
        self, ends: HandOver, peers: Peers, listener: Listener, clock: Clock, tell: Callable[[News], None]
    ) -> None:
        self._vocabulary = ends.vocabulary
        self._sender = ends.sender
        self._receiver = ends.receiver
        self._listener = listener
        self._clock = clock
        self._tell = tell
        self._peers = peers
        self._layout = ends.receiver.layout
        self._beside_s = 0.0  # of the receiver's, that was counted

    # --- what other workers say --------------------------------------------------------------------------------------

    def pull(self, peer: bytes, message: PullPages, now: float) -> None:
        """A receiver has room, or acknowledges."""
        self._sending(self._sender.pull(peer, message, now))

    def received(self, message: PagesReceived, now: float) -> None:
        """A receiver has everything, or wants no more."""
        self._sending(self._sender.received(message, now))

    def drain(self, now: float) -> float:
        """Take what senders sent and copy what can be copied within the budget.  Returns the seconds of copying, with
        those of the processor that threads have spent on it since."""
        for source, received in self._peers.received():
            if isinstance(received.message, _TOLD):
                self._take(source, received.message, received.payload, now)
        if not self._receiver.has_work:
            return 0.0
        began = self._clock.now()
        self._receiving(self._receiver.work(now))
        before, self._beside_s = self._beside_s, self._receiver.beside_s
        return self._clock.now() - began + self._beside_s - before

    def _take(self, source: PageSource, message: SenderMessage, payload: memoryview | None, now: float) -> None:
        """Whatever another worker says: it must not end this one, with the requests of others."""
        reason = unfit_first(message.first, self._vocabulary) if isinstance(message, PrefillDone) else None
        if reason is None:
            try:
                self._receiving(self._receiver.receive(source, message, payload, now))
            except Exception:
                log.exception("a %s of %s could not be handled", type(message).__name__, source.worker)
                reason = f"a {type(message).__name__} that could not be handled"
        if reason is not None:
            self._receiving(self._receiver.distrust(source, message.request, message.epoch, f"protocol: {reason}"))

    # --- what requests do --------------------------------------------------------------------------------------------

    def reach(self, source: PageSource, now: float) -> bool:
        """Connect while the request still waits for room.  Earlier incarnations of the source are dead."""
        self._receiving(self._receiver.sender_gone(source.worker, source.incarnation))
        return self._peers.reach(source, now)

    def open(self, request: RequestId, epoch: int, now: float) -> None:
        """A prefill leg is here."""
        self._sending(self._sender.open(request, epoch, now))

    def expect(self, request: Request, source: PageSource, now: float) -> None:
        """Room is reserved for the whole prompt: ask for its pages.  That is the credit."""
        if not self._peers.reach(source, now):
            self._tell(PullFailed(request.id, request.epoch, "no way to the source"))
            return
        tokens, ahead = request.handed, 0
        if request.ahead:  # the last token that is known is computed by whoever draws the next
            tokens, ahead = tokens - 1, request.ahead + 1
        pieces = self._layout.pieces(tokens, ahead=ahead)
        pull = Pull(
            request=request.id,
            epoch=request.epoch,
            source=source,
            pages=tuple(request.held[group].pages[block] for block, group in pieces),
            skip_blocks=pieces.before(request.computed // self._layout.page_tokens),
            tokens=tokens,
            ahead=ahead,
        )
        self._receiving(self._receiver.expect(pull, now))

    def offer(self, offer: Offer, now: float, *, more: bool = False) -> None:
        """A page is final; ``more`` of the same leg follow in this turn."""
        self._sending(self._sender.offer(offer, now, more=more))

    def acknowledged(self, request: RequestId, epoch: int) -> int:
        """Pages that the receiver is known to have, from the first without a gap."""
        return self._sender.acknowledged(request, epoch)

    def moved(self, last: TokenItem, blocks: int, now: float) -> None:
        """All ``blocks`` pages of an answer that moves were offered, and these are the tokens written meanwhile."""
        self._sending(self._sender.done(last, blocks, now))

    def done(self, first: TokenItem, tokens: int, now: float) -> None:
        """The pages of all ``tokens`` were offered, and this is the first token."""
        if first.phases or first.prompt_logprobs is not None:
            # Phases are of this worker's leg; what is known of the prompt's tokens this worker tells the gateway.
            first = msgspec.structs.replace(first, phases=(), prompt_logprobs=None)
        self._sending(self._sender.done(first, self._layout.pieces(tokens).total, now))

    def cancel(self, request: RequestId, epoch: int, now: float) -> None:
        """Nobody wants the request any more: both ends forget it."""
        self._receiving(self._receiver.cancel(request, epoch))
        self._sending(self._sender.cancel(request, epoch, now))

    def fail(self, request: RequestId, epoch: int, reason: str, now: float) -> None:
        """The request cannot be finished here: nothing more is written, and whoever waits for its pages is told."""
        self._receiving(self._receiver.cancel(request, epoch))
        self._sending(self._sender.fail(request, epoch, reason, now))

    # --- time and waiting --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> int:
        """Look at leases and unused connections.  Returns how many of the latter were closed."""
        self._receiving(self._receiver.tick(now))
        self._sending(self._sender.tick(now))
        return self._peers.close_idle(now)

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return self._receiver.page_bytes

    @property
    def busy(self) -> bool:
        """Are there pages to copy?"""
        return self._receiver.has_work

    def links(self) -> list[Link]:
        """What to wait for."""
        return self._peers.links()

    @property
    def descriptors(self) -> Sequence[int]:
        """What to wait for besides."""
        return self._receiver.descriptors

    # --- inside ------------------------------------------------------------------------------------------------------

    def _receiving(self, turn: ReceiverTurn) -> None:
        now = self._clock.now()
        for news in post_pulls(turn, lambda source, message: self._peers.send(source, message, now)):
            self._tell(news)

    def _sending(self, turn: SenderTurn) -> None:
        for news in post(turn, self._listener, self._sender, self._clock.now()):
            self._tell(news)
