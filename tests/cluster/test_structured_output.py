"""Constrained answers through the whole system: what ends is valid, and a death changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import jsonschema
import pytest

from grammar_world import random_schema

from .server import PenstockServer
from .streams import Answer, make_client, stream_completion

BODY = {"model": "storyteller", "prompt": "Once upon a time there was a fox: ", "temperature": 1.0}
AT_ONCE = 16


@pytest.fixture(scope="module")
def server() -> Iterator[PenstockServer]:
    with PenstockServer([]) as running:
        yield running


def schemas(count: int) -> list[dict[str, Any]]:
    chance = Random(5)
    return [random_schema(chance) for _ in range(count)]


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:

        async def ask(body: dict[str, Any]) -> httpx.Response:
            async with room:
                return await client.post(f"{url}/v1/completions", json=body)

        return await asyncio.gather(*map(ask, bodies))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [40, pytest.param(520, marks=pytest.mark.long)])
def test_what_ends_is_valid_and_nothing_hangs(server: PenstockServer, count: int) -> None:
    asked = schemas(count)
    bodies = [
        {**BODY, "seed": seed, "max_tokens": 200, "structured_outputs": {"json": schema}}
        for seed, schema in enumerate(asked)
    ]
    ended = followed = 0
    for schema, answer in zip(asked, asyncio.run(ask_all(server.url, bodies)), strict=True):
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "invalid_grammar"
            continue
        assert answer.status_code == 200, answer.text
        followed += 1
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            ended += 1
            jsonschema.validate(json.loads(choice["text"]), schema, jsonschema.Draft202012Validator)
    assert followed > 0.9 * count
    assert ended > 0.6 * count
    server.wait_idle()


PET = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}, "mood": {"enum": ["glad", "sad"]}},
       "required": ["kind", "mood"]}  # fmt: skip


def test_a_schema_without_additional_properties_comes_to_its_end(server: PenstockServer) -> None:
    """What instructor and LangChain send has none; were its objects open, every answer would be cut off."""
    chat = {"model": "storyteller", "messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 100}
    tool = {"type": "function", "function": {"name": "pet", "parameters": PET}}
    named = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET}}
    for seed in range(4):
        calls = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**chat, "seed": seed, "temperature": 1, "tools": [tool], "tool_choice": "required"},
            timeout=60,
        )
        (choice,) = calls.json()["choices"]
        assert set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) == {"kind", "mood"}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**chat, "seed": seed, "temperature": 1, "response_format": named},
            timeout=60,
        )
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"kind", "mood"}


ITEMS = {"enum": ["fox", "owl", "bear", "a little mouse", 1, 22, None]}
LIST = {"type": "array", "minItems": 20, "maxItems": 22, "items": ITEMS}
LONG = {**BODY, "seed": 9, "max_tokens": 700, "structured_outputs": {"json": LIST}}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_dies_in_the_middle_of_a_constrained_answer(server: PenstockServer, role: str) -> None:
    """Its successor reads the tokens again, and goes on at the same place of the same schema."""

    async def answer(*, kill: bool) -> Answer:
        killed: list[int] = []

        def on_chunk(so_far: Answer) -> None:
            if kill and not killed and len(so_far.times) >= 20:
                killed.extend(worker["pid"] for worker in server.workers() if worker["role"] == role)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        async with make_client() as client:
            told = await stream_completion(client, server.url, LONG, on_chunk=on_chunk)
        assert bool(killed) is kill
        return told

    undisturbed = asyncio.run(answer(kill=False))
    disturbed = asyncio.run(answer(kill=True))
    assert disturbed.identical == undisturbed.identical
    text = undisturbed.choices[0].text
    assert undisturbed.choices[0].finish == "stop"
    assert len(json.loads(text)) >= 20


@pytest.mark.long
def test_a_hostile_schema_holds_up_nobody(server: PenstockServer) -> None:
    """While one is compiled to its limit, plain answers come; in the default tier ``unit/grammar/test_checking.py``."""
    hostile = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4200)}}

    async def both() -> tuple[httpx.Response, int]:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            ask = {**BODY, "max_tokens": 4, "structured_outputs": {"json": hostile}}
            slow = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=ask))
            answered = 0
            while not slow.done():
                plain = await client.post(f"{server.url}/v1/completions", json={**BODY, "max_tokens": 2})
                assert plain.status_code == 200
                answered += 1
            return await slow, answered

    for _ in range(5):  # on a busy machine it may have been compiled when the second answer is there
        answer, answered = asyncio.run(both())
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "invalid_grammar"
        if answered >= 2:
            return
    raise AssertionError("plain answers waited each time for the schema")
