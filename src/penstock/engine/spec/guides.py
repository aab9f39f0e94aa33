# ruff: noqa: N815  (field names carry shapes)
"""Who can be asked what comes next: a head that reads the model's hidden states, or a small model that reads tokens.

Says what must be read before the next guess and by which steps; ``drafter`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Row
from penstock.engine.models.eagle import EagleHead
from penstock.engine.models.port import Model
from penstock.engine.spec.contexts import CONTEXT_TOKENS, Context
from penstock.kernels.operands import KvShape
from penstock.kernels.ops import Steps
from penstock.types import RequestId

Taps = Mapping[RequestId, tuple[int, NDArray[np.float32]]]
"""Of each row of the last step that drew: position of the first token drawn after, hidden states of it and of the
draft tokens behind it."""


class TapSource(Protocol):
    """Where hidden states come from: the runner."""

    def hand_out(self, wanted: bool) -> None:
        """Whether they are wanted from the next step on."""
        ...

    def taps(self) -> Taps:
        """Those of the last step, if they were wanted."""
        ...


BEGINNING_TOKENS = 256
"""A draft model begins with so many last tokens of a request."""

READ_AT_ONCE = 64
"""Tokens of one request that a draft model reads in one step, until it has caught up."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to be read from a context's end on, and what comes with them."""

    tokens: Sequence[int]
    features_TW: NDArray[np.float32] | None = None
    is_last: bool = True  # nothing else is missing: what is said then is a guess


class Guide(Protocol):
    """A head or a draft model, as it is used by one worker."""

    kv: KvShape
    vocab: int  # tokens below are read
    ids_V: NDArray[np.int32] | None  # tokens of what is guessed; None: the same
    first: Steps  # reads what is fed
    further: Steps | None  # reads a guess and what was said with it; None: the first reads guesses, too

    def follow(self, wanted: bool) -> None:
        """Whether guesses will be asked for after the next step; before it is called, none will be."""
        ...

    def begin(self) -> None:
        """Guesses for a step begin."""
        ...

    def feed(self, row: Row, context: Context, depth: int) -> Feed | None:
        """What must be read for this row, so that ``depth`` tokens can be guessed; None if that cannot be."""
        ...


class HeadGuide:
    """A head; it reads hidden states of the step before, whoever planned that."""

    def __init__(self, head: EagleHead, vocab: int, source: TapSource) -> None:
        self.kv = head.kv
        self.vocab = vocab
        self.ids_V = head.ids_V
        self.first: Steps = head.first
        self.further: Steps | None = head.further
        self._source = source
        self._taps: Taps = {}

    def follow(self, wanted: bool) -> None:
        """See ``Guide.follow``."""
        self._source.hand_out(wanted)

    def begin(self) -> None:
        """See ``Guide.begin``."""
        self._taps = self._source.taps()

    def feed(self, row: Row, context: Context, depth: int) -> Feed | None:
        """Hidden states of the tokens that stood, each with the token behind it.

        What was computed while nothing was guessed is missing in the context, which does little harm.
        """
        start, taps_RW = self._taps.get(row.request.id, (row.start, None))
        count = row.start - start
        if taps_RW is None or not 1 <= count <= len(taps_RW):
            return None
        if context.end + count + depth > CONTEXT_TOKENS:
            context.end = 0
        return Feed(row.request.tokens(start + 1, row.start + 1), taps_RW[:count])


class ModelGuide:
    """A small model with the same tokens."""

    def __init__(self, model: Model, kv: KvShape, vocab: int) -> None:
        self.kv = kv
        self.vocab = vocab
        self.ids_V: NDArray[np.int32] | None = None
        self.first: Steps = model
        self.further: Steps | None = None

    def follow(self, wanted: bool) -> None:
        """See ``Guide.follow``."""

    def begin(self) -> None:
        """See ``Guide.begin``."""

    def feed(self, row: Row, context: Context, depth: int) -> Feed | None:
        """The tokens that it has not read, a piece at a time; what it guessed right it has read already."""
        request, known = row.request, row.start + 1
        if context.base < 0 or known < context.base + context.end or known - context.base + depth > CONTEXT_TOKENS:
            context.base, context.end = max(0, known - BEGINNING_TOKENS), 0
            context.ahead.clear()
        unread = request.tokens(context.base + context.end, known)
        stood = 0
        while stood < min(len(context.ahead), len(unread) - 1) and context.ahead[stood] == unread[stood]:
            stood += 1
        context.ahead.clear()
        context.end += stood
        tokens = unread[stood : stood + READ_AT_ONCE]
        return Feed(tokens, is_last=stood + len(tokens) == len(unread)) if tokens else None
