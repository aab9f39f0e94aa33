"""The contract of ``interfaces.TokenStreams``, which the edge relies on: the router before workers, and the double.

It stands here and not in ``tests/contract`` because the real thing needs a whole town.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from penstock.interfaces import TokenStreams
from penstock.types import FinishReason, RequestId, SamplingParams, TokenBatch, ValidRequest, pack_token_ids

from .router_town import Town
from .streams import NullStreams
from .worker_stage import VOCAB


@dataclass
class Contender:
    """An implementation, and how to see that it holds nothing."""

    streams: TokenStreams
    assert_idle: Callable[[], Awaitable[None]]


@pytest.fixture(params=["router", "double"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Contender]:
    if request.param == "double":
        double = NullStreams(vocabulary=VOCAB)

        async def nothing_open() -> None:
            assert double.open == set()

        yield Contender(double, nothing_open)
        return
    async with Town("prefill-0", "decode-0") as town:
        turning = asyncio.create_task(turn_forever(town))

        async def idle() -> None:
            turning.cancel()
            with suppress(asyncio.CancelledError):
                await turning
            await town.assert_idle()

        yield Contender(town.router, idle)
        turning.cancel()
        with suppress(asyncio.CancelledError):
            await turning


async def turn_forever(town: Town) -> None:
    while True:
        await town.turn()


def request(name: str = "r", *, prompt: tuple[int, ...] = tuple(range(20)), **sampling: object) -> ValidRequest:
    params: dict[str, object] = {"seed": 7, "max_tokens": 12} | sampling
    return ValidRequest(
        id=RequestId(name),
        prompt=pack_token_ids(prompt),
        block_hashes=(),
        sampling=SamplingParams(**params),
        arrival=0.0,
    )


async def whole(streams: TokenStreams, asked: ValidRequest) -> list[TokenBatch]:
    stream = streams.stream(asked)
    try:
        return [batch async for batch in stream]
    finally:
        await stream.aclose()


def tokens(batches: list[TokenBatch]) -> list[int]:
    return [token for batch in batches for token in batch.tokens]


async def test_the_last_batch_and_no_other_has_the_end(made: Contender):
    batches = await whole(made.streams, request())
    assert [batch.finish for batch in batches[:-1]] == [None] * (len(batches) - 1)
    assert batches[-1].finish is FinishReason.LENGTH
    assert len(tokens(batches)) == 12
    assert all(batch.tokens for batch in batches)
    await made.assert_idle()


async def test_a_stop_token_is_told_as_the_last_token(made: Contender):
    free = tokens(await whole(made.streams, request("a")))
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    batches = await whole(made.streams, request("b", stop_token_ids=(stop,)))
    assert tokens(batches) == free[: free.index(stop) + 1]
    assert batches[-1].finish is FinishReason.STOP


async def test_one_prompt_one_answer(made: Contender):
    first = tokens(await whole(made.streams, request("a")))
    assert tokens(await whole(made.streams, request("b"))) == first
    both = await asyncio.gather(*(whole(made.streams, request(f"c{i}", choice=i)) for i in range(2)))
    assert tokens(both[0]) == first
    assert tokens(both[1]) != first


async def test_closing_early_frees_everything(made: Contender):
    stream = made.streams.stream(request(max_tokens=200))
    await anext(stream)  # type: ignore[call-overload]
    made.streams.mark_stopped(RequestId("r"))
    await stream.aclose()
    await stream.aclose()
    await made.assert_idle()


async def test_a_consumer_that_is_cancelled_frees_everything(made: Contender):
    began = asyncio.Event()

    async def consume() -> None:
        stream = made.streams.stream(request(max_tokens=200))
        try:
            async for _ in stream:
                began.set()
        finally:
            await stream.aclose()

    task = asyncio.create_task(consume())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.assert_idle()


async def test_what_the_status_pages_ask(made: Contender):
    await whole(made.streams, request())
    assert made.streams.identity() is not None
    assert made.streams.ready()
    assert made.streams.stall_reason() is None
    assert isinstance(list(made.streams.workers()), list)
    made.streams.mark_stopped(RequestId("nobody"))
