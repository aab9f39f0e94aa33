"""Law 1: the same request gives the same tokens and logprobs, whatever serves it.

Twenty varied requests are answered over the whole matrix of topology, batch, cache, chunk size, death and preemption,
and each answer is compared with the plainest one (one worker, alone, cold, whole prompts).  Every cell also has to show
that what it is named after took place: a cell that tested nothing fails.

By default three cells of the matrix are run, a round or two of each; ``--long`` runs all of it.  Kernel families and
compressed weights are in ``test_kernel_families.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .one_answer import (
    ANSWER,
    ROOMS,
    TRUSTING,
    Plain,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
    guess_until_some_are_right,
)
from .server import PATIENCE_S, PenstockServer, PenstockWorker
from .streams import all_answers
from .varied import varied_requests

TOPOLOGIES = {
    "split-shm": ["--transfer", "shm"],
    "split-tcp": ["--transfer", "tcp"],
    "aggregated": ["--aggregated"],
}
CHUNKS = {"chunk-16": 16, "chunk-64": 64, "whole": None}

Rounds = tuple[tuple[bool, bool], ...]
"""Of one cell: all requests together or one after the other, and whether a worker is killed."""

ALONE, ALONE_KILLED, TOGETHER, TOGETHER_KILLED = itertools.product((False, True), (False, True))

DEFAULT_CELLS: dict[tuple[str, str, str], Rounds] = {  # a kill amid many surely hits an answer that has to go on
    ("split-shm", "whole", "tight"): (TOGETHER_KILLED,),
    ("split-tcp", "chunk-64", "roomy"): (ALONE, TOGETHER_KILLED),
    ("aggregated", "chunk-16", "tight"): (TOGETHER_KILLED,),
}

GUESSING = {("split-shm", "chunk-16"): "head", ("aggregated", "chunk-16"): "lookup", ("split-tcp", "whole"): "head"}
"""How workers of these topologies and chunk sizes guess tokens ahead; the plain answers come from one that does not."""

CELLS = [
    *(pytest.param(*cell, rounds, id="-".join(cell)) for cell, rounds in DEFAULT_CELLS.items()),
    *(
        pytest.param(
            *cell,
            (ALONE, ALONE_KILLED, TOGETHER, TOGETHER_KILLED),
            id=f"{'-'.join(cell)}, whole",
            marks=pytest.mark.long,
        )
        for cell in itertools.product(TOPOLOGIES, CHUNKS, ROOMS)
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("topology", "chunk", "room", "rounds"), CELLS)
def test_one_prompt_one_answer(topology: str, chunk: str, room: str, rounds: Rounds, plain: Plain):
    flags = [*TOPOLOGIES[topology], "--kv-memory", ROOMS[room]]
    if CHUNKS[chunk] is not None:
        flags += ["--max-chunk-tokens", str(CHUNKS[chunk])]
    guessing = GUESSING.get((topology, chunk))
    if guessing is not None:
        flags += ["--speculate", guessing]
    with PenstockServer(flags) as server:
        if guessing is not None:
            guess_until_some_are_right(server, plain)
        for together, kill in rounds:
            # A salt of its own keeps a round's first pass cold, and makes its second pass find its own pages.  In a
            # batch, requests with a common beginning also find each other's.
            bodies = varied_requests(salt=f"{together}-{kill}", salt_each=not together)
            for temperature in ("cold", "cached"):
                asked_again = server.metrics()["penstock:resubmissions_total"]
                where = f"{topology} {chunk} {room} {'batch' if together else 'alone'} {temperature} kill={kill}"
                if kill:
                    answers = asyncio.run(answers_with_a_kill(server, bodies, plain.varied, together=together))
                else:
                    answers = asyncio.run(all_answers(server.url, bodies, together=together))
                compare(answers, plain.varied, where)
                cached = sum(answer.cached_tokens for answer in answers)
                if temperature == "cached" and not kill and room == "roomy":
                    assert cached > 1000, f"{where}: the second pass found {cached} tokens"
                asked_again = server.metrics()["penstock:resubmissions_total"] - asked_again  # of who was only slow
                if temperature == "cold" and not together and not kill and not asked_again:
                    assert cached <= 300, f"{where}: the first pass found {cached} tokens already"
        if room == "tight":
            crowd_until_somebody_gives_way(server, plain, f"{topology}, crowded")
        assert_it_took_place(server, split=topology != "aggregated", tight=room == "tight")


@pytest.mark.timeout(300)
def test_a_decode_worker_that_prefills_gives_one_answer(plain: Plain, tmp_path: Path):
    """Steps of the bundled model are short; beside a budget of 1 ms they are long.  Somebody has to give way, too."""
    config = f"{TRUSTING}[scheduling]\ninteractive_tpot_ms = 1.0\n"
    with PenstockServer(["--kv-memory", ROOMS["tight"]], config=config, folder=tmp_path) as server:
        for kill in (True, False):
            asyncio.run(all_answers(server.url, varied_requests(salt=f"measured {kill}"), together=True))
            server.wait_for(
                lambda: _local_prefill(server) == {"decode-0": True, "prefill-0": False}, PATIENCE_S, "local"
            )
            server.wait_idle()
            before = _prompt_tokens(server)
            bodies = varied_requests(salt=f"{kill}")
            if kill:
                answers = asyncio.run(answers_with_a_kill(server, bodies, plain.varied, together=True))
            else:
                answers = asyncio.run(all_answers(server.url, bodies, together=True))
            compare(answers, plain.varied, f"local prefill, kill={kill}")
        crowd_until_somebody_gives_way(server, plain, "local prefill, crowded")
        assert_it_took_place(server, split=False, tight=True)
        after = _prompt_tokens(server)
        assert after["decode-0"] - before["decode-0"] > 10 * (after["prefill-0"] - before["prefill-0"])


def _local_prefill(server: PenstockServer) -> dict[str, bool]:
    return {worker["id"]: worker.get("local_prefill", False) for worker in server.workers()}


def _prompt_tokens(server: PenstockServer) -> dict[str, int]:
    return {worker["id"]: worker["prompt_tokens_computed"] for worker in server.workers()}


def test_the_bodies_cross_every_threshold():
    """The data are what the docstring says: guards the test against being thinned out."""
    bodies = varied_requests()
    lengths = [len(body["prompt"]) for body in bodies]
    assert len(bodies) == 20
    assert (min(lengths), max(lengths)) == (3, 1500)
    assert any(body.get("n") == 2 for body in bodies)
    fields = {key for body in bodies for key in body}
    assert {"logprobs", "stop", "repetition_penalty", "min_p", "logit_bias", "structured_outputs"} <= fields


@pytest.mark.long
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


LARGE_CONTEXT = 512
LARGE = ["--kv-memory", "64MiB", "--max-model-len", str(LARGE_CONTEXT)]
SMALL = ["--kv-memory", "512KiB"]
"""Workers as hosts of unequal memory have them: 16 pages are a context of 256 tokens."""

UNEQUAL = {
    "aggregated": {"large": ["--role", "both", *LARGE], "small": ["--role", "both", *SMALL]},
    "split": {
        "reader": ["--role", "prefill", *LARGE],
        "large": ["--role", "decode", *LARGE],
        "small": ["--role", "decode", *SMALL],
    },
}

SMALL_EXPECTED = "[routing]\nexpected_answer_tokens = 16\n" + TRUSTING


def unequal_bodies() -> list[dict[str, Any]]:
    """Chats of which nobody names a length; nothing ends them but that of the context."""
    return [
        {
            "model": "storyteller",
            "messages": [{"role": "user", "content": f"Tell me a story about a little {who}."}],
            "ignore_eos": True,
            "logprobs": True,
            "seed": seed,
        }
        for seed, who in enumerate(("fox", "bear", "bird", "frog"))
    ]


async def chat(server: PenstockServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=100, trust_env=False) as client:
        asked = [client.post(f"{server.url}/v1/chat/completions", json=body) for body in bodies]
        return [answer.json() for answer in await asyncio.gather(*asked)]


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("topology", ["aggregated", "split"])
def test_workers_of_unequal_memory_give_one_answer(topology: str, tmp_path: Path, plain: Plain):
    """Each answer is as long as was asked for; without a length, as the longest context, wherever it began."""
    keys = str(tmp_path / "keys")
    CurveKeys.ephemeral().save(Path(keys))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(PenstockWorker(["--keys", keys, "--name", name, *flags]))
            for name, flags in UNEQUAL[topology].items()
        ]
        joined = [word for worker in workers for word in ("--join", worker.endpoint)]
        flags = ["--keys", keys, *joined, "--max-model-len", str(LARGE_CONTEXT)]
        server = stack.enter_context(PenstockServer(flags, config=SMALL_EXPECTED, folder=tmp_path))
        server.wait_all_ready()
        every = list(zip(varied_requests(salt="unequal"), plain.varied, strict=True))
        fit = [(body, answer) for body, answer in every if len(body["prompt"]) + ANSWER <= LARGE_CONTEXT]
        answers = asyncio.run(all_answers(server.url, [body for body, _ in fit], together=True))
        compare(answers, [answer for _, answer in fit], "unequal memory")

        open_ended = asyncio.run(begun_at_the_small_one(server))
        lengths = [LARGE_CONTEXT - answer["usage"]["prompt_tokens"] for answer in open_ended]
        assert [answer["usage"]["completion_tokens"] for answer in open_ended] == lengths
        named = [body | {"max_tokens": length} for body, length in zip(unequal_bodies(), lengths, strict=True)]
        assert [answer["choices"] for answer in asyncio.run(chat(server, named))] == [
            answer["choices"] for answer in open_ended
        ]
        moved = server.metrics()["penstock:answers_moved_total"] + server.metrics()["penstock:resubmissions_total"]
        assert moved > 0, "what began at the small worker cannot have ended there"


async def begun_at_the_small_one(server: PenstockServer) -> list[dict[str, Any]]:
    """The open-ended answers; the large worker takes no part before one of them has begun."""
    admin = f"{server.url}/admin/workers/large"
    async with httpx.AsyncClient(timeout=100, trust_env=False) as client:
        assert (await client.post(f"{admin}/drain", json={"force": True})).status_code == 200
        answers = asyncio.create_task(chat(server, unequal_bodies()))
        began = server.worker("small")["steps"]
        deadline = time.monotonic() + PATIENCE_S
        while (await asyncio.to_thread(server.worker, "small"))["steps"] == began:
            assert time.monotonic() < deadline, "nothing began at the small worker"
            await asyncio.sleep(0.02)
        assert (await client.post(f"{admin}/resume", json={})).status_code == 200
        return await answers
