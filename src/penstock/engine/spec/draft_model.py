# ruff: noqa: N815  (field names carry shapes)
"""Draft tokens from an EAGLE head, which reads the model's hidden states, or from a small model, which reads tokens.

Reads what has not been read yet, then samples draft token after draft token, all requests of a step side by side.
Sampled answers are drafted with the very random numbers that the model will sample with: where both see the same odds,
both sample the same token.

Each request has a slot in KV memory of its own::

    slot of one request, 1024 tokens = 64 pages, in order
           | accepted tokens | draft tokens |
    now    | true            | may be wrong |      counted from where reading began, not from the prompt's begin
    full   | restarted with what comes next
    at end | the slot is free

Nothing of it is handed over, cached or kept.  A request that begins in the middle of an answer drafts a little worse
for a while.  Knows nothing about what a draft is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.clock import Clock
from penstock.engine.core.plan import ScheduledTokens
from penstock.engine.core.request import Request
from penstock.engine.models.eagle import EagleHead
from penstock.engine.models.interface import Model
from penstock.kernels.operands import KvShape, StepBatch
from penstock.kernels.ops import Ops, RecordableModel
from penstock.kernels.sampling import GumbelRows
from penstock.types import PAGE_TOKENS, RequestId

SLOT_TOKENS = 1024
"""Tokens that a place holds."""

SLOT_PAGES = SLOT_TOKENS // PAGE_TOKENS


@dataclass(slots=True)
class DraftSlot:
    """One request's place.  ``end`` positions are read for good; what else that means is the guide's."""

    request: Request
    place: int
    base: int = -1  # draft models: position in the request of the first token read; -1: nothing is
    end: int = 0
    ahead: list[int] = field(default_factory=list[int])  # draft models: guesses that were read behind ``end``


class DraftSlots:
    """A fixed number of places."""

    def __init__(self, places: int) -> None:
        self._contexts: dict[RequestId, DraftSlot] = {}
        self._free = list(range(places - 1, -1, -1))

    def get(self, request: Request) -> DraftSlot | None:
        """The request's own, made anew for another object of the same id; None when all places are taken."""
        context = self._contexts.get(request.id)
        if context is not None and context.request is request:
            return context
        self.remove(request.id)
        if not self._free:
            return None
        context = self._contexts[request.id] = DraftSlot(request, self._free.pop())
        return context

    def remove(self, request: RequestId) -> None:
        """Free its place; an unknown one is no error."""
        context = self._contexts.pop(request, None)
        if context is not None:
            self._free.append(context.place)


def slot_tables(contexts: list[DraftSlot]) -> NDArray[np.int32]:
    """Pages of these places [S, 64]."""
    places = np.array([context.place for context in contexts], np.int32)
    return (places[:, None] * SLOT_PAGES + np.arange(SLOT_PAGES, dtype=np.int32)).astype(np.int32)


HiddenStates = Mapping[RequestId, tuple[int, NDArray[np.float32]]]
"""Of each row of the last step that drew: position of the first token drawn after, hidden states of it and of the
draft tokens behind it."""


class HiddenStateSource(Protocol):
    """Where hidden states come from: the runner."""

    def export_hidden_states(self, wanted: bool) -> None:
        """Whether they are wanted from the next step on."""
        ...

    def hidden_states(self) -> HiddenStates:
        """Hidden states of the last step, if they were requested."""
        ...


BEGINNING_TOKENS = 256
"""Tokens at the end of a request that a draft model begins with."""

MAX_READ_TOKENS = 64
"""Tokens of one request that a draft model reads in one step, until it has caught up."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Tokens to be read from a context's end on, and what comes with them."""

    tokens: Sequence[int]
    features_TW: NDArray[np.float32] | None = None
    is_last: bool = True  # nothing else is missing: what is said then is a guess


class DraftSource(Protocol):
    """A head or a draft model, as it is used by one worker."""

    kv: KvShape
    vocab: int  # tokens below are read
    ids_V: NDArray[np.int32] | None  # tokens of what is guessed; None: the same
    first: RecordableModel  # reads what is fed
    further: RecordableModel | None  # reads a guess and what was said with it; None: the first reads guesses, too

    def set_active(self, wanted: bool) -> None:
        """Whether guesses will be asked for after the next step; before it is called, none will be."""
        ...

    def begin_step(self) -> None:
        """Guesses for a step begin."""
        ...

    def next_input(self, row: ScheduledTokens, context: DraftSlot, depth: int) -> DraftInput | None:
        """What must be read for this row, so that ``depth`` tokens can be guessed; None if that cannot be."""
        ...


