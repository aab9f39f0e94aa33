"""Hand-overs between simulated workers: credit, pages over the wires, the first token, release.

The order of events is that of ``kv.transfer``; instead of bytes there is the time that they take.  Pages travel while
later chunks are computed, and stop nobody's steps (direct memory access), so what is modelled is the wire alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.core.events import FirstToken, Granted, PagesArrived, Released
from penstock.engine.core.plan import Outcome, PageDone, Progress
from penstock.engine.core.request import Request
from penstock.sim.events import Agenda
from penstock.sim.worker import SimWorker
from penstock.types import Leg, RequestId, WorkerId

Key = tuple[RequestId, int]
"""(request, epoch)."""


@dataclass(slots=True)
class _HandOver:
    """One, from the receiver's credit on."""

    source: SimWorker
    receiver: SimWorker
    skip_tokens: int  # that the receiver has already
    through_at: float  # when everything that was sent so far has arrived


class HandOvers:
    """All of a fleet."""

    def __init__(self, agenda: Agenda, message_s: float) -> None:
        self._agenda = agenda
        self._message_s = message_s
        self._sources: dict[Key, WorkerId] = {}  # where a decode leg's pages come from
        self._open: dict[Key, _HandOver] = {}
        self.pages = 0  # that have travelled

    def announce(self, key: Key, source: WorkerId) -> None:
        """A decode leg was placed whose pages come from there."""
        self._sources[key] = source

    def reserved(self, receiver: SimWorker, request: Request, workers: Mapping[WorkerId, SimWorker]) -> None:
        """The receiver has room: that is the credit."""
        key = (request.id, request.epoch)
        if key not in self._sources:
            return  # it is cancelled, and the receiver has not heard of that yet
        source = workers[self._sources[key]]
        self._open[key] = _HandOver(source, receiver, request.computed, self._agenda.now)
        self._agenda.after(self._message_s, source.tell, Granted(id=request.id, epoch=request.epoch))

    def sent(self, worker: SimWorker, outcome: Outcome) -> None:
        """What a prefill worker's step has brought: pages, and perhaps the first token after the last of them."""
        by_key: dict[Key, list[PageDone]] = {}
        for done in outcome.pages_done:
            by_key.setdefault((done.request.id, done.request.epoch), []).append(done)
        for key, pages in by_key.items():
            self._pages(key, pages)
        for progress in outcome.progress:
            if progress.request.leg is Leg.PREFILL:
                self._first(progress)

    def _pages(self, key: Key, pages: list[PageDone]) -> None:
        open_ = self._open.get(key)
        if open_ is None:
            return
        size = open_.receiver.config.page_tokens
        wanted = [done for done in pages if done.block * size + done.tokens > open_.skip_tokens]
        if not wanted:
            return
        self.pages += len(wanted)
        nbytes = len(wanted) * open_.receiver.page_bytes
        through = open_.source.out.carry(nbytes, self._agenda.now, open_.receiver.into)
        open_.through_at = max(open_.through_at, through)
        computed = max(done.block * size + done.tokens for done in wanted)
        arrived = PagesArrived(id=key[0], epoch=key[1], computed=computed)
        self._agenda.at(through + self._message_s, open_.receiver.tell, arrived)

    def _first(self, progress: Progress) -> None:
        request = progress.request
        key = (request.id, request.epoch)
        open_ = self._open.get(key)
        if open_ is None:
            return
        first = FirstToken(id=key[0], epoch=key[1], token=progress.tokens[0], finish=progress.finish)
        when = max(open_.through_at, self._agenda.now) + self._message_s
        self._agenda.at(when, open_.receiver.tell, first)
        self._agenda.at(when + self._message_s, open_.source.tell, Released(id=key[0], epoch=key[1]))
        self.forget(key)

    def forget(self, key: Key) -> None:
        """It is over, or nobody wants it any more."""
        self._open.pop(key, None)
        self._sources.pop(key, None)
