"""What was delivered and not yet taken: joined to one batch, nothing lost, nothing moved, nothing held back."""

from __future__ import annotations

import asyncio

import pytest
from router_words import request

from penstock.errors import NoWorkers
from penstock.router.request import FailoverLimits, RoutedRequest
from penstock.router.stream import MAX_BATCH_TOKENS, RequestStream
from penstock.types import FinishReason, RequestId, TokenBatch, TokenLogprob
from penstock.wire.gateway_messages import TokenItem

FIRST = TokenLogprob(7, -0.5)


def a_stream() -> RequestStream:
    return RequestStream(RoutedRequest(request(), FailoverLimits(max_attempts=1, first_byte_s=1.0, stall_s=1.0), 0.0))


def item(*tokens: int, logprobs: bool = False) -> TokenItem:
    told = tuple(TokenLogprob(token, -1.0 * token) for token in tokens) if logprobs else None
    return TokenItem(request=RequestId("r"), epoch=1, index=0, tokens=tokens, logprobs=told)


async def take(stream: RequestStream) -> TokenBatch:
    while (batch := stream.poll()) is None:
        await stream.wait()
    return batch


def test_all_that_waits_is_one_batch():
    stream = a_stream()
    stream.put(TokenBatch(tokens=(1,), cached_tokens=16, prompt_logprobs=(FIRST,)))
    stream.put(item(2, 3))
    stream.put(TokenBatch(tokens=(4,), finish=FinishReason.LENGTH))
    batch = stream.poll()
    assert batch == TokenBatch(
        tokens=(1, 2, 3, 4), cached_tokens=16, prompt_logprobs=(FIRST,), finish=FinishReason.LENGTH
    )
    assert stream.poll() is None


def test_what_came_by_itself_is_given_by_itself():
    stream = a_stream()
    stream.put(item(5, logprobs=True))
    assert stream.poll() == TokenBatch(tokens=(5,), logprobs=(TokenLogprob(5, -5.0),))


def test_logprobs_stay_with_their_tokens_and_an_end_without_tokens_joins_either():
    stream = a_stream()
    stream.put(item(1, logprobs=True))
    stream.put(item(2, 3, logprobs=True))
    stream.put(TokenBatch(tokens=(), finish=FinishReason.STOP))
    batch = stream.poll()
    assert batch is not None
    assert batch.finish is FinishReason.STOP
    assert batch.logprobs is not None
    assert [told.token for told in batch.logprobs] == [1, 2, 3] == list(batch.tokens)


def test_a_batch_is_bounded_and_the_rest_follows_in_order():
    stream = a_stream()
    for token in range(3 * MAX_BATCH_TOKENS):
        stream.put(item(token))
    sizes, tokens = [], []
    while (batch := stream.poll()) is not None:
        sizes.append(len(batch.tokens))
        tokens += batch.tokens
    assert sizes == [MAX_BATCH_TOKENS] * 3
    assert tokens == list(range(3 * MAX_BATCH_TOKENS))


async def test_a_stream_gives_what_is_buffered_before_its_error():
    stream = a_stream()
    stream.put(TokenBatch(tokens=(1,)))
    stream.fail(NoWorkers("none"))
    assert (await take(stream)).tokens == (1,)
    with pytest.raises(NoWorkers):
        await take(stream)


def test_who_waits_is_told_once_of_all_that_came_since_it_asked_and_at_once_of_what_is_there():
    stream, told = a_stream(), []
    stream.notify(lambda: told.append("came"))
    stream.put(item(1))
    stream.put(item(2))
    assert told == ["came"]
    stream.poll()
    stream.put(item(3))
    assert told == ["came"] * 2
    stream.notify(lambda: told.append("is here"))
    assert told == ["came"] * 2 + ["is here"]
    stream.notify(None)
    stream.fail(NoWorkers("none"))
    assert len(told) == 3


def test_who_has_polled_is_told_of_what_did_not_fit():
    stream, told = a_stream(), []
    for token in range(2 * MAX_BATCH_TOKENS):
        stream.put(item(token))
    stream.notify(lambda: told.append("more"))
    stream.poll()
    assert told == ["more"] * 2
    stream.poll()
    assert told == ["more"] * 2


async def test_a_consumer_that_gives_up_waiting_leaves_no_trace():
    stream = a_stream()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await take(stream)
    stream.put(TokenBatch(tokens=(1,)))
    assert (await take(stream)).tokens == (1,)
