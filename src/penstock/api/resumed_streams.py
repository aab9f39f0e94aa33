"""Responses that another gateway has begun: what it has saved is replayed, and the rest is computed after it.

A gateway that dies leaves the tokens of its requests with idempotency keys at a worker (``router.saved_tokens``).
Another gateway replays them at once and submits prompt and tokens, as it does when a worker dies::

    saved tokens ............ | computed after them (``ValidRequest.begun``)

Saved are requests whose responses follow from their tokens alone.  Not saved, so computed again: those with
log-probabilities, and all while prompts and responses are computed in two numerics classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from penstock.api.idempotency import IdempotentRequest, KeyHomes
from penstock.api.response_cache import REPLAY_BATCH_TOKENS, response_key
from penstock.interfaces import TokenStream, TokenStreams
from penstock.types import ModelIdentity, RequestId, ResumeFrom, ResumeKey, SamplingParams, TokenBatch, ValidRequest


def resume_keys(
    homes: KeyHomes, keyed: IdempotentRequest, requests: Sequence[ValidRequest], identity: ModelIdentity
) -> dict[int, ResumeKey]:
    """By choice, where the tokens of these requests are saved; none of those that are computed again."""
    key, keys = homes.digest(keyed.key), dict[int, ResumeKey]()
    for request in requests:
        sampling = request.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None and not identity.mixed:
            tokens_follow_from = response_key(request, identity).digest
            name = b"%b %b %d " % (keyed.key, keyed.mark.encode(), sampling.choice)
            keys[sampling.choice] = ResumeKey(key, homes.digest(name + tokens_follow_from), identity)
    return keys


class ResumedStreams:
    """A ``TokenStreamSource`` that replays the tokens of ``ValidRequest.resume``."""

    def __init__(self, streams: TokenStreams, count: Callable[[int], None]) -> None:
        """``count`` is called with numbers of replayed tokens."""
        self._streams = streams
        self._count = count

    def stream(self, request: ValidRequest) -> TokenStream:
        known = () if request.resume is None else usable_tokens(request.resume.tokens, request.sampling)
        if len(known) <= len(request.begun.tokens):
            return self._streams.stream(request)
        return self._replayed(request, known)

    async def _replayed(self, request: ValidRequest, known: tuple[int, ...]) -> AsyncGenerator[TokenBatch, None]:
        assert request.resume is not None
        begin = len(request.begun.tokens)
        self._count(len(known) - begin)
        for start in range(begin, len(known), REPLAY_BATCH_TOKENS):
            yield TokenBatch(tokens=known[start : start + REPLAY_BATCH_TOKENS], resumed=True)
            await asyncio.sleep(0)
        rest = msgspec.structs.replace(
            request,
            begun=ResumeFrom(known, request.resume.identity),
            resume=msgspec.structs.replace(request.resume, tokens=()),
        )
        del request, known
        async with aclosing(self._streams.stream(rest)) as stream:
            async for batch in stream:
                yield batch

    def mark_stopped(self, request: RequestId) -> None:
        self._streams.mark_stopped(request)

    def serving_identity(self, request: RequestId) -> ModelIdentity | None:
        """``TokenStreams.serving_identity``."""
        return self._streams.serving_identity(request)


def usable_tokens(tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """The saved tokens that do not end the response: its last token is computed, with the reason for its end.

    Where a grammar leaves nothing else, a response ends before it has ``min_tokens``.
    """
    for at, token in enumerate(tokens[: sampling.max_tokens - 1]):
        if token in sampling.stop_token_ids:
            return tokens[:at]
    return tokens[: sampling.max_tokens - 1]
