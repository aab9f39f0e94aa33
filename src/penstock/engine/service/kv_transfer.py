"""This worker's hand-overs: both ends of them (``kv.transfer``), and the connections to other workers.

Carries what the ends send to other workers and what those reply; events for the scheduler and the gateways go to a
callback.  Knows nothing of gateways, and nothing about when a request is given up.

Pages in host memory are offered at once when they are final.  Pages of a device are first written to their twins in
host memory (``kernels.page_export``), while the next step is computed; messages of a request leave in order::

    final:  offers ------------------------------------> hand-over        in this worker's memory
            begin -> in flight -> turn: over, offers --> hand-over        on a device

A twin is valid until its page is allocated anew: a page of a shared prefix is written once.  If a request ends while
its pages are in flight, the hand-over no longer knows it and their offers are void.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import msgspec

from penstock.clock import Clock
from penstock.engine.core.cost_model import StepWork
from penstock.engine.core.page_pool import PagePool
from penstock.engine.core.plan import CompletedPage
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.gateways import invalid_first_token
from penstock.engine.service.peer_links import PeerLinks
from penstock.kernels.page_export import PageWriter, PendingExport
from penstock.kv.transfer.events import (
    HedgeWon,
    PageOffer,
    PagePull,
    PagesAdvanced,
    PullFailed,
    PullGranted,
    ReceiverOutput,
    SenderOutput,
    TransferDone,
    TransferReleased,
)
from penstock.kv.transfer.receiver import KvReceiver, SenderMessage, send_pulls
from penstock.kv.transfer.sender import KvSender, send_messages
from penstock.types import ModelIdentity, PageId, RequestId
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import (
    FetchMessage,
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)
from penstock.wire.transport import Link, Listener

TransferEvent = PagesAdvanced | TransferDone | HedgeWon | PullFailed | PullGranted | TransferReleased
"""What an end says that is not for another worker."""

log = logging.getLogger("penstock.worker")

_TOLD = FetchMessage | PageReady | PrefillDone | HandOverAlive | HandOverFailed


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """Both ends of this worker's hand-overs, and whose pages pass through them."""

    identity: ModelIdentity
    sender: KvSender
    receiver: KvReceiver
    writer: PageWriter | None = None  # of pages that stand on a device
    vocabulary: int | None = None  # of the model; None: tokens that others drew are not compared with it


