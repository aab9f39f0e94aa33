"""The null device: a token is a hash of seed, choice and position, whatever the batch and whatever stands before it.

With it the whole system runs without a model.  Law 1 holds trivially here, so whatever breaks it is not the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import log

from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan, accepted_count
from penstock.engine.core.request import Request
from penstock.types import RequestId, SamplingParams, TokenLogprob


def null_token(sampling: SamplingParams, position: int, *, vocab: int, drawn: int | None = None) -> int:
    """The token for ``position``, below ``vocab``.

    A test that wants the answer to end at a position names that position's token in ``stop_token_ids``.  ``drawn``
    is how many output tokens stand before it: below ``min_tokens`` stop tokens are passed over.
    """
    key = b"%d/%d/%d" % (sampling.seed, sampling.choice, position)
    token = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % vocab
    if drawn is not None and drawn < sampling.min_tokens:
        banned = set(sampling.stop_token_ids)
        while token in banned:
            token = (token + 1) % vocab
    return token


class NullRunner:
    """Implements ``interface.Runner``; touches no memory and keeps nothing."""

    def __init__(self, *, vocab: int = 32_000) -> None:
        self.vocab = vocab

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        return [self._draw(row, plan.steps) for row in plan.rows]

    def remove_request(self, request: RequestId) -> None:
        pass

    def _draw(self, row: ScheduledTokens, steps: int) -> SampledTokens:
        request, end = row.request, row.start + row.count
        prompt_logprobs = self._prompt_logprobs(request, row.start, end) if request.wants_prompt_logprobs else ()
        if not row.samples:
            return SampledTokens((), (), prompt_logprobs)
        sampling, drawn = request.sampling, len(request.output)
        count = len(row.draft) + steps
        tokens = tuple(null_token(sampling, end + step, vocab=self.vocab, drawn=drawn + step) for step in range(count))
        if row.draft:
            tokens = tokens[: accepted_count(row.draft, tokens)]
        if sampling.logprobs is None:
            return SampledTokens(tokens, (), prompt_logprobs)
        logprobs = tuple(self._logprob(token, sampling.logprobs) for token in tokens)
        return SampledTokens(tokens, logprobs, prompt_logprobs)

    def _prompt_logprobs(self, request: Request, start: int, end: int) -> tuple[TokenLogprob, ...]:
        """A computed position tells of the prompt token after it."""
        top = request.sampling.prompt_logprobs or 0
        return tuple(self._logprob(token, top) for token in request.prompt[start + 1 : end + 1])

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        """As if all tokens were equally likely."""
        each = -log(self.vocab)
        return TokenLogprob(token, each, tuple((other, each) for other in range(min(top, self.vocab))))