class EagleSource:
    """An EAGLE head; it reads hidden states of the step before."""

    def __init__(self, head: EagleHead, vocab: int, source: HiddenStateSource) -> None:
        self.kv = head.kv
        self.vocab = vocab
        self.ids_V = head.ids_V
        self.first: RecordableModel = head.first
        self.further: RecordableModel | None = head.further
        self._source = source
        self._taps: HiddenStates = {}

    def set_active(self, wanted: bool) -> None:
        self._source.export_hidden_states(wanted)

    def begin_step(self) -> None:
        self._taps = self._source.hidden_states()

    def next_input(self, row: ScheduledTokens, context: DraftSlot, depth: int) -> DraftInput | None:
        """Hidden states of the tokens that stood, each with the token behind it.

        What was computed while nothing was guessed is missing in the context, which does little harm.
        """
        start, taps_RW = self._taps.get(row.request.id, (row.start, None))
        count = row.start - start
        if taps_RW is None or not 1 <= count <= len(taps_RW):
            return None
        if context.end + count + depth > SLOT_TOKENS:
            context.end = 0
        return DraftInput(row.request.tokens(start + 1, row.start + 1), taps_RW[:count])


class DraftModelSource:
    """A small model with the same tokens."""

    def __init__(self, model: Model, kv: KvShape, vocab: int) -> None:
        self.kv = kv
        self.vocab = vocab
        self.ids_V: NDArray[np.int32] | None = None
        self.first: RecordableModel = model
        self.further: RecordableModel | None = None

    def set_active(self, wanted: bool) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def next_input(self, row: ScheduledTokens, context: DraftSlot, depth: int) -> DraftInput | None:
        """The tokens that it has not read, a piece at a time; what it guessed right it has read already."""
        request, known = row.request, row.start + 1
        if context.base < 0 or known < context.base + context.end or known - context.base + depth > SLOT_TOKENS:
            context.base, context.end = max(0, known - BEGINNING_TOKENS), 0
            context.ahead.clear()
        unread = request.tokens(context.base + context.end, known)
        stood = 0
        while stood < min(len(context.ahead), len(unread) - 1) and context.ahead[stood] == unread[stood]:
            stood += 1
        context.ahead.clear()
        context.end += stood
        tokens = unread[stood : stood + MAX_READ_TOKENS]
        return DraftInput(tokens, is_last=stood + len(tokens) == len(unread)) if tokens else None


@dataclass(frozen=True, slots=True)
class _Fed:
    """A row that is guessed for; ``index`` among the step's rows."""

    index: int
    row: ScheduledTokens
    context: DraftSlot
    feed: DraftInput


