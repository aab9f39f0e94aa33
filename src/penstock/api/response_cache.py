"""The response cache: finished responses, replayed to equal requests.

A response is found by a hash over the tokenized request (everything that determines its tokens, without the length),
the model's identity and the tenant, so a hit is what would have been computed (docs/determinism.md)::

    stored tokens ................. | computed after them (``ValidRequest.begun``: given, not sent again)
    all that the request asks for: no worker is involved

    tenant -> digest -> packed response      eviction: least recently used of the tenant that holds most bytes

A response is stored when it is finished, or when its consumer stopped it; failed and aborted ones are not.  Two equal
requests at one time are both computed, so neither depends on the other's pace, class or failure.  Knows nothing about
HTTP or text.  Not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from penstock.api.errors import Header
from penstock.api.idempotency import TokenStreamSource
from penstock.telemetry.registry import ResponseCacheStats
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

MAX_RESPONSE_SHARE = 8
"""One response may take this fraction of the memory, as a divisor."""

MAX_RESPONSE_BYTES = 1 << 20
"""Bytes of a packed response at most: it is unpacked within one turn of the event loop, in some 10 ms for this size."""

ENTRY_BYTES = 320
"""Bytes that an entry takes in addition to its packed response: objects, entries of two tables."""

UNKEYED_FIELDS = frozenset(
    {
        "id",
        "arrival",
        "block_hashes",
        "session",
        "pictures",
        "qos",
        "begun",
        "open_ended",
        "trace",
        "usage_deferred",
        "resume",
    }
)
"""Fields of a request that do not determine its tokens.  Pictures are identified by their hashes, in ``images``."""

_KEYED = tuple(name for name in ValidRequest.__struct_fields__ if name not in UNKEYED_FIELDS)
_pack = msgspec.msgpack.Encoder(order="deterministic").encode


class ResponseKey(NamedTuple):
    """What a response is found by."""

    tenant: str
    digest: bytes


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of an answer from its first on.  ``finish`` is None where they are not all: the answer goes on."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def truncated(self, max_tokens: int) -> StoredResponse:
        """What such a request gets of it."""
        if len(self.tokens) <= max_tokens and (self.finish is FinishReason.STOP or len(self.tokens) < max_tokens):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:max_tokens]
        return StoredResponse(self.tokens[:max_tokens], FinishReason.LENGTH, logprobs, self.prompt_logprobs)


class PackedResponse(NamedTuple):
    """What is kept of an answer, and what can be said of it without unpacking it."""

    packed: bytes
    tokens: int
    finish: FinishReason | None

    @classmethod
    def of(cls, response: StoredResponse) -> PackedResponse:
        """Packed."""
        return cls(_pack(response), len(response.tokens), response.finish)

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.packed) + ENTRY_BYTES

    def covers(self, max_tokens: int) -> bool:
        """Whether it is the whole response to a request for ``max_tokens``."""
        return self.finish is FinishReason.STOP or self.tokens >= max_tokens

    def unpack(self) -> StoredResponse:
        """Unpacked: not to be asked for many in one turn."""
        return _unpack(self.packed)


_unpack = msgspec.msgpack.Decoder(StoredResponse).decode


def response_key(request: ValidRequest, identity: ModelIdentity) -> ResponseKey:
    """By everything that its tokens follow from but their number.  The likeliest token needs no seed."""
    changes: dict[str, int] = {"max_tokens": 1}
    if request.sampling.temperature == GREEDY:
        changes |= {"seed": 0, "choice": 0}
    parts = {name: getattr(request, name) for name in _KEYED}
    sampling = msgspec.structs.replace(request.sampling, **changes)
    parts["sampling"] = msgspec.to_builtins(sampling, str_keys=True)  # in its own order: keys of biases are sorted
    return ResponseKey(request.qos.tenant, blake3(_pack((identity, parts))).digest())


@dataclass(slots=True)
class _TenantResponses:
    """What is kept of one tenant; those used last are at the end."""

    kept: OrderedDict[bytes, PackedResponse] = field(default_factory=OrderedDict[bytes, PackedResponse])
    nbytes: int = 0


class ResponseLru:
    """The stored responses of one gateway, ``max_bytes`` at most; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.largest = min(max_bytes // MAX_RESPONSE_SHARE, MAX_RESPONSE_BYTES)  # bytes that one response may take
        self._shelves: dict[str, _TenantResponses] = {}
        self.nbytes = 0
        self.evicted = 0  # since the start

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def get(self, key: ResponseKey) -> PackedResponse | None:
        """What is kept; it counts as used now."""
        shelf = self._shelves.get(key.tenant)
        kept = shelf.kept.get(key.digest) if shelf is not None else None
        if shelf is None or kept is None:
            return None
        shelf.kept.move_to_end(key.digest)
        return kept

    def put(self, key: ResponseKey, response: StoredResponse) -> None:
        """Keep it, unless what is kept says more already, or it is too large.  Others may have to make room."""
        present = self.get(key)
        if present is not None and not _is_more_complete(response, present):
            return
        new = PackedResponse.of(response)
        size = new.size
        if size > self.largest:
            return
        self._drop(key)
        shelf = self._shelves.setdefault(key.tenant, _TenantResponses())
        shelf.kept[key.digest] = new
        shelf.nbytes += size
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            tenant, largest = max(self._shelves.items(), key=lambda item: item[1].nbytes)
            self._drop(ResponseKey(tenant, next(iter(largest.kept))))
            self.evicted += 1

    def _drop(self, key: ResponseKey) -> None:
        shelf = self._shelves.get(key.tenant)
        kept = shelf.kept.pop(key.digest, None) if shelf is not None else None
        if shelf is None or kept is None:
            return
        shelf.nbytes -= kept.size
        self.nbytes -= kept.size
        if not shelf.kept:
            del self._shelves[key.tenant]


def _is_more_complete(new: StoredResponse, old: PackedResponse) -> bool:
    """Whether ``new`` has more tokens of the response than ``old``, or its end."""
    if old.finish is FinishReason.STOP:
        return False
    return len(new.tokens) > old.tokens or new.finish is FinishReason.STOP


CACHE_CONTROL = b"cache-control"
"""With ``no-store`` the cache is neither read nor written."""

RESPONSE_CACHE = b"x-penstock-response-cache"
"""Says what was found: ``HIT``, ``PREFIX`` or ``MISS``."""

HIT, PREFIX, MISS = "hit", "prefix", "miss"

REPLAY_BATCH_TOKENS = 16
"""Stored tokens in one batch: others have a turn between two of them."""

_LOGPROB_BYTES = 11


class ResponseCache:
    """The stored responses of a gateway, and what is counted of them."""

    def __init__(self, max_bytes: int) -> None:
        self.responses = ResponseLru(max_bytes)
        self.found = dict.fromkeys((HIT, PREFIX, MISS), 0)
        self.tokens = 0  # replayed
        self._unpacks = asyncio.Lock()

    async def unpack(self, kept: PackedResponse) -> StoredResponse:
        """One at a time and one a turn of the loop, however many choices ask: others go on in between."""
        async with self._unpacks:
            await asyncio.sleep(0)
            return kept.unpack()

    def stats(self) -> ResponseCacheStats:
        """For the metrics."""
        responses = self.responses
        return ResponseCacheStats(dict(self.found), self.tokens, responses.evicted, len(responses), responses.nbytes)


def is_cacheable(requests: Sequence[ValidRequest], *, seeded: bool, control: bytes | None) -> bool:
    """Whether the same tokens would be sampled again and may be stored.  ``control``: the header ``CACHE_CONTROL``."""
    if control is not None and b"no-store" in control.lower():
        return False
    return seeded or all(request.sampling.temperature == GREEDY for request in requests)


@dataclass(frozen=True, slots=True)
class _Found:
    key: ResponseKey
    kept: PackedResponse | None


class CacheableStreams(TokenStreamSource, Protocol):
    """Streams whose responses are stored: the part of ``TokenStreams`` that this needs."""

    def serving_identity(self, request: RequestId) -> ModelIdentity | None: ...


class CachedResponseStreams:
    """A ``TokenStreamSource`` of one HTTP request, with stored responses.  Call ``lookup`` before the first stream."""

    def __init__(
        self,
        store: ResponseCache,
        streams: CacheableStreams,
        requests: Sequence[ValidRequest],
        identity: ModelIdentity,
    ) -> None:
        self._store = store
        self._streams = streams
        self._requests = requests
        self._identity = identity
        self._stopped: set[RequestId] = set()
        self._found: dict[int, _Found] = {}  # by choice: of requests with one key, another may ask for it
        self.lookup_result = ""  # what was found of all choices together, once it was looked for

    def lookup(self) -> None:
        """Find what is stored of the choices; called once."""
        words: set[str] = set()
        requests, self._requests = self._requests, ()  # who keeps this answer keeps no prompts
        for request in requests:
            key = response_key(request, self._identity)
            kept = self._store.responses.get(key)
            self._found[request.sampling.choice] = _Found(key, kept)
            word = _lookup_result(request, kept)
            self._store.found[word] += 1
            words.add(word)
        self.lookup_result = words.pop() if len(words) == 1 else PREFIX

    def headers(self) -> list[Header]:
        """For the answer."""
        return [(RESPONSE_CACHE, self.lookup_result.encode())] if self.lookup_result else []

    async def stream(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
        found = self._found.pop(request.sampling.choice)
        stored = None
        if found.kept is not None:
            stored = (await self._store.unpack(found.kept)).truncated(request.sampling.max_tokens)
            for batch in _batches(stored, len(request.prompt)):
                self._store.tokens += len(batch.tokens)
                yield batch
                if batch.finish is not None:
                    return
                await asyncio.sleep(0)
            request = _remaining_request(request, ResumeFrom(stored.tokens, self._identity))
        stream = self._streams.stream(request)
        seen, ours = _Recorder(stored, self._store.responses.largest), False
        try:
            async for batch in stream:
                ours = ours or self._streams.serving_identity(request.id) == self._identity
                seen.add(batch)
                yield batch
        finally:
            await stream.aclose()
            if ours and seen.fits and seen.tokens and (seen.finish is not None or request.id in self._stopped):
                self._store.responses.put(found.key, seen.response())

    def mark_stopped(self, request: RequestId) -> None:
        self._stopped.add(request)
        self._streams.mark_stopped(request)


class _Recorder:
    """An answer while it comes; nothing of one that will be too large.  ``most``: bytes, packed."""

    def __init__(self, stored: StoredResponse | None, most: int) -> None:
        self.finish: FinishReason | None = None
        self.fits = True
        self.tokens: list[int] = list(stored.tokens) if stored is not None else []
        self._logprobs: list[TokenLogprob] = list(stored.logprobs or ()) if stored is not None else []
        self._prompt = stored.prompt_logprobs if stored is not None else None
        self._left = most - len(self.tokens) - _min_bytes(self._logprobs) - _min_bytes(self._prompt or ())

    def add(self, batch: TokenBatch) -> None:
        self.finish = batch.finish
        self._left -= len(batch.tokens) + _min_bytes(batch.logprobs or ()) + _min_bytes(batch.prompt_logprobs or ())
        if self.fits and self._left >= 0:
            self.tokens += batch.tokens
            self._logprobs += batch.logprobs or ()
            self._prompt = batch.prompt_logprobs or self._prompt
        elif self.fits:
            self.fits = False
            self.tokens, self._logprobs, self._prompt = [], [], None

    def response(self) -> StoredResponse:
        finish = FinishReason.STOP if self.finish is FinishReason.STOP else None
        return StoredResponse(tuple(self.tokens), finish, tuple(self._logprobs) or None, self._prompt)


def _min_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    """A lower bound of their packed bytes: eight for each number, three for its id and frame."""
    return _LOGPROB_BYTES * (len(logprobs) + sum(len(token.top) for token in logprobs))


def _remaining_request(request: ValidRequest, begun: ResumeFrom) -> ValidRequest:
    """The part still to be computed, without prompt logprobs, which have been sent."""
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(request, begun=begun, sampling=sampling)


def _lookup_result(request: ValidRequest, kept: PackedResponse | None) -> str:
    if kept is None:
        return MISS
    return HIT if kept.covers(request.sampling.max_tokens) else PREFIX


def _batches(stored: StoredResponse, prompt_tokens: int) -> list[TokenBatch]:
    """A stored response as batches.  A complete one counts its whole prompt as cached."""
    starts = range(0, len(stored.tokens), REPLAY_BATCH_TOKENS)
    return [
        TokenBatch(
            tokens=stored.tokens[start : start + REPLAY_BATCH_TOKENS],
            logprobs=None if stored.logprobs is None else stored.logprobs[start : start + REPLAY_BATCH_TOKENS],
            prompt_logprobs=stored.prompt_logprobs if start == 0 else None,
            finish=stored.finish if start == starts[-1] else None,
            cached_tokens=prompt_tokens if start == 0 and stored.finish is not None else 0,
            stored=True,
        )
        for start in starts
    ]
