"""Idempotency keys: a repeated request gets the same response and is billed once.

Id, seed and event signatures follow from tenant, key, body, model and adapter, and from a secret of the service: every
gateway derives the same ones and stores nothing for it.  What this gateway still has of a response
(``IdempotencyCache``) is shared and replayed; anything else is recomputed, with the same result (docs/determinism.md).
A repeat joins a response that is still running; after a disconnect the response runs on for ``resume_grace_s``::

    router --tokens--> one reader task per choice --> buffered so far --> any number of consumers

``UsageDedup`` counts each token once, however many requests received it.  Where there are other gateways, the home of
the key (``KeyHomes``) knows what those have counted, and what they have saved of a response is replayed
(``api.resumed_streams``).  Knows nothing about text or events.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import msgspec

from penstock.api.http import HttpExchange
from penstock.api.sse import SIGNATURE_BYTES, ChoicePosition, EventSigner, ResumePoint
from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.errors import KeyReused, NoWorkers, PenstockError, RequestError
from penstock.interfaces import IDEMPOTENCY_KEY, JsonObject, RequestContext, TokenStream
from penstock.types import ModelIdentity, RequestId, ResumeKey, TokenBatch, ValidRequest
from penstock.wire.gateway_messages import (
    ClaimIdempotencyKey,
    IdempotencyKeyState,
    IdempotencyKeyStatus,
)


class UsageDelta(NamedTuple):
    """The part of a response that was not billed before."""

    first: bool  # nothing of it was: its prompt and the request count, too
    tokens: int
    stored: int  # of those, tokens that come from a stored response


class SentPart(NamedTuple):
    """Tokens of one choice that are to be counted: from ``begin`` to ``end``, stored ones up to ``stored_end``."""

    choice: int
    begin: int
    end: int
    stored_end: int


class UncountedUsage(NamedTuple):
    """What this gateway has sent and not counted yet."""

    first: bool
    parts: tuple[SentPart, ...]
    sent: tuple[int, ...]  # tokens of each choice, also those that were counted

    def beyond(self, counted: Sequence[int] = ()) -> UsageDelta:
        """The part that other gateways have not counted: ``counted`` tokens of each choice; empty: nothing."""
        tokens = stored = 0
        for part in self.parts:
            begin = max(part.begin, counted[part.choice] if part.choice < len(counted) else 0)
            tokens += max(0, part.end - begin)
            stored += max(0, part.stored_end - begin)
        return UsageDelta(self.first and not counted, tokens, stored)


_NONE: frozenset[int] = frozenset()


class UsageDedup:
    """How far each choice of a response has been billed."""

    __slots__ = ("_first", "_over", "_tokens")

    def __init__(self) -> None:
        self._first = True
        self._tokens: dict[int, int] | None = None  # with the first: most are made for nothing
        self._over = _NONE  # choices of which all is

    @classmethod
    def from_positions(cls, places: Mapping[int, ChoicePosition]) -> Self:
        """Counted up to these positions by another gateway, or by this one long ago.

        A client without any token gets the whole response, so the prompt and the request count here.
        """
        made = cls()
        made._first = bool(places) and not any(each.tokens or each.flushed or each.ended for each in places.values())
        made._tokens = {choice: place.tokens for choice, place in places.items()}
        made._over = frozenset(choice for choice, place in places.items() if place.ended)
        return made

    @classmethod
    def from_counts(cls, counted: Sequence[int]) -> Self:
        """Counted by another gateway: tokens of each choice; empty: nothing was."""
        made = cls()
        made._first = not counted
        made._tokens = dict(enumerate(counted))
        return made

    def new_usage(self, sent: Sequence[tuple[int, int]]) -> UsageDelta:
        """``sent``: for each choice its tokens, and how many of them came from the response cache."""
        return self.take_uncounted(sent).beyond()

    def take_uncounted(self, sent: Sequence[tuple[int, int]]) -> UncountedUsage:
        """As ``new_usage``, choice by choice.  It counts as billed from now on."""
        first, self._first = self._first, False
        parts = []
        counted = self._tokens = self._tokens or {}
        for choice, (end, stored_end) in enumerate(sent):
            begin = counted.get(choice, 0)
            if choice in self._over or end <= begin:
                continue
            parts.append(SentPart(choice, begin, end, stored_end))
            counted[choice] = end
        return UncountedUsage(first, tuple(parts), tuple(end for end, _ in sent))


LAST_EVENT_ID = b"last-event-id"

SEED_BITS = 53
"""A derived seed survives clients that keep JSON numbers as doubles, as a drawn one does."""

_NAME_BYTES = 12
_KEY_BYTES = 16

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotentRequest:
    """A request with an idempotency key."""

    tenant: str = ""
    key: bytes  # of tenant and key; what it is kept by
    name: str  # of the answer and of its charge: the same for every repeat
    seed: int  # instead of a drawn one
    mark: str  # of body, model and adapter: another one is another request
    adapter: str = ""  # the fingerprint of that LoRA adapter; empty: there is none
    signer: EventSigner  # of its events
    resume_point: ResumePoint = field(default_factory=ResumePoint)
    resumed: bool = False  # the client has some of it already

    def seeded_body(self, body: JsonObject) -> JsonObject:
        """With a seed in any case, so that a repeat draws the same tokens."""
        return body if body.get("seed") is not None else {**body, "seed": self.seed}


def parse_idempotency(
    exchange: HttpExchange,
    body: JsonObject,
    envelope: RequestContext,
    limits: RequestLimits,
    event_key: bytes,
    *,
    adapter: str = "",
) -> IdempotentRequest | None:
    """What the request's headers ask for; None without a key.  Raises RequestError, KeyReused.

    ``adapter``: the fingerprint of the LoRA adapter that the body's model names; empty: it names none.
    """
    given, last = exchange.header(IDEMPOTENCY_KEY), exchange.header(LAST_EVENT_ID)
    if given is None:
        if last is not None:
            raise RequestError(
                "Last-Event-ID needs the Idempotency-Key that the stream was begun with.",
                code="missing_idempotency_key",
            )
        return None
    _check(given, limits.max_idempotency_key_chars)
    if last is not None and body.get("stream") is not True:
        raise RequestError("Last-Event-ID is for streams: send it with 'stream': true.", code="invalid_last_event_id")
    wide = _tenant_key_hash(envelope.caller.tenant, given)
    marks = event_signer(event_key, envelope.caller.tenant, given, body, envelope.identity, adapter=adapter)
    return IdempotentRequest(
        tenant=envelope.caller.tenant,
        key=wide[:_KEY_BYTES],
        name=wide[_KEY_BYTES : _KEY_BYTES + _NAME_BYTES].hex(),
        seed=int.from_bytes(wide[-8:], "little") >> (64 - SEED_BITS),
        mark=_body_hash(body, envelope.identity, adapter),
        adapter=adapter,
        signer=marks,
        resume_point=ResumePoint() if last is None else ResumePoint.parse(last, marks),
        resumed=last is not None,
    )


def event_signer(
    event_key: bytes, tenant: str, key: bytes, body: JsonObject, identity: ModelIdentity, *, adapter: str = ""
) -> EventSigner:
    """The marks of one request's events.  ``adapter``: the fingerprint of its LoRA adapter; empty: it has none."""
    return EventSigner(event_key, _tenant_key_hash(tenant, key) + _body_hash(body, identity, adapter).encode())


