"""What a request gets that does not say it: a length of its answer, and how tokens are sampled."""

from __future__ import annotations

from penstock.config.schema import Limits

from .http_stage import stage
from .streams import NullStreams


async def test_a_chat_that_names_no_length_may_use_what_the_context_leaves():
    streams = NullStreams()
    async with stage(streams) as on:
        answer = await on.chat(max_tokens=None, ignore_eos=True)
    (request,) = streams.opened
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == 2048 == len(request.prompt) + request.sampling.max_tokens
    assert request.open_ended


async def test_default_max_tokens_is_a_length_that_the_operator_has_named():
    streams = NullStreams()
    async with stage(streams, Limits(default_max_tokens=7)) as on:
        answer = await on.chat(max_tokens=None, ignore_eos=True)
        await on.chat(max_tokens=5)
        await on.text(max_tokens=None)
    assert answer.json()["usage"]["completion_tokens"] == 7
    assert [request.sampling.max_tokens for request in streams.opened] == [7, 5, 16]
    assert not any(request.open_ended for request in streams.opened)
