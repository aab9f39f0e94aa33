"""Checks of what a gateway submits against this worker's model, before anything is computed with it.

The codec has looked at ranges.  Here is what depends on the model, or on two fields at once.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.types import PAGE_TOKENS, SamplingParams
from penstock.wire.gateway_messages import Submit, TokenItem

UNFIT = "unfit"
"""How the reason begins for which a request is given back that no gateway should have sent."""


def invalid_submit(message: Submit, vocabulary: int | None, *, mixed: bool) -> str | None:
    """Why a model with this vocabulary (None: not known) cannot compute ``message``; None where it can.

    ``mixed``: this worker's fleet reads prompts and writes answers in two numerics classes.
    """
    prompt = np.frombuffer(message.prompt, np.uint32)  # 100,000 tokens take some microseconds, one by one milliseconds
    if prompt.max() >= _unknown_from(vocabulary) or not _known(message.emitted, vocabulary):
        return f"a token that is none of the model's {vocabulary}"
    if len(message.block_hashes) > len(prompt) // PAGE_TOKENS:
        return f"{len(message.block_hashes)} hashes of blocks for {len(prompt)} tokens"
    if message.mixed and not mixed:
        return "prompt and answer in two numerics classes, of which there is one here"
    end = 0
    for image in message.images:
        if image.at < end or image.end > len(prompt):
            return "an image that is not in the prompt"
        end = image.end
    if message.media and len(message.media) != len(message.images):
        return f"{len(message.media)} pictures for {len(message.images)} places"
    if message.pooling is not None and (message.pooling.second or 0) > len(prompt):
        return "a second text that begins behind the prompt"
    return _unfit_sampling(message.sampling, vocabulary)


def _unfit_sampling(sampling: SamplingParams, vocabulary: int | None) -> str | None:
    named = (sampling.stop_token_ids, tuple(sampling.logit_bias), sampling.banned, sampling.banned_first)
    if not all(_known(tokens, vocabulary) for tokens in named):
        return f"a token in stop_token_ids, logit_bias or banned that is none of the model's {vocabulary}"
    most = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    if vocabulary is not None and most > vocabulary:
        return f"{most} alternatives of {vocabulary} tokens"
    return None


def invalid_first_token(first: TokenItem, vocabulary: int | None) -> str | None:
    """Why tokens that another worker has drawn are none of this model's."""
    return None if _known(first.tokens, vocabulary) else f"a token that is none of the model's {vocabulary}"


def _known(tokens: Sequence[int], vocabulary: int | None) -> bool:
    if not len(tokens):
        return True
    return min(tokens) >= 0 and max(tokens) < _unknown_from(vocabulary)


def _unknown_from(vocabulary: int | None) -> int:
    return 1 << 31 if vocabulary is None else vocabulary
