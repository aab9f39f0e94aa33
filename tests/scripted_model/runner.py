"""The runner that draws a script's tokens, and whose KV pages hold the tokens they were computed from.

A page's words are the tokens' ids, so that an answer proves its pages: before a token is drawn, all that stands before
it is read from the pages that the scheduler named, wherever they were computed, and compared with the request's tokens.
A worker whose pages hold anything else ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.runner.model_runner import ModelRunner
from penstock.types import PAGE_TOKENS, RequestId, TokenLogprob

from .conversation import END, Conversation
from .script import reply_to

if TYPE_CHECKING:
    from penstock.engine.core.request import Request


class WrongPage(AssertionError):  # noqa: N818 - says what is wrong
    """A page holds other tokens than those it stands for."""


class ScriptedAnswer:
    """The tokens of one answer, a function of the prompt alone."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        constrained = request.sampling.grammar is not None
        conversation = Conversation.read(request.prompt, tokenizer, constrained=constrained)
        self.request = request
        self.verified = 0  # tokens whose pages were compared
        reply = reply_to(conversation)
        text = reply.text_of_model(thinks=conversation.thinks and not constrained)
        self.tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self.end: int = tokenizer.token_to_id(END)

    def token(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else self.end


class ScriptedRunner(ModelRunner):
    """Made as ``ModelRunner`` is; neither the model nor its program is run."""

    folder: ClassVar[Path]  # of the model, set before anything is forked

    def __init__(
        self, model: Any, ops: Any, kv: Any, program: Any = None, aids: Any = None, *, micro_batches: int = 1
    ) -> None:
        super().__init__(model, ops, kv, program, aids, micro_batches=micro_batches)
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._scripted: dict[RequestId, ScriptedAnswer] = {}
        words = ops.page_bytes(kv.shape) // 4
        self._pages: NDArray[np.uint32] = kv.memory.reshape(-1, PAGE_TOKENS, words // PAGE_TOKENS)

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        return [self._row(row, plan.steps) for row in plan.rows]

    def remove_request(self, request: RequestId) -> None:
        super().remove_request(request)
        self._scripted.pop(request, None)

    def _row(self, row: ScheduledTokens, steps: int) -> SampledTokens:
        request, position = row.request, row.start
        self._write(request, row.start, request.tokens(row.start, row.start + row.count))
        position += row.count
        top = request.sampling.prompt_logprobs
        scored = request.prompt[row.start + 1 : position + 1] if top is not None else ()
        prompt_logprobs = tuple(TokenLogprob(token, 0.0, ()) for token in scored)
        if not row.samples:
            return SampledTokens((), (), prompt_logprobs)
        answer = self._answer(request)
        self._verify(answer, request.tokens(0, position))
        tokens: list[int] = []
        for step in range(steps):
            token = answer.token(position + step - len(request.prompt))
            self._check_grammar(request, tokens, token)
            tokens.append(token)
            if step + 1 < steps:
                self._write(request, position + step, (token,))
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = tuple(TokenLogprob(token, 0.0, ()) for token in tokens)
        return SampledTokens(tuple(tokens), logprobs, prompt_logprobs)

    def _answer(self, request: Request) -> ScriptedAnswer:
        answer = self._scripted.get(request.id)
        if answer is None or answer.request is not request:
            answer = self._scripted[request.id] = ScriptedAnswer(request, self._tokenizer)
        return answer

    def _check_grammar(self, request: Request, drawn: Sequence[int], token: int) -> None:
        """A script is to write what a grammar allows: otherwise the test is wrong."""
        constraint = self._answers.get(request).constraint
        if constraint is None:
            return
        job = constraint.next_job(drawn)
        if not job.done.is_set():
            job.run()
        constraint.apply_masks((), in_time=True)
        mask = constraint.mask()
        if not mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            before = self._tokenizer.decode([*request.output, *drawn], skip_special_tokens=False)
            wrong = self._tokenizer.decode([token], skip_special_tokens=False)
            raise AssertionError(f"the script writes {wrong!r} after {before!r}, which the grammar does not allow")

    def _write(self, request: Request, start: int, tokens: Sequence[int]) -> None:
        (table,) = request.page_tables
        positions = np.arange(start, start + len(tokens))
        pages = np.array(table.pages, np.int64)[positions // PAGE_TOKENS]
        self._pages[pages, positions % PAGE_TOKENS] = np.array(tokens, np.uint32)[:, None] + 1

    def _verify(self, answer: ScriptedAnswer, tokens: Sequence[int]) -> None:
        """All pages the first time, then those since the last time."""
        (table,) = answer.request.page_tables
        positions = np.arange(answer.verified, len(tokens))
        pages = np.array(table.pages, np.int64)[positions // PAGE_TOKENS]
        found = self._pages[pages, positions % PAGE_TOKENS]
        expected = np.array(tokens[answer.verified :], np.uint32)[:, None] + 1
        if not (found == expected).all():
            at = int(positions[(found != expected).any(axis=1)][0])
            raise WrongPage(f"{answer.request.id}: the page of token {at} of {len(tokens)} holds another token")
        answer.verified = len(tokens) - len(tokens) % PAGE_TOKENS
