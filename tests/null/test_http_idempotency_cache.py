"""What is kept by idempotency key: only what was begun."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator

import pytest

from penstock.api.idempotency import (
    CachedStream,
    IdempotencyCache,
    IdempotentRequest,
    KeyClaim,
    KeyOutcome,
    UsageDedup,
)
from penstock.api.sse import EventSigner
from penstock.clock import MonotonicClock
from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers
from penstock.types import RequestId, SamplingParams, TokenBatch, ValidRequest
from penstock.wire.gateway_messages import IdempotencyKeyStatus

from .streams import NullStreams, answer_tokens
from .test_idempotency_homes import Home


def keyed(number: int) -> IdempotentRequest:
    return IdempotentRequest(
        key=number.to_bytes(4, "big"), name=str(number), seed=number, mark="6d" * 8, signer=EventSigner(b"", b"")
    )


def request(number: int) -> ValidRequest:
    return ValidRequest(
        id=RequestId(f"r{number}"), prompt=(1, 2), block_hashes=(), arrival=0.0,
        sampling=SamplingParams(seed=1, max_tokens=4),
    )  # fmt: skip


def test_nothing_is_kept_of_what_was_refused_before_it_began():
    kept = IdempotencyCache(RequestLimits(max_idempotency_keys=2), MonotonicClock())
    for number in range(10):
        answer, met = kept.lookup(keyed(number), NullStreams())
        assert met is KeyOutcome.NEW
        kept.release(keyed(number), answer)
    assert len(kept) == 0


def test_another_answer_by_the_same_key_is_not_given_up_with_it():
    kept = IdempotencyCache(RequestLimits(), MonotonicClock())
    first, _ = kept.lookup(keyed(1), NullStreams())
    kept.release(keyed(1), first)
    second, _ = kept.lookup(keyed(1), NullStreams())
    kept.release(keyed(1), first)
    assert kept.lookup(keyed(1), NullStreams()) == (second, KeyOutcome.JOINED)


def test_an_answer_that_runs_is_kept_beyond_the_bound_of_keys():
    kept = IdempotencyCache(RequestLimits(max_idempotency_keys=1), MonotonicClock())
    running = {number: kept.lookup(keyed(number), NullStreams())[0] for number in (1, 2)}
    for number in (1, 2):
        assert kept.lookup(keyed(number), NullStreams()) == (running[number], KeyOutcome.JOINED)


async def test_the_end_of_an_answer_that_was_given_up_is_not_the_end_of_the_next_one():
    home = Home()
    kept, streams, homes = IdempotencyCache(RequestLimits(), MonotonicClock()), NullStreams(), home.of("a")
    streams.gate = asyncio.Event()
    first = KeyClaim(homes, keyed(1))
    await kept.open_claim(keyed(1), first)
    answer, _ = kept.lookup(keyed(1), streams, first)
    answer.stream(request(1))
    await streams.until(opened=1)

    homes.held = asyncio.Queue()  # the next one is claimed
    second = KeyClaim(homes, keyed(1))
    claiming = asyncio.create_task(kept.open_claim(keyed(1), second))
    on_state = await homes.held.get()
    answer._choices[0].failed = True  # as at the end of the grace period, some turns before its task ends
    answer._choices[0]._pump.cancel()
    await asyncio.wait([answer._choices[0]._pump])
    homes.held = None
    on_state()
    await claiming
    again, _ = kept.lookup(keyed(1), streams, second)
    again.stream(request(2))
    await streams.until(opened=2)
    assert again is not answer

    other = KeyClaim(home.of("b"), keyed(1))
    await other.open()
    assert other.state is not None
    assert other.state.status is IdempotencyKeyStatus.RUNNING


async def test_who_asks_again_and_again_for_a_kept_answer_leaves_nothing_behind():
    streams = NullStreams()
    answer = CachedStream(streams, 1.0, lambda _: None, UsageDedup(), is_computed=lambda: True)
    for number in range(50):
        asked = request(number)
        reader = answer.stream(asked)
        assert [token async for batch in reader for token in batch.tokens] == list(answer_tokens(asked, 4096)[0])
        await reader.aclose()
        answer.mark_stopped(asked.id)  # too late to mean anything
    assert answer._asked == {}


@pytest.mark.parametrize("fails", [True, False], ids=["it fails", "its client leaves"])
async def test_of_an_answer_that_cannot_be_completed_no_tokens_are_kept(fails: bool) -> None:
    """Only that there were some: a repeat is computed again, and is counted as one."""
    streams = NullStreams(batch_sizes=lambda _: 1, fail_at={2: NoWorkers("all gone")} if fails else {})
    kept = IdempotencyCache(RequestLimits(resume_grace_s=0.0), MonotonicClock())
    answer, _ = kept.lookup(keyed(1), streams)
    metered, ended = answer.metered, weakref.ref(answer)
    reader = answer.stream(request(1))
    assert (await anext(reader)).tokens
    if fails:
        with pytest.raises(NoWorkers):
            [batch async for batch in reader]
    await reader.aclose()
    kept.release(keyed(1), answer)
    async with asyncio.timeout(60):
        await streams.until(none_open=True)
    await asyncio.wait([answer._choices[0]._pump])
    streams.fail_at.clear()
    del answer, reader
    assert ended() is None, "in no cycle, which would wait for a full collection"
    again, met = kept.lookup(keyed(1), streams)
    assert met is KeyOutcome.REPEATED
    assert again.metered is metered


async def test_the_error_of_an_answer_holds_nothing_of_the_request_that_failed() -> None:
    class Prompt:
        """What a frame of the router has."""

    prompts = [Prompt()]
    forgotten = weakref.ref(prompts[0])

    async def failing(prompt: Prompt) -> AsyncGenerator[TokenBatch, None]:
        yield TokenBatch(tokens=(1,))
        raise NoWorkers("all gone")

    class Streams(NullStreams):
        def stream(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
            return failing(prompts.pop())

    answer, _ = IdempotencyCache(RequestLimits(), MonotonicClock()).lookup(keyed(1), Streams())
    reader = answer.stream(request(1))
    await asyncio.wait([answer._choices[0]._pump])
    gc.collect()
    assert forgotten() is None
    with pytest.raises(NoWorkers):
        [batch async for batch in reader]
