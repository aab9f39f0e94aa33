"""Answers that are known in part before they are asked for: the rest is the same, and comes alone."""

from __future__ import annotations

import msgspec
import pytest

from penstock.config.limits import RequestLimits
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers
from penstock.types import FinishReason, RequestId, ResumeFrom

from .router_town import SPLIT, WHOLE, WIDE, Client, Town
from .worker_stage import IDENTITY


async def whole(town: Town, **sampling: object) -> Client:
    client = town.ask("whole", **sampling)  # type: ignore[arg-type]
    await town.finish(client)
    client.assert_true_answer()
    return client


def goes_on(town: Town, first: Client, known: int, name: str = "rest", **more: object) -> Client:
    begun = ResumeFrom(tuple(first.tokens[:known]), IDENTITY)
    return town.serve(msgspec.structs.replace(first.request, id=RequestId(name), begun=begun, **more))


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
@pytest.mark.parametrize("known", [1, 7, 19])
async def test_the_rest_is_what_it_would_have_been(names: tuple[str, ...], known: int):
    async with Town(*names) as town:
        first = await whole(town, max_tokens=20, logprobs=1)
        rest = goes_on(town, first, known)
        await town.finish(rest)
        assert rest.error is None
        assert rest.tokens == first.tokens[known:]
        assert rest.finish is FinishReason.LENGTH
        assert rest.batches[0].cached_tokens > 0
        told = [entry for batch in first.batches for entry in batch.logprobs or ()]
        assert [entry for batch in rest.batches for entry in batch.logprobs or ()] == told[known:]
        await town.assert_idle()


async def test_a_longer_answer_goes_on_from_a_shorter_one():
    async with Town(*SPLIT) as town:
        short = await whole(town, max_tokens=10)
        sampling = msgspec.structs.replace(short.request.sampling, max_tokens=30)
        rest = goes_on(town, short, 10, sampling=sampling)
        await town.finish(rest)
        long = Client(msgspec.structs.replace(short.request, sampling=sampling))
        assert short.tokens + rest.tokens == long.truth()


async def test_the_rest_survives_its_worker():
    async with Town(*WIDE) as town:
        first = await whole(town, max_tokens=40)
        rest = goes_on(town, first, 10)
        await town.until(lambda: len(rest.tokens) >= 5)
        town.kill(town.router.debug(RequestId("rest"))[-1].decode.worker)  # type: ignore[union-attr]
        await town.finish(rest)
        assert rest.tokens == first.tokens[10:]
        await town.assert_idle()


async def test_it_goes_on_in_the_bits_that_it_began_in():
    patience = GatewayConfig(name="g", model_name="null", limits=RequestLimits(first_byte_s=3.0))
    async with Town(*WHOLE, config=patience) as town:
        first = await whole(town, max_tokens=10)
        other = msgspec.structs.replace(IDENTITY, numerics="other-1-fp32")
        begun = ResumeFrom(tuple(first.tokens[:4]), other)
        rest = town.serve(msgspec.structs.replace(first.request, id=RequestId("rest"), begun=begun))
        await town.wait(3.5)
        assert isinstance(rest.error, NoWorkers)
        assert not rest.tokens
