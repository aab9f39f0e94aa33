"""Tokens that wait are told together: the same text, log-probabilities, ids and usage, in fewer events, to the byte."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .http_stage import CHAT, HELLO, MODEL, TEXT, Event, events_of, stage
from .streams import NullStreams

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop strings": {"stop": ["e", "zq"], "min_tokens": 5},
    "n": {"n": 3},
    "usage": {"stream_options": {"include_usage": True}},
    "token ids": {"return_token_ids": True},
}


def told(events: list[Event]) -> dict[int, tuple[str, list[Any], list[int], str | None]]:
    """Of each choice: its text, log-probabilities, token ids and the reason of its end."""
    choices: dict[int, tuple[str, list[Any], list[int], str | None]] = {}
    for event in events:
        for choice in event.data["choices"] if isinstance(event.data, dict) else ():
            text, logprobs, ids, finish = choices.get(choice["index"], ("", [], [], None))
            delta = choice.get("delta") or {"content": choice.get("text")}
            logprobs = logprobs + ((choice.get("logprobs") or {}).get("content") or [])
            ids = ids + (choice.get("token_ids") or [])
            more = text + (delta.get("content") or "")
            choices[choice["index"]] = more, logprobs, ids, finish or choice["finish_reason"]
    return choices


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_answer_is_the_same_however_its_tokens_were_joined(path: str, asked: dict[str, Any]):
    body = {"model": MODEL, "max_tokens": 48, "seed": 7, "stream": True, "ignore_eos": True} | asked
    body |= {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    answers = []
    for most in (1, 7, 64):
        sizes = random.Random(most)
        streams = NullStreams(batch_sizes=lambda _, most=most, sizes=sizes: sizes.randint(1, most))
        async with stage(streams) as on:
            answers.append(events_of((await on.post(path, body)).text))
    one, several, many = answers
    assert told(one) == told(several) == told(many)
    assert one[-1].data == several[-1].data == many[-1].data == "[DONE]"
    assert len(many) < len(one)
    usage = [[event.data.get("usage") for event in answer[:-1] if event.data.get("usage")] for answer in answers]
    assert usage[0] == usage[1] == usage[2]


async def test_logprobs_stay_with_their_tokens():
    asked = {"max_tokens": 40, "seed": 7, "stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    answers = []
    for size in (1, 16):
        async with stage(NullStreams(batch_sizes=lambda _, size=size: size)) as on:
            answers.append(told(events_of((await on.chat(**asked)).text)))
    assert answers[0] == answers[1]
    assert len(answers[0][0][1]) == 40