def _tenant_key_hash(tenant: str, key: bytes) -> bytes:
    own = blake2b(tenant.encode(), digest_size=_KEY_BYTES).digest()
    return blake2b(own + key, digest_size=64, person=b"penstock idem").digest()


def _body_hash(body: JsonObject, identity: ModelIdentity, adapter: str) -> str:
    asked = blake2b(_encode(body), digest_size=SIGNATURE_BYTES, person=b"penstock body")
    asked.update(identity.system_fingerprint.encode())
    if adapter:  # the body has its name, which can be given to another adapter
        asked.update(b"\0" + adapter.encode())
    return asked.hexdigest()


def _check(key: bytes, most: int) -> None:
    plain = all(33 <= char < 127 for char in key)
    if not plain or not 0 < len(key) <= most:
        raise RequestError(
            f"The header Idempotency-Key must have 1 to {most} visible ASCII characters (a UUID, for example).",
            code="invalid_idempotency_key",
        )


class TokenStreamSource(Protocol):
    """A source of token streams: the part of ``TokenStreams`` that serves requests."""

    def stream(self, request: ValidRequest) -> TokenStream: ...

    def mark_stopped(self, request: RequestId) -> None: ...


NO_RESUME_KEYS: Mapping[int, ResumeKey] = MappingProxyType({})