class Drafter:
    """A guide's programs over KV memory of its own, and the places in that."""

    def __init__(self, guide: DraftSource, ops: Ops, *, vocab: int, places: int, clock: Clock) -> None:
        """``vocab``: of the model that is guessed for.  ``places``: requests that are guessed for at once."""
        self._guide = guide
        self._ops = ops
        self._vocab = vocab
        self._clock = clock
        self.places = places
        self._contexts = DraftSlots(places)
        kv = ops.new_kv(guide.kv, pages=places * SLOT_PAGES)
        self._first = ops.record(guide.first, kv)
        self._further = self._first if guide.further is None else ops.record(guide.further, kv)
        self._steps: dict[int, tuple[StepBatch, GumbelRows]] = {}  # of further guesses, by the number of requests
        self.seconds = (0.0, 0.0)  # of the last call: the first guess, and all further ones

    def draft(self, rows: Sequence[ScheduledTokens], depth: int) -> list[tuple[int, ...]]:
        """Up to ``depth`` (at least 1) draft tokens for each row; an empty list where no row can have any."""
        begin = self._clock.now()
        fed = self._fed(rows, depth)
        self.seconds = (0.0, 0.0)
        if not fed:
            return []
        tokens = self._read(fed)
        read = self._clock.now()
        last = [one for one in fed if one.feed.is_last]
        guesses: list[tuple[int, ...]] = [()] * len(rows)
        if last:
            tokens_SK = self._go_on(fed, last, tokens, depth)
            for one, own in zip(last, tokens_SK, strict=True):
                most = max(0, min(depth, one.row.request.local_end - one.row.request.known - 1))
                guesses[one.index] = self._sound(own[:most])
        self.seconds = (read - begin, self._clock.now() - read)
        return guesses

    def set_active(self, wanted: bool) -> None:
        self._guide.set_active(wanted)

    def remove_request(self, request: RequestId) -> None:
        """The request has left."""
        self._contexts.remove(request)

    def _fed(self, rows: Sequence[ScheduledTokens], depth: int) -> list[_Fed]:
        guide, found = self._guide, []
        guide.begin_step()
        for index, row in enumerate(rows):
            context = self._contexts.get(row.request)
            feed = guide.next_input(row, context, depth) if context is not None else None
            if context is not None and feed is not None and max(feed.tokens) < guide.vocab:
                found.append(_Fed(index, row, context, feed))
        return found

    def _read(self, fed: list[_Fed]) -> NDArray[np.int32]:
        """Read what is fed; what each says comes next [S]."""
        counts = [len(one.feed.tokens) for one in fed]
        starts = np.zeros(len(fed) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = [np.arange(one.context.end, one.context.end + n) for one, n in zip(fed, counts, strict=True)]
        features = [one.feed.features_TW for one in fed if one.feed.features_TW is not None]
        batch = StepBatch(
            np.array([token for one in fed for token in one.feed.tokens], np.int32),
            np.concatenate(positions, dtype=np.int32),
            starts,
            slot_tables([one.context for one in fed]),
            starts[1:] - 1,
            features_TW=features[0] if len(features) == 1 else np.concatenate(features) if features else None,
        )
        picks = self._picks(fed)
        self._first.run(batch, 0, [], picks)
        for one, count in zip(fed, counts, strict=True):
            one.context.end += count
        return self._ids(picks.tokens_F)

    def _picks(self, fed: list[_Fed]) -> GumbelRows:
        """How the token after each row's is drawn: as its model will, but for what bends the odds."""
        samplings = [one.row.request.sampling for one in fed]
        return GumbelRows(
            np.array([sampling.seed for sampling in samplings], np.uint64),
            np.array([one.row.start + 1 for one in fed], np.uint32),
            np.array([sampling.choice for sampling in samplings], np.uint32),
            np.array([self._temperature(sampling.temperature) for sampling in samplings], np.float32),
            np.zeros(len(fed), np.int32),
        )

    def _temperature(self, wanted: float) -> float:
        """Noise belongs to the model's tokens: outputs of another order take the likeliest."""
        return wanted if self._guide.ids_V is None else 0.0

    def _ids(self, outputs: NDArray[np.int32]) -> NDArray[np.int32]:
        ids_V = self._guide.ids_V
        return outputs.copy() if ids_V is None else ids_V[outputs]

    def _go_on(self, fed: list[_Fed], last: list[_Fed], tokens: NDArray[np.int32], depth: int) -> list[list[int]]:
        """Guess after guess, each read in its turn: [S][depth]."""
        own = [index for index, one in enumerate(fed) if one.feed.is_last]
        guesses = [tokens[own]]
        if depth > 1:
            batch, picks = self._step_of(last)
            hidden_SD = None
            if batch.features_TW is not None:
                hidden_SD = self._ops.to_numpy(self._first.hidden())[own]
            for _ in range(depth - 1):
                batch.tokens_T[:] = guesses[-1]
                if hidden_SD is not None and batch.features_TW is not None:
                    batch.features_TW[:] = hidden_SD
                self._further.run(batch, 0, [], picks)
                guesses.append(self._ids(picks.tokens_F))
                if hidden_SD is not None:
                    hidden_SD = self._ops.to_numpy(self._further.hidden())
                batch.positions_T[:] += 1
                picks.positions_F[:] += np.uint32(1)
        tokens_SK = [list(row) for row in np.stack(guesses, axis=1).tolist()]
        for one, said in zip(last, tokens_SK, strict=True):
            one.context.ahead[:] = said[:-1]
        return tokens_SK

    def _step_of(self, last: list[_Fed]) -> tuple[StepBatch, GumbelRows]:
        """The arrays of a further guess, for one more row of each."""
        count = len(last)
        fresh = self._picks(last)
        known = self._steps.get(count)
        if known is None:
            width = getattr(self._guide.further, "width", None)
            known = self._steps[count] = (
                StepBatch(
                    np.zeros(count, np.int32),
                    np.zeros(count, np.int32),
                    np.arange(count + 1, dtype=np.int32),
                    np.zeros((count, SLOT_PAGES), np.int32),
                    np.arange(count, dtype=np.int32),
                    features_TW=None if width is None else np.zeros((count, width), np.float32),
                ),
                fresh,
            )
        batch, picks = known
        batch.positions_T[:] = [one.context.end for one in last]
        batch.table_SP[:] = slot_tables([one.context for one in last])
        picks.seeds_F[:], picks.choices_F[:], picks.temperatures_F[:] = (
            fresh.seeds_F,
            fresh.choices_F,
            fresh.temperatures_F,
        )
        picks.positions_F[:] = fresh.positions_F + np.uint32(1)
        return known

    def _sound(self, tokens: list[int]) -> tuple[int, ...]:
        """As far as they are tokens of the model."""
        for index, token in enumerate(tokens):
            if token >= self._vocab:
                return tuple(tokens[:index])
        return tuple(tokens)
