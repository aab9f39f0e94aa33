"""Answers over HTTP: OpenAI's shapes and order, and what is streamed, joined, is what is not streamed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers, QueueFull, RequestError, WorkerLost
from penstock.types import FinishReason

from .http_stage import CHAT, MODEL, TEXT, Event, Stage, events_of, stage
from .streams import IDENTITY, NullStreams, answer_tokens


async def story(on: Stage, text: str) -> list[int]:
    """Token ids of a text, for a script."""
    return list((await on.post("/tokenize", {"prompt": text})).json()["tokens"])


def scripted(tokens: list[int], finish: FinishReason = FinishReason.LENGTH) -> Any:
    return lambda _: (tuple(tokens), finish)


def joined(events: list[Event]) -> dict[str, Any]:
    """What a client makes of a stream, in the words of an answer that is not streamed."""
    *chunks, done = [event.data for event in events]
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices, "usage": None}
    for chunk in chunks:
        for name in ("penstock", "prompt_token_ids"):
            if name in chunk:
                assert whole.setdefault(name, chunk[name]) == chunk[name]
        if not chunk["choices"]:
            whole["usage"] = chunk["usage"]
            continue
        (part,) = chunk["choices"]
        choice = choices.setdefault(
            part["index"],
            {"text": "", "logprobs": [], "token_ids": [], "finish_reason": None, "prompt_token_ids": None},
        )
        assert choice["finish_reason"] is None, "a choice goes on after its end"
        choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
        choice["logprobs"] += flat(part["logprobs"])
        choice["token_ids"] += part.get("token_ids", [])
        choice["prompt_token_ids"] = part.get("prompt_token_ids") or choice["prompt_token_ids"]
        choice["finish_reason"] = part["finish_reason"]
    return whole


def flat(logprobs: Any) -> list[Any]:
    """Chats' and completions' logprobs as a list of one entry a token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(row) for row in zip(*(logprobs[name] for name in columns), strict=True)]


def whole_of(body: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    choices = {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": flat(choice["logprobs"]),
            "token_ids": choice.get("token_ids", []),
            "finish_reason": choice["finish_reason"],
            "prompt_token_ids": choice.get("prompt_token_ids"),
        }
        for choice in body["choices"]
    }
    names = ("usage", "penstock", "prompt_token_ids")
    return {"choices": choices} | {name: body[name] for name in names if name in body}