class KeyHomes(Protocol):
    """The homes of keys, of which all gateways of the service ask the same one about a key
    (``router.idempotency_homes``)."""

    def digest(self, name: bytes) -> bytes:
        """What homes know instead of a key or a tenant."""
        ...

    def send(
        self,
        message: ClaimIdempotencyKey,
        on_state: Callable[[IdempotencyKeyState | None], None] | None = None,
    ) -> None:
        """Tells the home of the key; ``on_state`` is called with its answer, None if there is none, be it now."""
        ...

    def find_saved(
        self, key: bytes, names: Sequence[bytes], on_found: Callable[[Sequence[tuple[int, ...]]], None]
    ) -> None:
        """Looks for tokens that another gateway has saved; ``on_found`` is called with those of each name, be it
        now."""
        ...

    def count_tokens(self, prompts: int, generated: int, replayed: int) -> None:
        """Counts tokens of prompts and responses that are counted late (``CachedStream.is_deferred``), and tokens that
        another gateway has counted."""
        ...

    def count_resumed(self, tokens: int) -> None:
        """Counts tokens that another gateway has saved, and that are not computed again."""
        ...


class KeyClaim:
    """What this gateway tells the home of one key, and learns of it."""

    def __init__(
        self, homes: KeyHomes, keyed: IdempotentRequest, resume_keys: Mapping[int, ResumeKey] = NO_RESUME_KEYS
    ) -> None:
        """``resume_keys``: of the choices whose tokens are saved."""
        self.homes = homes
        tenant = homes.digest(keyed.tenant.encode())
        self._message = ClaimIdempotencyKey(key=homes.digest(keyed.key), tenant=tenant, mark=bytes.fromhex(keyed.mark))
        self.state: IdempotencyKeyState | None = None  # the home's answer
        self._resume_keys = dict(resume_keys)
        self._resumed = keyed.resumed
        self._answered = self._searching = self._searched = self._has_found = False
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Claims the key (``IdempotencyCache.open_claim``).  Raises KeyReused.

        Waits for the home's answer, and for saved tokens of a request that another gateway has had: also where there
        is no other gateway any more.
        """
        self.homes.send(msgspec.structs.replace(self._message, running=True), self._on_state)
        self._search_if_useful()
        while not self._is_settled():
            self._news.clear()
            await self._news.wait()
            self._search_if_useful()
        if self.state is not None and self.state.status is IdempotencyKeyStatus.REUSED:
            raise _key_reused()

    def _search_if_useful(self) -> None:
        """Begin the search for saved tokens once it may find some."""
        if self._resume_keys and not self._searching and (self._resumed or self.is_shared):
            self._searching = True
            names = [resume.name for resume in self._resume_keys.values()]
            self.homes.find_saved(self._message.key, names, self._on_found)

    def _is_settled(self) -> bool:
        """Whether nothing more has to be known."""
        is_searching = self._searching and not self._searched
        return self._answered and not is_searching

    def _on_state(self, state: IdempotencyKeyState | None) -> None:
        self._answered, self.state = True, state
        self._news.set()

    def _on_found(self, found: Sequence[tuple[int, ...]]) -> None:
        self._searched = True
        for (choice, resume), tokens in zip(list(self._resume_keys.items()), found, strict=True):
            self._resume_keys[choice] = msgspec.structs.replace(resume, tokens=tokens)
            self._has_found = self._has_found or bool(tokens)
        self._news.set()

    def take_resume_key(self, choice: int) -> ResumeKey | None:
        """Where the tokens of this choice are saved, with those that another gateway has saved; once."""
        return self._resume_keys.pop(choice, None)

    @property
    def is_shared(self) -> bool:
        """Whether another gateway has the request, or has had it."""
        return self._has_found or self.counted is not None

    @property
    def counted(self) -> Sequence[int] | None:
        """Tokens of each choice that other gateways have counted, as the home knows it; None: it knows nothing."""
        known = (IdempotencyKeyStatus.RUNNING, IdempotencyKeyStatus.KNOWN)
        return self.state.sent if self.state is not None and self.state.status in known else None

    def settle(
        self,
        usage: UncountedUsage,
        bill: Callable[[UsageDelta], None],
        *,
        is_running: Callable[[], bool],
        on_counted: Callable[[Sequence[int], bool], None],
    ) -> None:
        """Calls ``bill`` with what no other gateway has counted, once the home says so.

        A home that does not answer may be lost: the one that the key has by then is asked, too.  ``is_running`` says
        whether this gateway still computes it.  ``on_counted`` is called with the tokens of each choice that others
        have counted, and whether another gateway computes it, too, and counts its tokens as they come.
        """

        def ask(on_state: Callable[[IdempotencyKeyState | None], None]) -> None:
            message = msgspec.structs.replace(self._message, running=is_running(), sent=usage.sent)
            self.homes.send(message, on_state)

        def count(state: IdempotencyKeyState | None) -> None:
            counted = () if state is None else state.sent
            bill(usage.beyond(counted))
            on_counted(counted, state is not None and state.status is IdempotencyKeyStatus.RUNNING)

        def on_state(state: IdempotencyKeyState | None) -> None:
            if state is None:
                ask(count)
            else:
                count(state)

        ask(on_state)

    def end(self, *, withdrawn: bool = False) -> None:
        """This gateway computes it no more.  ``withdrawn``: it never did."""
        self.homes.send(msgspec.structs.replace(self._message, withdrawn=withdrawn))


def _key_reused() -> KeyReused:
    return KeyReused(
        "This Idempotency-Key was used for another request body or another version of the model or adapter. "
        "Use a new key for a new request."
    )


class KeyOutcome(StrEnum):
    """What became of a request with a key; a metric's label."""

    NEW = "new"
    JOINED = "joined"  # the first still runs here
    REPLAYED = "replayed"  # the first has ended, and its tokens are kept
    SHARED = "shared"  # another gateway has it, or has had it: computed again
    REPEATED = "repeated"  # the key is known and the tokens are not: computed again
    RESUMED = "resumed"  # the client has had some of it, from elsewhere or long ago: computed again
    REFUSED = "refused"  # the key was used for something else


