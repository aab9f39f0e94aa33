"""Consecutive tokens of one request in one step, and what a run has brought it so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.engine.core.plan import Drawn
from penstock.engine.core.speculation import standing
from penstock.engine.runner.answer import Answer
from penstock.kernels.sampling import Sampled
from penstock.types import TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.core.plan import Row


class Span:
    """Consecutive tokens of one request that are computed in one step, and what a run has brought it so far.

    ``draft``: the last of them are guessed; a token is drawn before each of these and after the last.
    """

    __slots__ = ("answer", "draft", "drawn", "logprobs", "prompt_logprobs", "samples", "start", "tokens")

    def __init__(self, row: Row, answer: Answer) -> None:
        self.answer = answer
        self.samples = row.samples
        self.draft = row.draft
        self.begin(row.start, (*row.request.tokens(row.start, row.start + row.count), *row.draft))

    def begin(self, start: int, tokens: Sequence[int]) -> None:
        """These tokens from ``start`` on; nothing is brought yet."""
        self.start = start
        self.tokens = tokens
        self.drawn: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def draws(self) -> range:
        """Positions that tokens are drawn for."""
        return range(self.stop - len(self.draft), self.stop + 1) if self.samples else range(0)

    @property
    def targets(self) -> Sequence[int]:
        """Prompt tokens that these tokens predict and whose log-probabilities were asked for."""
        if not self.answer.request.wants_prompt_logprobs:
            return ()
        return self.answer.request.prompt[self.start + 1 : self.stop + 1]

    def advance(self) -> None:
        """Go on with the token just drawn."""
        self.start = self.stop
        self.tokens = self.drawn[-1:]

    def result(self) -> Drawn:
        """What the span has brought: of the tokens after a draft, those that stand; none after a cut."""
        constraint = self.answer.constraint if self.samples else None
        if constraint is not None and constraint.late:
            return Drawn(prompt_logprobs=tuple(self.prompt_logprobs), late=True)
        count = standing(self.draft, self.drawn) if self.draft else len(self.drawn)
        if constraint is not None and constraint.stands is not None:
            count = min(count, constraint.stands + 1)
        cut_at = None if constraint is None else constraint.cut_at
        cut = cut_at is not None and (not self.draft or cut_at < count)
        if cut_at is not None and self.draft:
            count = min(count, cut_at + 1)
        return Drawn(tuple(self.drawn[:count]), tuple(self.logprobs[:count]), tuple(self.prompt_logprobs), cut)


def token_logprob(one: Sampled) -> TokenLogprob:
    """A row that asked for log-probabilities has them."""
    assert one.logprob is not None
    return TokenLogprob(one.token, one.logprob, one.top)
