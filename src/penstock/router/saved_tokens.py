"""Tokens of running requests with idempotency keys, saved at workers of other hosts for gateways that take over.

::

    gateway --SaveTokens: new tokens of its requests---> a worker of another host (engine.service.saved_tokens)
    another gateway --FindTokens: of a key's choices---> the two workers that may have them
    another gateway <--FoundTokens---------------------- both

A gateway sends each such worker one message every ``FailoverConfig.save_tokens_s``, and none while nothing is new.
The worker is the first one in the order of ``router.home_calls`` that is not on the gateway's host, so a host that dies
as a whole takes no tokens with it; where there is one host only, it is the first of all.  When a request's worker
changes, all of its tokens are saved at the new one.  Knows nothing of HTTP or text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.clock import Clock
from penstock.router.home_calls import HomeCalls, HomesElsewhere, WorkerHomes
from penstock.router.links import WorkerLink
from penstock.router.request import RoutedRequest
from penstock.router.turns import TurnWork
from penstock.types import TOKEN_BYTES, RequestId, ResumeKey, WorkerId
from penstock.wire.gateway_messages import (
    MAX_SAVED_PIECES,
    MAX_SAVED_TOKENS,
    FindTokens,
    FoundTokens,
    SavedPiece,
    SaveTokens,
)

MAX_MESSAGE_TOKENS = 1 << 18
"""Of all responses in one ``SaveTokens``, and those of one more."""

_REQUESTS_PER_UNIT = 16
"""Requests that one unit of a turn's work looks through."""

FoundTokenLists: TypeAlias = list[tuple[int, ...]]
"""Of each name that was asked for, the tokens from the first on; empty: none is known."""

FoundHandler: TypeAlias = Callable[[FoundTokenLists], None]
"""Called once, be it now."""


@dataclass(slots=True)
class _SavedRequest:
    routed: RoutedRequest
    resume: ResumeKey
    chosen: int = 0  # the version of the homes by which the link was chosen
    link: WorkerLink | None = None
    sent: int = 0  # tokens, over this link


@dataclass(slots=True)
class _Batch:
    pieces: list[SavedPiece] = field(default_factory=list[SavedPiece])
    requests: list[_SavedRequest] = field(default_factory=list[_SavedRequest])
    tokens: int = 0


class SavedTokenHomes:
    """What one gateway saves and finds; from its event loop."""

    def __init__(self, homes: WorkerHomes, turns: TurnWork, clock: Clock, *, every_s: float, vocabulary: int) -> None:
        """``every_s``: between two messages to a worker; 0: nothing is saved or found."""
        self._homes = homes
        self._calls = HomeCalls[FoundTokens](homes, clock)
        self._turns = turns
        self._every_s = every_s
        self._vocabulary = vocabulary
        self._requests: dict[RequestId, _SavedRequest] = {}
        self._workers: tuple[tuple[WorkerId, int], ...] = ()  # among which links are chosen
        self._version = 1  # grows when they change
        self._saved_at = float("-inf")
        self._saving = False

    def __len__(self) -> int:
        """Requests whose tokens are saved."""
        return len(self._requests)

    def add(self, routed: RoutedRequest, resume: ResumeKey) -> None:
        """This request has begun."""
        if self._every_s:
            self._requests[routed.request.id] = _SavedRequest(routed, resume)

    def discard(self, routed: RoutedRequest) -> None:
        """This request is over, or was never saved."""
        self._requests.pop(routed.request.id, None)

    def find(self, key: bytes, names: Sequence[bytes], on_found: FoundHandler) -> None:
        """Asks for what any gateway has saved; without an answer nothing is known, after ``home_calls.ANSWER_S``."""
        links = self._homes.possible_links(key) if self._every_s else []
        if not links:
            on_found(_nothing(len(names)))
            return
        search = _Search(len(links), len(names), self._vocabulary, on_found)
        for link in links:
            self._calls.call_at(link, FindTokens(names=tuple(names)), search.on_answer)

    def on_answer(self, worker: WorkerId, incarnation: int, message: FoundTokens) -> None:
        """The answer of a worker.  One that was not asked is ignored."""
        self._calls.on_answer(worker, incarnation, message)

    def tick(self, now: float) -> None:
        """Give up what is overdue; save what is new, if it is time."""
        self._calls.tick(now)
        if self._requests and not self._saving and now - self._saved_at >= self._every_s:
            self._saved_at, self._saving = now, True
            self._turns.add(self._save_all())

    def close(self) -> None:
        """No more answers will come."""
        self._calls.close()

    def _save_all(self) -> Iterator[None]:
        """Sends each worker the new tokens of its requests; over several turns."""
        try:
            homes, batches = self._homes.elsewhere(), dict[WorkerLink, _Batch]()
            if homes.workers != self._workers:
                self._workers, self._version = homes.workers, self._version + 1
            for number, saved in enumerate(list(self._requests.values()), 1):
                if saved.chosen != self._version or len(saved.routed.emitted) > saved.sent:
                    self._add_new(saved, homes, batches)
                if number % _REQUESTS_PER_UNIT == 0:
                    yield
            for link, batch in batches.items():
                _send(link, batch)
        finally:
            self._saving = False

    def _add_new(self, saved: _SavedRequest, homes: HomesElsewhere, batches: dict[WorkerLink, _Batch]) -> None:
        routed = saved.routed
        known = min(len(routed.emitted), MAX_SAVED_TOKENS)
        if saved.chosen != self._version:
            link = homes.link(saved.resume.key) if homes.workers else None
            saved.sent = saved.sent if link is saved.link else 0
            saved.link, saved.chosen = link, self._version
        if saved.link is None or known <= saved.sent or routed.identity != saved.resume.identity:
            return
        piece = SavedPiece(saved.resume.name, saved.sent, routed.emitted[saved.sent : known].tobytes())
        batch = batches.setdefault(saved.link, _Batch())
        batch.pieces.append(piece)
        batch.requests.append(saved)
        batch.tokens += known - saved.sent
        if len(batch.pieces) == MAX_SAVED_PIECES or batch.tokens >= MAX_MESSAGE_TOKENS:
            _send(saved.link, batches.pop(saved.link))


def _send(link: WorkerLink, batch: _Batch) -> None:
    """What cannot be sent now is sent with the next message."""
    if link.send(SaveTokens(pieces=tuple(batch.pieces))):
        for saved, piece in zip(batch.requests, batch.pieces, strict=True):
            if saved.link is link:
                saved.sent = piece.start + len(piece.tokens) // TOKEN_BYTES


def _nothing(names: int) -> FoundTokenLists:
    return [() for _ in range(names)]


class _Search:
    """The answers of several workers: the first with tokens counts."""

    def __init__(self, workers: int, names: int, vocabulary: int, on_found: FoundHandler) -> None:
        self._left = workers
        self._names = names
        self._vocabulary = vocabulary
        self._on_found = on_found

    def on_answer(self, answer: FoundTokens | None) -> None:
        """One worker's answer; None: it has not answered."""
        self._left -= 1
        found = _nothing(self._names) if answer is None else self._valid(answer)
        if self._left >= 0 and (any(found) or not self._left):
            self._left = -1
            self._on_found(found)

    def _valid(self, answer: FoundTokens) -> FoundTokenLists:
        """The tokens of the answer; none of an answer that cannot be."""
        lists = [array("I", packed) for packed in answer.tokens]
        if len(lists) != self._names or any(max(tokens, default=0) >= self._vocabulary for tokens in lists):
            return _nothing(self._names)
        return [tuple(tokens) for tokens in lists]