class _BufferedChoice:
    """One choice: its tokens so far, and its consumers."""

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
        """The count of buffered numbers, roughly."""
        tops = (len(token.top) for batch in self.batches for token in batch.logprobs or ())
        return sum(len(batch.tokens) for batch in self.batches) + sum(2 * (1 + top) for top in tops)

    @property
    def resumed_tokens(self) -> int:
        """Tokens up to the last one that another gateway had computed; 0: there is none."""
        known = resumed = 0
        for batch in self.batches:
            known += len(batch.tokens)
            if batch.resumed:
                resumed = known
            elif not batch.stored:
                break
        return resumed

    def enough(self) -> None:
        """A consumer found the end of the response in the tokens so far."""
        self.finished = True
        self._pump.cancel()

    def read(self, closed: Callable[[], object]) -> _BufferReader:
        """A stream from the first token on, which counts as a consumer until it is closed."""
        self._readers += 1
        return _BufferReader(self, closed)

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
        """A consumer has closed its stream."""
        self._readers -= 1
        if not self._readers and not self.finished and not self.failed:
            asyncio.get_running_loop().call_later(self._grace_s, self._unless_read)

    def forget_error(self) -> None:
        """Called without consumers.  The error's traceback has their frames, and those have this object."""
        self._error = None

    def _unless_read(self) -> None:
        if not self._readers and not self.finished:
            self.failed = True  # at once: later consumers must not wait for the pump to end
            self._pump.cancel()

    async def _run(self, source: TokenStream) -> None:
        try:
            async with aclosing(source):
                async for batch in source:
                    self.batches.append(batch)
                    self.finished = self.finished or batch.finish is not None
                    self._tell()
        except PenstockError as error:
            self._error = error.with_traceback(None)  # its frames have the whole prompt
        except Exception as error:  # noqa: BLE001 - raised where it is read, and logged there with its traceback
            self._error = error
        finally:
            self.failed = not self.finished
            self._tell()
            self._over()
            del self._over  # it refers to the response, which refers to this

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class _BufferReader:
    """``TokenStream`` over buffered tokens."""

    def __init__(self, tokens: _BufferedChoice, closed: Callable[[], object]) -> None:
        self._tokens = tokens
        self._over = closed
        self._at = 0
        self._closed = False

    def __aiter__(self) -> _BufferReader:
        return self

    async def __anext__(self) -> TokenBatch:
        batch = None if self._closed else await self._tokens.after(self._at)
        if batch is None:
            await self.aclose()
            raise StopAsyncIteration
        self._at += 1
        return batch

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._over()
            self._tokens.left()


