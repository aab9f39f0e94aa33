"""Requests with an idempotency key: the same answer from any gateway and any event on, charged once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from typing import Any

import pytest

from penstock.api.auth import StaticApiKeys, Tenant
from penstock.api.endpoints import event_key_with_defaults
from penstock.api.idempotency import KeyOutcome, event_signer
from penstock.api.response_cache import ResponseCache
from penstock.api.sse import MAX_ID_CHOICES, EventSigner, ResumePoint
from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers, RequestError
from penstock.interfaces import TtftForecast
from penstock.telemetry.service_levels import ServiceLevels
from penstock.types import ModelIdentity

from .http_stage import CHAT, HELLO, MODEL, TEXT, Event, Stage, check, events_of, intake_of, stage
from .streams import IDENTITY, NullStreams

KEY = {"Idempotency-Key": "6f1c2d1e-order-7"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 24}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "n": 3, "logprobs": True, "top_logprobs": 2}),
    (TEXT, {"prompt": "Once", "max_tokens": 30, "stop": ["e", "zz"], "logprobs": 2}),
    (TEXT, {"prompt": ["Once", "Twice"], "max_tokens": 12, "n": 2, "echo": True, "return_token_ids": True}),
    (TEXT, {"prompt": "Once", "max_tokens": 25, "stop": ["never in this world"]}),
]


def marked(place: str, body: dict[str, Any], tenant: str = "") -> str:
    """An event's id as the service would give it out that has no secret."""
    key, secret = KEY["Idempotency-Key"].encode(), event_key_with_defaults(b"", intake_of(RequestLimits()).cards()[0])
    return f"{place}/{event_signer(secret, tenant, key, body, IDENTITY).sign(place)}"


async def streamed(on: Stage, path: str, body: dict[str, Any], last: str | None = None) -> list[Event]:
    headers = KEY if last is None else KEY | {"Last-Event-ID": last}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await on.post(path, {"model": MODEL} | body | options, headers=headers)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def told(events: list[Event]) -> dict[int, dict[str, Any]]:
    """What a client puts together, choice by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event.data["choices"] if event.data != "[DONE]" else ():
            own = choices.setdefault(part["index"], {"text": "", "finish": None, "logprobs": [], "ids": [], "roles": 0})
            delta = part.get("delta", part)
            own["text"] += delta.get("content") or delta.get("text") or ""
            own["roles"] += "role" in delta
            own["ids"] += part.get("token_ids") or []
            own["logprobs"] += next(iter((part.get("logprobs") or {}).values())) if part.get("logprobs") else []
            own["finish"] = own["finish"] or part["finish_reason"]
    return choices


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_goes_on_from_any_event_at_another_gateway(path: str, body: dict[str, Any]) -> None:
    async with stage(NullStreams(cuts=random.Random(5))) as one:
        whole = await streamed(one, path, body)
    assert len({event.id for event in whole}) == len(whole)
    for index in range(0, len(whole) - 1, max(1, len(whole) // 8)):
        async with stage(
            NullStreams(cuts=random.Random(index))
        ) as other:  # which batches tokens come in does not matter
            rest = await streamed(other, path, body, last=whole[index].id)
        assert told(whole[: index + 1] + rest) == told(whole)
        assert rest[-1].data == "[DONE]"
        if index < len(whole) - 2:
            usage, later = whole[-2].data["usage"], rest[-2].data["usage"]
            assert later["completion_tokens"] == usage["completion_tokens"]
            assert later["penstock"]["charge_id"] == usage["penstock"]["charge_id"] == whole[0].data["id"]
            assert (usage["penstock"]["repeated"], later["penstock"]["repeated"]) == (False, True)


async def test_the_drawn_seed_follows_from_the_idempotency_key() -> None:
    """And from the tenant: ``test_http_fronted.test_idempotency_keys_belong_to_tenants``."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4}

    async def seed(key: str, bearer: str) -> int:
        async with stage(None, None, "a", "b") as on:
            headers = {"Idempotency-Key": key, "Authorization": f"Bearer {bearer}"}
            answer = await on.post(TEXT, body, headers=headers)
            return answer.json()["penstock"]["seed"]

    first = await seed("k1", "a")
    assert first == await seed("k1", "a") == await seed("k1", "b")  # keys of nobody in particular are one tenant's
    assert first != await seed("k2", "a")


