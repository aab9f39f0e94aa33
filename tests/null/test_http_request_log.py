"""The log of requests: who was refused, and with --log-requests every request; never what was said in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import WorkerLost

from .http_stage import CHAT, HELLO, MODEL, stage
from .streams import NullStreams

NAME = "penstock.api.requests"


class Lines(logging.Handler):
    """What was logged, as messages and fields."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), record.__dict__["fields"]))


@pytest.fixture
def lines() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    handler, log = Lines(), logging.getLogger(NAME)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


Written = list[tuple[str, dict[str, Any]]]


async def test_what_is_refused_has_a_line_and_what_is_served_has_none(lines: Written):
    async with stage(None, None, "secret") as on:
        key = {"authorization": "Bearer secret"}
        assert (await on.post(CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 2}, headers=key)).is_success
        await on.post(CHAT, {})
        await on.post("/v1/assistants?secret=1", {}, headers=key)
        await on.post(CHAT, {"model": MODEL, "messages": HELLO, "temperature": "my secret"}, headers=key)
    told = [(message, fields["route"], fields["status"], fields["code"]) for message, fields in lines]
    assert told == [
        ("request refused", CHAT, 401, "missing_api_key"),
        ("request refused", "/v1/assistants", 404, "unknown_url"),
        ("request refused", CHAT, 400, "invalid_type"),
    ]
    assert "secret" not in str(lines)


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_request_has_a_line_with_its_figures_where_that_is_asked_for(lines: Written, streamed: bool):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "seed": 1, "ignore_eos": True, "stream": streamed}
    async with stage(NullStreams(cached=3), log_requests=True) as on:
        answer = await on.post(CHAT, body)
        await on.client.get("/health")
        await on.client.get("/v1/models")
    (first, fields), (second, models) = lines
    assert (first, second, models["route"], models["method"]) == ("request", "request", "/v1/models", "GET")
    assert fields["request_id"] == answer.headers["x-request-id"]
    assert (fields["status"], fields["completion_tokens"], fields["cached_tokens"]) == (200, 9, 3)
    assert 0 <= fields["ttft_s"] <= fields["seconds"]
    assert fields["prompt_tokens"] > 3
    assert fields["tokens_per_s"] > 0


async def test_the_line_of_an_error_has_the_id_that_its_client_got(lines: Written):
    async with stage() as on:
        answers = [await on.post("/v1/assistants", {}), await on.post(CHAT, {"messages": 1})]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [fields["request_id"] for _, fields in lines] == ids
    assert len(set(ids)) == 2


async def test_a_stream_that_breaks_off_says_so(lines: Written):
    streams = NullStreams(fail_at={2: WorkerLost("gone")})
    async with stage(streams, log_requests=True) as on:
        await on.chat(stream=True, ignore_eos=True)
    ((_, fields),) = lines
    assert (fields["status"], fields["code"], fields["completion_tokens"]) == (200, "service_unavailable", 2)


async def test_requests_under_another_name_of_the_host_have_a_line(lines: Written):
    async with stage(allowed_hosts=()) as on:
        assert (await on.chat(max_tokens=1)).status_code == 403
    ((_, fields),) = lines
    assert (fields["status"], fields["code"]) == (403, "host_not_allowed")


async def test_many_refusals_have_few_lines(lines: Written):
    async with stage(None, RequestLimits(max_logged_refusals=3)) as on:
        for _ in range(10):
            await on.post("/nowhere", {})
    assert len(lines) == 3
