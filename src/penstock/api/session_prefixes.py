"""Why a session's prefix cache broke: where a turn's prompt differs from that of an earlier turn.

An agent sends its whole transcript with each turn, so the prompt of a turn should begin with that of the turn before.
A line that changes near the beginning makes a cache useless without any error; here the token is found at which it
happens.  A few prompts of a session are kept, since agents hold small conversations of their own beside the main one: a
prompt is compared with the one that it has the most pages in common with.  Pages are compared by their hashes, as in
caches, so another image, adapter or salt is found as well.  Bounded in sessions, bytes and time; of one gateway.  Knows
nothing about text: ``GET /debug/sessions`` has tokens decoded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.telemetry.log import log_event
from penstock.types import PAGE_TOKENS, TokenIds, ValidRequest, read_token_ids

log = logging.getLogger("penstock.api.sessions")

PROMPTS_KEPT = 4
"""Of one session."""

BREAKS_KEPT = 8
"""Of one session, the latest."""

SHOWN_BEFORE, SHOWN_BEHIND = 16, 32
"""Tokens around the place of a break that are kept of either prompt."""

LOG_S = 1.0
"""Between two lines in the log; breaks in between are counted in the next."""

_RECORD_BYTES, _PROMPT_BYTES, _BREAK_BYTES = 3072, 768, 1024
"""What a session, a prompt and a break take beside their tokens and hashes, at most."""

_HASH_BYTES = 32
_WORDS = _HASH_BYTES // 8


class BreakReason(StrEnum):
    """What differs between two prompts of a session."""

    TOKENS = "tokens"
    IMAGES = "images"  # or audio: other ones stand for the same tokens
    CACHE_SALT = "cache_salt"
    ADAPTER = "adapter"
    MODEL = "model"  # another version of it, or another numerics class


class PrefixBreak(NamedTuple):
    """A prompt that left an earlier prompt of its session before that one's end."""

    at: float  # by the gateway's clock
    reason: BreakReason
    token: int  # the first that differs, or the first of the first page that does
    lost_tokens: int  # of the earlier prompt, from that one's page on
    earlier_tokens: int  # of the earlier prompt, all
    shown_from: int  # the first token of both windows
    earlier: bytes  # tokens around the place, as ``read_token_ids`` has them
    later: bytes


