"""Decoded copies of compressed weights in a whole service: made at the start, shared by its workers, and no answer
changes."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from .server import PenstockServer
from .streams import all_answers

LINES = {
    "auto": r"decoded copies: 20MiB, for products of 8 rows and more",
    "8MiB": r"decoded copies: \d+KiB of 20MiB, for products of 8 rows and more",
    "0": "",
}
"""What the log says, by ``--decoded-weights``."""


def bodies() -> list[dict[str, Any]]:
    """Prompts of several chunks, greedy and not."""
    draw = random.Random(5)
    words = [
        "the",
        "fox",
        "went",
        "to",
        "see",
        "a",
        "river",
        "and",
        "old",
        "bear",
        "one",
        "day",
        "with",
        "his",
        "mother",
    ]
    same = {"model": "storyteller", "max_tokens": 24, "ignore_eos": True, "logprobs": 3, "stream": True}
    prompts = [" ".join(draw.choice(words) for _ in range(10 + 12 * number)) for number in range(9)]
    return [
        {**same, "prompt": text, "seed": number, "temperature": 0.8 * (number % 2)}
        for number, text in enumerate(prompts)
    ]


@pytest.mark.timeout(300)
def test_no_answer_depends_on_copies() -> None:
    found = {}
    for setting, line in LINES.items():
        server = PenstockServer(["--decoded-weights", setting, "--device", "cpu", "--max-chunk-tokens", "48"])
        server.module = "kept_compressed"
        with server:
            answers = [*asyncio.run(all_answers(server.url, bodies(), together=True))]
            answers += asyncio.run(all_answers(server.url, bodies()[:3], together=False))
            said = re.findall(r"decoded copies: .*", server.read_log())
        found[setting] = [answer.identical for answer in answers]
        assert len(said) == bool(line)
        assert all(re.match(line, own) for own in said), said
    assert found["auto"] == found["8MiB"] == found["0"]
