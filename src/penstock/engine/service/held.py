"""Requests that must wait before the scheduler hears of them, and with them whatever is said about them meanwhile.

A grammar is compiled beside the loop; until it is, its request is kept here, in order with its credit, its pages and
its first token.  Pure but for the port that it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.engine.core.plan import Arrive, Cancelled, Event
from penstock.errors import GrammarRefused
from penstock.types import Grammar, RequestId


class Readiness(Protocol):
    """What compiles grammars (``grammar.worker.Grammars``)."""

    def ready(self, grammar: Grammar) -> bool:
        """Can it be followed now?  If not, it is being compiled.  Raises GrammarRefused when it never can."""
        ...


class AlwaysReady:
    """For engines that follow no grammar."""

    def ready(self, grammar: Grammar) -> bool:
        """See ``Readiness``."""
        return True


class Held:
    """Events on their way to the scheduler."""

    def __init__(self, grammars: Readiness, refuse: Callable[[Arrive, str], None]) -> None:
        """``refuse`` is told of a request whose grammar cannot be followed here; it must not come back to this."""
        self._grammars = grammars
        self._refuse = refuse
        self._kept: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def holds(self, request: RequestId) -> bool:
        """Does this request wait here?"""
        return any(event.id == request for event in self._kept)

    def sift(self, events: Iterable[Event]) -> list[Event]:
        """What may go on now, of what was kept and of ``events``, in order."""
        todo, self._kept = [*self._kept, *events], []
        passed: list[Event] = []
        for event in todo:
            if isinstance(event, Cancelled):
                self._kept = [kept for kept in self._kept if kept.id != event.id or kept.epoch > event.epoch]
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
        grammar = event.sampling.grammar
        try:
            return passed if grammar is None or self._grammars.ready(grammar) else self._kept
        except GrammarRefused as error:
            self._refuse(event, str(error))
            return []
