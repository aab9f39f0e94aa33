"""What a body takes: room is counted before it is made, and nothing of it stays while the answer runs."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.config.schema import Limits

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
    ("path", "asked"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Once"})], ids=["chat", "completion"]
)
async def test_nothing_of_a_body_stays_while_its_answer_runs(path: str, asked: dict[str, Any]) -> None:
    streams = NullStreams(gate=asyncio.Event())
    size = 8 << 20
    body = asked | {"model": MODEL, "max_tokens": 8, "metadata": {"a": [[] for _ in range(80_000)]}}
    raw = padded(body, size)
    async with stage(streams, Limits(max_ignored_chars=1 << 20)) as on:
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
    limits = Limits(max_pending_body_bytes=4 << 20, max_ignored_chars=1 << 20)
    async with stage(limits=limits) as on:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
        for filler, status in (([1] * 1000, 200), ([[]] * 30_000, 429)):
            answer = await on.client.post(TEXT, json=body | {"metadata": {"a": filler}, "user": "x" * 20_000})
            assert answer.status_code == status, answer.text


async def test_a_body_of_too_many_values_is_refused() -> None:
    async with stage(limits=Limits(max_json_containers=5000, max_json_values=30_000)) as on:
        for filler, words in (([[]] * 6000, "5000 arrays and objects"), ([1] * 40_000, "30000 values")):
            answer = await on.text(metadata={"a": filler})
            check(answer, 400, None, words)
        assert (await on.text()).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_field_that_is_ignored_may_not_be_large(path: str) -> None:
    limits = Limits(max_ignored_chars=1000)
    ask = {"model": MODEL, "messages": HELLO} if path == CHAT else {"model": MODEL, "prompt": "Once"}
    async with stage(limits=limits) as on:
        for value in ({"a": "x" * 1000}, {"x" * 1000: 1}, [1] * 1000, {"a": [[]] * 1000}):
            answer = await on.post(path, ask | {"metadata": value, "max_tokens": 1})
            check(answer, 400, "string_above_max_length", "at most 1000 characters", "metadata")
        assert (await on.post(path, ask | {"metadata": {"a": "x" * 900}, "max_tokens": 1})).status_code == 200
