"""What is kept of one request between steps: how its next token is drawn, and which pages it has.

Everything here can be made again from the request, and is when the request object is another one (a later epoch) or
has fewer output tokens than were counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.engine.runner.constraint import Constraint
from penstock.errors import GrammarRefused
from penstock.grammar.matcher import Matcher
from penstock.kernels.sampling import SampleRow
from penstock.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.core.request import Request

FIRST_CAPACITY = 64


class Counts:
    """How often each id stands in an answer, as two arrays; constant time a token."""

    __slots__ = ("_counts", "_ids", "_place", "total")

    def __init__(self) -> None:
        self._ids = np.empty(FIRST_CAPACITY, np.int32)
        self._counts = np.empty(FIRST_CAPACITY, np.int32)
        self._place: dict[int, int] = {}
        self.total = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """Distinct ids, in order of first appearance."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of ``ids``."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """One more token."""
        self.total += 1
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place] = token
        self._counts[place] = 1
        self._place[token] = place


class Answer:
    """One request's state."""

    __slots__ = ("_banned", "_counts", "_pages", "_pages_P", "_plain", "_row", "constraint", "request")

    def __init__(self, request: Request, constraint: Constraint | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.constraint = constraint  # bans stop tokens itself, as far as they can be spared
        self._row = SampleRow(
            seed=sampling.seed,
            position=0,
            choice=sampling.choice,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=np.array(list(sampling.logit_bias), np.int32),
            bias_values=np.array(list(sampling.logit_bias.values()), np.float32),
            logprobs=sampling.logprobs,
        )
        if sampling.repetition_penalty != 1.0:
            self._row.prompt_ids = np.unique(np.array(request.prompt, np.int32))
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        self._counts = Counts() if penalised else None
        self._banned = banned_ids(sampling, constrained=constraint is not None)
        cut = sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self._plain = constraint is None and not (
            cut or penalised or sampling.logit_bias or sampling.banned or sampling.logprobs is not None
        )
        self._pages: list[list[int]] = []
        self._pages_P: list[NDArray[np.int32]] = []

    def row(self, position: int, drawn: Sequence[int]) -> SampleRow:
        """How the token at ``position`` is drawn, after the request's output and ``drawn``, drawn since.

        The row is the answer's own and is overwritten by the next call.
        """
        row = self._row
        row.position = position
        row.banned_ids = self._banned_at(position)
        if self._counts is not None:
            row.output_ids, row.output_counts = self._count(self._counts, drawn)
        if self.constraint is not None:
            row.allowed = self.constraint.mask()
        return row

    def rows(self, position: int, draft: Sequence[int]) -> list[SampleRow]:
        """How the tokens at ``position`` and the positions after it are drawn: each after so much of ``draft``.

        Rows of their own: drawing from one and guessing wrongly in the next leaves nothing behind.
        """
        found: list[SampleRow] = []
        first = self.row(position, ())
        ids, counts = first.output_ids, first.output_counts
        for index in range(len(draft) + 1):
            if self._counts is not None:
                output = np.array([*self.request.output, *draft[:index]], np.int32)
                ids, often = np.unique(output, return_counts=True)
                counts = often.astype(np.int32)
            found.append(
                replace(
                    first,
                    position=position + index,
                    banned_ids=self._banned_at(position + index),
                    output_ids=ids,
                    output_counts=counts,
                    allowed=None if self.constraint is None else self.constraint.mask(index),
                )
            )
        return found

    def picks(self, position: int) -> bool:
        """Is the token at ``position``, and so every later one, drawn from all tokens by temperature alone?"""
        return self._plain and not len(self._banned_at(position))

    def _banned_at(self, position: int) -> NDArray[np.int32]:
        """Ids that cannot be drawn for this position."""
        begin, short, later = self._banned
        drawn = position - len(self.request.prompt)
        return begin if drawn == 0 else short if drawn < self.request.sampling.min_tokens else later

    def pages(self) -> list[NDArray[np.int32]]:
        """The request's pages by block, one array a group of layers.  Compared on every call: a preempted request comes
        back with others."""
        held = [own.pages for own in self.request.held]
        if held != self._pages:
            self._pages = [list(pages) for pages in held]
            self._pages_P = [np.array(pages, np.int32) for pages in held]
        return self._pages_P

    def _count(self, counts: Counts, drawn: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        output = self.request.output
        known = len(output) + len(drawn)
        if counts.total > known:
            counts = self._counts = Counts()
        for index in range(counts.total, known):
            counts.add(output[index] if index < len(output) else drawn[index - len(output)])
        return counts.ids, counts.counts


Ids = NDArray[np.int32]


def banned_ids(sampling: SamplingParams, *, constrained: bool) -> tuple[Ids, Ids, Ids]:
    """What cannot be drawn: first, while the answer is too short to end, and later."""
    ends = sampling.stop_token_ids if sampling.min_tokens and not constrained else ()
    short = (*sampling.banned, *ends)
    first, early, later = (
        np.array(ids, np.int32) for ids in ((*short, *sampling.banned_first), short, sampling.banned)
    )
    return first, early, later


def no_grammars(grammar: Grammar) -> Matcher:
    """For engines that follow none."""
    raise GrammarRefused("this engine follows no grammar")


class Answers:
    """All answers by request."""

    def __init__(self, matcher_of: Callable[[Grammar], Matcher] = no_grammars) -> None:
        """``matcher_of``: a grammar's matcher at the beginning of an answer, for requests that hold none themselves."""
        self._by_id: dict[str, Answer] = {}
        self._matcher_of = matcher_of

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, request: Request) -> Answer:
        """The state of this very request object, made anew if it belonged to an earlier one of the same id."""
        answer = self._by_id.get(request.id)
        if answer is None or answer.request is not request:
            grammar, constraint = request.sampling.grammar, None
            if grammar is not None:
                in_use = request.grammar
                begin = partial(self._matcher_of, grammar) if in_use is None else in_use.matcher
                constraint = Constraint(request, begin)
            answer = self._by_id[request.id] = Answer(request, constraint)
        return answer

    def forget(self, request: str) -> None:
        """Drop a request's state, if there is any."""
        self._by_id.pop(request, None)
