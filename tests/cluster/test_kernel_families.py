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
from penstock.kernels.native.backend import families
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.wire.curve_keys import CurveKeys

from .one_answer import ROOMS, Plain, assert_same_in_a_crowd, compare, plain_answers
from .server import PenstockServer, PenstockWorker
from .streams import Answer, all_answers, make_client, stream_completion
from .varied import varied_requests

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
        assert any(checkpoint.compressed_matrix(name) is not None for name in checkpoint.names)
    return {"plain": str(plain_storyteller), "compressed": str(storyteller())}


@cache
def plainest(family: str, model: str) -> Plain:
    """As the fixture ``plain``, of any family."""
    return plain_answers([model], environ={"PENSTOCK_KERNELS": family})


def fingerprint(server: PenstockServer) -> str:
    """Model and numerics class, as an answer names them."""
    body = {"model": "storyteller", "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, trust_env=False)
    return answer.json()["system_fingerprint"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "form"), cells())
def test_every_family_gives_one_answer(models: dict[str, str], family: str, form: str, plain: Plain) -> None:
    """Split, in chunks of 16, in too little memory, in a batch, with a kill, then from the cache."""
    flags = [models[form], "--max-chunk-tokens", "16", "--kv-memory", ROOMS["tight"]]
    wanted = plain if family == families()[0] else plainest(family, models["plain"])
    with PenstockServer(flags, environ={"PENSTOCK_KERNELS": family}) as server:
        assert_same_in_a_crowd(server, wanted, f"{family} {form}")
        assert f"-cpp-{family}-" in fingerprint(server)


# --- one answer, two forms of the weights -----------------------------------------------------------------------------

SCENES = 3
"""How often a worker is killed to hit an answer: on a busy machine all may have been written before it dies."""

PATIENT = "[failover]\nno_path_s = 60.0\n"
"""However long the other worker takes to start, answers wait for it."""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    CurveKeys.ephemeral().save(tmp_path / "keys")
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("plain", "compressed", id="plain, then compressed"),
        pytest.param("compressed", "plain", id="compressed, then plain"),
    ],
)
def test_an_answer_goes_on_where_weights_are_stored_otherwise(
    models: dict[str, str], keys: str, tmp_path: Path, before: str, after: str
) -> None:
    """The decode worker dies in mid-answer; another goes on that has the same model in the other form."""
    words = ["--keys", keys, "--role", "decode", "--name", "d"]
    forms = [before, after] * SCENES
    with ExitStack() as stack:
        reader = stack.enter_context(PenstockWorker([models[before], "--keys", keys, "--role", "prefill"]))
        writers = [stack.enter_context(PenstockWorker([models[forms[0]], *words]))]
        joined = ["--join", reader.endpoint, "--join", writers[0].endpoint]
        flags = [models["plain"], "--keys", keys, *joined]
        server = stack.enter_context(PenstockServer(flags, config=PATIENT, folder=tmp_path))
        wanted = asyncio.run(all_answers(server.url, long_requests("undisturbed"), together=False))
        for scene, form in enumerate(forms[1:]):

            def change(form: str = form) -> None:
                writers[-1].kill()
                writers.append(stack.enter_context(PenstockWorker([models[form], *words], port=writers[0].port)))

            found = asyncio.run(answers_while(server, long_requests(f"changed {scene}"), change))
            compare(found, [answer.identical for answer in wanted], f"then {form}")
            if server.metrics()["penstock:resubmissions_total"] >= 1:
                return
    raise AssertionError("all had ended each time before the worker died")
