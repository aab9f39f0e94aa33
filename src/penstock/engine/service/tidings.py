"""What the ends of hand-overs say, as events for the scheduler and words for gateways.

Sends nothing itself, and knows no messages of other workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.core.plan import ComputeHere, Event, Joined, Moving
from penstock.engine.core.plan import FirstToken as FirstTokenCame
from penstock.engine.core.plan import Granted as CreditCame
from penstock.engine.core.plan import PagesArrived as PagesCame
from penstock.engine.core.plan import Released as PagesReleased
from penstock.engine.core.request import Status
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.asks import Ask, Asks, Gateway
from penstock.engine.service.hand_overs import News
from penstock.engine.service.moves import Moves, joining
from penstock.engine.service.reports import Reporter
from penstock.kv.transfer.effects import FirstToken, Granted, Outrun, PagesAdvanced, PullFailed, Released
from penstock.types import RequestId
from penstock.wire.duties import HANDED_OVER
from penstock.wire.messages import TokenItem


@dataclass(frozen=True, slots=True)
class Outbox:
    """Where words go."""

    event: Callable[[Event], None]  # to the scheduler
    give_back: Callable[[RequestId, int, str], None]  # a request to its gateway, with the reason
    tokens: Callable[[Gateway, tuple[TokenItem, ...]], object]


class Tidings:
    """Of one worker."""

    def __init__(self, scheduler: Scheduler, asks: Asks, moves: Moves, reporter: Reporter, out: Outbox) -> None:
        self._scheduler = scheduler
        self._asks = asks
        self._moves = moves
        self._reporter = reporter
        self._out = out

    def on(self, news: News, now: float) -> None:
        """Take what an end says."""
        match news:
            case PagesAdvanced():
                self._out.event(PagesCame(id=news.request, epoch=news.epoch, computed=news.computed))
            case FirstToken():
                self._complete(news, now)
            case Outrun():
                self._outrun(news, now)
            case PullFailed():
                self._reporter.count("hand_overs_failed")
                self._out.give_back(news.request, news.epoch, f"pages_lost: {news.reason}")
            case Granted():
                if not self._moves.granted(news, now):
                    self._out.event(CreditCame(id=news.request, epoch=news.epoch))
            case Released():
                self._released(news, now)

    def _complete(self, effect: FirstToken, now: float) -> None:
        """The scheduler puts tokens in their place; what else is known of them waits with the ask for ``publish``."""
        first = effect.first
        ask = self._asks.get(effect.request)
        if ask is not None and ask.epoch != effect.epoch:
            ask = None
        if ask is not None:
            began, tokens = ask.pulled
            ask.ended("transfer", began, now, tokens=tokens)
        if ask is not None and ask.joins:
            self._joined(effect, ask)
            return
        self._reporter.count("hand_overs")
        if ask is not None:
            ask.first = first
            if first.finish is not None:
                # The whole answer is this token.  The prefill worker has told the gateway; if it died first, we do.
                self._out.tokens(ask.gateway, (first,))
        self._out.event(
            FirstTokenCame(id=effect.request, epoch=effect.epoch, token=first.tokens[0], finish=first.finish)
        )

    def _outrun(self, effect: Outrun, now: float) -> None:
        """All was computed elsewhere and its pages are too slow to come: this worker computes them, too."""
        ask = self._asks.get(effect.request)
        if ask is not None and ask.epoch == effect.epoch:
            began, tokens = ask.pulled
            ask.ended("transfer", began, now, tokens=tokens)
            ask.first = effect.first
        self._out.event(ComputeHere(id=effect.request, epoch=effect.epoch, token=effect.first.tokens[0]))

    def _joined(self, effect: FirstToken, ask: Ask) -> None:
        """An answer that another worker wrote goes on here."""
        first, here = effect.first, self._scheduler.find(effect.request)
        self._reporter.count("answers_joined")
        if here is not None and 0 <= here.emitted - first.index <= len(first.tokens):
            ask.first = joining(first, here.emitted)
        self._out.event(Joined(id=effect.request, epoch=effect.epoch, index=first.index, tokens=first.tokens))

    def _released(self, effect: Released, now: float) -> None:
        if effect.reason == "lease ended":
            self._reporter.count("leases_expired")
        moved = self._moves.released(effect)
        if isinstance(moved, Moving):
            self._out.event(moved)
            return
        if moved:
            self._reporter.count("answers_moved")
            self._out.give_back(effect.request, effect.epoch, HANDED_OVER)
            return
        request = self._scheduler.find(effect.request)
        if request is not None and request.epoch == effect.epoch and request.status is not Status.HANDOVER:
            # The receiver went away before the prompt was read: nobody will finish this answer.
            self._reporter.count("hand_overs_failed")
            self._out.give_back(effect.request, effect.epoch, f"pages_lost: {effect.reason}")
        self._out.event(PagesReleased(id=effect.request, epoch=effect.epoch))
