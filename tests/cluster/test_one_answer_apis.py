"""Law 1 over the generation APIs: chats, Messages and Responses give one conversation the same text and usage.

Streamed and in one piece, split and together, alone and in a batch, cached, and when a worker dies; each is compared
with the chat that one worker answers alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from .one_answer import ROOMS, answers_with_a_kill, assert_it_took_place, compare
from .server import PenstockServer
from .streams import all_answers, api_of, max_tokens_of
from .varied import in_every_api, varied_conversations

TOPOLOGIES = {
    "split-shm": ["--transfer", "shm"],
    "split-tcp": ["--transfer", "tcp"],
    "aggregated": ["--aggregated"],
}

CELLS = [
    pytest.param("split-shm", "roomy"),
    *(
        pytest.param(topology, room, marks=pytest.mark.long)
        for topology in TOPOLOGIES
        for room in ROOMS
        if (topology, room) != ("split-shm", "roomy")
    ),
]


@pytest.fixture(scope="module")
def plain_chats() -> list[dict[str, Any]]:
    """What one worker answers to each conversation as a chat, alone; once for each API."""
    with PenstockServer(["--aggregated", "--kv-memory", ROOMS["roomy"]]) as server:
        answers = asyncio.run(all_answers(server.url, varied_conversations(), together=False))
    assert all(answer.choices[0].text for answer in answers)
    return [answer.identical for answer in answers for _ in range(3)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("topology", "room"), CELLS)
def test_every_api_gives_one_answer(topology: str, room: str, plain_chats: list[dict[str, Any]]) -> None:
    with PenstockServer([*TOPOLOGIES[topology], "--kv-memory", ROOMS[room]]) as server:
        for together in (False, True):
            where = f"{topology} {room} {'batch' if together else 'alone'}"
            bodies = in_every_api(varied_conversations(), salt=where)
            compare(asyncio.run(all_answers(server.url, bodies, together=together)), plain_chats, where)
            compare(asyncio.run(all_answers(server.url, bodies, together=together)), plain_chats, f"{where}, cached")
        bodies = in_every_api(varied_conversations(), salt=f"{topology} {room} killed")
        answers = asyncio.run(answers_with_a_kill(server, bodies, plain_chats, together=True))
        compare(answers, plain_chats, f"{topology} {room} killed")
        assert [in_one_piece(server, body) for body in bodies] == [
            (answer["choices"][0]["text"], answer["prompt_tokens"], answer["completion_tokens"])
            for answer in plain_chats
        ]
        assert_it_took_place(server, split=topology != "aggregated", tight=False)


def in_one_piece(server: PenstockServer, body: dict[str, Any]) -> tuple[str, int, int]:
    """Text and usage of the response that is not streamed."""
    api = api_of(body)
    answer = httpx.post(f"{server.url}{api.path}", json=body, timeout=100, trust_env=False)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    usage = whole["usage"]
    match api.name:
        case "messages":
            text = "".join(block["text"] for block in whole["content"])
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            return text, prompt, usage["output_tokens"]
        case "responses":
            text = "".join(part["text"] for item in whole["output"] for part in item["content"])
            return text, usage["input_tokens"], usage["output_tokens"]
        case _:
            return whole["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"]


def test_the_conversations_end_in_both_ways(plain_chats: list[dict[str, Any]]) -> None:
    """Some end by themselves and some at their length: guards the test against being thinned out."""
    assert {answer["choices"][0]["finish"] for answer in plain_chats} == {"stop", "length"}
    assert all(max_tokens_of(body) == 60 for body in in_every_api(varied_conversations(), salt=""))
