"""Can this be what a worker says of an answer?  By request and model: the codec has looked at ranges.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.types import TokenLogprob, ValidRequest
from penstock.wire.messages import TokenItem


def has_known_tokens(item: TokenItem, vocabulary: int) -> bool:
    """Are all tokens of the item, and of its log-probabilities, those of a model that knows so many?"""
    if max(item.tokens, default=0) >= vocabulary:
        return False
    if item.logprobs is not None and (len(item.logprobs) != len(item.tokens) or not _known(item.logprobs, vocabulary)):
        return False
    return item.prompt_logprobs is None or _known(item.prompt_logprobs, vocabulary)


def _known(logprobs: Iterable[TokenLogprob], vocabulary: int) -> bool:
    return all(one.token < vocabulary and all(token < vocabulary for token, _ in one.top) for one in logprobs)


def is_of(item: TokenItem, request: ValidRequest) -> bool:
    """Can the item be a part of an answer to this request?"""
    most, prompt = request.sampling.max_tokens, len(request.prompt)
    if item.index + len(item.tokens) > most or item.cached_tokens > prompt + most:
        return False
    if request.sampling.logprobs is not None and item.tokens and item.logprobs is None and request.pooling is None:
        return False
    if request.pooling is None:
        return item.pooled is None
    return item.pooled is None or (len(item.pooled) > 0 and len(item.pooled) % 4 == 0)