class SessionPrompt(NamedTuple):
    """A prompt, as far as caches tell prompts apart."""

    tokens: TokenIds
    pages: npt.NDArray[np.uint64]  # [pages], the beginning of each page's hash
    cache_salt: str
    adapter: str  # its fingerprint; empty: none
    images: bool

    @classmethod
    def of(cls, request: ValidRequest) -> SessionPrompt:
        """The prompt of a request."""
        hashes = np.frombuffer(b"".join(request.block_hashes), np.uint64)
        return cls(
            request.prompt,
            hashes[::_WORDS].copy(),
            request.cache_salt,
            "" if request.adapter is None else request.adapter.fingerprint,
            bool(request.images),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.tokens.nbytes + self.pages.nbytes + len(self.cache_salt) + _PROMPT_BYTES


@dataclass(slots=True)
class SessionPrefixRecord:
    """The latest prompts of one session, and where they broke."""

    prompts: list[SessionPrompt] = field(default_factory=list)  # the latest last
    breaks: deque[PrefixBreak] = field(default_factory=lambda: deque(maxlen=BREAKS_KEPT))
    turns: int = 0
    broken: int = 0  # times
    seen_at: float = 0.0
    nbytes: int = 0  # of memory

    def count(self) -> int:
        """Sets ``nbytes``, and returns by how much it grew."""
        before = self.nbytes
        self.nbytes = _RECORD_BYTES + sum(prompt.nbytes for prompt in self.prompts) + _BREAK_BYTES * len(self.breaks)
        return self.nbytes - before


class _Tenant:
    """The sessions of one tenant, the one that was seen last at the end."""

    __slots__ = ("nbytes", "sessions")

    def __init__(self) -> None:
        self.sessions: OrderedDict[str, SessionPrefixRecord] = OrderedDict()
        self.nbytes = 0


class SessionPrefixes:
    """The sessions of one gateway, the latest of each tenant."""

    def __init__(self, limits: RequestLimits, clock: Clock, on_break: Callable[[str, int], None]) -> None:
        """``on_break`` is called with the reason and the lost tokens of each break."""
        self._limits = limits
        self._clock = clock
        self._on_break = on_break
        self._tenants: dict[str, _Tenant] = {}  # those with sessions
        self._seen: OrderedDict[tuple[str, str], SessionPrefixRecord] = OrderedDict()  # of all tenants, latest last
        self._bytes = 0
        self._logged_at = -LOG_S
        self._unlogged = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes

    def observe(self, request: ValidRequest) -> PrefixBreak | None:
        """The next turn of the request's session.  Returns the break, if this is one."""
        if not request.session or not self._limits.max_session_prefix_bytes:
            return None
        now = self._clock.now()
        self._forget_old(now)
        record = self._touch(request.qos.tenant, request.session)
        prompt = SessionPrompt.of(request)
        found = _compare(record, prompt, now)
        record.turns += 1
        record.seen_at = now
        if len(prompt.pages):  # else no cache has anything of it
            record.prompts.append(prompt)
            del record.prompts[:-PROMPTS_KEPT]
        if found is not None:
            record.breaks.append(found)
            record.broken += 1
            self._on_break(found.reason.value, found.lost_tokens)
            self._log(request.session, found)
        self._grow(self._tenants[request.qos.tenant], record.count())
        self._make_room(request.qos.tenant)
        return found

    def find(self, session: str) -> list[tuple[str, SessionPrefixRecord]]:
        """The sessions of this name, with their tenants."""
        self._forget_old(self._clock.now())
        named = [(name, tenant.sessions.get(session)) for name, tenant in self._tenants.items()]
        return [(name, record) for name, record in named if record is not None]

    def _touch(self, tenant: str, session: str) -> SessionPrefixRecord:
        """The record of a session, now the latest."""
        own = self._tenants.setdefault(tenant, _Tenant()).sessions
        record = own.setdefault(session, SessionPrefixRecord())
        own.move_to_end(session)
        self._seen[tenant, session] = record
        self._seen.move_to_end((tenant, session))
        return record

    def _grow(self, tenant: _Tenant, nbytes: int) -> None:
        tenant.nbytes += nbytes
        self._bytes += nbytes

    def _forget_old(self, now: float) -> None:
        """Forgets sessions that were not seen for ``session_prefix_s``."""
        while self._seen:
            (tenant, _), record = next(iter(self._seen.items()))
            if now - record.seen_at <= self._limits.session_prefix_s:
                return
            self._drop_oldest(tenant)

    def _make_room(self, growing: str) -> None:
        """Forgets the oldest sessions of ``growing`` if it has more than its share, else of who has most."""
        limits = self._limits
        while self._bytes > limits.max_session_prefix_bytes:
            self._drop_oldest(self._largest(growing, limits.max_session_prefix_bytes, lambda one: one.nbytes))
        while len(self._seen) > limits.max_sessions:
            self._drop_oldest(self._largest(growing, limits.max_sessions, lambda one: len(one.sessions)))

    def _largest(self, growing: str, limit: int, size: Callable[[_Tenant], int]) -> str:
        own = self._tenants.get(growing)
        if own is not None and size(own) > limit // len(self._tenants):
            return growing
        return max(self._tenants, key=lambda name: size(self._tenants[name]))

    def _drop_oldest(self, name: str) -> None:
        tenant = self._tenants[name]
        session, record = tenant.sessions.popitem(last=False)
        del self._seen[name, session]
        self._grow(tenant, -record.nbytes)
        if not tenant.sessions:
            del self._tenants[name]

    def _log(self, session: str, found: PrefixBreak) -> None:
        """Positions only: texts are for operators."""
        if found.at - self._logged_at < LOG_S:
            self._unlogged += 1
            return
        log_event(
            log,
            logging.INFO,
            "a session's prefix broke",
            session=session,
            reason=found.reason.value,
            token=found.token,
            lost_tokens=found.lost_tokens,
            earlier_tokens=found.earlier_tokens,
            more_since_last_line=self._unlogged,
        )
        self._logged_at, self._unlogged = found.at, 0


def _compare(record: SessionPrefixRecord, prompt: SessionPrompt, now: float) -> PrefixBreak | None:
    """Where a prompt leaves the one that it has most in common with.  Takes out the one that it continues."""
    if not record.prompts or not len(prompt.pages):
        return None
    in_common = [_common(earlier.pages, prompt.pages) for earlier in record.prompts]
    pages = max(in_common)
    # Of several, the one that it goes on from, else the latest.
    best = max((count, count == len(record.prompts[i].pages), i) for i, count in enumerate(in_common))[2]
    if pages == 0:  # no page decides, so the tokens do
        newest_first = reversed(range(len(record.prompts)))
        best = max(newest_first, key=lambda i: common_tokens(record.prompts[i].tokens, prompt.tokens))
    earlier = record.prompts[best]
    lost_pages = len(earlier.pages) - pages
    if not lost_pages or pages == len(prompt.pages):
        del record.prompts[best]
        return None
    token, reason = _difference(earlier, prompt, pages)
    begin = max(0, token - SHOWN_BEFORE)
    return PrefixBreak(
        at=now,
        reason=reason,
        token=token,
        lost_tokens=lost_pages * PAGE_TOKENS,
        earlier_tokens=len(earlier.tokens),
        shown_from=begin,
        earlier=earlier.tokens[begin : token + SHOWN_BEHIND].tobytes(),
        later=prompt.tokens[begin : token + SHOWN_BEHIND].tobytes(),
    )


def _difference(earlier: SessionPrompt, later: SessionPrompt, pages: int) -> tuple[int, BreakReason]:
    """The first token that differs, or the page behind the ``pages`` in common, and why that page does."""
    token = common_tokens(earlier.tokens, later.tokens)
    start = pages * PAGE_TOKENS
    if token < start + PAGE_TOKENS:
        return token, BreakReason.TOKENS
    if earlier.cache_salt != later.cache_salt:
        return start, BreakReason.CACHE_SALT
    if earlier.adapter != later.adapter:
        return start, BreakReason.ADAPTER
    return start, BreakReason.IMAGES if earlier.images or later.images else BreakReason.MODEL


def common_tokens(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two prompts begin with alike."""
    return _common(np.asarray(a), np.asarray(b))


def shown_tokens(window: bytes) -> list[int]:
    """The tokens of one side of a break."""
    return read_token_ids(window).tolist()


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    count = min(len(a), len(b))
    if count == 0:
        return 0
    differs = np.not_equal(a[:count], b[:count])
    first = int(differs.argmax())
    return first if differs[first] else count
