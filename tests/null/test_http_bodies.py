"""What a body takes: room is counted before it is made, and nothing of it stays while the answer runs."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.processing.chat.template import ChatTemplate, Conversation
from penstock.processing.tokenizer.tokenizer import TextTokenizer

from .http_stage import CHAT, HELLO, MODEL, TEXT, check, stage
from .streams import NullStreams

PATIENCE_S = 60.0
JSON_TYPE = {"content-type": "application/json"}


async def in_pieces(raw: bytes) -> AsyncIterator[bytes]:
    """So that the server has to make one of them, which is its own."""
    for start in range(0, len(raw), 1 << 16):
        yield raw[start : start + (1 << 16)]


def padded(body: dict[str, Any], size: int) -> bytes:
    """With white space behind it."""
    raw = json.dumps(body).encode()
    return raw + b" " * (size - len(raw))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        pytest.param(CHAT, {"messages": HELLO}, id="chat"),
        pytest.param(TEXT, {"prompt": "Once"}, id="completion", marks=pytest.mark.long),
    ],
)
async def test_nothing_of_a_body_stays_while_its_answer_runs(path: str, asked: dict[str, Any]) -> None:
    streams = NullStreams(gate=asyncio.Event())
    size = 2 << 20
    body = asked | {"model": MODEL, "max_tokens": 8, "metadata": {"a": [[] for _ in range(20_000)]}}
    raw = padded(body, size)
    async with stage(streams, RequestLimits(max_ignored_chars=1 << 20)) as on:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            asking = asyncio.create_task(on.client.post(path, content=in_pieces(raw), headers=JSON_TYPE))
            await asyncio.wait_for(streams.until(opened=1), PATIENCE_S)
            gc.collect()
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most - before > size  # it was there
        assert held - before < size / 8
        streams.gate.set()
        assert (await asking).status_code == 200


async def test_room_is_taken_for_values_before_they_are_made() -> None:
    """Not only for the bytes that they are written in."""
    limits = RequestLimits(max_pending_body_bytes=4 << 20, max_ignored_chars=1 << 20)
    async with stage(limits=limits) as on:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
        for filler, status in (([1] * 1000, 200), ([[]] * 30_000, 429)):
            answer = await on.client.post(TEXT, json=body | {"metadata": {"a": filler}, "user": "x" * 20_000})
            assert answer.status_code == status, answer.text


async def test_a_body_of_too_many_values_is_refused() -> None:
    async with stage(limits=RequestLimits(max_json_containers=5000, max_json_values=30_000)) as on:
        for filler, words in (([[]] * 6000, "5000 arrays and objects"), ([1] * 40_000, "30000 values")):
            answer = await on.text(metadata={"a": filler})
            check(answer, 400, None, words)
        assert (await on.text()).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_field_that_is_ignored_may_not_be_large(path: str) -> None:
    limits = RequestLimits(max_ignored_chars=1000)
    ask = {"model": MODEL, "messages": HELLO} if path == CHAT else {"model": MODEL, "prompt": "Once"}
    async with stage(limits=limits) as on:
        for value in ({"a": "x" * 1000}, {"x" * 1000: 1}, [1] * 1000, {"a": [[]] * 1000}):
            answer = await on.post(path, ask | {"metadata": value, "max_tokens": 1})
            check(answer, 400, "string_above_max_length", "at most 1000 characters", "metadata")
        assert (await on.post(path, ask | {"metadata": {"a": "x" * 900}, "max_tokens": 1})).status_code == 200


# --- chats: what is too large is neither rendered nor tokenized ------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def with_call(arguments: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def with_tool(**parts: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tools": [FUNCTION | {"function": FUNCTION["function"] | parts}]}  # type: ignore[operator]


PLACES: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda size: {"messages": [{"role": "user", "content": "a" * size}]},
    "parts": lambda size: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a" * (size // 10)}] * 10}]
    },
    "reasoning": lambda size: {
        "messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "a" * size}, *HELLO]
    },
    "a call's arguments": lambda size: with_call('{"a":"' + "a" * size + '"}'),
    "a call's nested arguments": lambda size: with_call('{"a":[' + "[]," * (size // 3) + "[]]}"),
    "a tool's description": lambda size: with_tool(description="a" * size),
    "a tool's parameters": lambda size: with_tool(parameters={"properties": {"a" * size: {}}}),
    "a tool's many values": lambda size: with_tool(parameters={"enum": [1] * size}),
    "documents": lambda size: {"messages": HELLO, "documents": [{"title": "a", "text": "a" * size}]},
}


class Work:
    """Counts what is rendered and tokenized."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rendered = self.encoded = 0
        render, encode = ChatTemplate.render, TextTokenizer.encode

        def rendering(template: ChatTemplate, conversation: Conversation) -> str:
            self.rendered += 1
            return render(template, conversation)

        def encoding(tokenizer: TextTokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            self.encoded += 1
            return encode(tokenizer, text, add_special_tokens=add_special_tokens)

        patch.setattr(ChatTemplate, "render", rendering)
        patch.setattr(TextTokenizer, "encode", encoding)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_chats_are_weighed_before_they_are_rendered(
    place: Callable[[int], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RequestLimits(max_tokenize_chars=10_000, max_chars_per_token=32)  # of a context of 2,048 tokens: 65,536
    async with stage(limits=limits) as on:
        assert (await on.chat(**place(300))).status_code == 200
        work = Work(monkeypatch)
        answer = await on.chat(**place(100_000))
        check(answer, 400, "context_length_exceeded", "", "messages")
        assert (work.rendered, work.encoded) == (0, 0)


async def test_what_a_template_has_written_is_weighed_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as on:
        assert (await on.chat(**with_tool(description="a"))).status_code == 200
        work = Work(monkeypatch)
        for marked in ("", "<|im_end|>"):  # with a control token that the text spells, and without
            answer = await on.chat(**with_tool(description=marked + "a" * 200_000))
            check(answer, 400, "context_length_exceeded", "at least", "messages")
        assert (work.rendered, work.encoded) == (2, 0)


async def test_a_chat_has_so_many_parts_and_calls_and_no_more() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with stage(limits=RequestLimits(max_content_parts=20)) as on:
        for messages in (
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * 11}] * 2,
            [*HELLO, *[{"role": "assistant", "content": "a", "tool_calls": [call] * 11}] * 2],
        ):
            check(await on.chat(messages=messages), 400, "array_above_max_length", "at most 20", "messages")
            assert (await on.chat(messages=messages[:-1])).status_code == 200


async def test_arguments_of_calls_may_not_become_many_objects() -> None:
    async with stage(limits=RequestLimits(max_json_containers=1000)) as on:
        answer = await on.chat(**with_call('{"a":[' + "[]," * 1000 + "[]]}"))
        check(answer, 400, "array_above_max_length", "max_json_containers", "messages")


async def test_parts_of_a_text_are_joined_once() -> None:
    """Each of them a line of its own, as before; not each to all that came before it."""
    texts = [str(i) for i in range(1000)]
    parts = [{"type": "text", "text": text} for text in texts]
    async with stage() as on:
        joined = await on.post("/tokenize", {"messages": [{"role": "user", "content": "\n".join(texts)}]})
        apart = await on.post("/tokenize", {"messages": [{"role": "user", "content": parts}]})
        assert apart.json()["tokens"] == joined.json()["tokens"]
