"""A real fleet that reads prompts with one kind of kernels and writes answers with another: one prompt has one answer.

The readers are torch's, whose pages lie as a GPU's do and are written out in the layout of the processors' kernels; in
one test they are the GPU's own kernels, interpreted, which takes a second a step.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import llama_config, write_model

from penstock.kernels.select import make_ops
from penstock.wire.curve_keys import CurveKeys

from .server import PenstockServer, PenstockWorker
from .streams import Answer, all_answers, make_client, stream_completion

PROMPT = (
    "Once upon a time there was a small fox who lived near the river and liked to count the stones every morning before"
)
LENGTH = 40
FLEET = ["--allow-mixed-numerics", "--kernels", "portable", "--kv-memory", "64MiB", "--max-model-len", "512"]

PATIENT = """
[supervise]
wedge_s = 60.0
busy_s = 300.0
[failover]
silence_s = 60.0
still_s = 60.0
"""
"""The interpreter takes seconds for a step."""


def body(text: str = PROMPT, **changes: Any) -> dict[str, Any]:
    request = {"model": "storyteller", "prompt": text, "max_tokens": LENGTH, "temperature": 0.8, "seed": 7}
    return request | {"logprobs": 2} | changes


def crowd() -> list[dict[str, Any]]:
    return [body(PROMPT + more) for more in ("", " he", " she ran and ran")]


async def one(server: PenstockServer, request: dict[str, Any], kill: str | None = None) -> Answer:
    """An answer, during which a worker of this role dies that has a part in it, if it is to."""
    killed: list[str] = []

    def on_chunk(answer: Answer) -> None:
        if kill is None or killed or not answer.choices or len(answer.choices[0].tokens) < 12:
            return
        rows = [row for row in server.workers() if row["role"] == kill]
        busy = [row for row in rows if row["running"]] or rows
        killed.append(busy[0]["id"])
        os.kill(busy[0]["pid"], signal.SIGKILL)

    async with make_client() as client:
        answer = await stream_completion(client, server.url, request, on_chunk=on_chunk)
    assert bool(killed) == (kill is not None)
    return answer


@pytest.mark.long
def test_the_mixed_class_has_one_answer_to_a_prompt() -> None:
    """Alone, in a batch, from the cache, and when a worker of either role dies in the middle."""
    flags = ["--prefill", "1", "--decode", "2", "--prefill-kernels", "reference", *FLEET]
    with PenstockServer(flags) as server:
        server.wait_all_ready(60)
        (identity,) = {row["identity"] for row in server.workers()}
        assert ">cpp-portable-" in identity
        alone = [asyncio.run(one(server, request)).identical for request in crowd()]
        together = asyncio.run(all_answers(server.url, crowd(), together=True))
        assert [answer.identical for answer in together] == alone
        for role in ("decode", "prefill"):
            assert asyncio.run(one(server, body(), kill=role)).identical == alone[0]
            server.wait_all_ready(60)
        assert asyncio.run(one(server, body())).identical == alone[0]
        server.wait_idle()
        metrics = server.metrics()
        assert metrics["penstock:kv_transfer_pages_total"] > 0
        assert metrics["penstock:kv_pages_leaked"] == 0
        assert metrics["penstock:kv_hand_overs_outrun_total"] == 0
    with PenstockServer(["--prefill", "2", "--decode", "1", "--prefill-kernels", "reference", *FLEET]) as another:
        another.wait_all_ready(60)
        assert asyncio.run(one(another, body())).identical == alone[0]


@pytest.mark.long
def test_a_mixed_fleet_of_several_hosts(tmp_path: Path) -> None:
    """Each names the class of the others, pages go over sockets, and a gateway that does not allow it uses nobody."""
    CurveKeys.ephemeral().save(tmp_path / "keys")
    keys = ["--keys", str(tmp_path / "keys")]
    reading, writing = (make_ops(family=family, compute_dtype="bf16").numerics for family in ("reference", "portable"))
    small = [*keys, "--kv-memory", "64MiB", "--max-model-len", "512"]
    reads = PenstockWorker(["--role", "prefill", "--kernels", "reference", "--mixed-with", writing, *small])
    writes = PenstockWorker(["--role", "decode", "--kernels", "portable", "--mixed-with", reading, *small])
    with reads, writes:
        join = ["--join", reads.endpoint, "--join", writes.endpoint, *keys]
        with PenstockServer([*join, "--allow-mixed-numerics"]) as server:
            first = asyncio.run(one(server, body())).identical
            assert asyncio.run(one(server, body(seed=8))).identical != first
            assert asyncio.run(one(server, body())).identical == first
            assert all(row["identity"].endswith(f"{reading}>{writing}") for row in server.workers())
        refusing = PenstockServer(join)
        refusing.start()
        try:
            refusing.wait_for(lambda: refusing.read_log().count("is not used: its fleet") == 2, 30, "refused")
        finally:
            refusing.kill()
    with PenstockServer(["--prefill-kernels", "reference", *FLEET]) as here:
        here.wait_all_ready(60)
        assert asyncio.run(one(here, body())).identical == first


@pytest.mark.long
def test_the_gpus_kernels_read_for_a_processors(tmp_path: Path) -> None:
    """Interpreted, over a tiny model: alone, in a batch, and when the writer dies."""
    model = write_model(tmp_path / "tiny", llama_config(hidden_size=32, num_hidden_layers=2, vocab_size=96))
    flags = [str(model), "--served-model-name", "storyteller", "--decode", "2", *FLEET]
    prompts = [" ".join(f"t{5 * n + k}" for k in range(18 + n)) for n in range(2)]
    with PenstockServer([*flags, "--prefill-kernels", "triton-interpreter"], config=PATIENT, folder=tmp_path) as server:
        server.wait_all_ready(60)
        assert all("interpreter" in row["identity"] for row in server.workers())
        requests = [body(prompt, ignore_eos=True, logprobs=1) for prompt in prompts]
        alone = [asyncio.run(one(server, request)).identical for request in requests]
        together = asyncio.run(all_answers(server.url, requests, together=True))
        assert [answer.identical for answer in together] == alone
        assert asyncio.run(one(server, requests[0], kill="decode")).identical == alone[0]
        assert server.metrics()["penstock:kv_transfer_pages_total"] > 0
