"""What is kept by idempotency key: only what was begun."""

from __future__ import annotations

from penstock.api.idempotency import CachedStream, IdempotencyCache, IdempotentRequest, KeyOutcome, UsageDedup
from penstock.api.sse import EventSigner
from penstock.clock import MonotonicClock
from penstock.config.limits import RequestLimits
from penstock.types import RequestId, SamplingParams, ValidRequest

from .streams import NullStreams, answer_tokens


def keyed(number: int) -> IdempotentRequest:
    return IdempotentRequest(
        key=number.to_bytes(4, "big"), name=str(number), seed=number, mark="m", signer=EventSigner(b"", b"")
    )


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


async def test_who_asks_again_and_again_for_a_kept_answer_leaves_nothing_behind():
    streams = NullStreams()
    answer = CachedStream(streams, 1.0, lambda: None, UsageDedup())
    for number in range(50):
        request = ValidRequest(
            id=RequestId(f"r{number}"), prompt=(1, 2), block_hashes=(), arrival=0.0,
            sampling=SamplingParams(seed=1, max_tokens=4),
        )  # fmt: skip
        reader = answer.stream(request)
        assert [token async for batch in reader for token in batch.tokens] == list(answer_tokens(request, 4096)[0])
        await reader.aclose()
        answer.mark_stopped(request.id)  # too late to mean anything
    assert answer._asked == {}