async def test_a_repeat_joins_the_one_that_runs_and_later_is_told_from_what_is_kept() -> None:
    streams = NullStreams()
    streams.gate = asyncio.Event()
    async with stage(streams) as on:
        first = asyncio.create_task(on.text(max_tokens=12))
        body = {"max_tokens": 12}
        tasks = [asyncio.create_task(on.post(TEXT, _text(body), headers=KEY)) for _ in range(3)]
        await asyncio.sleep(0)
        streams.gate.set()
        answers = [(await task).json() for task in tasks]
        await first
        began = len(streams.opened)
        answers.append((await on.post(TEXT, _text(body), headers=KEY)).json())
        assert len(streams.opened) == began == 2  # one without a key, one for all with it
    assert len({answer["id"] for answer in answers}) == 1
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert sorted(answer["usage"]["penstock"]["repeated"] for answer in answers) == [False, True, True, True]


def _text(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once"} | fields


async def test_a_failed_answer_is_computed_again() -> None:
    streams = NullStreams()
    streams.fail_at = {4: NoWorkers("all gone")}
    async with stage(streams) as on:
        assert (await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)).status_code == 503
        streams.fail_at = {}
        answer = await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)
        assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("store", [None, ResponseCache(1 << 20)])
async def test_what_was_refused_at_the_door_was_never_met(store: ResponseCache | None) -> None:
    streams = NullStreams(foreseen=TtftForecast(wait_s=60.0, prefill_s=1.0))
    async with stage(streams, RequestLimits(first_byte_s=1.0), response_cache=store) as on:
        body = _text({"max_tokens": 8, "seed": 1})
        for _ in range(2):
            assert (await on.post(TEXT, body, headers=KEY)).status_code == 503
        streams.foreseen = None
        answer = await on.post(TEXT, body, headers=KEY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["penstock"]["repeated"] is False
        assert (await on.post(TEXT, body, headers=KEY)).json()["usage"]["penstock"]["repeated"] is True


async def test_what_failed_before_its_first_token_is_not_charged_and_the_next_is() -> None:
    streams, met = NullStreams(), list[str]()
    async with stage(streams, count_key_outcome=met.append) as on:
        for first in (0, 3):
            streams.fail_at = {first: NoWorkers("all gone")}
            assert (await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)).status_code == 503
        streams.fail_at = {}
        assert (await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)).status_code == 200
    assert met == [KeyOutcome.NEW, KeyOutcome.NEW, KeyOutcome.REPEATED]


