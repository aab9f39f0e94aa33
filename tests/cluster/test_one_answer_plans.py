"""Law 1 over plans: the same request gives the same tokens and logprobs, however ranks divide the model, also when one
of them dies or stops in the middle.

Prefill and decode may have different plans: pages do not know of them.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from penstock.config.mesh import parse_mesh
from penstock.wire.curve_keys import CurveKeys

from .one_answer import (
    ROOMS,
    TRUSTING,
    Plain,
    a_follower,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
    the_worker,
)
from .server import PenstockServer, PenstockWorker
from .streams import all_answers
from .varied import varied_requests

PLANS = {
    "tp2": ["--aggregated", "--parallel", "tp2"],
    "pp2": ["--aggregated", "--parallel", "pp2"],
    "tp2,pp2": ["--aggregated", "--parallel", "tp2,pp2"],
    "pp3 as sizes": ["--aggregated", "--pipeline-parallel-size", "3"],
    "tp2 to tp1, shm": ["--prefill-parallel", "tp2", "--transfer", "shm"],
    "tp1 to tp2, tcp": ["--decode-parallel", "tp2", "--transfer", "tcp"],
    "pp2 to tp2, tcp": ["--prefill-parallel", "pp2", "--decode-parallel", "tp2", "--transfer", "tcp"],
    "tp2,pp2 to pp2, curve": ["--prefill-parallel", "tp2,pp2", "--decode-parallel", "pp2", "--transfer", "curve"],
}

JOINED = {
    "reader": ["--role", "prefill", "--parallel", "pp2"],
    "writer": ["--role", "decode", "--parallel", "tp2"],
}
"""Workers as on hosts of their own, which send each other encrypted pages."""

STORY = "Once upon a time a fox lived in a hill. "

BLOWS = {
    "leader killed": (the_worker, signal.SIGKILL),
    "follower killed": (a_follower, signal.SIGKILL),
    "follower stopped": (a_follower, signal.SIGSTOP),
}

DEFAULT = {("tp2", "follower killed"), ("pp2 to tp2, tcp", "follower killed")}
"""In the default tier."""


def cells() -> list[Any]:
    return [
        pytest.param(plan, blow, id=f"{plan}-{blow}", marks=() if (plan, blow) in DEFAULT else pytest.mark.long)
        for plan in PLANS
        for blow in BLOWS
        if not (plan == "tp2 to tp1, shm" and blow != "leader killed")  # the worker that decodes has one rank
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "blow"), cells())
def test_a_plan_gives_one_answer(plan: str, blow: str, plain: Plain) -> None:
    victim, signum = BLOWS[blow]
    with PenstockServer([*PLANS[plan], "--kv-memory", ROOMS["tight"]]) as server:
        bodies = varied_requests(salt=f"{plan} {blow}")
        killed = answers_with_a_kill(server, bodies, plain.varied, together=True, victim=victim, signum=signum)
        compare(asyncio.run(killed), plain.varied, f"{plan}, {blow}")
        compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, f"{plan}, cached")
        crowd_until_somebody_gives_way(server, plain, f"{plan}, crowded")
        assert_it_took_place(server, split="--aggregated" not in server.flags, tight=True)
        assert_ranks_have_their_shares(server)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_joined_workers_with_ranks_give_one_answer(plain: Plain, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    CurveKeys.ephemeral().save(Path(keys))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(PenstockWorker(["--keys", keys, "--name", name, "--transfer", "curve", *flags]))
            for name, flags in JOINED.items()
        ]
        joined = [word for worker in workers for word in ("--join", worker.endpoint)]
        server = stack.enter_context(PenstockServer(["--keys", keys, *joined], config=TRUSTING, folder=tmp_path))
        server.wait_all_ready()
        assert {len(worker["ranks"]) for worker in server.workers()} == {2}
        bodies = varied_requests(salt="joined")
        compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, "joined")
        server.wait_counted("kv_transfer_pages_total")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["shard", "compress"])
def test_a_model_in_slices_gives_one_answer(
    command: str, plain: Plain, plain_storyteller: Path, tmp_path: Path
) -> None:
    assert main([command, str(plain_storyteller), str(tmp_path / "storyteller"), "--verify"]) == 0
    with PenstockServer([str(tmp_path / "storyteller"), *PLANS["tp2,pp2"]]) as server:
        bodies = varied_requests(salt=command)
        compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, command)
        assert_ranks_have_their_shares(server)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["tp2", pytest.param("tp2,pp2", marks=pytest.mark.long)])
def test_scores_of_prompts_and_grammars_are_the_same(plan: str) -> None:
    """All that reads logits: they come together from the ranks that have parts of the head."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    bodies: list[dict[str, Any]] = [
        {"prompt": STORY * 12, "echo": True, "logprobs": 5, "max_tokens": 3, "seed": 1},
        {"prompt": STORY, "echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt": STORY, "logprobs": 2, "max_tokens": 40, "temperature": 1.2, "top_k": 20, "seed": 4},
        {"prompt": "A name:", "structured_outputs": {"json": schema}, "max_tokens": 30, "seed": 2},
    ]
    found = []
    for flags in (["--aggregated"], PLANS[plan]):
        with PenstockServer(flags) as server, httpx.Client(timeout=60, trust_env=False) as client:
            answers = [client.post(f"{server.url}/v1/completions", json={"model": "storyteller"} | b) for b in bodies]
            assert [answer.status_code for answer in answers] == [200] * len(bodies), [a.text for a in answers]
            found.append([answer.json()["choices"] for answer in answers])
    assert found[0] == found[1]


def assert_ranks_have_their_shares(server: PenstockServer) -> None:
    for worker in server.workers():
        ranks = worker["ranks"]
        role = {"prefill": "--prefill-parallel", "decode": "--decode-parallel"}.get(worker["role"], "--parallel")
        if role in server.flags:
            assert len(ranks) == parse_mesh(server.flags[server.flags.index(role) + 1]).ranks
        assert len({rank["pid"] for rank in ranks}) == len(ranks)
        assert all(rank["weight_bytes"] and rank["kv_bytes"] and rank["step_cpu_s"] for rank in ranks), ranks
