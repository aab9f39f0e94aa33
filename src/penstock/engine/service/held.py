"""Requests that must wait before the scheduler hears of them, and with them whatever is said about them meanwhile.

A grammar is compiled beside the loop, an adapter is read beside it, pages are fetched beside it, images are encoded
between steps; until that is done, a request is kept here, in order with its credit, its pages and its first token.
Pure but for the ports that it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Arrive, Cancelled, Event
from penstock.errors import AdapterRefused, GrammarRefused, ImageRefused
from penstock.types import AdapterRef, Grammar, Medium, RequestId


class Readiness(Protocol):
    """What compiles grammars (``grammar.worker.Grammars``)."""

    def ready(self, grammar: Grammar) -> bool:
        """Can it be followed now?  If not, it is being compiled.  Raises GrammarRefused when it never can."""
        ...


class AdapterReadiness(Protocol):
    """What reads adapters (``engine.runner.adapters.Adapters``)."""

    def ready(self, ref: AdapterRef) -> bool:
        """Is it in memory?  If not, it is on its way.  Raises AdapterRefused when it cannot be had."""
        ...

    def settled(self) -> None:
        """The scheduler knows of every request that was ready."""
        ...


class PageWait(NamedTuple):
    """How long a request waited for pages, and for what (``telemetry.spans.TIERS``)."""

    began: float
    ended: float
    facts: Mapping[str, float]


class PageReadiness(Protocol):
    """What brings pages of prompts from elsewhere (``engine.service.stored.StoredPages``)."""

    def watch(self, tell: Callable[[RequestId, PageWait], None]) -> None:
        """``tell`` hears how long each request waited that passes."""
        ...

    def ready(self, event: Arrive) -> bool:
        """Need nothing be waited for?  If not, pages are on their way, or it is being asked who has them."""
        ...

    def forget(self, request: RequestId) -> None:
        """Nobody waits for this request any more."""
        ...

    def passed(self, request: RequestId) -> None:
        """It goes to the scheduler now."""
        ...

    def settled(self) -> None:
        """The scheduler has had its turn with every request that passed."""
        ...


class PagesHere:
    """For engines that have no other pages than their own."""

    def watch(self, tell: Callable[[RequestId, PageWait], None]) -> None:
        """See ``PageReadiness``."""

    def ready(self, event: Arrive) -> bool:
        """See ``PageReadiness``."""
        return True

    def forget(self, request: RequestId) -> None:
        """See ``PageReadiness``."""

    def passed(self, request: RequestId) -> None:
        """See ``PageReadiness``."""

    def settled(self) -> None:
        """See ``PageReadiness``."""


class NoAdapters:
    """For engines that have none."""

    def ready(self, ref: AdapterRef) -> bool:
        """See ``AdapterReadiness``."""
        raise AdapterRefused("this engine has no adapters")

    def settled(self) -> None:
        """See ``AdapterReadiness``."""


class AlwaysReady:
    """For engines that follow no grammar."""

    def ready(self, grammar: Grammar) -> bool:
        """See ``Readiness``."""
        return True


class ImageReadiness(Protocol):
    """What encodes images (``engine.images.stage.ImageStage``)."""

    def ready(self, event: Arrive) -> bool:
        """Can the request's images be read now?  If not, they are being encoded.  Raises ImageRefused when they never
        can."""
        ...

    def forget(self, request: RequestId) -> None:
        """Nobody waits for this request any more."""
        ...

    def serve(self, content: bytes, picture: Medium) -> NDArray[np.float32] | None:
        """Encode an image for another worker; None: ``served`` has its rows later.  Raises ImageRefused."""
        ...

    def served(self, contents: Iterable[bytes]) -> Iterable[tuple[bytes, NDArray[np.float32]]]:
        """Those that are encoded now."""
        ...


class NoImages:
    """For engines that read text only."""

    def ready(self, event: Arrive) -> bool:
        """See ``ImageReadiness``."""
        if event.images:
            raise ImageRefused("this engine reads text only")
        return True

    def forget(self, request: RequestId) -> None:
        """See ``ImageReadiness``."""

    def serve(self, content: bytes, picture: Medium) -> NDArray[np.float32] | None:
        """See ``ImageReadiness``."""
        raise ImageRefused("this engine reads text only")

    def served(self, contents: Iterable[bytes]) -> Iterable[tuple[bytes, NDArray[np.float32]]]:
        """See ``ImageReadiness``."""
        return ()


@dataclass(frozen=True, slots=True)
class Ready:
    """What makes requests ready."""

    grammars: Readiness = field(default_factory=AlwaysReady)
    images: ImageReadiness = field(default_factory=NoImages)
    adapters: AdapterReadiness = field(default_factory=NoAdapters)
    pages: PageReadiness = field(default_factory=PagesHere)


class Held:
    """Events on their way to the scheduler."""

    def __init__(self, ready: Ready, refuse: Callable[[Arrive, str], None]) -> None:
        """``refuse`` is told of a request whose grammar cannot be followed, whose images cannot be read or whose
        adapter cannot be had here, and why; it must not come back to this."""
        self._grammars = ready.grammars
        self._images = ready.images
        self._adapters = ready.adapters
        self._pages = ready.pages
        self._refuse = refuse
        self._kept: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def holds(self, request: RequestId) -> bool:
        """Does this request wait here?"""
        return any(event.id == request for event in self._kept)

    def sift(self, events: Iterable[Event]) -> list[Event]:
        """What may go on now, of what was kept and of ``events``, in order."""
        self._adapters.settled()  # what passed the last time has reached the scheduler
        self._pages.settled()
        todo, self._kept = [*self._kept, *events], []
        passed: list[Event] = []
        for event in todo:
            if isinstance(event, Cancelled):
                self._kept = [kept for kept in self._kept if kept.id != event.id or kept.epoch > event.epoch]
                self._images.forget(event.id)
                self._pages.forget(event.id)
                passed.append(event)
            elif isinstance(event, Arrive):
                (self._kept if self.holds(event.id) else self._place(event, passed)).append(event)
            elif self.holds(event.id):
                self._kept.append(event)
            else:
                passed.append(event)
        return passed

    def _place(self, event: Arrive, passed: list[Event]) -> list[Event]:
        """Where this request belongs now.  What is said of a refused one later concerns nobody: it never came."""
        grammar, adapter = event.sampling.grammar, event.adapter
        try:
            ready = self._pages.ready(event)  # asked first: who has an image's pages need not encode it
            ready = (grammar is None or self._grammars.ready(grammar)) and ready and self._images.ready(event)
            # Asked last: who is told that an adapter is there comes at once.
            ready = ready and (adapter is None or self._adapters.ready(adapter))
        except (GrammarRefused, ImageRefused, AdapterRefused) as error:
            self._pages.forget(event.id)
            self._refuse(event, f"{_REFUSERS[type(error)]}: {error}")
            return []
        if not ready:
            return self._kept
        self._pages.passed(event.id)
        return passed


_REFUSERS = {GrammarRefused: "grammar", ImageRefused: "image", AdapterRefused: "adapter"}
