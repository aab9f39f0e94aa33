"""Law 1 in every kernel family that this processor runs: over plain weights, over compressed ones, and across the two.

Each family is a numerics class of its own, so each is compared with its own plainest answers.  By default only the best
family runs; ``--long`` runs all of them.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.bundled import storyteller
from penstock.kernels.native import families
from penstock.weights.reader import Checkpoint
from penstock.wire.keys import Keys

from .server import PenstockServer, PenstockWorker
from .streams import Answer, all_answers, make_client, stream_completion
from .test_one_answer import (
    ROOMS,
    Plain,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
)
from .varied import crowd, varied_requests

WEIGHTS = ("plain", "compressed")


def cells(*default: tuple[str, str]) -> list[Any]:
    """Every family with both forms of weights; those that are not ``default`` only with ``--long``."""
    return [
        pytest.param(family, form, id=f"{family}-{form}", marks=() if (family, form) in default else pytest.mark.long)
        for family in families()
        for form in WEIGHTS
    ]


@pytest.fixture(scope="module")
def models(plain_storyteller: Path) -> dict[str, str]:
    """The bundled model's folder in both forms, under its own name."""
    with Checkpoint(storyteller()) as checkpoint:
        assert any(checkpoint.matrix(name) is not None for name in checkpoint.names)
    return {"plain": str(plain_storyteller), "compressed": str(storyteller())}


@cache
def plainest(family: str, model: str) -> Plain:
    """The family's answers of one worker, plain weights, to one request at a time, from nothing, with whole prompts."""
    flags = [model, "--aggregated", "--kv-memory", ROOMS["roomy"]]
    with PenstockServer(flags, environ={"PENSTOCK_KERNELS": family}) as server:
        answers = asyncio.run(all_answers(server.url, varied_requests(salt_each=True), together=False))
        crowded = asyncio.run(all_answers(server.url, crowd(), together=False))
    return Plain([answer.identical for answer in answers], [answer.identical for answer in crowded])


def fingerprint(server: PenstockServer) -> str:
    """Model and numerics class, as an answer names them."""
    body = {"model": "storyteller", "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, trust_env=False)
    return answer.json()["system_fingerprint"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "form"), cells((families()[0], "compressed")))
def test_every_family_gives_one_answer(models: dict[str, str], family: str, form: str) -> None:
    """Split, in chunks of 16, in too little memory, in a batch, with a kill, then from the cache."""
    flags = [models[form], "--max-chunk-tokens", "16", "--kv-memory", ROOMS["tight"]]
    plain = plainest(family, models["plain"])
    wanted = plain.varied
    with PenstockServer(flags, environ={"PENSTOCK_KERNELS": family}) as server:
        for kill in (True, False):
            where = f"{family} {form} kill={kill}"
            bodies = varied_requests(salt=where)
            if kill:
                compare(asyncio.run(answers_with_a_kill(server, bodies, wanted, together=True)), wanted, where)
            compare(asyncio.run(all_answers(server.url, bodies, together=True)), wanted, where)
        crowd_until_somebody_gives_way(server, plain.crowd, f"{family} {form} crowded")
        assert_it_took_place(server, split=True, tight=True)
        assert f"-cpp-{family}-" in fingerprint(server)


# --- one answer, two forms of the weights -----------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> str:
    Keys.ephemeral().save(tmp_path / "keys")
    return str(tmp_path / "keys")


def long_requests(salt: str) -> list[dict[str, Any]]:
    """Three that take long enough to be hit in the middle."""
    bodies = [body for body in varied_requests(max_tokens=300, salt=salt) if "stop" not in body and "n" not in body][:3]
    return [{**body, "ignore_eos": True, "logprobs": 4} for body in bodies]


async def answers_while(server: PenstockServer, bodies: list[dict[str, Any]], change: Any) -> list[Answer]:
    """All answers; ``change`` is called once, when each of them has begun and none has ended."""
    begun: set[int] = set()

    def watch(number: int) -> Any:
        def on_chunk(answer: Answer) -> None:
            if len(begun) == len(bodies) or len(answer.times) < 5:
                return
            begun.add(number)
            if len(begun) == len(bodies):
                change()

        return on_chunk

    async with make_client() as client:
        streams = [
            stream_completion(client, server.url, body, on_chunk=watch(number)) for number, body in enumerate(bodies)
        ]
        return await asyncio.gather(*streams)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("plain", "compressed", id="plain, then compressed"),
        pytest.param("compressed", "plain", id="compressed, then plain", marks=pytest.mark.long),
    ],
)
def test_an_answer_goes_on_where_weights_are_stored_otherwise(
    models: dict[str, str], keys: str, before: str, after: str
) -> None:
    """The decode worker dies in mid-answer; another goes on that has the same model in the other form."""
    words = ["--keys", keys, "--role", "decode", "--name", "d"]
    with ExitStack() as stack:
        reader = stack.enter_context(PenstockWorker([models[before], "--keys", keys, "--role", "prefill"]))
        writer = stack.enter_context(PenstockWorker([models[before], *words]))
        joined = ["--join", reader.endpoint, "--join", writer.endpoint]
        server = stack.enter_context(PenstockServer([models["plain"], "--keys", keys, *joined]))
        wanted = asyncio.run(all_answers(server.url, long_requests("undisturbed"), together=False))

        def change() -> None:
            writer.kill()
            stack.enter_context(PenstockWorker([models[after], *words], port=writer.port))

        found = asyncio.run(answers_while(server, long_requests("changed"), change))
        assert server.metrics()["penstock:resubmissions_total"] >= len(found)
        compare(found, [answer.identical for answer in wanted], f"{before} then {after}")
