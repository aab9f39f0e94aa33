"""Anthropic's Messages API over HTTP: events in order, tokens and usage of a chat, errors in its own envelope."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.interfaces import HIDDEN_THINKING
from penstock.types import FinishReason

from .http_stage import HELLO, MODEL, Stage, stage
from .streams import NullStreams
from .test_http_tools import CALLS, WANTED, thinker  # noqa: F401 - a fixture

MESSAGES = "/v1/messages"
TOOLS = [
    {
        "name": "get_weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "now"},
]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1} | fields


@asynccontextmanager
async def saying(text: str, finish: FinishReason = FinishReason.STOP, **options: Any) -> AsyncIterator[Stage]:
    """A model that writes ``text``."""
    async with stage(NullStreams(), **options) as on:
        tokens = (await on.post("/tokenize", {"prompt": text})).json()["tokens"]
        end = [1] if finish is FinishReason.STOP else []
        on.streams.script = lambda _: ((*tokens, *end), finish)
        yield on


def parsed(body: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type, and only the last of those of one delta need an id."""
    events: list[dict[str, Any]] = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        event = json.loads(fields["data"])
        assert fields["event"] == event["type"]
        events.append(event)
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to; checks their order as Anthropic documents it."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: dict[str, Any] | None = None
    partial = ""
    for event in events[1:]:
        match event["type"]:
            case "ping":
                assert message["content"] == []
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block, partial = dict(event["content_block"]), ""
            case "content_block_delta":
                assert open_block is not None
                assert event["index"] == len(message["content"])
                delta = event["delta"]
                match delta["type"], open_block["type"]:
                    case "text_delta", "text":
                        open_block["text"] += delta["text"]
                    case "thinking_delta", "thinking":
                        open_block["thinking"] += delta["thinking"]
                    case "signature_delta", "thinking":
                        open_block["signature"] = delta["signature"]
                    case "input_json_delta", "tool_use":
                        partial += delta["partial_json"]
                    case pair:
                        raise AssertionError(pair)
            case "content_block_stop":
                assert open_block is not None
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(partial or "{}")
                message["content"].append(open_block)
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
                message["usage"] = event["usage"]
            case "message_stop":
                assert event is events[-1]
                assert message["stop_reason"] is not None
            case kind:
                raise AssertionError(kind)
    assert events[-1]["type"] == "message_stop"
    return message


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """What must be the same however a message is sent."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {"content": content, **{name: message[name] for name in ("role", "stop_reason", "stop_sequence", "usage")}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Once upon a time.", ["text"]),
        (f"I shall look.\n{CALLS}", ["text", "tool_use", "tool_use"]),
        (CALLS, ["tool_use", "tool_use"]),
        ("They ask.\n</think>\n\nIt rains.", ["thinking", "text"]),
        (f"They ask.\n</think>\n\n{CALLS}", ["thinking", "tool_use", "tool_use"]),
    ],
)
async def test_streamed_is_not_streamed_and_both_are_the_chat(
    text: str, kinds: list[str], seed: int, request: pytest.FixtureRequest
) -> None:
    options = {"intake": request.getfixturevalue("thinker")} if "think" in text else {}
    async with saying(text, **options) as on:
        on.streams.cuts = random.Random(seed)
        body = asked(tools=TOOLS, max_tokens=400)
        whole = (await on.post(MESSAGES, body)).json()
        streamed = joined(parsed((await on.post(MESSAGES, body | {"stream": True})).text))
        assert shown(streamed) == shown(whole)
        assert [block["type"] for block in whole["content"]] == kinds
        calls = [(block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
        assert calls == (WANTED if "tool_use" in kinds else [])
        tools = [
            {"type": "function", "function": {"name": tool["name"], "parameters": tool.get("input_schema")}}
            for tool in TOOLS
        ]
        chat = (await on.chat(tools=tools, max_tokens=400)).json()
        (choice,) = chat["choices"]
        assert "".join(block.get("text", "") for block in whole["content"]) == (choice["message"]["content"] or "")
        usage = whole["usage"]
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        reasoning = usage["output_tokens_details"]["thinking_tokens"]
        assert reasoning == chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert (reasoning > 0) == ("thinking" in kinds)


PIECES = [
    *("I shall look.", "\n", "\n\n", " ", "Done.", "<think>Hm.</think>", "</think>", "They ask."),
    *(CALLS, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
]
RESPONSES_TOOLS = [{"type": "function", "name": tool["name"], "parameters": tool.get("input_schema")} for tool in TOOLS]


def items(response: dict[str, Any]) -> list[tuple[str, str]]:
    """The items of a response of the Responses API, each with its text."""
    found: list[tuple[str, str]] = []
    for item in response["output"]:
        texts = [part["text"] for name in ("summary", "content") for part in item.get(name) or ()]
        found.append((item["type"], "".join(texts) + item.get("arguments", "")))
    return found


@pytest.mark.parametrize("thinks", [False, True])
async def test_blocks_come_in_the_order_they_were_written_in_however_tokens_are_batched(
    request: pytest.FixtureRequest, *, thinks: bool
) -> None:
    """Text behind calls, reasoning behind text: a model may write what it likes."""
    options = {"intake": request.getfixturevalue("thinker")} if thinks else {}
    mixed = 0
    for seed in range(40):
        rng = random.Random(seed)
        async with saying("".join(rng.choices(PIECES, k=rng.randint(2, 6))), **options) as on:
            body = asked(tools=TOOLS, max_tokens=800)
            whole = (await on.post(MESSAGES, body)).json()
            response = {"model": MODEL, "input": "Hi", "tools": RESPONSES_TOOLS, "store": False}
            output = (await on.post("/v1/responses", response)).json()
            for most in (1, 7, 400):  # tokens in a batch
                on.streams.batch_sizes = lambda rng, most=most: rng.randint(1, most)
                streamed = joined(parsed((await on.post(MESSAGES, body | {"stream": True})).text))
                assert shown(streamed) == shown(whole)
                assert shown((await on.post(MESSAGES, body)).json()) == shown(whole)
                events = (await on.post("/v1/responses", response | {"stream": True})).text
                last = json.loads(events.removesuffix("\n\n").split("\n\n")[-1].split("data: ")[1])
                assert items(last["response"]) == items(output)
            kinds = [block["type"] for block in whole["content"]]
            mixed += kinds != sorted(kinds, key=["thinking", "text", "tool_use"].index)
    assert mixed > 3, "outputs whose kinds alternate"


@pytest.mark.parametrize(
    ("finish", "fields", "reason", "sequence"),
    [
        (FinishReason.STOP, {}, "end_turn", None),
        (FinishReason.LENGTH, {}, "max_tokens", None),
        (FinishReason.STOP, {"stop_sequences": ["time", "zzz"]}, "stop_sequence", "time"),
        (FinishReason.LENGTH, {"max_tokens": 1 << 20}, "model_context_window_exceeded", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_ended(
    finish: FinishReason, fields: dict[str, Any], reason: str, sequence: str | None, *, stream: bool
) -> None:
    async with saying("Once upon a time there was", finish) as on:
        answer = await on.post(MESSAGES, asked(stream=stream, max_tokens=6) | fields)
        message = joined(parsed(answer.text)) if stream else answer.json()
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert answer.headers["request-id"].startswith("msg_")


async def test_the_cached_part_of_a_prompt_is_no_input() -> None:
    async with stage(NullStreams(cached=5)) as on:
        usage = (await on.post(MESSAGES, asked())).json()["usage"]
        counted = (await on.post(f"{MESSAGES}/count_tokens?beta=true", {"model": MODEL, "messages": HELLO})).json()
        assert usage["cache_read_input_tokens"] == 5
        assert counted == {"input_tokens": usage["input_tokens"] + 5}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"messages": [*HELLO, {"role": "assistant", "content": "Once"}]},
        {"messages": [*HELLO, {"role": "system", "content": "Be kind."}], "stop_sequences": ["x"], "stream": False},
    ],
)
async def test_tokens_are_counted_as_usage_counts_them(fields: dict[str, Any], request: pytest.FixtureRequest) -> None:
    async with stage(intake=request.getfixturevalue("thinker")) as on:
        body = asked(**fields)
        usage = (await on.post(MESSAGES, body)).json()["usage"]
        del body["max_tokens"]
        counted = (await on.post(f"{MESSAGES}/count_tokens", body)).json()
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("seed", range(3))
async def test_thinking_whose_display_is_omitted_goes_back_within_its_signature(
    seed: int, request: pytest.FixtureRequest
) -> None:
    async with saying("They ask.\n</think>\n\nIt rains.", intake=request.getfixturevalue("thinker")) as on:
        on.streams.cuts = random.Random(seed)
        hidden = asked(max_tokens=400, thinking={"type": "adaptive", "display": "omitted"})
        whole = (await on.post(MESSAGES, hidden)).json()
        text = (await on.post(MESSAGES, hidden | {"stream": True})).text
        assert "They ask" not in text
        assert "thinking_delta" not in text
        assert shown(joined(parsed(text))) == shown(whole)
        (thought, _) = whole["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "")
        displayed = (await on.post(MESSAGES, asked(max_tokens=400))).json()["content"][0]["thinking"]
        assert b64decode(thought["signature"].removeprefix(HIDDEN_THINKING)).decode() == displayed


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        (MESSAGES, asked(model="gpt"), 404, "not_found_error", "gpt"),
        (MESSAGES, {"model": MODEL, "messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
        (MESSAGES, asked(max_tokens=0), 400, "invalid_request_error", "max_tokens"),
        (MESSAGES, asked(messages=[{"role": "user", "content": "a " * 3000}]), 400, "invalid_request_error",
         "prompt is too long: "),
        (f"{MESSAGES}/count_tokens", {"model": MODEL}, 400, "invalid_request_error", "messages"),
        (f"{MESSAGES}/batches", {}, 404, "not_found_error", "batches"),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_envelope(path: str, body: Any, status: int, kind: str, words: str) -> None:
    async with stage() as on:
        answer = await on.post(path, body)
        assert answer.status_code == status
        told = answer.json()
        assert set(told) == {"type", "error", "request_id"}
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"] != ""
        assert words in told["error"]["message"]


async def test_either_header_has_the_key_and_two_keys_are_none() -> None:
    async with stage(None, None, "secret") as on:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer secret", "x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret", "x-api-key": "guess"}, 401),
            ({"x-api-key": "guess"}, 401),
            ({}, 401),
        ):
            answer = await on.post(MESSAGES, asked(), headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_full_queue_is_a_rate_limit_error_with_retry_after() -> None:
    async with stage(None, RequestLimits(max_queued_requests=0)) as on:
        answer = await on.post(MESSAGES, asked())
        assert answer.status_code in (429, 503)
        assert answer.json()["error"]["type"] in ("rate_limit_error", "overloaded_error")
        assert int(answer.headers["retry-after"]) > 0


async def test_a_stream_goes_on_from_any_event_that_has_an_id() -> None:
    """Joined with what came before, it is the whole stream."""
    text = f"I shall look.\n{CALLS}"
    async with saying(text) as on:
        body = asked(tools=TOOLS, max_tokens=400, stream=True)
        headers = {"idempotency-key": "k"}
        blocks = (await on.post(MESSAGES, body, headers=headers)).text.removesuffix("\n\n").split("\n\n")
        whole = joined(parsed("\n\n".join(blocks)))
        for number, block in enumerate(blocks):
            if not block.startswith("id: "):
                continue
            last = block.split("\n")[0].removeprefix("id: ")
            rest = (await on.post(MESSAGES, body, headers=headers | {"last-event-id": last})).text.removesuffix("\n\n")
            again = [*blocks[: number + 1], *(rest.split("\n\n") if rest else [])]
            message = joined(parsed("\n\n".join(again)))
            for one in (message, whole):
                one["usage"].pop("penstock", None)  # it says that this was sent before
            assert message == whole