class KvTransfer:
    """The ends, and a way to say what they want said.  ``tell`` gets their events, in order, and may call back."""

    def __init__(
        self,
        ends: TransferEnds,
        peers: PeerLinks,
        listener: Listener,
        clock: Clock,
        tell: Callable[[TransferEvent], None],
    ) -> None:
        self._vocabulary = ends.vocabulary
        self._sender = ends.sender
        self._receiver = ends.receiver
        self._listener = listener
        self._clock = clock
        self._emit = tell
        self._peers = peers
        self._layout = ends.receiver.layout
        self._beside_s = 0.0  # of the receiver's, that was counted

    # --- what other workers say --------------------------------------------------------------------------------------

    def on_pull(self, peer: bytes, message: PullPages, now: float) -> None:
        """A receiver has room, or acknowledges."""
        self._sending(self._sender.on_pull(peer, message, now))

    def on_pages_received(self, message: PagesReceived, now: float) -> None:
        """A receiver has everything, or wants no more."""
        self._sending(self._sender.on_received(message, now))

    def drain(self, now: float) -> float:
        """Take what senders sent and copy what can be copied within the budget.  Returns the seconds of copying, with
        those of the processor that threads have spent on it since."""
        for source, received in self._peers.messages():
            if isinstance(received.message, _TOLD):
                self._on_message(source, received.message, received.payload, now)
        if not self._receiver.has_work:
            return 0.0
        began = self._clock.now()
        self._receiving(self._receiver.fetch_pages(now))
        before, self._beside_s = self._beside_s, self._receiver.background_s
        return self._clock.now() - began + self._beside_s - before

    def _on_message(self, source: PageSource, message: SenderMessage, payload: memoryview | None, now: float) -> None:
        """Whatever another worker says: it must not end this one, with the requests of others."""
        reason = invalid_first_token(message.first, self._vocabulary) if isinstance(message, PrefillDone) else None
        if reason is None:
            try:
                self._receiving(self._receiver.on_message(source, message, payload, now))
            except Exception:
                log.exception("a %s of %s could not be handled", type(message).__name__, source.worker)
                reason = f"a {type(message).__name__} that could not be handled"
        if reason is not None:
            self._receiving(self._receiver.reject_pull(source, message.request, message.epoch, f"protocol: {reason}"))

    # --- what requests do --------------------------------------------------------------------------------------------

    def connect(self, source: PageSource, now: float) -> bool:
        """Connect while the request still waits for room.  Earlier incarnations of the source are dead."""
        self._receiving(self._receiver.on_sender_gone(source.worker, source.incarnation))
        return self._peers.connect(source, now)

    def open_send(self, request: RequestId, epoch: int, now: float) -> None:
        """A prefill leg is here."""
        self._sending(self._sender.open_transfer(request, epoch, now))

    def request_pages(self, request: Request, source: PageSource, now: float) -> None:
        """Room is reserved for the whole prompt: ask for its pages.  That is the credit."""
        if not self._peers.connect(source, now):
            self._emit(PullFailed(request.id, request.epoch, "no way to the source"))
            return
        tokens, ahead = request.remote_tokens, 0
        if request.extra_tokens:  # the worker that samples the next token computes the last known one
            tokens, ahead = tokens - 1, request.extra_tokens + 1
        pieces = self._layout.transfer_order(tokens, ahead=ahead)
        pull = PagePull(
            request=request.id,
            epoch=request.epoch,
            source=source,
            pages=tuple(request.page_tables[group].pages[block] for block, group in pieces),
            skip_blocks=pieces.pages_before(request.computed // self._layout.page_tokens),
            tokens=tokens,
            ahead=ahead,
        )
        self._receiving(self._receiver.start_pull(pull, now))

    def offer_page(self, offer: PageOffer, now: float, *, more: bool = False) -> None:
        """A page is final; ``more`` of the same leg follow in this turn."""
        self._sending(self._sender.offer_page(offer, now, more=more))

    def acknowledged_pages(self, request: RequestId, epoch: int) -> int:
        """Pages that the receiver is known to have, from the first without a gap."""
        return self._sender.acknowledged_pages(request, epoch)

    def finish_migration(self, last: TokenItem, blocks: int, now: float) -> None:
        """All ``blocks`` pages of an answer that moves were offered, and these are the tokens written meanwhile."""
        self._sending(self._sender.finish_prefill(last, blocks, now))

    def finish_prefill(self, first: TokenItem, tokens: int, now: float) -> None:
        """The pages of all ``tokens`` were offered, and this is the first token."""
        if first.phases or first.prompt_logprobs is not None:
            # Phases are of this worker's leg; what is known of the prompt's tokens this worker tells the gateway.
            first = msgspec.structs.replace(first, phases=(), prompt_logprobs=None)
        self._sending(self._sender.finish_prefill(first, self._layout.transfer_order(tokens).total, now))

    def cancel(self, request: RequestId, epoch: int, now: float) -> None:
        """The request was cancelled: both ends forget it."""
        self._receiving(self._receiver.cancel_pull(request, epoch))
        self._sending(self._sender.cancel_transfer(request, epoch, now))

    def fail(self, request: RequestId, epoch: int, reason: str, now: float) -> None:
        """The request cannot be finished here: nothing more is written, and the receiver of its pages is notified."""
        self._receiving(self._receiver.cancel_pull(request, epoch))
        self._sending(self._sender.fail_transfer(request, epoch, reason, now))

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
    def has_work(self) -> bool:
        """Whether there are pages to copy."""
        return self._receiver.has_work

    def links(self) -> list[Link]:
        """What to wait for."""
        return self._peers.links()

    @property
    def descriptors(self) -> Sequence[int]:
        """What to wait for besides."""
        return self._receiver.descriptors

    # --- inside ------------------------------------------------------------------------------------------------------

    def _receiving(self, turn: ReceiverOutput) -> None:
        now = self._clock.now()
        for event in send_pulls(turn, lambda source, message: self._peers.send(source, message, now)):
            self._emit(event)

    def _sending(self, turn: SenderOutput) -> None:
        for event in send_messages(turn, self._listener, self._sender, self._clock.now()):
            self._emit(event)


EXPORT_POLL_S = 0.001
"""Between two looks at what is under way, when there is nothing else to do."""


class OfferPage(Protocol):
    """Callback that takes a finished page: ``KvTransfer.offer_page``."""

    def __call__(self, offer: PageOffer, now: float, *, more: bool = False) -> None:
        """A page is final; ``more`` of the same leg follow in this turn."""
        ...


@dataclass(slots=True)
class _Batch:
    """What becomes known with a step, once its pages are written."""

    writing: PendingExport
    offers: list[PageOffer]
    ends: list[tuple[TokenItem, int]] = field(default_factory=list[tuple[TokenItem, int]])  # first token; of tokens


class PageExporter:
    """Exports the pages of one worker.  ``offer`` and ``done`` are those of the transfer."""

    def __init__(
        self,
        pool: PagePool,
        offer: OfferPage,
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

    def on_pages_completed(self, pages_done: Sequence[CompletedPage], now: float) -> None:
        """A step was computed, and these pages are final."""
        if not pages_done:
            return
        offers = [page_offer(done, self._pool) for done in pages_done]
        if self._writer is None:
            self._leave(offers, now)
            return
        fresh = [offer for offer in offers if self._written.get(offer.page) != (offer.generation, offer.tokens)]
        self._written.update((offer.page, (offer.generation, offer.tokens)) for offer in fresh)
        self._under_way.append(_Batch(self._writer.begin_export([offer.page for offer in fresh]), offers))

    def on_prefill_end(self, first: TokenItem, tokens: int, now: float) -> None:
        """All pages of a prompt of ``tokens`` tokens were announced, and this is its first token."""
        if self._under_way:
            self._under_way[-1].ends.append((first, tokens))
        else:
            self._done(first, tokens, now)

    def send_written(self, now: float) -> None:
        """Offer what has been written by now."""
        while self._under_way and self._under_way[0].writing.is_complete:
            batch = self._under_way.popleft()
            self._leave(batch.offers, now)
            for first, tokens in batch.ends:
                self._done(first, tokens, now)

    def _leave(self, offers: Sequence[PageOffer], now: float) -> None:
        """Each prompt's pages stand one behind the other."""
        for offer, following in zip_longest(offers, offers[1:]):
            self._offer(offer, now, more=following is not None and following.request == offer.request)


def page_offer(done: CompletedPage, pool: PagePool) -> PageOffer:
    """A page of a prompt that is read for another worker is final."""
    request, page = done.request, done.request.page_tables[done.group].pages[done.block]
    return PageOffer(
        request=request.id,
        epoch=request.epoch,
        index=done.piece,
        page=page,
        tokens=done.tokens,
        generation=pool.generation(page),
    )


class RecomputeEstimate:
    """How long one worker would take to recompute what it waits for (``KvReceiver``)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def predict(self, request_id: RequestId, start: int, stop: int) -> float | None:
        """Seconds to compute these tokens here; None where only the sender can: it alone has the images of a prompt,
        and the bits of a prompt in another numerics class.

        Of what has arrived only that counts which the cache can continue from: where layers have windows or states, it
        cannot before their own pages are here.
        """
        scheduler = self._scheduler
        request = scheduler.get_request(request_id)
        if request is None or request.images or request.prompt_pages_only:
            return None
        start = min(start, scheduler.memory.cached_tokens(request.hashes))
        load, own = scheduler.load(), StepWork()
        own.add(start, stop - start, 1)
        before = StepWork(tokens=load.prompt_tokens, pairs=load.prompt_pairs)
        seconds = scheduler.cost.predict(own)
        return seconds + scheduler.cost.predict(before) if before.tokens else seconds