class CachedStream:
    """All choices of one request, shared by the requests with its key."""

    def __init__(
        self,
        streams: TokenStreamSource,
        grace_s: float,
        over: Callable[[CachedStream], None],
        metered: UsageDedup,
        claim: KeyClaim | None = None,
        *,
        is_computed: Callable[[], bool],
    ) -> None:
        """``over`` is called when no more tokens of a choice will come.  ``is_computed``: whether this gateway
        computes the key, for this stream or another.  ``metered``: what was billed before, also for a buffer that was
        evicted since.
        """
        self.rated, self.metered = UsageDedup(), metered
        self.claim = claim
        self.is_deferred = claim is not None and claim.is_shared  # its tokens are counted at its end
        self.consumers = 0  # requests with its key: between ``IdempotencyCache.lookup`` and ``release``
        self._streams = streams
        self._grace_s = grace_s
        self._over = over
        self._is_computed = is_computed
        self._choices: dict[int, _BufferedChoice] = {}
        self._asked: dict[RequestId, tuple[int, RequestId]] = {}  # -> choice, and what its first asker called it
        self._names: dict[int, RequestId] = {}

    def stream(self, request: ValidRequest) -> TokenStream:
        """The first who asks for a choice has it computed."""
        choice = request.sampling.choice
        self._asked[request.id] = choice, self._names.setdefault(choice, request.id)
        tokens = self._choices.get(choice)
        if tokens is None:
            resume = None if self.claim is None else self.claim.take_resume_key(choice)
            if self.is_deferred or resume is not None:
                request = msgspec.structs.replace(request, usage_deferred=self.is_deferred, resume=resume)
            tokens = self._choices[choice] = _BufferedChoice(
                self._streams.stream(request), self._grace_s, lambda: self._over(self)
            )
        return tokens.read(lambda: self._asked.pop(request.id, None))

    def mark_stopped(self, request: RequestId) -> None:
        asked = self._asked.get(request)
        if asked is not None:
            choice, name = asked
            self._streams.mark_stopped(name)
            self._choices[choice].enough()

    def is_from(self, streams: TokenStreamSource) -> bool:
        """Whether its tokens come from there."""
        return self._streams is streams

    @property
    def is_started(self) -> bool:
        """Whether any of it was requested."""
        return bool(self._choices)

    @property
    def is_running(self) -> bool:
        """Whether more tokens may come."""
        return any(not tokens.finished and not tokens.failed for tokens in self._choices.values())

    def settle(
        self, usage: UncountedUsage, bill: Callable[[UsageDelta], None], computed: UsageDelta, prompts: Sequence[int]
    ) -> None:
        """Calls ``bill`` with the part of this usage that no gateway has counted.

        ``computed``: what this gateway has computed for it and not settled before.  ``prompts``: the tokens of
        each choice's.
        """
        if self.claim is None:
            bill(usage.beyond())
            return
        on_counted = partial(self._count_deferred, self.claim, usage, computed=computed, prompts=prompts)
        if usage.first or usage.parts:
            self.claim.settle(usage, bill, is_running=self._is_computed, on_counted=on_counted)
        else:
            on_counted((), False)

    def _count_deferred(
        self,
        claim: KeyClaim,
        usage: UncountedUsage,
        counted: Sequence[int],
        elsewhere: bool,
        *,
        computed: UsageDelta,
        prompts: Sequence[int],
    ) -> None:
        """Counts what the router has not counted.  ``elsewhere``: another gateway counts its tokens as they come, as
        the one did that had the resumed ones computed."""
        if not self.is_deferred:
            return
        part, prompt_tokens, generated = usage.beyond(counted), 0, 0
        if not elsewhere:
            resumed = [
                self._choices[choice].resumed_tokens if choice in self._choices else 0 for choice in range(len(prompts))
            ]
            own = usage.beyond([max(pair) for pair in zip_longest(counted, resumed, fillvalue=0)])
            generated = own.tokens - own.stored
            if part.first:
                prompt_tokens = sum(tokens for tokens, begun in zip(prompts, resumed, strict=True) if not begun)
        claim.homes.count_tokens(prompt_tokens, generated, max(0, computed.tokens - part.tokens))

    @property
    def has_tokens(self) -> bool:
        """Whether a token has come."""
        return any(tokens.batches for tokens in self._choices.values())

    @property
    def failed(self) -> bool:
        """Whether it cannot be completed."""
        return any(tokens.failed for tokens in self._choices.values())

    @property
    def finished(self) -> bool:
        """Whether it is complete."""
        return bool(self._choices) and all(tokens.finished for tokens in self._choices.values())

    def forget_errors(self) -> None:
        """Called without consumers: after that it is in no reference cycle, so its memory is freed at once."""
        for tokens in self._choices.values():
            tokens.forget_error()

    @property
    def weight(self) -> int:
        """The count of buffered numbers, roughly."""
        return sum(tokens.weight for tokens in self._choices.values())


