"""Answers from stored responses, as far as those go; what is missing is computed behind them and stored in its turn.

::

    stored tokens ................. | computed behind them (``ValidRequest.begun``: given, never told again)
    all that the request asks for: no worker is asked

An answer is stored when it has ended, or its reader had all that it wanted; one that failed or was given up is not.
Two equal requests at one time are both computed: neither's pace, class or fate is the other's.  Knows nothing about
HTTP or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from penstock.edge.errors import Header
from penstock.edge.responses import Kept, Response, ResponseKey, Responses, key_of
from penstock.telemetry.registry import ResponseFigures
from penstock.types import (
    GREEDY,
    FinishReason,
    ModelIdentity,
    RequestId,
    ResumeFrom,
    TokenBatch,
    TokenLogprob,
    ValidRequest,
)
from penstock.wire.ports import TokenStreams

CACHE_CONTROL = b"cache-control"
"""With ``no-store`` nothing stored is told, and nothing of the answer is stored."""

RESPONSE_CACHE = b"x-penstock-response-cache"
"""Says what was found: ``HIT``, ``PREFIX`` or ``MISS``."""

HIT, PREFIX, MISS = "hit", "prefix", "miss"

TOLD_AT_ONCE = 16
"""Stored tokens in one batch: others have a turn between two of them."""

_LOGPROB_BYTES = 11


class ResponseStore:
    """The stored responses of a gateway, and what is counted of them."""

    def __init__(self, max_bytes: int) -> None:
        self.responses = Responses(max_bytes)
        self.found = dict.fromkeys((HIT, PREFIX, MISS), 0)
        self.tokens = 0  # told from it
        self._unpacks = asyncio.Lock()

    async def unpacked(self, kept: Kept) -> Response:
        """One at a time and one a turn of the loop, however many choices ask: others go on in between."""
        async with self._unpacks:
            await asyncio.sleep(0)
            return kept.response()

    def figures(self) -> ResponseFigures:
        """For the metrics."""
        responses = self.responses
        return ResponseFigures(dict(self.found), self.tokens, responses.evicted, len(responses), responses.nbytes)


def repeats(requests: Sequence[ValidRequest], *, seeded: bool, control: bytes | None) -> bool:
    """Would the same tokens be drawn again, and may they be stored?  ``control``: the header ``CACHE_CONTROL``."""
    if control is not None and b"no-store" in control.lower():
        return False
    return seeded or all(request.sampling.temperature == GREEDY for request in requests)


@dataclass(frozen=True, slots=True)
class _Found:
    key: ResponseKey
    kept: Kept | None


class StoredAnswers:
    """``kept.Answers`` of one HTTP request.  ``look`` before the first stream."""

    def __init__(
        self,
        store: ResponseStore,
        streams: TokenStreams,
        requests: Sequence[ValidRequest],
        identity: ModelIdentity,
    ) -> None:
        self._store = store
        self._streams = streams
        self._requests = requests
        self._identity = identity
        self._stopped: set[RequestId] = set()
        self._found: dict[RequestId, _Found] = {}
        self.word = ""  # what was found of all choices together, once it was looked for

    def look(self) -> None:
        """What is stored of the choices?  Once."""
        words: set[str] = set()
        requests, self._requests = self._requests, ()  # who keeps this answer keeps no prompts
        for request in requests:
            key = key_of(request, self._identity)
            kept = self._store.responses.find(key)
            self._found[request.id] = _Found(key, kept)
            word = _word(request, kept)
            self._store.found[word] += 1
            words.add(word)
        self.word = words.pop() if len(words) == 1 else PREFIX

    def headers(self) -> list[Header]:
        """For the answer."""
        return [(RESPONSE_CACHE, self.word.encode())] if self.word else []

    async def stream(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
        """See ``TokenStreams``."""
        found = self._found.pop(request.id)
        stored = None
        if found.kept is not None:
            stored = (await self._store.unpacked(found.kept)).cut(request.sampling.max_tokens)
            for batch in _batches(stored, len(request.prompt)):
                self._store.tokens += len(batch.tokens)
                yield batch
                if batch.finish is not None:
                    return
                await asyncio.sleep(0)
            request = _rest(request, ResumeFrom(stored.tokens, self._identity))
        stream = self._streams.stream(request)
        told, ours = _Told(stored, self._store.responses.largest), False
        try:
            async for batch in stream:
                ours = ours or self._streams.served_by(request.id) == self._identity
                told.add(batch)
                yield batch
        finally:
            await stream.aclose()
            if ours and told.fits and told.tokens and (told.finish is not None or request.id in self._stopped):
                self._store.responses.keep(found.key, told.response())

    def stopped(self, request: RequestId) -> None:
        """See ``TokenStreams``."""
        self._stopped.add(request)
        self._streams.stopped(request)


class _Told:
    """An answer while it comes; nothing of one that will be too large.  ``most``: bytes, packed."""

    def __init__(self, stored: Response | None, most: int) -> None:
        self.finish: FinishReason | None = None
        self.fits = True
        self.tokens: list[int] = list(stored.tokens) if stored is not None else []
        self._logprobs: list[TokenLogprob] = list(stored.logprobs or ()) if stored is not None else []
        self._prompt = stored.prompt_logprobs if stored is not None else None
        self._left = most - len(self.tokens) - _least(self._logprobs) - _least(self._prompt or ())

    def add(self, batch: TokenBatch) -> None:
        self.finish = batch.finish
        self._left -= len(batch.tokens) + _least(batch.logprobs or ()) + _least(batch.prompt_logprobs or ())
        if self.fits and self._left >= 0:
            self.tokens += batch.tokens
            self._logprobs += batch.logprobs or ()
            self._prompt = batch.prompt_logprobs or self._prompt
        elif self.fits:
            self.fits = False
            self.tokens, self._logprobs, self._prompt = [], [], None

    def response(self) -> Response:
        finish = FinishReason.STOP if self.finish is FinishReason.STOP else None
        return Response(tuple(self.tokens), finish, tuple(self._logprobs) or None, self._prompt)


def _least(logprobs: Sequence[TokenLogprob]) -> int:
    """Bytes that these take packed, at the least: eight each for a number, three for what is beside it."""
    return _LOGPROB_BYTES * (len(logprobs) + sum(len(token.top) for token in logprobs))


def _rest(request: ValidRequest, begun: ResumeFrom) -> ValidRequest:
    """What is still to be computed.  Of the prompt all was told."""
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(request, begun=begun, sampling=sampling)


def _word(request: ValidRequest, kept: Kept | None) -> str:
    if kept is None:
        return MISS
    return HIT if kept.serves(request.sampling.max_tokens) else PREFIX


def _batches(stored: Response, prompt_tokens: int) -> list[TokenBatch]:
    """A stored response as it is told.  Nothing of the prompt is computed for a whole one."""
    starts = range(0, len(stored.tokens), TOLD_AT_ONCE)
    return [
        TokenBatch(
            tokens=stored.tokens[start : start + TOLD_AT_ONCE],
            logprobs=None if stored.logprobs is None else stored.logprobs[start : start + TOLD_AT_ONCE],
            prompt_logprobs=stored.prompt_logprobs if start == 0 else None,
            finish=stored.finish if start == starts[-1] else None,
            cached_tokens=prompt_tokens if start == 0 and stored.finish is not None else 0,
            stored=True,
        )
        for start in starts
    ]
