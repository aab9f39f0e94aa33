"""Law 1: the same request gives the same tokens and logprobs, whatever serves it.

Twenty varied requests are answered over the whole matrix of topology, batch, cache, chunk size, death and preemption,
and each answer is compared with the plainest one (one worker, alone, cold, whole prompts).  Every cell also has to show
that what it is named after took place: a cell that tested nothing fails.

By default one row of the matrix for each topology is run; ``--long`` runs all of it.  Kernel families and compressed
weights are in ``test_kernel_families.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from .server import PenstockServer
from .streams import Answer, all_answers, make_client, stream_completion
from .varied import crowd, varied_requests

TOPOLOGIES = {
    "split-shm": ["--transfer", "shm"],
    "split-tcp": ["--transfer", "tcp"],
    "aggregated": ["--aggregated"],
}
CHUNKS = {"chunk-16": 16, "chunk-64": 64, "whole": None}
ROOMS = {"roomy": "128MiB", "tight": "4MiB"}  # tight: 128 pages, one full context, so that a batch cannot stay together

DEFAULT_CELLS = {
    ("split-shm", "chunk-16", "roomy"),
    ("split-shm", "whole", "tight"),
    ("split-tcp", "chunk-64", "roomy"),
    ("aggregated", "chunk-16", "tight"),
    ("aggregated", "whole", "roomy"),
}

CROWDS = 6
"""How often the crowd comes at most."""

GUESSING = {("split-shm", "chunk-16"): "head", ("aggregated", "chunk-16"): "lookup", ("split-tcp", "whole"): "head"}
"""How workers of these topologies and chunk sizes guess tokens ahead; the plain answers come from one that does not."""

CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=() if cell in DEFAULT_CELLS else (pytest.mark.long,))
    for cell in itertools.product(TOPOLOGIES, CHUNKS, ROOMS)
]


@dataclass(frozen=True)
class Plain:
    """The answers of one worker, to one request at a time, from nothing, with whole prompts."""

    varied: list[dict[str, Any]]
    crowd: list[dict[str, Any]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    with PenstockServer([*TOPOLOGIES["aggregated"], "--kv-memory", ROOMS["roomy"]]) as server:
        answers = asyncio.run(all_answers(server.url, varied_requests(salt="plain", salt_each=True), together=False))
        crowded = asyncio.run(all_answers(server.url, crowd(), together=False))
    assert all(answer.cached_tokens == 0 for answer in answers if len(answer.choices) == 1)
    return Plain([answer.identical for answer in answers], [answer.identical for answer in crowded])


LEFT = 20
"""Tokens that an answer must still have before it when its worker is killed: it takes a moment to die."""


@dataclass
class Killer:
    """Kills the worker that writes an answer, once, after a token was delivered and long before the last one."""

    server: PenstockServer
    role: str
    lengths: list[int]  # tokens of each undisturbed answer
    after_tokens: int = 3
    killed_at: dict[int, int] = field(default_factory=dict)  # tokens that each stream had at that moment
    answers: dict[int, Answer] = field(default_factory=dict)

    def watch(self, number: int):
        def on_chunk(answer: Answer) -> None:
            self.answers[number] = answer
            had = len(answer.times)
            if self.killed_at or had < self.after_tokens or self.lengths[number] < had + LEFT or _finished(answer):
                return
            for worker in self.server.workers():
                if worker["role"] == self.role:
                    os.kill(worker["pid"], signal.SIGKILL)
            self.killed_at = {n: len(a.times) for n, a in self.answers.items() if not _finished(a)}

        return on_chunk

    def assert_hit_an_answer(self) -> None:
        hit = [n for n, had in self.killed_at.items() if 0 < had < len(self.answers[n].times)]
        assert hit, f"the kill hit no answer in the middle: {self.killed_at}"


def _finished(answer: Answer) -> bool:
    return any(choice.finish for choice in answer.choices.values())


async def answers_with_a_kill(
    server: PenstockServer, bodies: list[dict[str, Any]], plain: list[dict[str, Any]], *, together: bool
) -> list[Answer]:
    """All answers, while the worker that decodes dies once (alone: in the middle of the first long one)."""
    lengths = [answer["completion_tokens"] for answer in plain]
    killer = Killer(server, "both" if "--aggregated" in server.flags else "decode", lengths)
    async with make_client() as client:
        streams = [
            stream_completion(client, server.url, body, on_chunk=killer.watch(number))
            for number, body in enumerate(bodies)
        ]
        answers = await asyncio.gather(*streams) if together else [await stream for stream in streams]
    killer.assert_hit_an_answer()
    return answers


def compare(answers: list[Answer], plain: list[dict[str, Any]], where: str) -> None:
    for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        assert answer.identical == wanted, f"{where}: request {number} was answered differently"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("topology", "chunk", "room"), CELLS)
def test_one_prompt_one_answer(topology: str, chunk: str, room: str, plain: Plain):
    flags = [*TOPOLOGIES[topology], "--kv-memory", ROOMS[room]]
    if CHUNKS[chunk] is not None:
        flags += ["--max-chunk-tokens", str(CHUNKS[chunk])]
    guessing = GUESSING.get((topology, chunk))
    if guessing is not None:
        flags += ["--speculate", guessing]
    with PenstockServer(flags) as server:
        for together, kill in itertools.product([False, True], [False, True]):
            # A salt of its own keeps a round's first pass cold, and makes its second pass find its own pages.  In a
            # batch, requests with a common beginning also find each other's.
            bodies = varied_requests(salt=f"{together}-{kill}", salt_each=not together)
            for temperature in ("cold", "cached"):
                where = f"{topology} {chunk} {room} {'batch' if together else 'alone'} {temperature} kill={kill}"
                if kill:
                    answers = asyncio.run(answers_with_a_kill(server, bodies, plain.varied, together=together))
                else:
                    answers = asyncio.run(all_answers(server.url, bodies, together=together))
                compare(answers, plain.varied, where)
                cached = sum(answer.cached_tokens for answer in answers)
                if temperature == "cached" and not kill and room == "roomy":
                    assert cached > 1000, f"{where}: the second pass found {cached} tokens"
                if temperature == "cold" and not together and not kill:
                    assert cached <= 300, f"{where}: the first pass found {cached} tokens already"
        if room == "tight":
            crowd_until_somebody_gives_way(server, plain.crowd, f"{topology}, crowded")
        assert_it_took_place(server, split=topology != "aggregated", tight=room == "tight")
        if guessing is not None:
            metrics = server.metrics()
            guessed = metrics["penstock:spec_decode_num_draft_tokens_total"]
            assert 0 < metrics["penstock:spec_decode_num_accepted_tokens_total"] < guessed


def crowd_until_somebody_gives_way(server: PenstockServer, wanted: list[dict[str, Any]], where: str) -> None:
    """The crowd's answers, again while none was preempted: on a busy machine one may have ended before the other
    begins."""
    for _ in range(CROWDS):
        compare(asyncio.run(all_answers(server.url, crowd(), together=True)), wanted, where)
        server.wait_idle(2.0)
        if server.metrics()["penstock:num_preemptions_total"] > 0:
            return


def assert_it_took_place(server: PenstockServer, *, split: bool, tight: bool) -> None:
    """Rows shared steps, pages travelled, somebody was preempted where room was short, and nothing leaked."""
    server.wait_idle(2.0)
    metrics = server.metrics()
    assert metrics["penstock:engine_multi_row_steps_total"] > 0
    assert metrics["penstock:resubmissions_total"] > 0
    if split:
        assert metrics["penstock:kv_transfer_pages_total"] > 0
    if tight:
        assert metrics["penstock:num_preemptions_total"] > 0
    assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


def test_the_bodies_cross_every_threshold():
    """The data are what the docstring says: guards the test against being thinned out."""
    bodies = varied_requests()
    lengths = [len(body["prompt"]) for body in bodies]
    assert len(bodies) == 20
    assert (min(lengths), max(lengths)) == (3, 1500)
    assert any(body.get("n") == 2 for body in bodies)
    fields = {key for body in bodies for key in body}
    assert {"logprobs", "stop", "repetition_penalty", "min_p", "logit_bias", "structured_outputs"} <= fields


@pytest.mark.timeout(120)
def test_a_chat_answer_is_the_same_split_and_aggregated():
    body = {
        "model": "storyteller",
        "messages": [{"role": "user", "content": "Tell me a story about a little fox who was lost."}],
        "max_tokens": 200,
        "seed": 42,
    }
    texts = []
    for flags in ([], ["--aggregated"]):
        with PenstockServer(flags) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 100
