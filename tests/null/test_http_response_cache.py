"""Stored responses as clients meet them: what is told again, what is computed behind it, and what never is stored."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from penstock.api.auth import StaticApiKeys, Tenant
from penstock.api.response_cache import (
    HIT,
    MAX_RESPONSE_SHARE,
    MISS,
    PREFIX,
    RESPONSE_CACHE,
    PackedResponse,
    ResponseCache,
    StoredResponse,
    _Recorder,
)
from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers
from penstock.interfaces import TtftForecast
from penstock.types import FinishReason, ModelIdentity, RequestId, TokenBatch, TokenLogprob, ValidRequest

from .http_stage import CHAT, HELLO, MODEL, TEXT, Stage, events_of, stage
from .streams import NullStreams

WORD = RESPONSE_CACHE.decode()
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 40, "seed": 3}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "n": 3, "seed": 3, "logprobs": True, "top_logprobs": 2}),
    (TEXT, {"prompt": "Once", "max_tokens": 30, "temperature": 0, "stop": ["never in this world"], "logprobs": 2}),
    (TEXT, {"prompt": ["Once", "Twice"], "max_tokens": 12, "n": 2, "seed": 1, "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": "Once", "max_tokens": 25, "seed": -4, "return_token_ids": True}),
]


async def whole(on: Stage, path: str, body: dict[str, Any], **headers: str) -> tuple[str, dict[str, Any]]:
    """What was found, and the answer."""
    answer = await on.post(path, {"model": MODEL} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers.get(WORD, ""), answer.json()


def same(answer: dict[str, Any]) -> Any:
    """What is the same however it was made."""
    return answer["choices"], answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]


def text_of(stream: str) -> dict[int, str]:
    told: dict[int, str] = {}
    for event in events_of(stream):
        for choice in event.data["choices"] if event.data != "[DONE]" else ():
            part = choice.get("text") or choice.get("delta", {}).get("content") or ""
            told[choice["index"]] = told.get(choice["index"], "") + part
    return told


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_equal_request_is_told_the_same_and_no_worker_is_asked(path: str, body: dict[str, Any]):
    store = ResponseCache(1 << 20)
    async with stage(response_cache=store) as on:
        word, first = await whole(on, path, body)
        opened = len(on.streams.opened)
        again, second = await whole(on, path, body)
        assert (word, again) == (MISS, HIT)
        assert len(on.streams.opened) == opened
        assert same(second) == same(first)
        usage = second["usage"]
        assert usage["penstock"]["stored_tokens"] == usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        assert "penstock" not in first["usage"]
        streamed = await on.post(path, {"model": MODEL, "stream": True} | body)
        assert streamed.headers[WORD] == HIT
        texts = {c["index"]: c.get("text") or c.get("message", {}).get("content") or "" for c in first["choices"]}
        assert text_of(streamed.text) == texts


async def test_shorter_and_longer_ones_share_what_is_stored():
    store = ResponseCache(1 << 20)

    def ends(request: ValidRequest) -> tuple[tuple[int, ...], FinishReason]:
        length = min(40, request.sampling.max_tokens)
        return tuple(range(100, 100 + length)), FinishReason.STOP if length == 40 else FinishReason.LENGTH

    async with stage(NullStreams(script=ends), response_cache=store) as on:
        asked = {"prompt": "Once", "seed": 1, "return_token_ids": True}
        words: list[tuple[str, int, str]] = []
        for length in (10, 4, 10, 25, 60, 40, 39, 100):
            word, answer = await whole(on, TEXT, asked | {"max_tokens": length})
            choice = answer["choices"][0]
            assert choice["token_ids"] == list(range(100, 100 + min(40, length)))
            words.append((word, length, choice["finish_reason"]))
        assert words == [
            (MISS, 10, "length"),
            (HIT, 4, "length"),
            (HIT, 10, "length"),
            (PREFIX, 25, "length"),
            (PREFIX, 60, "stop"),
            (HIT, 40, "stop"),
            (HIT, 39, "length"),
            (HIT, 100, "stop"),
        ]
        assert [len(request.begun.tokens) for request in on.streams.opened] == [0, 10, 25]
        assert store.tokens == 4 + 10 + 10 + 25 + 40 + 39 + 40


async def test_what_a_stop_string_cut_goes_on_for_a_request_without_it():
    async with stage(response_cache=ResponseCache(1 << 20)) as on:
        _, plain = await whole(
            on, TEXT, {"prompt": "Twice", "seed": 5, "max_tokens": 30}, **{"cache-control": "no-store"}
        )
        stop = plain["choices"][0]["text"][12:16]
        cut = {"prompt": "Twice", "seed": 5, "max_tokens": 30, "stop": stop}
        _, first = await whole(on, TEXT, cut)
        word, second = await whole(on, TEXT, cut)
        assert word == PREFIX  # fewer tokens than asked for, though none is needed
        assert same(second) == same(first)
        word, rest = await whole(on, TEXT, {"prompt": "Twice", "seed": 5, "max_tokens": 30})
        assert word == PREFIX
        assert same(rest) == same(plain)


async def test_what_failed_or_was_left_is_not_stored():
    store = ResponseCache(1 << 20)
    streams = NullStreams(fail_at={6: NoWorkers("all gone")})
    async with stage(streams, response_cache=store) as on:
        assert (await on.text(max_tokens=12)).status_code == 503
        streams.fail_at, streams.gate = {}, asyncio.Event()
        leaving = asyncio.create_task(on.text(max_tokens=12))
        await streams.until(opened=2)
        leaving.cancel()
        await streams.until(none_open=True)
        assert len(store.responses) == 0
        streams.gate = None
        assert (await on.text(max_tokens=12)).headers[WORD] == MISS


@pytest.mark.parametrize(
    ("fields", "headers"),
    [({"seed": None}, {}), ({}, {"cache-control": "no-store"}), ({"seed": None, "temperature": 0.7}, {})],
)
async def test_what_is_not_to_be_repeated(fields: dict[str, Any], headers: dict[str, str]):
    store = ResponseCache(1 << 20)
    async with stage(response_cache=store) as on:
        body = {"prompt": "Once", "max_tokens": 8, "seed": 1} | fields
        for _ in range(2):
            word, _ = await whole(on, TEXT, body, **headers)
            assert word == ""
        assert len(on.streams.opened) == 2
        assert len(store.responses) == 0


async def test_no_store_is_seen_on_any_of_its_lines():
    store = ResponseCache(1 << 20)
    async with stage(response_cache=store) as on:
        lines = [("Cache-Control", "max-age=0"), ("Cache-Control", "no-transform, No-Store")]
        answer = await on.post(TEXT, {"model": MODEL, "prompt": "Once", "seed": 1, "max_tokens": 4}, headers=lines)
        assert (answer.status_code, answer.headers.get(WORD), len(store.responses)) == (200, None, 0)


async def test_tenants_do_not_share():
    tenants = {"a": Tenant(id="ta"), "b": Tenant(id="tb", tokens_per_minute=60)}
    ring = StaticApiKeys({hashlib.sha256(name.encode()).digest(): tenant for name, tenant in tenants.items()})
    body = {"prompt": "Once", "seed": 1, "max_tokens": 40}
    async with stage(ring=ring, response_cache=ResponseCache(1 << 20)) as on:
        words = [(await whole(on, TEXT, body, authorization=f"Bearer {key}"))[0] for key in "abab"]
        assert words == [MISS, MISS, HIT, HIT]
        # What is stored takes none of a tenant's tokens: a third answer would have been too much for b.
        assert (await whole(on, TEXT, body, authorization="Bearer b"))[0] == HIT


async def test_another_model_is_another_answer():
    async with stage(response_cache=ResponseCache(1 << 20)) as on:
        assert (await on.text()).headers[WORD] == MISS
        on.streams.served = ModelIdentity(fingerprint="f" * 64, numerics="null-1-fp32")
        assert (await on.text()).headers[WORD] == MISS
        assert (await on.text()).headers[WORD] == HIT


class Elsewhere(NullStreams):
    """Streams of which each is served by another version of the model than the gateway knew."""

    def serving_identity(self, request: RequestId) -> ModelIdentity | None:
        return ModelIdentity(fingerprint="e" * 64, numerics="null-1-fp32")


async def test_nothing_is_kept_of_what_another_model_wrote():
    store = ResponseCache(1 << 20)
    async with stage(Elsewhere(), response_cache=store) as on:
        for _ in range(2):
            assert (await on.text()).headers[WORD] == MISS
        assert len(store.responses) == 0


async def test_equal_requests_at_one_time_are_both_computed():
    streams = NullStreams(gate=asyncio.Event())
    async with stage(streams, response_cache=ResponseCache(1 << 20)) as on:
        both = [asyncio.create_task(on.text(max_tokens=12)) for _ in range(2)]
        await streams.until(opened=2)
        assert streams.gate is not None
        streams.gate.set()
        first, second = [(await task).json() for task in both]
        assert same(first) == same(second)
        assert (await on.text(max_tokens=12)).headers[WORD] == HIT


async def test_with_an_idempotency_key_an_answer_is_told_once_more_and_charged_once():
    store = ResponseCache(1 << 20)
    async with stage(response_cache=store) as on:
        body = {"prompt": "Once", "seed": 1, "max_tokens": 12}
        _, plain = await whole(on, TEXT, body)
        word, first = await whole(on, TEXT, body, **{"idempotency-key": "k"})
        assert word == HIT
        assert first["usage"]["penstock"]["stored_tokens"] == 12
        assert first["usage"]["penstock"]["repeated"] is False
        word, second = await whole(on, TEXT, body, **{"idempotency-key": "k"})
        assert word == ""  # told from what is kept of the key
        assert second["usage"]["penstock"]["repeated"] is True
        assert len({answer["id"] for answer in (plain, first, second)}) == 2
        assert same(plain) == same(first) == same(second)
        assert len(on.streams.opened) == 1


async def test_a_busy_service_sends_nobody_away_who_needs_no_worker():
    streams = NullStreams()
    async with stage(streams, RequestLimits(first_byte_s=1.0), response_cache=ResponseCache(1 << 20)) as on:
        assert (await on.text()).headers[WORD] == MISS
        streams.foreseen = TtftForecast(wait_s=60.0, prefill_s=1.0)
        assert (await on.text(seed=2)).status_code == 503
        assert (await on.text()).headers[WORD] == HIT


async def test_who_has_a_stored_beginning_still_waits_for_a_worker():
    streams = NullStreams()
    async with stage(streams, RequestLimits(max_queued_requests=1), response_cache=ResponseCache(1 << 20)) as on:
        await on.text(max_tokens=4)
        streams.gate = asyncio.Event()
        longer = asyncio.create_task(on.text(max_tokens=12))
        await streams.until(opened=2)
        async with asyncio.timeout(60):
            assert (await on.text(seed=2)).status_code == 429
        streams.gate.set()
        assert (await longer).headers[WORD] == PREFIX
        assert (await on.text(seed=2)).status_code == 200


async def test_many_choices_are_unpacked_in_as_many_turns(monkeypatch: pytest.MonkeyPatch):
    turn, unpacked, plain = 0, list[int](), PackedResponse.unpack

    async def turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def noted(kept: PackedResponse) -> StoredResponse:
        unpacked.append(turn)
        return plain(kept)

    async with stage(response_cache=ResponseCache(1 << 20)) as on:
        first = (await on.text(n=8)).json()
        monkeypatch.setattr(PackedResponse, "unpack", noted)
        counting = asyncio.create_task(turns())
        second = await on.text(n=8)
        counting.cancel()
        assert (second.headers[WORD], same(second.json())) == (HIT, same(first))
    assert len(unpacked) == len(set(unpacked)) == 8


async def test_nothing_is_kept_of_an_answer_that_becomes_too_large():
    store = ResponseCache(MAX_RESPONSE_SHARE * 2000)
    async with stage(response_cache=store) as on:
        assert (await on.text(max_tokens=100, logprobs=5)).status_code == 200
        assert len(store.responses) == 0
        await on.text(max_tokens=100)
        assert (await on.text(max_tokens=100)).headers[WORD] == HIT


def test_what_is_told_is_not_gathered_beyond_what_may_be_stored():
    logprobs = (TokenLogprob(1, -0.5, tuple((2, -1.5) for _ in range(9))),) * 10
    told = _Recorder(None, 1000)
    for _ in range(50):
        told.add(TokenBatch(tokens=(1,) * 10, logprobs=logprobs))
    assert (told.fits, told.tokens) == (False, [])
    small = _Recorder(None, 3000)
    small.add(TokenBatch(tokens=(1,) * 10, logprobs=logprobs))
    assert small.fits
    assert small.response().logprobs == logprobs
