"""Spans of HTTP requests: taken up from headers, told in one, and what they say of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.response_cache import ResponseCache
from penstock.errors import NoWorkers
from penstock.telemetry import spans

from .http_stage import CHAT, HELLO, MODEL, TEXT, events_of, stage
from .span_notes import SpanNotes
from .streams import NullStreams

CALLER = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b"}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 6, "seed": 1}, "chat storyteller"),
        (
            TEXT,
            {"prompt": ["Once", "Twice"], "max_tokens": 6, "seed": 1, "stream": True},
            "text_completion storyteller",
        ),
    ],
)
async def test_a_request_is_a_span_and_its_choices_are_parts_of_it(path: str, body: dict[str, Any], name: str):
    notes = SpanNotes()
    async with stage(tracer=notes) as on:
        answer = await on.post(path, {"model": MODEL} | body, headers=CALLER | {"x-penstock-class": "batch"})
        assert answer.status_code == 200
        assert {request.trace for request in on.streams.opened} == {"span-0"}
    notes.assert_whole()
    root, intake = notes.notes
    assert (root.name, root.parent, intake.parent) == (name, CALLER["traceparent"], "span-0")
    assert answer.headers["traceresponse"] == root.context
    told = answer.json() if path == CHAT else events_of(answer.text)[0].data
    assert root.facts["gen_ai.response.id"] == told["id"]
    assert root.facts["gen_ai.request.model"] == MODEL
    assert root.facts["penstock.class"] == "batch"
    assert root.facts["gen_ai.usage.output_tokens"] == 6 * len(on.streams.opened)
    assert intake.facts["penstock.requests"] == len(on.streams.opened)


async def test_the_state_of_a_trace_may_come_in_several_lines():
    notes = SpanNotes()
    async with stage(tracer=notes) as on:
        lines = [*CALLER.items(), ("tracestate", "c=d,e=f"), ("tracestate", "g=h")]
        await on.post(TEXT, {"model": MODEL, "prompt": "Once", "max_tokens": 1}, headers=lines)
    (caller,) = notes.callers
    assert caller == {"traceparent": CALLER["traceparent"], "tracestate": "a=b, c=d,e=f, g=h"}


async def test_a_stored_response_says_so():
    notes = SpanNotes()
    async with stage(tracer=notes, response_cache=ResponseCache(1 << 20)) as on:
        for _ in range(2):
            await on.text()
    roots = notes.of(spans.REQUEST)
    assert [root.facts["penstock.response_cache"] for root in roots] == ["miss", "hit"]
    assert [root.facts["penstock.stored_tokens"] for root in roots] == [0, 8]


@pytest.mark.parametrize(
    ("fields", "streams", "error"),
    [
        ({"temperature": 7}, NullStreams(), "BadField"),
        ({}, NullStreams(fail_at={0: NoWorkers("all gone")}), "NoWorkers"),
    ],
)
async def test_what_is_refused_or_fails_is_a_span_too(fields: dict[str, Any], streams: NullStreams, error: str):
    notes = SpanNotes()
    async with stage(streams, tracer=notes) as on:
        assert (await on.text(**fields)).status_code >= 400
    notes.assert_whole()
    assert notes.of(spans.REQUEST)[0].error == error


async def test_without_a_tracer_nothing_is_told():
    async with stage() as on:
        answer = await on.text()
        assert "traceresponse" not in answer.headers
        assert on.streams.opened[0].trace == ""
