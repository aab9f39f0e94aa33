"""Responses that are decoded here and migrate to another worker: which, how far each is, and when it stops here.

::

    requested -----> granted ------------------------------> stopped ------> gone
    MigrateRequests; a receiver pulls; full pages are        the rest        the receiver has taken it
    pages are kept   offered, a budget at a time             and the tokens

All responses migrate when this worker is to stop, or becomes a prefill worker.  An open-ended one also migrates before
it is as long as this worker's context: to a worker with a longer one.

A response stops only when its receiver has every full page: what is left is the last page and a few tokens.  If the
receiver is lost, the response continues here, and another receiver is requested (``MigrateRequests``).

Never changes requests but by events for the scheduler.  Knows no sockets; the gateway chooses receivers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.core.events import Migrate, MigrationStep
from penstock.engine.core.plan import StepOutcome
from penstock.engine.core.request import Request, RequestStatus
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.gateways import ConnectedGateway, GatewayRequest, GatewayRequests
from penstock.engine.service.kv_transfer import KvTransfer
from penstock.kv.transfer.events import TAKEN, PageOffer, PullGranted, TransferReleased
from penstock.kv_spec import TransferOrder, blocks_for
from penstock.types import RequestId, RequestStage, TokenLogprob
from penstock.wire.gateway_messages import MAX_NAMED_REQUESTS, MigrateRequests, TokenItem, in_parts

ASK_INTERVAL_S = 0.5
"""Between two messages to a gateway about a response that no receiver has asked for."""


MAX_STOPPED_S = 1.0
"""A stopped response continues here if its receiver has not taken it within this time: it has probably died."""


UNCLAIMED_S, OUTGROWN_S = 0.25, 5.0
"""The same for a response that has no room left here: without a receiver, and with one.  Here it could continue for no
more than a token, and recomputing it elsewhere takes longer than copying it."""


_ROOM_FOR_MOVING = 8
"""One in this many tokens of a context (at most ``ahead_tokens``) is reserved for the time of migration."""


@dataclass(slots=True)
class _Move:
    request: Request
    index: int  # output tokens when it was asked for first: every later one is sent to the receiver
    asked: float
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # of those later ones
    pieces: TransferOrder | None = None  # as the receiver numbers them, once it has come
    offered: int = 0  # pieces
    most: int = 0  # tokens that the receiver has room for
    finished: bool = False  # all was sent to the receiver
    stopping: float | None = None  # when it was stopped


class Migrations:
    """The migrations of one worker's requests.  Nothing moves until ``start_all``."""

    def __init__(
        self,
        scheduler: Scheduler,
        hand_overs: KvTransfer,
        asks: GatewayRequests,
        budget_bytes: int,
        *,
        ahead_tokens: int,
    ) -> None:
        """``budget_bytes``: of pages offered between two steps; ``ahead_tokens``: written while an answer moves."""
        self._scheduler = scheduler
        self._transfer = hand_overs
        self._requests = asks
        self._budget = budget_bytes
        self._spare = 1 + scheduler.config.max_draft_tokens  # tokens that one step may add
        self._ahead = min(ahead_tokens, scheduler.config.max_model_len // _ROOM_FOR_MOVING)
        self._wanted = False
        self._movable = not scheduler.memory.keeps_states  # a state is no page that becomes full and stays
        self.is_urgent = False  # an answer has come near the end of the context since ``ask``
        self._moves: dict[RequestId, _Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def start_all(self) -> None:
        """Migrate every response that is decoded here."""
        self._wanted = True

    def stop_all(self, now: float) -> None:
        """Start no more migrations; those that have a receiver continue."""
        self._wanted = False
        for move in [m for m in self._moves.values() if m.pieces is None and not self._outgrows(m.request)]:
            self._transfer.fail(move.request.id, move.request.epoch, "it stays", now)

    def relief_requests(self, now: float) -> list[tuple[ConnectedGateway, MigrateRequests]]:
        """Messages to gateways that are due.  Called between two steps, when all tokens so far were sent."""
        self.is_urgent = False
        asked: dict[int, tuple[ConnectedGateway, list[tuple[RequestId, int]]]] = {}
        for ask in self._requests.all():
            if not self._wanted and not self._outgrows(self._scheduler.get_request(ask.request)):
                continue
            move = self._moves.get(ask.request) or self._new(ask, now)
            if move is not None and move.pieces is None and move.asked <= now:
                move.asked = now + ASK_INTERVAL_S
                asked.setdefault(id(ask.gateway), (ask.gateway, []))[1].append((ask.request, ask.epoch))
        return [
            (gateway, MigrateRequests(requests=part))
            for gateway, requests in asked.values()
            for part in in_parts(requests, MAX_NAMED_REQUESTS)
        ]

    def _outgrows(self, request: Request | None) -> bool:
        """Whether a worker with a longer context should continue it."""
        return request is not None and request.may_outgrow and request.known + self._ahead >= request.local_end

    def _new(self, ask: GatewayRequest, now: float) -> _Move | None:
        """Begin to migrate a response; None: not now, or never."""
        request = self._scheduler.get_request(ask.request)
        if not self._movable:
            return None
        if request is None or request.epoch != ask.epoch or request.status is not RequestStatus.RUNNING:
            return None
        if (
            request.stage is RequestStage.PREFILL
            or request.pooling is not None
            or not request.output
            or request.uncomputed != 1
        ):
            return None
        self._moves[request.id] = move = _Move(request, len(request.output), now)
        self._transfer.open_send(request.id, request.epoch, now)
        return move

    # --- what is heard ------------------------------------------------------------------------------------------------

    def on_credit(self, effect: PullGranted, now: float) -> bool:
        """A receiver asked for pages.  False: not those of a migration."""
        move, pull = self._moves.get(effect.request), effect.pull
        if move is None or pull is None or move.request.epoch != effect.epoch:
            return False
        request = move.request
        if pull.ahead <= 0 or not len(request.prompt) + move.index <= pull.tokens + 1 <= request.known:
            self._transfer.fail(request.id, request.epoch, "protocol: it is not written so far", now)
            return True
        memory = self._scheduler.memory
        move.pieces = TransferOrder(memory.reaches, pull.tokens, memory.page_tokens, ahead=pull.ahead)
        move.most = pull.tokens + pull.ahead
        if move.stopping is not None:
            move.stopping = now
        move.offered = pull.skip_blocks
        return True

    def on_released(self, effect: TransferReleased) -> Migrate | bool | None:
        """A transfer ended.  None: of no migration.  True: the receiver has the response.  Else: it continues here."""
        move = self._moves.get(effect.request)
        if move is None or move.request.epoch != effect.epoch:
            return None
        del self._moves[effect.request]
        if effect.reason != TAKEN or not move.finished:
            return Migrate(id=effect.request, epoch=effect.epoch, step=MigrationStep.GO_ON)
        return True

    # --- between two steps --------------------------------------------------------------------------------------------

    def next_events(self, now: float) -> list[Migrate]:
        """Keep the pages of migrating responses, and stop those whose receivers have all full pages."""
        events: list[Migrate] = []
        for move in self._moves.values():
            request = move.request
            if not request.retains_pages:
                events.append(Migrate(id=request.id, epoch=request.epoch, step=MigrationStep.KEEP))
            elif move.stopping is None and self._is_ripe(move):
                move.stopping = now
                events.append(Migrate(id=request.id, epoch=request.epoch, step=MigrationStep.STOP))
        return events

    def _is_ripe(self, move: _Move) -> bool:
        request, pieces = move.request, move.pieces
        if request.status is not RequestStatus.RUNNING:
            return False
        if self._is_at_end(request):
            return True  # it can wait a moment for a receiver, which saves that one to compute all of it
        if pieces is None:
            return False
        if request.known + self._spare > move.most:
            return True
        return self._has_what_is_full(move)

    def _has_what_is_full(self, move: _Move) -> bool:
        request, pieces = move.request, move.pieces
        full = request.computed // self._scheduler.memory.page_tokens
        # The block that was filled last may still be on its way: it takes no longer than the one that is not full.
        acknowledged = self._transfer.acknowledged_pages(request.id, request.epoch)
        return pieces is not None and acknowledged >= pieces.pages_before(max(0, full - 1))

    def _is_at_end(self, request: Request) -> bool:
        """Whether there is room for no further step of an answer that is to become longer."""
        return request.may_outgrow and request.known + self._spare >= request.local_end

    def _most_stopped_s(self, move: _Move) -> float:
        if not self._is_at_end(move.request):
            return MAX_STOPPED_S
        return UNCLAIMED_S if move.pieces is None else OUTGROWN_S

    def on_plan(self, now: float) -> None:
        """A plan was made: hand over what is left of those that have stopped, and give up those that have no pages."""
        for move in list(self._moves.values()):
            request = move.request
            if request.status not in (RequestStatus.RUNNING, RequestStatus.HANDOVER):
                self._transfer.fail(request.id, request.epoch, "its pages were taken", now)
            elif request.status is RequestStatus.HANDOVER and not move.finished and move.pieces is not None:
                if not request.in_flight and (not self._is_at_end(request) or self._has_what_is_full(move)):
                    # Else a step in flight still writes to the last page, or the receiver has come only now.
                    self._announce(move, move.pieces, now)
            elif move.stopping is not None and now - move.stopping > self._most_stopped_s(move):
                self._transfer.fail(request.id, request.epoch, "it was not taken", now)

    def _announce(self, move: _Move, pieces: TransferOrder, now: float) -> None:
        request = move.request
        move.finished = True
        blocks = pieces.pages_before(blocks_for(request.computed, self._scheduler.memory.page_tokens))
        for piece in range(move.offered, blocks):
            self._offer(move, piece, pieces, now)
        wants_logprobs = request.sampling.logprobs is not None
        last = TokenItem(
            request=request.id,
            epoch=request.epoch,
            index=move.index,
            tokens=tuple(request.output[move.index :]),
            logprobs=tuple(move.logprobs) if wants_logprobs else None,
        )
        self._transfer.finish_migration(last, blocks, now)

    def on_step(self, outcome: StepOutcome, now: float) -> None:
        """A step was computed: note what is to be sent, offer pages that have become full, and drop what has ended."""
        for progress in outcome.new_tokens:
            move = self._moves.get(progress.request.id)
            if move is None:
                if progress.request.may_outgrow and self._movable and self._outgrows(progress.request):
                    self.is_urgent = True
                continue
            move.logprobs.extend(progress.logprobs)
            if progress.finish is not None:
                self._transfer.fail(progress.request.id, progress.request.epoch, "it is finished", now)
        left = self._budget
        for move in list(self._moves.values()):
            pieces, request = move.pieces, move.request
            if pieces is None or move.finished or request.status not in (RequestStatus.RUNNING, RequestStatus.HANDOVER):
                continue
            full = pieces.pages_before(request.computed // self._scheduler.memory.page_tokens)
            while move.offered < full and left > 0:
                left -= self._transfer.page_bytes
                self._offer(move, move.offered, pieces, now, more=move.offered + 1 < full and left > 0)

    def _offer(self, move: _Move, piece: int, pieces: TransferOrder, now: float, *, more: bool = False) -> None:
        request, memory = move.request, self._scheduler.memory
        block, group = pieces.page_at(piece)
        page = request.page_tables[group].pages[block]
        offer = PageOffer(
            request=request.id,
            epoch=request.epoch,
            index=piece,
            page=page,
            tokens=min(memory.page_tokens, request.computed - block * memory.page_tokens),
            generation=memory.pool.generation(page),
        )
        self._transfer.offer_page(offer, now, more=more)
        move.offered = piece + 1


def migrated_item(item: TokenItem, emitted: int) -> TokenItem:
    """The item for a gateway that has ``emitted`` tokens, of the tokens that came with a migrated answer."""
    skip = emitted - item.index
    return TokenItem(
        request=item.request,
        epoch=item.epoch,
        index=emitted,
        tokens=item.tokens[skip:],
        logprobs=None if item.logprobs is None else item.logprobs[skip:],
    )
