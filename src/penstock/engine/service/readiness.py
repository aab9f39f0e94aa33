"""Requests that must wait before the scheduler hears of them, and with them whatever is said about them meanwhile.

Grammars are compiled, adapters read and pages fetched while the loop runs, images are encoded
between steps; until that is done, a request is kept here, in order with its credit, its pages and its first token.
A turn looks at ``MAX_CHECKED_PER_TURN`` of those that wait, in turn, whatever their number.  Pure but for the ports
that it asks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.events import AddRequest, CancelRequest, EngineEvent, MatcherFactory
from penstock.engine.service.gateways import UNFIT
from penstock.errors import AdapterRefused, GrammarRefused, ImageRefused, QueueFull
from penstock.types import AdapterRef, Grammar, MediaInput, RequestId
from penstock.wire.gateway_messages import ReturnReason

MAX_CHECKED_PER_TURN = 256
"""Requests that wait here and are looked at in one turn: some 0.5 ms.  The next turn goes on with the others."""


log = logging.getLogger("penstock.worker")


class PendingGrammar(MatcherFactory, Protocol):
    """A grammar that is being compiled, for as long as somebody holds this (``grammar.manager.GrammarHandle``)."""

    def ready(self) -> bool:
        """Whether it is compiled.  Raises GrammarRefused when it never will be."""
        ...


class GrammarCompiler(Protocol):
    """What compiles grammars (``grammar.manager.GrammarManager``)."""

    def get_or_compile(self, grammar: Grammar) -> PendingGrammar:
        """Have it compiled.  Raises QueueFull where too many are."""
        ...


class AdapterReadiness(Protocol):
    """What reads adapters (``engine.runner.lora.LoraManager``)."""

    def is_ready(self, ref: AdapterRef, in_use: Callable[[], Set[str]]) -> bool:
        """Whether it is in memory; if not, it is being read.  ``in_use``: fingerprints that may not be evicted for it.

        Raises AdapterRefused when it cannot be had.
        """
        ...

    def on_scheduled(self) -> None:
        """The scheduler knows of every request that was ready."""
        ...


class PageWait(NamedTuple):
    """How long a request waited for pages, and for what (``telemetry.spans.TIERS``)."""

    began: float
    ended: float
    facts: Mapping[str, float]


class PageReadiness(Protocol):
    """What brings pages of prompts from elsewhere (``engine.service.kv_prefetch.KvPrefetcher``)."""

    def watch(self, tell: Callable[[RequestId, PageWait], None]) -> None:
        """``tell`` hears how long each request waited that passes."""
        ...

    def is_ready(self, event: AddRequest) -> bool:
        """Whether the request need not wait; if it must, pages are being fetched or tiers are being asked."""
        ...

    def remove_request(self, request: RequestId) -> None:
        """The request has left."""
        ...

    def on_passed(self, request: RequestId) -> None:
        """It goes to the scheduler now."""
        ...

    def on_scheduled(self) -> None:
        """The scheduler has had its turn with every request that passed."""
        ...


class NoPrefetch:
    """For engines that have no other pages than their own."""

    def watch(self, tell: Callable[[RequestId, PageWait], None]) -> None:
        pass

    def is_ready(self, event: AddRequest) -> bool:
        return True

    def remove_request(self, request: RequestId) -> None:
        pass

    def on_passed(self, request: RequestId) -> None:
        pass

    def on_scheduled(self) -> None:
        pass


class NoAdapters:
    """For engines that have none."""

    def is_ready(self, ref: AdapterRef, in_use: Callable[[], Set[str]]) -> bool:
        raise AdapterRefused("this engine has no adapters")

    def on_scheduled(self) -> None:
        pass


class NoGrammars:
    """For engines that follow no grammar."""

    def get_or_compile(self, grammar: Grammar) -> PendingGrammar:
        raise GrammarRefused("this engine follows no grammar")


class ImageReadiness(Protocol):
    """What encodes images (``engine.encoder_stage.EncoderStage``)."""

    def is_ready(self, event: AddRequest) -> bool:
        """Whether the request's images are encoded; if not, they are being encoded.  Raises ImageRefused for images
        that cannot be."""
        ...

    def remove_request(self, request: RequestId) -> None:
        """The request has left."""
        ...

    def encode_for_peer(self, content: bytes, picture: MediaInput) -> NDArray[np.float32] | None:
        """Encode an image for another worker; None: ``encoded_for_peers`` has its rows later.  Raises ImageRefused."""
        ...

    def encoded_for_peers(self, contents: Iterable[bytes]) -> Iterable[tuple[bytes, NDArray[np.float32]]]:
        """The encoded ones of ``contents``, with their rows."""
        ...


class NoImages:
    """For engines that read text only."""

    def is_ready(self, event: AddRequest) -> bool:
        if event.images:
            raise ImageRefused("this engine reads text only")
        return True

    def remove_request(self, request: RequestId) -> None:
        pass

    def encode_for_peer(self, content: bytes, picture: MediaInput) -> NDArray[np.float32] | None:
        raise ImageRefused("this engine reads text only")

    def encoded_for_peers(self, contents: Iterable[bytes]) -> Iterable[tuple[bytes, NDArray[np.float32]]]:
        return ()


@dataclass(frozen=True, slots=True)
class ReadinessSources:
    """What makes requests ready."""

    grammars: GrammarCompiler = field(default_factory=NoGrammars)
    images: ImageReadiness = field(default_factory=NoImages)
    adapters: AdapterReadiness = field(default_factory=NoAdapters)
    pages: PageReadiness = field(default_factory=NoPrefetch)


def _no_end() -> float:
    return inf


class ReadinessGate:
    """Events on their way to the scheduler."""

    def __init__(
        self,
        ready: ReadinessSources,
        refuse: Callable[[AddRequest, str], None],
        room: Callable[[], float] = _no_end,
        *,
        adapters_in_use: Callable[[], Set[str]] = frozenset,
    ) -> None:
        """``refuse`` is called with a request whose grammar cannot be followed, whose images cannot be read or whose
        adapter cannot be had here, or that there is no room for, and why; it must not come back to this.  ``room``: how
        many requests may wait here now.
        """
        self._grammars = ready.grammars
        self._images = ready.images
        self._adapters = ready.adapters
        self._pages = ready.pages
        self._refuse = refuse
        self._room = room
        self._adapters_in_use = adapters_in_use
        self._compiling: dict[RequestId, PendingGrammar] = {}  # of those that wait
        self._kept: dict[RequestId, deque[EngineEvent]] = {}  # looked at longest ago first; each begins with an arrival

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._kept)

    def holds(self, request: RequestId) -> bool:
        """Whether this request waits here."""
        return request in self._kept

    def release_ready(self, events: Iterable[EngineEvent]) -> list[EngineEvent]:
        """What may go on now, of what was kept and of ``events``, in order."""
        self._adapters.on_scheduled()  # what passed the last time has reached the scheduler
        self._pages.on_scheduled()
        passed: list[EngineEvent] = []
        for request in [request for request, _ in zip(self._kept, range(MAX_CHECKED_PER_TURN), strict=False)]:
            self._go_on(request, self._kept.pop(request), passed)
        for event in events:
            kept = self._kept.get(event.id)
            if isinstance(event, CancelRequest):
                self._cancel(event, passed)
            elif kept is not None:
                kept.append(event)
            elif not isinstance(event, AddRequest):
                passed.append(event)
            elif self._kept and len(self._kept) >= self._room():
                self._refuse(event, ReturnReason.QUEUE_FULL)
            else:
                self._go_on(event.id, deque([event]), passed)
        return passed

    def _cancel(self, event: CancelRequest, passed: list[EngineEvent]) -> None:
        kept = self._kept.pop(event.id, None)
        self._forget(event.id)
        passed.append(event)
        left = deque(later for later in kept or () if later.epoch > event.epoch)
        if left:
            self._go_on(event.id, left, passed)

    def _go_on(self, request: RequestId, waiting: deque[EngineEvent], passed: list[EngineEvent]) -> None:
        """Pass on what was said of this request, up to an arrival that has to wait (on)."""
        while waiting:
            event = waiting[0]
            if isinstance(event, AddRequest):
                try:
                    if not self._is_ready(event):
                        self._kept[request] = waiting
                        return
                except Exception as error:
                    if type(error) not in REFUSAL_REASONS:  # it is this request's own affair all the same
                        log.exception("%s could not be made ready", request)
                    # Later events of it are dropped by the scheduler: it never arrived there.
                    self._forget(request)
                    self._refuse(
                        event, REFUSAL_REASONS.get(type(error), f"{UNFIT}: {type(error).__name__}").format(error)
                    )
                    waiting.popleft()
                    continue
                self._pages.on_passed(request)
                in_use = self._compiling.pop(request, None)
                event = event if in_use is None else replace(event, grammar=in_use)
            waiting.popleft()
            passed.append(event)

    def _is_ready(self, event: AddRequest) -> bool:
        """Whether this request can go to the scheduler."""
        grammar, adapter = event.sampling.grammar, event.adapter
        has_pages = self._pages.is_ready(event)  # first: a request that has an image's pages need not encode it
        has_grammar = grammar is None or self._compiled(event.id, grammar)  # compiled while pages are fetched
        if not (has_pages and has_grammar and self._images.is_ready(event)):
            return False
        # Last: a request whose adapter is ready goes to the scheduler at once.
        return adapter is None or self._adapters.is_ready(adapter, self._adapters_in_use)

    def _compiled(self, request: RequestId, grammar: Grammar) -> bool:
        wanted = self._compiling.get(request)
        if wanted is None:
            wanted = self._compiling[request] = self._grammars.get_or_compile(grammar)
        return wanted.ready()

    def _forget(self, request: RequestId) -> None:
        self._compiling.pop(request, None)
        self._images.remove_request(request)
        self._pages.remove_request(request)


REFUSAL_REASONS: dict[type[Exception], str] = {
    GrammarRefused: ReturnReason.GRAMMAR.with_details("{}"),
    ImageRefused: ReturnReason.IMAGE.with_details("{}"),
    AdapterRefused: ReturnReason.ADAPTER.with_details("{}"),
    QueueFull: ReturnReason.QUEUE_FULL,
}
"""The reason of each kind of refusal, a ``ReturnReason`` with the error as its details."""
