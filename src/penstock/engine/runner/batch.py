"""Spans of requests to the arrays of one step.  The arrays are kept and reused: a batch is valid until the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.engine.runner.answer import Answer
from penstock.kernels.ops import StepBatch
from penstock.types import PAGE_TOKENS, TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.core.plan import Row


class Span:
    """Consecutive tokens of one request that are computed in one step, and what a run has brought it so far."""

    __slots__ = ("answer", "drawn", "logprobs", "prompt_logprobs", "samples", "start", "tokens")

    def __init__(self, row: Row, answer: Answer) -> None:
        self.answer = answer
        self.start = row.start
        self.tokens: Sequence[int] = row.request.tokens(row.start, row.start + row.count)
        self.samples = row.samples
        self.drawn: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

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


class StepArrays:
    """Owner of the arrays that a ``StepBatch`` shows."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._positions = np.empty(0, np.int32)
        self._starts = np.empty(0, np.int32)
        self._table = np.empty(0, np.int32)

    def fill(self, spans: Sequence[Span], wanted_R: NDArray[np.int32]) -> StepBatch:
        """The batch of these spans, one after another; ``wanted_R`` are the rows whose logits are wanted."""
        count = sum(len(span.tokens) for span in spans)
        blocks = max(-(-span.stop // PAGE_TOKENS) for span in spans)
        self._reserve(count, len(spans), blocks)
        table_SP = self._table[: len(spans) * blocks].reshape(len(spans), blocks)
        begin = 0
        for index, span in enumerate(spans):
            end = begin + len(span.tokens)
            if end - begin == 1:
                self._tokens[begin] = span.tokens[0]
                self._positions[begin] = span.start
            else:
                self._tokens[begin:end] = span.tokens
                self._positions[begin:end] = np.arange(span.start, span.stop, dtype=np.int32)
            self._starts[index + 1] = begin = end
            pages_P = span.answer.pages()[: -(-span.stop // PAGE_TOKENS)]
            table_SP[index, : len(pages_P)] = pages_P
        return StepBatch(
            self._tokens[:count], self._positions[:count], self._starts[: len(spans) + 1], table_SP, wanted_R
        )

    def _reserve(self, tokens: int, spans: int, blocks: int) -> None:
        if tokens > len(self._tokens):
            self._tokens = np.empty(_room(tokens), np.int32)
            self._positions = np.empty(_room(tokens), np.int32)
        if spans + 1 > len(self._starts):
            self._starts = np.zeros(_room(spans + 1), np.int32)
        if spans * blocks > len(self._table):
            self._table = np.zeros(_room(spans * blocks), np.int32)


def _room(wanted: int) -> int:
    """The next power of two, so that growing is rare."""
    return 1 << (wanted - 1).bit_length()
