"""Whose tokens a head or a draft model has read, and how far: places in KV memory that only guessing uses.

::

    place of one request, 1024 tokens = 64 pages of its own, in order
           | read for good | read for guesses |
    now    | true tokens   | perhaps wrong    |      counted from where reading began, not from the prompt's begin
    full   | begun anew with what comes next
    at end | the place is free

Nothing of it is handed over, cached or kept: who begins in the middle of an answer guesses a little worse for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.request import Request
from penstock.types import PAGE_TOKENS, RequestId

CONTEXT_TOKENS = 1024
"""Tokens that a place holds."""

CONTEXT_PAGES = CONTEXT_TOKENS // PAGE_TOKENS


@dataclass(slots=True)
class Context:
    """One request's place.  ``end`` positions are read for good; what else that means is the guide's."""

    request: Request
    place: int
    base: int = -1  # draft models: position in the request of the first token read; -1: nothing is
    end: int = 0
    ahead: list[int] = field(default_factory=list[int])  # draft models: guesses that were read behind ``end``


class Contexts:
    """A fixed number of places."""

    def __init__(self, places: int) -> None:
        self._contexts: dict[RequestId, Context] = {}
        self._free = list(range(places - 1, -1, -1))

    def of(self, request: Request) -> Context | None:
        """The request's own, made anew for another object of the same id; None when all places are taken."""
        context = self._contexts.get(request.id)
        if context is not None and context.request is request:
            return context
        self.forget(request.id)
        if not self._free:
            return None
        context = self._contexts[request.id] = Context(request, self._free.pop())
        return context

    def forget(self, request: RequestId) -> None:
        """Free its place; an unknown one is no error."""
        context = self._contexts.pop(request, None)
        if context is not None:
            self._free.append(context.place)


def table_of(contexts: list[Context]) -> NDArray[np.int32]:
    """Pages of these places [S, 64]."""
    places = np.array([context.place for context in contexts], np.int32)
    return (places[:, None] * CONTEXT_PAGES + np.arange(CONTEXT_PAGES, dtype=np.int32)).astype(np.int32)
