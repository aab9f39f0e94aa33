"""The receiving end of KV transfers: one decode worker, many sources.

::

    start_pull -> OpenPull: announced pages are queued, ``fetch_pages`` copies them within a budget -> TransferDone
                     |
                     +-- cancel_pull, HandOverFailed, wrong checksum, lease expired -> PullFailed (not when cancelled)

Only ``fetch_pages`` starts writing, and writing is stopped before a pull is dropped: after ``cancel_pull`` returns, no
page of that request is written.  Most connectors copy a page at once; a network connector returns results later.  A
message for an unknown pull is dropped, and its sender learns that the pull is over.

Once the source has sent its last message, only bytes are missing.  If they are predicted to take longer than
recomputing (``HedgePolicy``), the pull is given up.  The estimate extrapolates the rate since then: missing pages
divided by pages per second.  A stopped sender, a slow link and a congested one all look alike.  Received and recomputed
pages have the same content (docs/determinism.md).

A migrating request (``PagePull.ahead``) is decoded while its pages arrive: the number of pages is known with the
source's last message only, and no token beyond ``PagePull.tokens`` counts as computed before it.

Pure: no sockets, no clock, no meaning of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.config.limits import KvTransferConfig
from penstock.errors import PageCorrupt, TransferRefused
from penstock.kv.connectors.base import CORRUPT, REFUSED, FetchRequest, FetchResult, KvConnector
from penstock.kv.page_memory import KvLayout
from penstock.kv.transfer.events import (
    HedgeWon,
    PagePull,
    PagesAdvanced,
    PullFailed,
    ReceiverOutput,
    SendToSource,
    TransferDone,
)
from penstock.kv.transfer.sender import HEARTBEATS_PER_LEASE
from penstock.kv_spec import TransferOrder
from penstock.types import RequestId, WorkerId, is_older_incarnation, same_run
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


@dataclass(slots=True)
class OpenPull:
    """A pull whose pages may still be written."""

    pull: PagePull
    pieces: TransferOrder  # what a "block" is in all messages: a page, in the order of travel
    missing: set[int]  # blocks that are not here
    queued: set[int]  # blocks whose frame is here
    contiguous: int  # blocks from 0 that are here
    last_message_at: float  # when the sender last gave a sign
    last_frame_at: float  # when it last gave a frame
    last_sent_at: float  # when we last gave a sign
    resend_after_s: float  # silence before asking again; doubles each time
    first: TokenItem | None = None
    waiting: PendingPages | None = None  # since ``first`` came, for bytes alone
    reported: int = -1  # tokens reported as computed
    acknowledged: int = 0  # pages, from the first on, acknowledged to the sender

    def fits(self, frame: PageReady) -> bool:
        """Whether the announced page can exist: its index is in range and its token count possible."""
        if not 0 <= frame.index < len(self.pull.pages):
            return False
        most = self.pieces.tokens_of(frame.index)
        return 0 < frame.tokens <= most and (self.pull.ahead > 0 or frame.tokens == most)


@dataclass(slots=True)
class QueuedPage:
    """An announced page that is not fetched yet."""

    pulling: OpenPull
    frame: PageReady
    payload: memoryview | None = field(repr=False)


def page_announcements(several: PagesReady) -> Iterator[PageReady]:
    """The announcements of a ``PagesReady``, one by one."""
    for each in several.pages:
        yield PageReady(
            request=several.request,
            epoch=several.epoch,
            index=each.index,
            tokens=each.tokens,
            page=each.page,
            generation=each.generation,
            checksum=each.checksum,
        )


PredictCompute = Callable[[RequestId, int, int], float | None]
"""Seconds to compute tokens [start, stop) of a request here, with what lies before it; None: it cannot be done."""

PAGES_BEFORE_FIRST = 0.5
"""Pages that are taken to have come while none has: the first is on its way."""


@dataclass(frozen=True, slots=True)
class PendingPages:
    """When only page bytes were missing for the first time, and how many pages that were."""

    since: float
    missing: int


def no_local_prefill(request: RequestId, start: int, stop: int) -> float | None:
    """``PredictCompute`` of a worker that computes no prompts: never."""
    del request, start, stop
    return None


class HedgePolicy:
    """Decides when recomputing is faster than waiting for pages.  ``predict`` estimates the time to recompute."""

    def __init__(self, config: KvTransferConfig, predict: PredictCompute) -> None:
        self.predict = predict
        self._after_s = config.hedge_after_s
        self._margin = config.hedge_margin

    def should_recompute(
        self, request: RequestId, pending: PendingPages, now: float, *, missing: int, computed: int, total: int
    ) -> bool:
        """Whether recomputing tokens ``computed`` to ``total`` is predicted to be faster than waiting for
        ``missing`` pages."""
        elapsed = now - pending.since
        if elapsed < self._after_s or not missing:
            return False
        arrived = max(pending.missing - missing, PAGES_BEFORE_FIRST)
        transfer_s = elapsed * missing / arrived
        recompute_s = self.predict(request, computed, total)
        return transfer_s > self._margin * (inf if recompute_s is None else recompute_s)


@dataclass(slots=True)
class TransferCounters:
    """Counters of the receiving end; they only grow."""

    pages: int = 0
    bytes: int = 0
    corrupt: int = 0  # pages whose copy failed its check
    duplicates: int = 0  # frames for a block that was here or queued
    strays: int = 0  # messages for unknown pulls
    expired: int = 0  # pulls given up because the sender was silent
    outrun: int = 0  # pulls given up because computing was sooner
    waited_s: float = 0.0  # that complete prompts waited for their last pages, and others for any, in vain
    missed: int = 0  # pages that were announced and had not come when their pulls were given up for that


ACKNOWLEDGMENTS_PER_WINDOW = 8
"""How often the sender hears how far we are while one window of bytes comes."""

SenderMessage = FetchTicket | PageReady | PagesReady | PrefillDone | HandOverAlive | HandOverFailed


class KvReceiver:
    """All pulls into one worker's pages.  Every method returns messages to send and events for the scheduler."""

    def __init__(
        self, config: KvTransferConfig, carrier: KvConnector, *, predict: PredictCompute = no_local_prefill
    ) -> None:
        """``predict``: how long computing tokens here would take."""
        self.counters = TransferCounters()
        self.hedge_policy = HedgePolicy(config, predict)
        self._config = config
        self._carrier = carrier
        self._layout = carrier.seal.layout
        self._pulls: dict[RequestId, OpenPull] = {}
        self._queue: deque[QueuedPage] = deque()
        self._answered_strays: dict[
            tuple[PageSource, RequestId, int], float
        ] = {}  # who knows that we want no more, since when

    @property
    def layout(self) -> KvLayout:
        """Layout of the pages."""
        return self._layout

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._layout.page_bytes

    @property
    def background_s(self) -> float:
        """Processor seconds that the connector's threads have spent on fetching pages since the start."""
        return self._carrier.busy_s

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def start_pull(self, pull: PagePull, now: float) -> ReceiverOutput:
        """Ask for pages into reserved memory.  Replaces a pull of an earlier epoch.

        Raises ValueError when a pull of this or a later epoch is open, or the pages do not match ``pull.tokens``.
        """
        pieces = self._layout.transfer_order(pull.tokens, ahead=pull.ahead)
        blocks = pieces.total
        if len(pull.pages) != blocks or not 0 <= pull.skip_blocks <= blocks:
            raise ValueError(f"{len(pull.pages)} pages from block {pull.skip_blocks} for {pull.tokens} tokens")
        turn = ReceiverOutput()
        earlier = self._pulls.get(pull.request)
        if earlier is not None:
            if earlier.pull.epoch >= pull.epoch:
                raise ValueError(f"{pull.request} is pulled already, in epoch {earlier.pull.epoch}")
            self._drop(earlier, turn)
        pulling = OpenPull(
            pull=pull,
            pieces=pieces,
            missing=set(range(pull.skip_blocks, blocks)),
            queued=set(),
            contiguous=pull.skip_blocks,
            last_message_at=now,
            last_frame_at=now,
            last_sent_at=now,
            resend_after_s=self._config.lease_s / HEARTBEATS_PER_LEASE,
        )
        self._pulls[pull.request] = pulling
        self._send_pull(pulling, now, turn)
        return turn

    def cancel_pull(self, request: RequestId, epoch: int) -> ReceiverOutput:
        """Stop writing pages of this request, unless a later epoch is open, and notify the sender."""
        turn = ReceiverOutput()
        pulling = self._pulls.get(request)
        if pulling is not None and pulling.pull.epoch <= epoch:
            self._drop(pulling, turn)
        return turn

    # --- what senders say --------------------------------------------------------------------------------------------

    def on_message(
        self, source: PageSource, message: SenderMessage, payload: memoryview | None, now: float
    ) -> ReceiverOutput:
        """Handle a message from ``source``.  Announced pages are queued; nothing is written yet."""
        turn = ReceiverOutput()
        pulling = self._pulls.get(message.request)
        if pulling is None or pulling.pull.epoch != message.epoch or pulling.pull.source != source:
            self._stray(source, message, now, turn)
            return turn
        pulling.last_message_at = now
        match message:
            case FetchTicket():
                self._carrier.add_ticket(source, message)
            case PageReady():
                self._queue_page(pulling, message, payload, now, turn)
            case PagesReady():
                self._queue_pages(pulling, message, now, turn)
            case PrefillDone():
                self._finish(pulling, message, now, turn)
            case HandOverFailed():
                self._fail(pulling, message.reason, turn, tell=False)
            case HandOverAlive():
                pass
        return turn

    def reject_pull(self, source: PageSource, request: RequestId, epoch: int, reason: str) -> ReceiverOutput:
        """Fail a pull whose source sent something impossible."""
        turn = ReceiverOutput()
        pulling = self._pulls.get(request)
        if pulling is not None and pulling.pull.epoch == epoch and pulling.pull.source == source:
            self._fail(pulling, reason, turn)
        return turn

    # --- what the loop and the clock say -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether pages are queued or fetch results are waiting."""
        return bool(self._queue) or self._carrier.has_results

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that become readable when fetch results are waiting."""
        return self._carrier.descriptors

    def fetch_pages(self, now: float, budget_bytes: int | None = None) -> ReceiverOutput:
        """Process fetch results, then copy and verify queued pages until the budget is used up; at least one page."""
        turn = ReceiverOutput()
        left = self._config.copy_budget_bytes if budget_bytes is None else budget_bytes
        touched: dict[RequestId, OpenPull] = {}
        for landed in self._carrier.fetch_results():
            self._landed(landed, now, turn, touched)
        while self._queue:
            queued = self._queue.popleft()
            if self._bring(queued, turn):
                touched[queued.pulling.pull.request] = queued.pulling
                left -= self._layout.page_bytes
                if left <= 0:
                    break
        self._carrier.start_fetches()
        for request, pulling in touched.items():
            if self._pulls.get(request) is pulling:
                self._advance(pulling, now, turn)
        return turn

    def tick(self, now: float) -> ReceiverOutput:
        """Expire silent sources and send heartbeats.  To be called several times a second."""
        turn = ReceiverOutput()
        lease = self._config.lease_s
        outran = False  # one a turn: the next is predicted with what this one adds to the work here
        for pulling in list(self._pulls.values()):
            if now - pulling.last_message_at >= lease:
                self.counters.expired += 1
                self._fail(pulling, "silent", turn)
            elif not outran and pulling.waiting is not None and self._outrun(pulling, pulling.waiting, now):
                outran = True
                self._give_up(pulling, now, turn)
            elif not pulling.queued and now - pulling.last_frame_at >= pulling.resend_after_s:
                pulling.last_frame_at = now
                pulling.resend_after_s *= 2
                self._send_pull(pulling, now, turn, resend=True)
            elif now - pulling.last_sent_at >= lease / HEARTBEATS_PER_LEASE:
                self._send_pull(pulling, now, turn)
        self._answered_strays = {key: since for key, since in self._answered_strays.items() if now - since < lease}
        return turn

    def on_sender_gone(self, worker: WorkerId, incarnation: int) -> ReceiverOutput:
        """Fail pulls from earlier incarnations of a worker, and from other runs of its supervisor."""
        turn = ReceiverOutput()
        for pulling in list(self._pulls.values()):
            source = pulling.pull.source
            replaced = is_older_incarnation(source.incarnation, incarnation) or not same_run(
                source.incarnation, incarnation
            )
            if source.worker == worker and replaced:
                self._fail(pulling, "sender gone", turn, tell=False)
        return turn

    @property
    def open_pulls(self) -> frozenset[tuple[RequestId, int]]:
        """Requests whose pages may still be written, as (request, epoch): for integrity checks."""
        return frozenset((p.pull.request, p.pull.epoch) for p in self._pulls.values())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _queue_page(
        self, pulling: OpenPull, frame: PageReady, payload: memoryview | None, now: float, turn: ReceiverOutput
    ) -> None:
        if not pulling.fits(frame):
            self._fail(pulling, f"protocol: {frame.tokens} tokens in block {frame.index}", turn)
        elif frame.index not in pulling.missing or frame.index in pulling.queued:
            self.counters.duplicates += 1
        else:
            pulling.last_frame_at = now
            pulling.resend_after_s = self._config.lease_s / HEARTBEATS_PER_LEASE
            pulling.queued.add(frame.index)
            self._queue.append(QueuedPage(pulling, frame, payload))

    def _queue_pages(self, pulling: OpenPull, several: PagesReady, now: float, turn: ReceiverOutput) -> None:
        for frame in page_announcements(several):
            if self._pulls.get(several.request) is pulling:
                self._queue_page(pulling, frame, None, now, turn)

    def _bring(self, queued: QueuedPage, turn: ReceiverOutput) -> bool:
        """Fetch one page.  True when it is copied and verified already."""
        pulling, frame = queued.pulling, queued.frame
        pull = pulling.pull
        if self._pulls.get(pull.request) is not pulling:
            return False
        into = self._carrier.own.view(pull.pages[frame.index])
        try:
            if self._carrier.fetch_page(FetchRequest(pull.source, frame, into, queued.payload)):
                self._came(pulling, frame)
                return True
        except PageCorrupt:
            self.counters.corrupt += 1
            self._fail(pulling, CORRUPT, turn)
        except TransferRefused as refusal:
            self._fail(pulling, f"refused: {refusal}", turn)
        return False

    def _landed(
        self, landed: FetchResult, now: float, turn: ReceiverOutput, touched: dict[RequestId, OpenPull]
    ) -> None:
        """Handle one fetch result; results of pulls that are no longer open are ignored."""
        wanted, frame = landed.request, landed.request.frame
        pulling = self._pulls.get(frame.request)
        if pulling is None or pulling.pull.epoch != frame.epoch or pulling.pull.source != wanted.source:
            return
        if frame.index not in pulling.missing:
            return
        if landed.failure is None:
            self._came(pulling, frame)
            touched[frame.request] = pulling
            return
        if landed.failure == REFUSED:  # it says why over the control channel, or it will send it once more
            pulling.queued.discard(frame.index)
            return
        self.counters.corrupt += landed.failure == CORRUPT
        if landed.failure != CORRUPT:
            self._missed(pulling, now)
        self._fail(pulling, landed.failure, turn)

    def _missed(self, pulling: OpenPull, now: float) -> None:
        """Count the pages that had not arrived when a pull was given up, and the time spent waiting."""
        waiting = pulling.waiting
        self.counters.waited_s += now - (pulling.last_frame_at if waiting is None else waiting.since)
        self.counters.missed += len(pulling.queued if waiting is None else pulling.missing)

    def _came(self, pulling: OpenPull, frame: PageReady) -> None:
        self.counters.pages += 1
        self.counters.bytes += self._layout.page_bytes
        pulling.queued.discard(frame.index)
        pulling.missing.discard(frame.index)

    def _advance(self, pulling: OpenPull, now: float, turn: ReceiverOutput) -> None:
        """Report progress to the scheduler, and acknowledge pages to the source."""
        pull = pulling.pull
        before = pulling.contiguous
        while pulling.contiguous < len(pull.pages) and pulling.contiguous not in pulling.missing:
            pulling.contiguous += 1
        if pulling.contiguous > before:
            computed = min(pull.tokens, pulling.pieces.tokens_in(pulling.contiguous))
            if computed > pulling.reported:
                pulling.reported = computed
                turn.events.append(PagesAdvanced(pull.request, pull.epoch, computed))
            if (pulling.missing or pulling.first is None) and self._should_acknowledge(pulling):
                self._send_pull(pulling, now, turn)
        self._complete(pulling, now, turn)

    def _should_acknowledge(self, pulling: OpenPull) -> bool:
        """Whether to acknowledge now: always when idle, otherwise once per part of the source's window."""
        if self._queue or not pulling.queued:
            return True
        new = (pulling.contiguous - pulling.acknowledged) * self._layout.page_bytes
        return new * ACKNOWLEDGMENTS_PER_WINDOW >= self._config.window_bytes

    def _finish(self, pulling: OpenPull, done: PrefillDone, now: float, turn: ReceiverOutput) -> None:
        pull = pulling.pull
        pulling.last_frame_at = now
        first, most = done.first, len(pull.pages)
        fits = 0 <= done.blocks <= most if pull.ahead else done.blocks == most
        if not fits or (first.request, first.epoch) != (pull.request, pull.epoch):
            self._fail(pulling, f"protocol: {done.blocks} blocks for {pull.tokens} tokens", turn)
            return
        if len(first.tokens) != 1 and not pull.ahead:
            self._fail(pulling, f"protocol: {len(first.tokens)} first tokens", turn)
            return
        pulling.first = first
        pulling.waiting = pulling.waiting or PendingPages(now, len(pulling.missing))
        pulling.missing = {block for block in pulling.missing if block < done.blocks}
        self._complete(pulling, now, turn)

    def _complete(self, pulling: OpenPull, now: float, turn: ReceiverOutput) -> None:
        first = pulling.first
        if first is None or (pulling.missing and first.finish is None):
            return
        if pulling.waiting is not None:
            self.counters.waited_s += now - pulling.waiting.since
        self._drop(pulling, turn, taken=pulling.pull.ahead > 0)
        turn.events.append(TransferDone(pulling.pull.request, pulling.pull.epoch, first))

    def _outrun(self, pulling: OpenPull, waiting: PendingPages, now: float) -> bool:
        """Whether recomputing the missing pages is predicted to be faster than waiting."""
        pull, first = pulling.pull, pulling.first
        if pull.ahead or first is None or first.finish is not None:
            return False
        here = min(pull.tokens, pulling.pieces.tokens_in(pulling.contiguous))
        return self.hedge_policy.should_recompute(
            pull.request, waiting, now, missing=len(pulling.missing), computed=here, total=pull.tokens
        )

    def _give_up(self, pulling: OpenPull, now: float, turn: ReceiverOutput) -> None:
        """Give up a pull; the missing pages are recomputed here."""
        assert pulling.first is not None
        self.counters.outrun += 1
        self._missed(pulling, now)
        self._drop(pulling, turn)
        turn.events.append(HedgeWon(pulling.pull.request, pulling.pull.epoch, pulling.first))

    def _fail(self, pulling: OpenPull, reason: str, turn: ReceiverOutput, *, tell: bool = True) -> None:
        self._drop(pulling, turn, tell=tell)
        turn.events.append(PullFailed(pulling.pull.request, pulling.pull.epoch, reason))

    def _drop(self, pulling: OpenPull, turn: ReceiverOutput, *, tell: bool = True, taken: bool = False) -> None:
        """Drop a pull: no page of it is written from here on, and its queued payloads are released."""
        pull = pulling.pull
        del self._pulls[pull.request]
        self._carrier.stop_transfer(pull.source, pull.request, pull.epoch)
        if pulling.queued:
            self._queue = deque(queued for queued in self._queue if queued.pulling is not pulling)
        if tell:
            received = PagesReceived(request=pull.request, epoch=pull.epoch, moved=taken)
            turn.sends.append(SendToSource(pull.source, received))

    def _stray(self, source: PageSource, message: SenderMessage, now: float, turn: ReceiverOutput) -> None:
        """Answer a message for an unknown pull, at most once per lease."""
        self.counters.strays += 1
        key = (source, message.request, message.epoch)
        if isinstance(message, HandOverFailed) or key in self._answered_strays:
            return
        self._answered_strays[key] = now
        turn.sends.append(SendToSource(source, PagesReceived(request=message.request, epoch=message.epoch)))

    def _send_pull(self, pulling: OpenPull, now: float, turn: ReceiverOutput, *, resend: bool = False) -> None:
        pull, seal = pulling.pull, self._carrier.seal
        pulling.last_sent_at, pulling.acknowledged = now, pulling.contiguous
        message = PullPages(
            request=pull.request,
            epoch=pull.epoch,
            skip_blocks=pulling.contiguous,
            identity=seal.identity,
            layout=seal.layout.name,
            carrier=self._carrier.name,
            incarnation=pull.source.incarnation,
            resend=resend,
            tokens=pull.tokens if pull.ahead else 0,
            ahead=pull.ahead,
        )
        turn.sends.append(SendToSource(pull.source, message))


def send_pulls(
    turn: ReceiverOutput, say: Callable[[PageSource, PullPages | PagesReceived], object]
) -> list[PagesAdvanced | TransferDone | HedgeWon | PullFailed]:
    """Send the receiver's messages with ``say`` and return the events for the scheduler."""
    for send in turn.sends:
        say(send.source, send.message)
    return turn.events
