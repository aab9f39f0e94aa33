"""Why a session's prefix cache broke: where a turn's prompt differs from that of an earlier turn.

An agent sends its whole transcript with each turn, so the prompt of a turn should begin with that of the turn before.
A line that changes near the beginning makes a cache useless without any error; here the token is found at which it
happens.  A few prompts of a session are kept, since agents hold small conversations of their own beside the main one: a
prompt is compared with the one that it has the most in common with.  Bounded in sessions, bytes and time; of one
gateway.  Knows nothing about text: ``GET /debug/sessions`` has tokens decoded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.telemetry.log import log_event
from penstock.types import PAGE_TOKENS, TokenIds

log = logging.getLogger("penstock.api.sessions")

PROMPTS_KEPT = 4
"""Of one session."""

BREAKS_KEPT = 8
"""Of one session, the latest."""

SHOWN_BEFORE, SHOWN_BEHIND = 16, 32
"""Tokens around the place of a break that are kept of either prompt."""

LOG_S = 1.0
"""Between two lines in the log; breaks in between are counted in the next."""


class PrefixBreak(NamedTuple):
    """A prompt that left an earlier prompt of its session before that one's end."""

    at: float  # by the gateway's clock
    token: int  # the first that differs
    lost_tokens: int  # of the earlier prompt, from that one's page on
    earlier_tokens: int  # of the earlier prompt, all
    shown_from: int  # the first token of both windows
    earlier: Sequence[int]  # tokens around the place
    later: Sequence[int]


@dataclass(slots=True)
class SessionPrefixRecord:
    """The latest prompts of one session, and where they broke."""

    prompts: list[TokenIds] = field(default_factory=list)  # the latest last
    breaks: deque[PrefixBreak] = field(default_factory=lambda: deque(maxlen=BREAKS_KEPT))
    turns: int = 0
    broken: int = 0  # times
    seen_at: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of its prompts."""
        return sum(prompt.nbytes for prompt in self.prompts)


class SessionPrefixes:
    """The sessions of one gateway, the latest of each tenant."""

    def __init__(self, limits: RequestLimits, clock: Clock, on_break: Callable[[int], None]) -> None:
        """``on_break`` is called with the lost tokens of each break."""
        self._limits = limits
        self._clock = clock
        self._on_break = on_break
        self._sessions: OrderedDict[tuple[str, str], SessionPrefixRecord] = OrderedDict()
        self._bytes = 0
        self._logged_at = -LOG_S
        self._unlogged = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all prompts that are kept."""
        return self._bytes

    def observe(self, tenant: str, session: str, prompt: TokenIds) -> PrefixBreak | None:
        """The next turn of a session.  Returns the break, if this is one.

        O(tokens) in numpy, for a turn that goes on from the one before.
        """
        limits = self._limits
        if not session or not limits.max_session_prefix_bytes:
            return None
        now = self._clock.now()
        key = tenant, session
        record = self._sessions.pop(key, None) or SessionPrefixRecord()
        self._bytes -= record.nbytes
        found = self._compare(record, prompt, now)
        record.turns += 1
        record.seen_at = now
        record.prompts.append(prompt)
        del record.prompts[:-PROMPTS_KEPT]
        if found is not None:
            record.breaks.append(found)
            record.broken += 1
            self._on_break(found.lost_tokens)
            self._log(session, found)
        self._sessions[key] = record
        self._bytes += record.nbytes
        self._forget(now)
        return found

    def find(self, session: str) -> list[tuple[str, SessionPrefixRecord]]:
        """The sessions of this name, with their tenants."""
        self._forget(self._clock.now())
        return [(tenant, record) for (tenant, name), record in self._sessions.items() if name == session]

    def _compare(self, record: SessionPrefixRecord, prompt: TokenIds, now: float) -> PrefixBreak | None:
        """Takes out the earlier prompt that this one continues or leaves."""
        if not record.prompts:
            return None
        best = token = -1
        for i in reversed(range(len(record.prompts))):
            common = common_tokens(record.prompts[i], prompt)
            if common > token:
                best, token = i, common
            if common == len(record.prompts[i]):
                break  # it goes on from this one
        earlier = record.prompts[best]
        lost_pages = len(earlier) // PAGE_TOKENS - token // PAGE_TOKENS
        if lost_pages <= 0 or token == len(prompt):
            del record.prompts[best]
            return None
        begin = max(0, token - SHOWN_BEFORE)
        return PrefixBreak(
            at=now,
            token=token,
            lost_tokens=lost_pages * PAGE_TOKENS,
            earlier_tokens=len(earlier),
            shown_from=begin,
            earlier=earlier[begin : token + SHOWN_BEHIND].tolist(),
            later=prompt[begin : token + SHOWN_BEHIND].tolist(),
        )

    def _forget(self, now: float) -> None:
        limits = self._limits
        while self._sessions:
            record = next(iter(self._sessions.values()))
            fits = self._bytes <= limits.max_session_prefix_bytes and len(self._sessions) <= limits.max_sessions
            if fits and now - record.seen_at <= limits.session_prefix_s:
                return
            self._sessions.popitem(last=False)
            self._bytes -= record.nbytes

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
            token=found.token,
            lost_tokens=found.lost_tokens,
            earlier_tokens=found.earlier_tokens,
            more_since_last_line=self._unlogged,
        )
        self._logged_at, self._unlogged = found.at, 0


def common_tokens(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two prompts begin with alike."""
    count = min(len(a), len(b))
    if count == 0:
        return 0
    differs = np.not_equal(np.asarray(a)[:count], np.asarray(b)[:count])
    first = int(differs.argmax())
    return first if differs[first] else count