@dataclass(slots=True)
class _Entry:
    key: bytes
    mark: str
    until: float = 0.0
    answer: CachedStream | None = None
    weight: int = 0  # of a finished answer
    has_sent: bool = False  # a token had come of a response that was evicted
    metered: UsageDedup = field(default_factory=UsageDedup)


class IdempotencyCache:
    """Responses by key, least recently used first.  Bounded in time, keys and tokens."""

    def __init__(self, limits: RequestLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._claiming: dict[tuple[bytes, str], int] = {}  # requests whose claims are being opened, by key and mark
        self._told: OrderedDict[bytes, None] = OrderedDict()  # keys of answers that are kept whole, oldest first
        self.tokens = 0  # the weight of those

    def __len__(self) -> int:
        return len(self._entries)

    def has_stream(self, keyed: IdempotentRequest) -> bool:
        """Whether nothing has to be computed for this request."""
        entry = self._entries.get(keyed.key)
        if entry is None or entry.answer is None or entry.answer.failed:
            return False
        return entry.until > self._clock.now() or self._runs(entry)

    async def open_claim(self, keyed: IdempotentRequest, claim: KeyClaim) -> None:
        """``KeyClaim.open``.  Raises KeyReused.

        The home knows one claim of this gateway, however many requests with the key are here: the last one that is
        cancelled before any of them is computed withdraws it.
        """
        name = keyed.key, keyed.mark
        self._claiming[name] = self._claiming.get(name, 0) + 1
        try:
            await claim.open()
        except asyncio.CancelledError:
            if self._claiming[name] == 1 and not self._has_running(keyed):
                claim.end(withdrawn=True)
            raise
        finally:
            self._claiming[name] -= 1
            if not self._claiming[name]:
                del self._claiming[name]

    def _has_running(self, keyed: IdempotentRequest) -> bool:
        """Whether another request with this key and body is computed, or is about to be."""
        entry = self._entries.get(keyed.key)
        return entry is not None and entry.mark == keyed.mark and self._runs(entry)

    def lookup(
        self, keyed: IdempotentRequest, streams: TokenStreamSource, claim: KeyClaim | None = None
    ) -> tuple[CachedStream, KeyOutcome]:
        """The stream of this request, running, finished or not started.  ``claim``: of one that is computed here.

        Raises KeyReused.
        """
        now = self._clock.now()
        entry = self._entries.get(keyed.key)
        if entry is not None and entry.until <= now and not self._runs(entry):
            self._drop(keyed.key)
            entry = None
        if entry is not None and entry.mark != keyed.mark:
            if claim is not None:  # the home has forgotten the one that has the key
                claim.end(withdrawn=True)
            raise _key_reused()
        met = _outcome(entry, keyed)
        is_shared = claim is not None and claim.is_shared
        if is_shared and met is KeyOutcome.NEW:
            met = KeyOutcome.SHARED
        if entry is None:
            entry = self._entries[keyed.key] = _Entry(keyed.key, keyed.mark)
            if claim is not None and claim.counted is not None:
                entry.metered = UsageDedup.from_counts(claim.counted)
            elif keyed.resumed:
                entry.metered = UsageDedup.from_positions(keyed.resume_point.positions)
        answer = entry.answer
        if answer is None or answer.failed:
            self._forget_tokens(entry)
            answer = entry.answer = CachedStream(
                streams,
                self._limits.resume_grace_s,
                partial(self._ended, keyed.key, keyed.mark),
                entry.metered,
                claim,
                is_computed=partial(self._is_computed, keyed.key, keyed.mark),
            )
        elif claim is not None and answer.is_started and not answer.is_running:
            claim.end()  # it ended while this was claimed, and did not say so for that reason
        answer.consumers += 1
        entry.until = now + self._limits.idempotency_s
        self._entries.move_to_end(keyed.key)
        self._make_room(now)  # it may take this entry, too
        return answer, met

    def release(self, keyed: IdempotentRequest, answer: CachedStream) -> None:
        """A consumer is done.  A stream that was never started, because all requests were refused, is removed."""
        answer.consumers -= 1
        self._forget_failed(keyed.key, answer)
        entry = self._entries.get(keyed.key)
        if answer.consumers or answer.is_started or entry is None or entry.answer is not answer:
            return
        if answer.claim is not None and (keyed.key, keyed.mark) not in self._claiming:
            answer.claim.end(withdrawn=True)
        self._forget_tokens(entry)
        if not entry.has_sent:
            self._drop(keyed.key)

    def _is_computed(self, key: bytes, mark: str) -> bool:
        """Whether tokens of a request with this key and body may come here, or it is about to be begun."""
        entry = self._entries.get(key)
        has_running = entry is not None and entry.answer is not None and entry.mark == mark and entry.answer.is_running
        return has_running or (key, mark) in self._claiming

    def _ended(self, key: bytes, mark: str, answer: CachedStream) -> None:
        """A choice of this response has ended, perhaps after another one of the same key has begun."""
        if answer.claim is not None and not answer.is_running and not self._is_computed(key, mark):
            answer.claim.end()
        self._forget_failed(key, answer)
        entry = self._entries.get(key)
        if entry is None or entry.answer is not answer or not answer.finished:
            return
        self.tokens -= entry.weight
        entry.weight = entry.answer.weight
        self.tokens += entry.weight
        self._told[key] = None
        self._make_room(self._clock.now())

    def _forget_failed(self, key: bytes, answer: CachedStream) -> None:
        """Frees the tokens of a response that cannot be completed, once it has no consumers.

        A repeat is computed again, so they have no use, and no bound counts them.
        """
        entry = self._entries.get(key)
        if entry is None or entry.answer is not answer or answer.consumers:
            return
        if answer.failed and not answer.is_running:
            self._forget_tokens(entry)
            answer.forget_errors()

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
        entry.has_sent = entry.has_sent or (entry.answer is not None and entry.answer.has_tokens)
        entry.answer, entry.weight = None, 0
        self._told.pop(entry.key, None)


def _outcome(entry: _Entry | None, keyed: IdempotentRequest) -> KeyOutcome:
    if entry is None or entry.answer is None or entry.answer.failed:
        has_sent = entry is not None and (entry.has_sent or (entry.answer is not None and entry.answer.has_tokens))
        return KeyOutcome.RESUMED if keyed.resumed else KeyOutcome.REPEATED if has_sent else KeyOutcome.NEW
    return KeyOutcome.REPLAYED if entry.answer.finished else KeyOutcome.JOINED
