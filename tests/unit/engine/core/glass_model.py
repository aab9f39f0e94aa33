"""A model that can be looked through, and what its answers must be.

Its KV memory holds, for every position, a hash of all tokens up to it; a row that draws reads its whole context back
through its own page table and compares it with its tokens.  So a page that is shared wrongly, given out too early, not
copied or not computed is seen by the first row that reads it.  The token drawn depends on the whole context;
``answer`` computes the same without pages, batches, chunks or caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan, accepted_count
from penstock.engine.core.request import Request
from penstock.types import BlockHash, FinishReason, RequestId, SamplingParams, TokenLogprob

VOCAB = 11
STOP = 0
ROOT = BlockHash(b"r" * 32)


def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family are prefixes of each other."""
    return tuple(1 + (family * 3 + position * (position + family)) % (VOCAB - 1) for position in range(length))


def extend(context: int, token: int) -> int:
    return hash((context, token))


def draw(context: int, sampling: SamplingParams, drawn: int) -> int:
    token = hash((context, sampling.seed)) % VOCAB
    if drawn < sampling.min_tokens and token in sampling.stop_token_ids:
        token += 1
    return token


@dataclass
class Answer:
    tokens: list[int]
    finish: FinishReason


def answer(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int) -> Answer:
    """What the request must yield, computed alone and at once."""
    context = 0
    for token in prompt:
        context = extend(context, token)
    tokens: list[int] = []
    while True:
        tokens.append(draw(context, sampling, len(tokens)))
        context = extend(context, tokens[-1])
        if tokens[-1] in sampling.stop_token_ids:
            return Answer(tokens, FinishReason.STOP)
        if len(tokens) == sampling.max_tokens or len(prompt) + len(tokens) == max_model_len:
            return Answer(tokens, FinishReason.LENGTH)


class GlassRunner:
    """The model one can look through.  ``kv[page][slot]``: a group, and the hash of all tokens up to there.

    A page of states has one slot: the hash of all tokens that the state has taken in.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.size = config.page_tokens
        self.reaches = config.reaches
        self.kv: list[list[tuple[int, int] | None]] = [[None] * self.size for _ in range(config.pages)]

    def run(self, plan: StepPlan) -> list[SampledTokens]:
        return [self.row(row, plan.steps) for row in plan.rows]

    def remove_request(self, request: RequestId) -> None:
        pass

    def row(self, row: ScheduledTokens, steps: int) -> SampledTokens:
        request = row.request
        assert row.start == request.computed
        assert row.count >= 1
        assert row.samples == (row.start + row.count == request.known)
        told = ()
        if request.wants_prompt_logprobs:
            told = tuple(TokenLogprob(t, -1.0) for t in request.prompt[row.start + 1 : row.start + row.count + 1])
        tokens = list(request.tokens(0, row.start + row.count))
        for position in range(row.start, row.start + row.count):
            self.write(request, tokens, position)
        self.read(request, tokens, row.start)
        if not row.samples:
            return SampledTokens((), (), told)
        if row.draft:
            assert steps == 1
            return self.drafted(row, tokens)
        drawn: list[int] = []
        for step in range(steps):
            if step:
                self.write(request, tokens, len(tokens) - 1)
            self.read(request, tokens, len(tokens) - 1)
            drawn.append(draw(context_of(tokens), request.sampling, len(request.output) + step))
            tokens.append(drawn[-1])
        return SampledTokens(tuple(drawn), tuple(TokenLogprob(t, -1.0) for t in drawn), told)

    def drafted(self, row: ScheduledTokens, tokens: list[int]) -> SampledTokens:
        """Compute the guesses as if they were true, draw after each, and keep what stands."""
        request, drawn = row.request, list[int]()
        assert request.known + len(row.draft) < request.local_end, "guessed beyond the end"
        for index, guess in enumerate((*row.draft, None)):
            self.read(request, tokens, len(tokens) - 1)
            drawn.append(draw(context_of(tokens), request.sampling, len(request.output) + index))
            if guess is not None:
                tokens.append(guess)
                self.write(request, tokens, len(tokens) - 1)
        stands = tuple(drawn[: accepted_count(row.draft, drawn)])
        return SampledTokens(stands, tuple(TokenLogprob(t, -1.0) for t in stands))

    def write(self, request: Request, tokens: Sequence[int], position: int) -> None:
        if position:
            self.check_states(request, context_of(tokens[:position]), position)
        self.put(request, position, context_of(tokens[: position + 1]), range(len(self.reaches)))

    def put(self, request: Request, position: int, context: int, groups: Iterable[int]) -> None:
        for group in groups:
            own, size = request.page_tables[group], self.reaches[group].tokens_per_page(self.size)
            block = position // size
            assert own.first <= block, (request.id, "writes what it has given back")
            slot = position % size if self.reaches[group].state_interval is None else 0
            self.kv[own.pages[block]][slot] = (group, context)

    def check_states(self, request: Request, context: int, count: int) -> None:
        """The states behind ``count`` tokens stand where the page tables say; they have taken in nothing else."""
        for group, reach in enumerate(self.reaches):
            if reach.state_interval is not None:
                own, cell = request.page_tables[group], (count - 1) // reach.state_interval
                assert own.first <= cell, (request.id, group, count, "given back too early")
                assert self.kv[own.pages[cell]][0] == (group, context), (request.id, group, count)

    def read(self, request: Request, tokens: Sequence[int], position: int) -> None:
        """All that ``position`` sees of ``tokens`` stands where the page tables say."""
        contexts = list(accumulate(tokens[: position + 1], extend, initial=0))[1:]
        for group, reach in enumerate(self.reaches):
            if reach.state_interval is None:
                self.check(request, group, contexts, reach.first_read_position(position))

    def check(self, request: Request, group: int, contexts: Sequence[int], first: int) -> None:
        """What stands in a group's pages from ``first`` on."""
        own = request.page_tables[group]
        for seen in range(first, len(contexts)):
            block, slot = divmod(seen, self.size)
            assert own.first <= block, (request.id, group, seen, "given back too early")
            assert self.kv[own.pages[block]][slot] == (group, contexts[seen]), (request.id, group, seen)


def context_of(tokens: Sequence[int]) -> int:
    return reduce(extend, tokens, 0)
