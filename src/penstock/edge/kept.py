"""Answers to requests with an idempotency key, as far as this gateway has them: joined while they run, told again.

Nothing depends on what is kept here: what is not, is computed again, and by law 1 comes out the same.  A repeat that
comes while the first still runs reads the same tokens; a client that went away is waited for ``resume_grace_s``.

::

    router --tokens--> one pump a choice --> kept so far --> any number of readers

Knows nothing about text, events or HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from penstock.clock import Clock
from penstock.config.limits import Limits
from penstock.edge.counted import Counted
from penstock.edge.keyed import Keyed
from penstock.errors import KeyReused, NoWorkers, PenstockError
from penstock.types import RequestId, TokenBatch, ValidRequest
from penstock.wire.ports import TokenStream


class Answers(Protocol):
    """What an answer is made of: the part of ``TokenStreams`` that serves requests."""

    def stream(self, request: ValidRequest) -> TokenStream:
        """See ``TokenStreams``."""
        ...

    def stopped(self, request: RequestId) -> None:
        """See ``TokenStreams``."""
        ...


class Met(StrEnum):
    """How a request with a key was met."""

    NEW = "new"
    JOINED = "joined"  # the first still runs here
    REPLAYED = "replayed"  # the first has ended, and its tokens are kept
    REPEATED = "repeated"  # the key is known and the tokens are not: computed again
    RESUMED = "resumed"  # the client has had some of it, from elsewhere or long ago: computed again
    REFUSED = "refused"  # the key was used for something else


class _Tokens:
    """One choice: its tokens as far as they came, and who reads them."""

    def __init__(self, source: TokenStream, grace_s: float, over: Callable[[], None]) -> None:
        """``over`` is called once, when no more tokens will come."""
        self.batches: list[TokenBatch] = []
        self.finished = False  # whatever a reader needs is there
        self.failed = False
        self._error: PenstockError | Exception | None = None
        self._readers = 0
        self._news = asyncio.Event()
        self._grace_s = grace_s
        self._over = over
        self._pump = asyncio.get_running_loop().create_task(self._run(source), name="keyed answer")

    @property
    def weight(self) -> int:
        """Numbers that are kept of it, roughly."""
        tops = (len(token.top) for batch in self.batches for token in batch.logprobs or ())
        return sum(len(batch.tokens) for batch in self.batches) + sum(2 * (1 + top) for top in tops)

    def enough(self) -> None:
        """A reader has found the end of the answer in what has come."""
        self.finished = True
        self._pump.cancel()

    def read(self, closed: Callable[[], object]) -> _Reader:
        """From the first token on.  Whoever asks counts as a reader from now on, until the reader is ``closed``."""
        self._readers += 1
        return _Reader(self, closed)

    async def after(self, at: int) -> TokenBatch | None:
        """The batch with this number, once it is there; None after the last."""
        while at >= len(self.batches):
            if self.finished:
                return None
            if self.failed:
                raise self._error or NoWorkers("The answer was given up; send the request again.")
            await self._news.wait()
        return self.batches[at]

    def left(self) -> None:
        """A reader is closed."""
        self._readers -= 1
        if not self._readers and not self.finished and not self.failed:
            asyncio.get_running_loop().call_later(self._grace_s, self._unless_read)

    def _unless_read(self) -> None:
        if not self._readers and not self.finished:
            self.failed = True  # at once: whoever comes before the pump has ended must not wait for it
            self._pump.cancel()

    async def _run(self, source: TokenStream) -> None:
        try:
            async with aclosing(source):
                async for batch in source:
                    self.batches.append(batch)
                    self.finished = self.finished or batch.finish is not None
                    self._tell()
        except Exception as error:  # noqa: BLE001 - raised where it is read
            self._error = error
        finally:
            self.failed = not self.finished
            self._tell()
            self._over()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class _Reader:
    """``TokenStream`` of one who reads kept tokens."""

    def __init__(self, tokens: _Tokens, closed: Callable[[], object]) -> None:
        self._tokens = tokens
        self._over = closed
        self._at = 0
        self._closed = False

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> TokenBatch:
        batch = None if self._closed else await self._tokens.after(self._at)
        if batch is None:
            await self.aclose()
            raise StopAsyncIteration
        self._at += 1
        return batch

    async def aclose(self) -> None:
        """See ``TokenStream``."""
        if not self._closed:
            self._closed = True
            self._over()
            self._tokens.left()


class KeptAnswer:
    """All choices of one request, by their number; ``Answers`` for whoever asks with the same key."""

    def __init__(self, streams: Answers, grace_s: float, over: Callable[[], None], metered: Counted) -> None:
        """``metered``: what was told of it before, also of one that was lost since."""
        self.rated, self.metered = Counted(), metered
        self._streams = streams
        self._grace_s = grace_s
        self._over = over
        self._choices: dict[int, _Tokens] = {}
        self._asked: dict[RequestId, tuple[int, RequestId]] = {}  # -> choice, and what its first asker called it
        self._names: dict[int, RequestId] = {}

    def stream(self, request: ValidRequest) -> TokenStream:
        """See ``Answers``.  The first who asks for a choice has it computed."""
        choice = request.sampling.choice
        self._asked[request.id] = choice, self._names.setdefault(choice, request.id)
        tokens = self._choices.get(choice)
        if tokens is None:
            tokens = self._choices[choice] = _Tokens(self._streams.stream(request), self._grace_s, self._over)
        return tokens.read(lambda: self._asked.pop(request.id, None))

    def stopped(self, request: RequestId) -> None:
        """See ``Answers``."""
        asked = self._asked.get(request)
        if asked is not None:
            choice, name = asked
            self._streams.stopped(name)
            self._choices[choice].enough()

    @property
    def begun(self) -> bool:
        """Has anybody asked for any of it?"""
        return bool(self._choices)

    @property
    def told(self) -> bool:
        """Has a token of it come?"""
        return any(tokens.batches for tokens in self._choices.values())

    @property
    def failed(self) -> bool:
        """Can it not be read to its end?"""
        return any(tokens.failed for tokens in self._choices.values())

    @property
    def finished(self) -> bool:
        """Is all of it there?"""
        return bool(self._choices) and all(tokens.finished for tokens in self._choices.values())

    @property
    def weight(self) -> int:
        """Numbers that are kept of it, roughly."""
        return sum(tokens.weight for tokens in self._choices.values())


@dataclass(slots=True)
class _Entry:
    key: bytes
    mark: str
    until: float = 0.0
    answer: KeptAnswer | None = None
    weight: int = 0  # of a finished answer
    told: bool = False  # a token has come of an answer that is no longer kept
    metered: Counted = field(default_factory=Counted)


class KeptAnswers:
    """By key, those used last at the end.  Bounded in time, keys and tokens."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._told: OrderedDict[bytes, None] = OrderedDict()  # keys of answers that are kept whole, oldest first
        self.tokens = 0  # the weight of those

    def __len__(self) -> int:
        return len(self._entries)

    def meet(self, keyed: Keyed, streams: Answers) -> tuple[KeptAnswer, Met]:
        """The answer to this request, running, finished or not begun.  Raises KeyReused."""
        now = self._clock.now()
        entry = self._entries.get(keyed.key)
        if entry is not None and entry.until <= now and not self._runs(entry):
            self._drop(keyed.key)
            entry = None
        if entry is not None and entry.mark != keyed.mark:
            raise KeyReused(
                "This Idempotency-Key was used for another request body or another version of the model. "
                "Use a new key for a new request."
            )
        met = _how(entry, keyed)
        if entry is None:
            entry = self._entries[keyed.key] = _Entry(keyed.key, keyed.mark)
            if keyed.resumed:
                entry.metered = Counted.elsewhere(keyed.after.places)
        answer = entry.answer
        if answer is None or answer.failed:
            self._forget_tokens(entry)
            grace_s = self._limits.resume_grace_s
            answer = entry.answer = KeptAnswer(streams, grace_s, lambda: self._ended(keyed.key), entry.metered)
        entry.until = now + self._limits.idempotency_s
        self._entries.move_to_end(keyed.key)
        self._make_room(now)  # it may take this entry, too
        return answer, met

    def left(self, keyed: Keyed, answer: Answers) -> None:
        """Whoever met this answer is gone.  One that was not begun, being refused at the door, was never met."""
        entry = self._entries.get(keyed.key)
        if entry is None or entry.answer is None or entry.answer is not answer or entry.answer.begun:
            return
        self._forget_tokens(entry)
        if not entry.told:
            self._drop(keyed.key)

    def _ended(self, key: bytes) -> None:
        """No more tokens come for a choice of this answer."""
        entry = self._entries.get(key)
        if entry is None or entry.answer is None or not entry.answer.finished:
            return
        self.tokens -= entry.weight
        entry.weight = entry.answer.weight
        self.tokens += entry.weight
        self._told[key] = None
        self._make_room(self._clock.now())

    def _make_room(self, now: float) -> None:
        entries, limits = self._entries, self._limits
        for _ in range(len(entries)):
            key, oldest = next(iter(entries.items()))
            if oldest.until > now and len(entries) <= limits.max_idempotency_keys:
                break
            if self._runs(oldest):
                oldest.until = now + limits.idempotency_s
                entries.move_to_end(key)
            else:
                self._drop(key)
        while self._told and self.tokens > limits.max_kept_tokens:
            entry = entries[next(iter(self._told))]
            self._forget_tokens(entry)

    @staticmethod
    def _runs(entry: _Entry) -> bool:
        return entry.answer is not None and not entry.answer.finished and not entry.answer.failed

    def _drop(self, key: bytes) -> None:
        self._forget_tokens(self._entries.pop(key))

    def _forget_tokens(self, entry: _Entry) -> None:
        self.tokens -= entry.weight
        entry.told = entry.told or (entry.answer is not None and entry.answer.told)
        entry.answer, entry.weight = None, 0
        self._told.pop(entry.key, None)


def _how(entry: _Entry | None, keyed: Keyed) -> Met:
    if entry is None or entry.answer is None or entry.answer.failed:
        told = entry is not None and (entry.told or (entry.answer is not None and entry.answer.told))
        return Met.RESUMED if keyed.resumed else Met.REPEATED if told else Met.NEW
    return Met.REPLAYED if entry.answer.finished else Met.JOINED