async def test_a_client_that_comes_back_in_time_finds_its_answer_running() -> None:
    streams = NullStreams()
    streams.gate = asyncio.Event()
    async with stage(streams, RequestLimits(resume_grace_s=5.0)) as on:
        task = asyncio.create_task(on.post(TEXT, _text({"max_tokens": 8, "stream": True}), headers=KEY))
        await streams.until(opened=1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        streams.gate.set()
        again = await on.post(TEXT, _text({"max_tokens": 8, "stream": True}), headers=KEY)
        assert events_of(again.text)[-1].data == "[DONE]"
        assert len(streams.opened) == 1


async def test_nobody_comes_back_and_the_work_ends() -> None:
    streams = NullStreams()
    streams.gate = asyncio.Event()
    async with stage(streams, RequestLimits(resume_grace_s=0.0)) as on:
        task = asyncio.create_task(on.post(TEXT, _text({"max_tokens": 8, "stream": True}), headers=KEY))
        await streams.until(opened=1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(60):
            await streams.until(none_open=True)


async def test_the_same_key_for_something_else_is_refused() -> None:
    async with stage() as on:
        assert (await on.post(TEXT, _text({"max_tokens": 4}), headers=KEY)).status_code == 200
        other = await on.post(TEXT, _text({"max_tokens": 5}), headers=KEY)
        check(other, 422, "idempotency_key_reused", "another request body")
    async with stage() as on:
        events = await streamed(on, TEXT, {"prompt": "Once", "max_tokens": 4})
        headers = KEY | {"Last-Event-ID": events[0].id}
        elsewhere = await on.post(TEXT, _text({"max_tokens": 5, "stream": True}), headers=headers)
        check(elsewhere, 422, "idempotency_key_reused", "belongs to another request body")


async def test_a_stream_goes_on_at_no_gateway_of_another_model() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with stage() as on:
        events = await streamed(on, TEXT, {"prompt": "Once", "max_tokens": 4})
    async with stage(NullStreams(served=ModelIdentity(fingerprint="f" * 64, numerics="null-1-fp32"))) as on:
        headers = KEY | {"Last-Event-ID": events[0].id}
        elsewhere = await on.post(TEXT, _text({"max_tokens": 4} | options), headers=headers)
        check(elsewhere, 422, "idempotency_key_reused", "version of the model")
        assert not on.streams.opened


@pytest.mark.parametrize(
    ("headers", "stream", "code", "words"),
    [
        ({"Idempotency-Key": ""}, True, "invalid_idempotency_key", "1 to 256 visible ASCII"),
        ({"Idempotency-Key": "x" * 257}, True, "invalid_idempotency_key", "1 to 256 visible ASCII"),
        ({"Last-Event-ID": "0:3"}, True, "missing_idempotency_key", "needs the Idempotency-Key"),
        (KEY | {"Last-Event-ID": "0:3"}, True, "invalid_last_event_id", "'0:3'"),
        (KEY | {"Last-Event-ID": "0:-1/0123456789abcdef"}, True, "invalid_last_event_id", "not the id of an event"),
        (KEY | {"Last-Event-ID": "0:1" + ";0:1" * 5000}, True, "invalid_last_event_id", "not the id of an event"),
        (KEY | {"Last-Event-ID": "0:3"}, False, "invalid_last_event_id", "is for streams"),
    ],
)
async def test_headers_that_cannot_be(headers: dict[str, str], stream: bool, code: str, words: str) -> None:
    async with stage() as on:
        check(await on.post(TEXT, _text({"stream": stream}), headers=headers), 400, code, words)


async def test_a_place_beyond_the_end_is_refused() -> None:
    async with stage() as on:
        body = _text({"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}})
        answer = await on.post(TEXT, body, headers=KEY | {"Last-Event-ID": marked("0:9", body)})
        check(answer, 400, "invalid_last_event_id", "names 9 tokens of an answer that has 4")


async def test_with_everything_told_only_the_last_word_is_left() -> None:
    async with stage() as on:
        events = await streamed(on, TEXT, {"prompt": "Once", "max_tokens": 4})
        asked = len(on.streams.opened)
        for last in (events[-2].id, "done"):
            assert [event.data for event in await streamed(on, TEXT, {"prompt": "Once", "max_tokens": 4}, last)] == [
                "[DONE]"
            ]
        assert len(on.streams.opened) == asked


async def test_the_first_event_again_and_again_is_no_way_around_a_rate() -> None:
    tenant = Tenant(id="t", tokens_per_minute=60)
    ring = StaticApiKeys({hashlib.sha256(b"t").digest(): tenant})
    body = _text({"max_tokens": 40, "stream": True, "seed": 1})
    headers = KEY | {"Authorization": "Bearer t", "Last-Event-ID": marked("0:0", body, "t")}
    async with stage(limits=RequestLimits(max_kept_tokens=0), ring=ring) as on:
        codes = [(await on.post(TEXT, body, headers=headers)).status_code for _ in range(4)]
    assert codes[0] == 200
    assert 429 in codes


class Meter(ServiceLevels):
    """What a tenant was found to have used: requests, then tokens of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def add_usage(self, tenant: str, tokens: tuple[int, int, int, int], requests: int = 1) -> None:
        self.seen.append((requests, *tokens))

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.seen, strict=True)))


async def leave_after(on: Stage, events: int, body: dict[str, Any], headers: dict[str, str]) -> str:
    """A client that goes after so many events; the id of the last."""
    got: list[Event] = []
    scope = {"type": "http", "method": "POST", "path": TEXT, "http_version": "1.1", "query_string": b""}
    plain = {"content-type": "application/json"} | headers
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in plain.items()]
    bodies = [{"type": "http.request", "body": json.dumps(body).encode()}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            got.extend(events_of(message["body"].decode()))
        if len(got) >= events:
            gone.set()

    await on.application(scope, receive, send)
    return got[events - 1].id


@pytest.mark.parametrize("grace_s", [60.0, 0.0])
@pytest.mark.parametrize("resumes", [True, False])
async def test_every_token_counts_once_however_often_its_client_leaves(grace_s: float, resumes: bool) -> None:
    """It joins what runs, is told again what is kept, or has it computed again."""
    tokens, meter, streams = 40, Meter(), NullStreams(batch_sizes=lambda _: 1)
    tenant = Tenant(id="t", tokens_per_minute=1_000_000)
    keys = StaticApiKeys({hashlib.sha256(b"t").digest(): tenant})
    body = _text({"max_tokens": tokens, "stream": True, "seed": 1, "ignore_eos": True})
    headers = KEY | {"Authorization": "Bearer t"}
    async with stage(streams, RequestLimits(resume_grace_s=grace_s), ring=keys, levels=meter) as on:
        last = await leave_after(on, 2, body, headers)
        if grace_s == 0.0:
            async with asyncio.timeout(60):
                await streams.until(none_open=True)
        more = {"Last-Event-ID": last} if resumes else {}
        last = await leave_after(on, 3, body, headers | more)
        for _ in range(2):
            answer = await on.post(TEXT, body, headers=headers | ({"Last-Event-ID": last} if resumes else {}))
            assert events_of(answer.text)[-1].data == "[DONE]"
    prompt = len(streams.opened[0].prompt)
    assert meter.sums == (1, prompt, tokens, 0, 0)


async def test_elsewhere_a_stream_counts_what_stands_behind_its_event() -> None:
    body = {"prompt": "Once", "max_tokens": 30, "n": 2}
    whole, meter = Meter(), Meter()
    async with stage(levels=whole) as one:
        last = (await streamed(one, TEXT, body))[10].id
    async with stage(levels=meter) as other:
        await streamed(other, TEXT, body, last)
    marks = EventSigner(b"", b"")
    places = ResumePoint.parse(
        f"{last.partition('/')[0]}/{marks.sign(last.partition('/')[0])}".encode(), marks
    ).positions.values()
    had = sum(place.tokens for place in places)
    assert not any(place.ended for place in places)
    assert whole.sums[2] > had > 0
    assert meter.sums == (0, 0, whole.sums[2] - had, 0, 0)


async def test_an_event_before_the_first_token_leaves_everything_to_count() -> None:
    body = {"prompt": "Once", "max_tokens": 30, "n": 2}
    whole, meter = Meter(), Meter()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with stage(levels=whole) as one:
        await streamed(one, TEXT, body)
    async with stage(levels=meter) as other:
        await streamed(other, TEXT, body, marked("0:0", {"model": MODEL} | body | options))
    assert meter.sums == whole.sums


def test_an_event_of_more_choices_than_an_id_tells_of_is_none_of_ours() -> None:
    marks = EventSigner(b"", b"")
    places = [f"{choice}:1" for choice in range(MAX_ID_CHOICES + 1)]
    most = ";".join(places[1:])
    assert len(ResumePoint.parse(f"{most}/{marks.sign(most)}".encode(), marks).positions) == MAX_ID_CHOICES
    with pytest.raises(RequestError):
        ResumePoint.parse(f"{';'.join(places)}/{marks.sign(';'.join(places))}".encode(), marks)


async def test_no_client_can_name_an_event_that_it_was_not_told_of() -> None:
    """Or it would have an answer that nobody counts: each gateway believes that another one has told its beginning."""
    body = _text({"max_tokens": 40, "stream": True, "seed": 1})
    tenants = StaticApiKeys({hashlib.sha256(name).digest(): Tenant(id=name.decode()) for name in (b"ann", b"eve")})
    ann, eve = ({"Authorization": f"Bearer {name}"} for name in ("ann", "eve"))
    async with stage(ring=tenants, event_key=b"secret") as on:
        events = events_of((await on.post(TEXT, body, headers=ann | KEY)).text)
        place, _, mark = events[1].id.partition("/")
        last = place.rpartition(":")[0] + ":39"
    meter = Meter()
    async with stage(ring=tenants, levels=meter, event_key=b"secret") as on:  # another gateway
        for headers in (
            ann | KEY | {"Last-Event-ID": f"{last}/{mark}"},  # another place of the same stream
            ann | {"Idempotency-Key": "fresh", "Last-Event-ID": events[1].id},  # of a fresh key
            eve | KEY | {"Last-Event-ID": events[1].id},  # somebody else's
            ann | KEY | {"Last-Event-ID": marked("0:1", body)},  # made without the secret
        ):
            answer = await on.post(TEXT, body, headers=headers)
            check(answer, 422, "idempotency_key_reused", "Last-Event-ID")
        assert meter.seen == []
        gone_on = await on.post(TEXT, body, headers=ann | KEY | {"Last-Event-ID": events[1].id})
        told = [(event.id, event.data["choices"]) for event in events_of(gone_on.text)[:-1]]
        assert told == [(event.id, event.data["choices"]) for event in events[2:-1]]


async def test_a_busy_service_tells_again_what_it_has() -> None:
    streams = NullStreams()
    async with stage(streams, RequestLimits(first_byte_s=1.0)) as on:
        assert (await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)).status_code == 200
        streams.foreseen = TtftForecast(wait_s=60.0, prefill_s=1.0)
        assert (await on.post(TEXT, _text({"max_tokens": 8}), headers=KEY)).status_code == 200


async def test_what_is_kept_is_bounded() -> None:
    limits = RequestLimits(max_idempotency_keys=2, max_kept_tokens=10)
    streams = NullStreams()
    async with stage(streams, limits) as on:
        asked = itertools.count(1)
        for key, computed in [("a", True), ("b", True), ("b", False), ("c", True), ("a", True)]:
            wanted = next(asked) if computed else len(streams.opened)
            await on.post(TEXT, _text({"max_tokens": 8}), headers={"Idempotency-Key": key})
            assert len(streams.opened) == wanted, key