@st.composite
def asks(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A request with any mixture of fields that change what an answer looks like."""
    chats = draw(st.booleans())
    fields: dict[str, Any] = {
        "model": MODEL,
        "seed": draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        "max_tokens": draw(st.integers(1, 40)),
        "n": draw(st.integers(1, 3)),
        "min_tokens": draw(st.integers(0, 1)),
        "return_token_ids": draw(st.booleans()),
        "stop": draw(st.lists(st.sampled_from(["a", " th", "e ", "\n", "ing", "��", "."]), max_size=3)),
        "stop_token_ids": draw(st.lists(st.integers(0, 4095), max_size=100)),
        "ignore_eos": draw(st.booleans()),
    }
    top = draw(st.none() | st.integers(0, 3))
    if chats:
        fields["messages"] = [{"role": "user", "content": draw(st.text(max_size=10))}]
        if top is not None:
            fields |= {"logprobs": True, "top_logprobs": top}
        return CHAT, fields
    prompts = st.text(min_size=1, max_size=8) | st.lists(st.integers(0, 4095), min_size=1, max_size=8)
    fields["prompt"] = draw(st.lists(prompts, min_size=1, max_size=3))
    fields |= {"logprobs": top, "echo": draw(st.booleans())}
    return TEXT, fields


@settings(max_examples=80, deadline=None)
@given(ask=asks(), cuts=st.integers(0, 1 << 30))
async def test_what_is_streamed_joined_is_what_is_not_streamed(ask: tuple[str, dict[str, Any]], cuts: int):
    path, fields = ask
    sizes = (1, 1, 2, 3, 40)
    streams = NullStreams(batch_sizes=lambda rng: rng.choice(sizes), cuts=random.Random(cuts), cached=3)
    async with stage(streams) as on:
        whole = await on.post(path, fields)
        assert whole.status_code == 200, whole.text
        streamed = await on.post(path, fields | {"stream": True, "stream_options": {"include_usage": True}})
        assert joined(events_of(streamed.text)) == whole_of(whole.json())
        assert streams.open == set()


@settings(max_examples=40, deadline=None)
@given(ask=asks(), left=st.integers(0, 99), right=st.integers(100, 199))
async def test_batches_do_not_show(ask: tuple[str, dict[str, Any]], left: int, right: int):
    path, fields = ask
    answers = []
    for cuts in (left, right):
        async with stage(NullStreams(cuts=random.Random(cuts))) as on:
            answers.append(whole_of((await on.post(path, fields)).json()))
    assert answers[0] == answers[1]


async def test_a_chat_answer_to_the_letter():
    async with stage(NullStreams(cached=5)) as on:
        on.streams.script = scripted(await story(on, "Once upon"))
        answer = await on.chat(seed=7)
        body = answer.json()
        assert answer.headers["x-request-id"] == body["id"]
        assert body.pop("id").startswith("chatcmpl-")
        assert isinstance(body.pop("created"), int)
        assert body == {
            "object": "chat.completion",
            "model": MODEL,
            "system_fingerprint": IDENTITY.system_fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Once upon", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 5},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "penstock": {"seed": 7},
        }


async def test_the_order_of_a_chats_chunks():
    async with stage(NullStreams(batch_sizes=lambda _: 1)) as on:
        on.streams.script = scripted(await story(on, "Once upon"), FinishReason.LENGTH)
        answer = await on.chat(stream=True, stream_options={"include_usage": True}, seed=7)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        events = events_of(answer.text)
        assert [event.id for event in events] == ["0:0", "0:1", "0:2", "0:end", "usage", "done"]
        chunks = [event.data for event in events[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert [chunk["usage"] is None for chunk in chunks] == [True] * 4 + [False]
        assert [chunk["choices"] and chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "Once"},
            {"content": " upon"},
            {},
            [],
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
        assert [chunk.get("penstock") for chunk in chunks] == [{"seed": 7}, None, None, None, None]


async def test_without_include_usage_there_is_no_usage():
    async with stage() as on:
        for event in events_of((await on.chat(stream=True)).text)[:-1]:
            assert "usage" not in event.data
            assert event.data["choices"]


async def test_the_seed_is_told_even_when_nothing_else_is():
    async with stage(NullStreams(script=scripted([1], FinishReason.STOP))) as on:
        first, done = events_of((await on.text(stream=True)).text)
        assert first.data["penstock"] == {"seed": 1}
        assert first.data["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        assert done.data == "[DONE]"


async def test_a_drawn_seed_gives_the_same_answer_again():
    async with stage() as on:
        drawn = (await on.chat(seed=None)).json()
        again = (await on.chat(seed=drawn["penstock"]["seed"])).json()
        assert again["choices"] == drawn["choices"]


async def test_a_stop_string_ends_the_engines_work():
    async with stage(NullStreams(batch_sizes=lambda _: 1)) as on:
        on.streams.script = scripted(await story(on, "Once upon a time there was a fox."))
        body = (await on.chat(stop=" time", max_tokens=50)).json()
        assert body["choices"][0]["message"]["content"] == "Once upon a"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 4
        assert on.streams.open == set()
        assert on.streams.ended_by_caller == {on.streams.opened[0].id}


async def test_completions_logprobs_have_the_chosen_token_among_the_top():
    async with stage() as on:
        on.streams.script = scripted(await story(on, "Once upon a"))
        choice = (await on.text(logprobs=0)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["Once", " upon", " a"]
        assert choice["logprobs"]["text_offset"] == [0, 4, 9]
        for token, value, top in zip(
            *(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top == {token: value}


async def test_parts_of_characters_in_logprobs_are_bytes():
    async with stage() as on:
        fox = await story(on, "🦊")
        on.streams.script = scripted(fox)
        chat = (await on.chat(logprobs=True)).json()["choices"][0]
        told = chat["logprobs"]["content"]
        assert chat["message"]["content"] == "🦊"
        assert bytes(byte for token in told for byte in token["bytes"]).decode() == "🦊"
        assert told[0]["token"].startswith("\\xf0")
        text = (await on.text(logprobs=0)).json()["choices"][0]
        assert text["logprobs"]["tokens"][0].startswith("bytes:\\xf0")
        streamed = events_of((await on.chat(stream=True)).text)
        assert "\ufffd" not in "".join(event.data["choices"][0]["delta"].get("content", "") for event in streamed[:-1])


async def test_token_ids_are_told_when_asked_for():
    async with stage() as on:
        body = (await on.chat(return_token_ids=True)).json()
        (request,) = on.streams.opened
        assert body["prompt_token_ids"] == list(request.prompt)
        assert body["choices"][0]["token_ids"] == list(answer_tokens(request, 4096)[0])
        assert "token_ids" not in (await on.chat()).text


async def test_choices_run_at_once():
    streams = NullStreams(gate=asyncio.Event())
    async with stage(streams) as on:
        asked = asyncio.create_task(on.chat(n=4))
        await streams.until(opened=4)
        streams.gate.set()
        assert len((await asked).json()["choices"]) == 4


async def test_streamed_choices_interleave():
    async with stage(NullStreams(batch_sizes=lambda _: 1)) as on:
        events = events_of((await on.chat(n=3, stream=True, ignore_eos=True)).text)
        order = [event.data["choices"][0]["index"] for event in events[:-1]]
        assert set(order) == {0, 1, 2}
        assert order != sorted(order)
        assert [event.id for event in events if event.id.endswith(":0")] == ["0:0", "1:0", "2:0"]


async def test_a_batch_of_prompts_counts_each_prompt_once():
    async with stage(NullStreams(cached=2)) as on:
        body = (await on.text(prompt=["Once upon", [5, 6, 7]], n=2, max_tokens=3, ignore_eos=True)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 2 + 3
        assert body["usage"]["completion_tokens"] == 12
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


# --- errors of the service -------------------------------------------------------------------------------------------

EARLY = [
    (QueueFull("full", retry_after=7), 429, "7", "rate_limit_exceeded"),
    (NoWorkers("nobody"), 503, "1", "service_unavailable"),
    (WorkerLost("gone"), 503, "1", "service_unavailable"),
    (RequestError("never fits", code="too_big"), 400, None, "too_big"),
    (RuntimeError("a secret"), 500, None, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("error", "status", "retry_after", "code"), EARLY, ids=[str(case[1]) for case in EARLY])
async def test_an_error_before_the_first_token_has_its_status(
    error: Exception, status: int, retry_after: str | None, code: str, n: int, stream: bool
):
    async with stage(NullStreams(fail_at={0: error})) as on:
        answer = await on.chat(stream=stream, n=n)
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == retry_after
        assert answer.json()["error"]["code"] == code
        assert "secret" not in answer.text
        assert on.streams.open == set()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("error", [WorkerLost("used up"), RuntimeError("a secret")])
async def test_an_error_amid_a_stream_is_its_last_event(error: Exception, n: int):
    async with stage(NullStreams(fail_at={3: error}, batch_sizes=lambda _: 1)) as on:
        answer = await on.chat(stream=True, n=n, ignore_eos=True)
        assert answer.status_code == 200
        events = events_of(answer.text)
        assert events[-1].id == "", "what is asked for again goes on behind the event before"
        assert events[-1].data["error"]["type"] == "server_error"
        assert "[DONE]" not in answer.text
        assert "secret" not in answer.text
        assert on.streams.open == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_just_ends_is_an_error(stream: bool):
    async with stage(NullStreams(script=lambda _: ((), FinishReason.LENGTH))) as on:
        assert (await on.chat(stream=stream)).status_code == 503


async def test_nothing_is_served_before_a_worker_has_reported():
    async with stage(NullStreams(served=None)) as on:
        answer = await on.chat()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


# --- the queue's limits ----------------------------------------------------------------------------------------------


async def test_over_the_queues_limit_is_429_with_retry_after():
    streams = NullStreams(gate=asyncio.Event())
    async with stage(streams, RequestLimits(max_queued_requests=3)) as on:
        waiting = [asyncio.create_task(on.chat()) for _ in range(3)]
        await streams.until(opened=3)
        full = await on.chat()
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert "the limit is 3" in full.json()["error"]["message"]
        assert full.json()["error"]["type"] == "rate_limit_error"
        streams.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3
        assert (await on.chat()).status_code == 200


async def test_the_queue_is_bounded_in_prompt_tokens_too():
    streams = NullStreams(gate=asyncio.Event())
    async with stage(streams, RequestLimits(max_queued_tokens=100)) as on:
        waiting = [asyncio.create_task(on.text(prompt=[5] * 60))]
        await streams.until(opened=1)
        assert (await on.text(prompt=[5] * 60)).status_code == 429
        waiting.append(asyncio.create_task(on.text(prompt=[5] * 30)))
        await streams.until(opened=2)
        streams.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 2
        # What is larger than the whole queue is let in when nobody waits.
        assert (await on.text(prompt=[5] * 200)).status_code == 200


async def test_the_queues_limits_are_those_of_each_worker_that_reads_prompts():
    """Three prompts of which one would fill the queue of one worker do not fill that of many."""
    streams = NullStreams(gate=asyncio.Event())
    streams.read_by = 4
    async with stage(streams, RequestLimits(max_queued_tokens=100, max_queued_requests=1)) as on:
        waiting = [asyncio.create_task(on.text(prompt=[5] * 100)) for _ in range(4)]
        await streams.until(opened=4)
        full = await on.text(prompt=[5])
        assert full.status_code == 429
        assert "the limit is 4" in full.json()["error"]["message"]
        streams.read_by = 5
        waiting.append(asyncio.create_task(on.text(prompt=[5] * 100)))
        await streams.until(opened=5)
        streams.read_by = 0  # none is ready: as for one
        assert "the limit is 1" in (await on.text(prompt=[5])).json()["error"]["message"]
        streams.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 5


async def test_a_request_that_was_refused_or_failed_leaves_the_queue():
    async with stage(NullStreams(fail_at={0: WorkerLost("x")}), RequestLimits(max_queued_requests=1)) as on:
        for _ in range(5):
            assert (await on.chat()).status_code == 503
        on.streams.fail_at.clear()
        assert (await on.chat()).status_code == 200


async def test_choices_that_write_make_room():
    streams = NullStreams(batch_sizes=lambda _: 1)
    async with stage(streams, RequestLimits(max_queued_requests=1)) as on:
        answers = [await on.chat(n=4, stream=True) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
