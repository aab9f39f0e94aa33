"""The receiving end of hand-overs: one decode worker, many senders.

::

    expect -> pulling: frames queue up, ``work`` copies them a budget at a time -> complete: FirstToken, PagesReceived
                 |
                 +-- cancel (silent), HandOverFailed, wrong checksum, lease ended (PullFailed) -> forgotten

Copying is the only thing that writes, it happens in ``work`` only, and only for a request that is expected at that
moment: a request that is cancelled while its frames wait gets nothing written any more.  A frame that nobody expects
is dropped, and its sender told that nobody wants it.

Knows no sockets and no clock, and nothing of what the pages mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.config.schema import HandOverConfig
from penstock.errors import HandOverRefused, PageCorrupt
from penstock.kv.layout import KvLayout
from penstock.kv.transfer.effects import (
    FirstToken,
    PagesAdvanced,
    Pull,
    PullFailed,
    ReceiverTurn,
    SendTo,
)
from penstock.kv.transfer.port import PageCarrier
from penstock.kv.transfer.sender import SIGNS_PER_LEASE
from penstock.reach import Pieces
from penstock.types import RequestId, WorkerId
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

SenderMessage = PageReady | PrefillDone | HandOverAlive | HandOverFailed


@dataclass(slots=True)
class TransferCounters:
    """Numbers only grow."""

    pages: int = 0
    bytes: int = 0
    corrupt: int = 0  # pages whose copy failed its check
    duplicates: int = 0  # frames for a block that was here or queued
    strays: int = 0  # frames that nobody expected
    expired: int = 0  # pulls given up because the sender was silent


@dataclass(slots=True)
class _Pulling:
    pull: Pull
    pieces: Pieces  # what a "block" is in all messages: a page, in the order of travel
    missing: set[int]  # blocks not yet copied
    queued: set[int]  # blocks whose frame waits to be copied
    contiguous: int  # blocks from 0 that are here
    heard: float  # when the sender last gave a sign
    moved: float  # when it last gave a frame
    spoke: float  # when we last gave a sign
    patience: float  # silence before asking again; doubles each time
    first: TokenItem | None = None


@dataclass(slots=True)
class _Queued:
    pulling: _Pulling
    frame: PageReady
    payload: memoryview | None = field(repr=False)


class HandOverReceiver:
    """All hand-overs into one worker's pages.  Every method returns what to send and what to tell the scheduler."""

    def __init__(self, config: HandOverConfig, carrier: PageCarrier) -> None:
        self.counters = TransferCounters()
        self._config = config
        self._carrier = carrier
        self._layout = carrier.seal.layout
        self._pulls: dict[RequestId, _Pulling] = {}
        self._queue: deque[_Queued] = deque()
        self._told: dict[tuple[PageSource, RequestId, int], float] = {}  # who knows that we want no more, since when

    @property
    def layout(self) -> KvLayout:
        """Of the pages."""
        return self._layout

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return self._layout.page_bytes

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def expect(self, pull: Pull, now: float) -> ReceiverTurn:
        """Room is reserved; ask for the pages.  Replaces a pull of an earlier epoch.

        Raises ValueError when one of this or a later epoch is here, or the pages are not those of ``pull.tokens``.
        """
        pieces = self._layout.pieces(pull.tokens)
        blocks = pieces.total
        if len(pull.pages) != blocks or not 0 <= pull.skip_blocks <= blocks:
            raise ValueError(f"{len(pull.pages)} pages from block {pull.skip_blocks} for {pull.tokens} tokens")
        turn = ReceiverTurn()
        earlier = self._pulls.get(pull.request)
        if earlier is not None:
            if earlier.pull.epoch >= pull.epoch:
                raise ValueError(f"{pull.request} is pulled already, in epoch {earlier.pull.epoch}")
            self._forget(earlier, turn)
        pulling = _Pulling(
            pull=pull,
            pieces=pieces,
            missing=set(range(pull.skip_blocks, blocks)),
            queued=set(),
            contiguous=pull.skip_blocks,
            heard=now,
            moved=now,
            spoke=now,
            patience=self._config.lease_s / SIGNS_PER_LEASE,
        )
        self._pulls[pull.request] = pulling
        self._ask(pulling, now, turn)
        return turn

    def cancel(self, request: RequestId, epoch: int) -> ReceiverTurn:
        """Write nothing more for this request, unless a later epoch of it is here.  The sender is told."""
        turn = ReceiverTurn()
        pulling = self._pulls.get(request)
        if pulling is not None and pulling.pull.epoch <= epoch:
            self._forget(pulling, turn)
        return turn

    # --- what senders say --------------------------------------------------------------------------------------------

    def receive(
        self, source: PageSource, message: SenderMessage, payload: memoryview | None, now: float
    ) -> ReceiverTurn:
        """Take a message that came over the link to ``source``.  Pages are queued, nothing is written yet."""
        turn = ReceiverTurn()
        pulling = self._pulls.get(message.request)
        if pulling is None or pulling.pull.epoch != message.epoch or pulling.pull.source != source:
            self._stray(source, message, now, turn)
            return turn
        pulling.heard = now
        match message:
            case PageReady():
                self._queue_page(pulling, message, payload, now, turn)
            case PrefillDone():
                self._finish(pulling, message, now, turn)
            case HandOverFailed():
                self._fail(pulling, message.reason, turn, tell=False)
            case HandOverAlive():
                pass
        return turn

    # --- what the loop and the clock say -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Are there frames to copy?"""
        return bool(self._queue)

    def work(self, now: float, budget_bytes: int | None = None) -> ReceiverTurn:
        """Copy and verify queued pages until the budget is used up, one page at least."""
        turn = ReceiverTurn()
        left = self._config.copy_budget_bytes if budget_bytes is None else budget_bytes
        touched: dict[RequestId, _Pulling] = {}
        while self._queue:
            queued = self._queue.popleft()
            pulling = queued.pulling
            if self._copy(queued, turn):
                touched[pulling.pull.request] = pulling
            left -= self._layout.page_bytes
            if left <= 0:
                break
        for request, pulling in touched.items():
            if self._pulls.get(request) is pulling:
                self._advance(pulling, now, turn)
        return turn

    def tick(self, now: float) -> ReceiverTurn:
        """Give up on senders that are silent, and give signs of our own.  Call it a few times a second."""
        turn = ReceiverTurn()
        lease = self._config.lease_s
        for pulling in list(self._pulls.values()):
            if now - pulling.heard >= lease:
                self.counters.expired += 1
                self._fail(pulling, "silent", turn)
            elif not pulling.queued and now - pulling.moved >= pulling.patience:
                pulling.moved = now
                pulling.patience *= 2
                self._ask(pulling, now, turn, resend=True)
            elif now - pulling.spoke >= lease / SIGNS_PER_LEASE:
                self._ask(pulling, now, turn)
        self._told = {key: since for key, since in self._told.items() if now - since < lease}
        return turn

    def sender_gone(self, worker: WorkerId, incarnation: int) -> ReceiverTurn:
        """That incarnation of a worker is known to be dead: give up on its pages at once."""
        turn = ReceiverTurn()
        for pulling in list(self._pulls.values()):
            source = pulling.pull.source
            if source.worker == worker and source.incarnation <= incarnation:
                self._fail(pulling, "sender gone", turn, tell=False)
        return turn

    @property
    def open_pulls(self) -> frozenset[tuple[RequestId, int]]:
        """Requests whose pages may still be written, as (request, epoch): for integrity checks."""
        return frozenset((p.pull.request, p.pull.epoch) for p in self._pulls.values())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _queue_page(
        self, pulling: _Pulling, frame: PageReady, payload: memoryview | None, now: float, turn: ReceiverTurn
    ) -> None:
        last = len(pulling.pull.pages) - 1
        if not 0 <= frame.block <= last or frame.tokens != self._tokens_of(pulling, frame.block):
            self._fail(pulling, f"protocol: {frame.tokens} tokens in block {frame.block}", turn)
        elif frame.block not in pulling.missing or frame.block in pulling.queued:
            self.counters.duplicates += 1
        else:
            pulling.moved = now
            pulling.patience = self._config.lease_s / SIGNS_PER_LEASE
            pulling.queued.add(frame.block)
            self._queue.append(_Queued(pulling, frame, payload))

    def _tokens_of(self, pulling: _Pulling, piece: int) -> int:
        size = self._layout.page_tokens
        return min(size, pulling.pull.tokens - pulling.pieces.place(piece)[0] * size)

    def _copy(self, queued: _Queued, turn: ReceiverTurn) -> bool:
        """Write one page.  True when it is the announced one."""
        pulling, frame = queued.pulling, queued.frame
        pull = pulling.pull
        if self._pulls.get(pull.request) is not pulling:
            return False
        try:
            into = self._carrier.own.view(pull.pages[frame.block])
            self._carrier.copy(pull.source, frame, queued.payload, into)
        except PageCorrupt:
            self.counters.corrupt += 1
            self._fail(pulling, "corrupt", turn)
            return False
        except HandOverRefused as refusal:
            self._fail(pulling, f"refused: {refusal}", turn)
            return False
        self.counters.pages += 1
        self.counters.bytes += into.nbytes
        pulling.queued.discard(frame.block)
        pulling.missing.discard(frame.block)
        return True

    def _advance(self, pulling: _Pulling, now: float, turn: ReceiverTurn) -> None:
        """After copying: tell how far we are, and the sender that it may send more."""
        pull = pulling.pull
        before = pulling.contiguous
        while pulling.contiguous < len(pull.pages) and pulling.contiguous not in pulling.missing:
            pulling.contiguous += 1
        if pulling.contiguous > before:
            computed = min(pull.tokens, pulling.pieces.tokens_in(pulling.contiguous))
            turn.effects.append(PagesAdvanced(pull.request, pull.epoch, computed))
            if pulling.missing or pulling.first is None:
                self._ask(pulling, now, turn)
        self._complete(pulling, turn)

    def _finish(self, pulling: _Pulling, done: PrefillDone, now: float, turn: ReceiverTurn) -> None:
        pull = pulling.pull
        pulling.moved = now
        first = done.first
        if done.blocks != len(pull.pages) or (first.request, first.epoch) != (pull.request, pull.epoch):
            self._fail(pulling, f"protocol: {done.blocks} blocks for {pull.tokens} tokens", turn)
            return
        if len(first.tokens) != 1:
            self._fail(pulling, f"protocol: {len(first.tokens)} first tokens", turn)
            return
        pulling.first = first
        self._complete(pulling, turn)

    def _complete(self, pulling: _Pulling, turn: ReceiverTurn) -> None:
        first = pulling.first
        if first is None or (pulling.missing and first.finish is None):
            return
        self._forget(pulling, turn)
        turn.effects.append(FirstToken(pulling.pull.request, pulling.pull.epoch, first))

    def _fail(self, pulling: _Pulling, reason: str, turn: ReceiverTurn, *, tell: bool = True) -> None:
        self._forget(pulling, turn, tell=tell)
        turn.effects.append(PullFailed(pulling.pull.request, pulling.pull.epoch, reason))

    def _forget(self, pulling: _Pulling, turn: ReceiverTurn, *, tell: bool = True) -> None:
        """Nothing will be written for it from here on; its queued payloads are given back."""
        pull = pulling.pull
        del self._pulls[pull.request]
        if pulling.queued:
            self._queue = deque(queued for queued in self._queue if queued.pulling is not pulling)
        if tell:
            turn.sends.append(SendTo(pull.source, PagesReceived(request=pull.request, epoch=pull.epoch)))

    def _stray(self, source: PageSource, message: SenderMessage, now: float, turn: ReceiverTurn) -> None:
        """A frame for a request that is not expected: tell its sender, but not for every frame."""
        self.counters.strays += 1
        key = (source, message.request, message.epoch)
        if isinstance(message, HandOverFailed) or key in self._told:
            return
        self._told[key] = now
        turn.sends.append(SendTo(source, PagesReceived(request=message.request, epoch=message.epoch)))

    def _ask(self, pulling: _Pulling, now: float, turn: ReceiverTurn, *, resend: bool = False) -> None:
        pull, seal = pulling.pull, self._carrier.seal
        pulling.spoke = now
        message = PullPages(
            request=pull.request,
            epoch=pull.epoch,
            skip_blocks=pulling.contiguous,
            identity=seal.identity,
            layout=seal.layout.name,
            carrier=self._carrier.name,
            incarnation=pull.source.incarnation,
            resend=resend,
        )
        turn.sends.append(SendTo(pull.source, message))
