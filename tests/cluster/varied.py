"""Twenty requests that differ in everything that could make an answer depend on how it was served.

Prompts of 3 to 1,500 tokens cross every size threshold (pages of 16, attention blocks of 64, the tile of 256, key
partitions of 512, chunks of 1,024), sampling goes from greedy to everything at once.  They are data: the law-1 test and
the chaos run send them and compare answers.
"""

from __future__ import annotations

import random
from typing import Any

PROMPT_LENGTHS = (3, 15, 16, 17, 31, 63, 64, 65, 100, 129, 255, 256, 257, 300, 511, 513, 700, 1023, 1025, 1500)

PETS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    "minItems": 4,
}
"""A schema whose answers are long enough to be killed in the middle."""

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 1.2, "top_k": 20, "seed": -3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 4, "presence_penalty": 0.8},
    {"temperature": 0.8, "frequency_penalty": 1.1, "seed": 5, "logprobs": 5},
    {"temperature": 1.0, "seed": 6, "stop": ["the", "."]},
    {"temperature": 0, "stop": ["\n\n"], "logprobs": 0},
    {"temperature": 1.0, "seed": 7, "min_tokens": 20, "stop_token_ids": [1]},
    {"temperature": 1.5, "top_p": 0.8, "top_k": 50, "min_p": 0.01, "seed": 8, "repetition_penalty": 1.1},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.6, "seed": 9, "logit_bias": {"262": 3.0, "46": -100}},
    {"temperature": 1.0, "seed": 10, "n": 2},
    {"temperature": 0.9, "seed": 11, "structured_outputs": {"json": PETS}},
    {"temperature": 0, "logprobs": 1, "min_tokens": 8, "guided_regex": "([A-Z][a-z]{1,9}( [a-z]+){2,8}[.!] ?)+"},
)


CROWDED = 1100
"""Tokens of each request of a crowd: more than half of 128 pages."""

CROWD_PROMPT = 600
"""How many of them are the prompt's: three find room.  The fewer, the longer the requests stand beside each other."""


def crowd(prompt: int = CROWD_PROMPT) -> list[dict[str, Any]]:
    """Three requests that all find room, until one of them must give way: the first when each has written 80 tokens,
    and if one is late, any two of them later.

    The greedy one soon repeats itself, so tokens that are looked up in it are right.
    """
    long = {"model": "storyteller", "max_tokens": CROWDED - prompt, "ignore_eos": True, "logprobs": 1}
    return [
        {**long, "prompt": random.Random(seed).choices(range(6, 4096), k=prompt), "seed": seed, "temperature": heat}
        for seed, heat in ((0, 1.0), (1, 0.0), (2, 1.0))
    ]


def varied_requests(
    *, max_tokens: int = 48, salt: str = "", salt_each: bool = False, vocab: int = 4096
) -> list[dict[str, Any]]:
    """Bodies for ``/v1/completions``.

    ``salt`` keeps the prefix caches of two rounds apart without changing an answer; with ``salt_each`` those of the
    requests of one round, too.
    """
    source = random.Random(20261122)
    bodies: list[dict[str, Any]] = []
    for index, length in enumerate(PROMPT_LENGTHS):
        # Half of the prompts share a beginning, so that prefix hits end inside other requests' prompts.
        shared = random.Random(7) if index % 2 else source
        prompt = [shared.randrange(6, vocab) for _ in range(length)]
        bodies.append(
            {
                "model": "storyteller",
                "prompt": prompt,
                "max_tokens": max_tokens - index % 5,
                "cache_salt": f"{salt}-{index}" if salt_each else salt or "varied",
                **SAMPLING[index % len(SAMPLING)],
            }
        )
    return bodies


def varied_conversations(*, max_tokens: int = 60) -> list[dict[str, Any]]:
    """Bodies for ``/v1/chat/completions``, of what Messages and Responses can say, too."""
    words = ("fox", "bear", "bird", "frog", "dog", "duck")
    bodies: list[dict[str, Any]] = []
    for number, who in enumerate(words):
        turns = [{"role": "user", "content": f"Tell me a story about a little {who}."}]
        for turn in range(number % 3):
            turns += [
                {"role": "assistant", "content": f"Once there was a {who}. " * (turn + 1)},
                {"role": "user", "content": f"And then the {words[turn]} came? \u00e9 \U0001f98a" * (1 + 8 * turn)},
            ]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        bodies.append(
            {
                "model": "storyteller",
                "messages": [{"role": "system", "content": f"You tell short stories. {number}"}, *turns],
                "max_tokens": max_tokens,
                **sampling,
            }
        )
    return bodies


def as_messages(chat: dict[str, Any]) -> dict[str, Any]:
    """The same for Anthropic's ``/v1/messages``."""
    system, *turns = chat["messages"]
    return {**chat, "system": system["content"], "messages": turns}


def as_response(chat: dict[str, Any]) -> dict[str, Any]:
    """The same for OpenAI's ``/v1/responses``, not to be stored."""
    system, *turns = chat["messages"]
    kept = {key: value for key, value in chat.items() if key not in ("messages", "max_tokens")}
    return {
        **kept,
        "instructions": system["content"],
        "input": turns,
        "max_output_tokens": chat["max_tokens"],
        "store": False,
    }


def in_every_api(chats: list[dict[str, Any]], *, salt: str) -> list[dict[str, Any]]:
    """Each conversation as a chat, a message and a response; ``salt`` keeps the caches of two rounds apart."""
    salted = [{**chat, "cache_salt": salt} if salt else chat for chat in chats]
    return [body for chat in salted for body in (chat, as_messages(chat), as_response(chat))]
