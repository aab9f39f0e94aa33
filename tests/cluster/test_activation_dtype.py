"""``--activation-dtype int8`` over HTTP: law 1 in its own numerics class, and answers near those of floats."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGMLQuantizationType as Type

from tiny_adapters import write_adapter
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

from .asking import penstock
from .server import PenstockServer
from .streams import all_answers

INT8 = ["--activation-dtype", "int8"]
KINDS = {"v_proj": Type.Q6_K, "o_proj": Type.Q8_0, "embed": Type.Q6_K, "": Type.Q4_K}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("int8") / "letters.gguf"
    config = llama_config(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    write_gguf(path, config, random_tensors(config), KINDS)
    return str(path)


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As a flag."""
    return f"--lora=fox={write_adapter(tmp_path_factory.mktemp('lora') / 'fox', Path(model), rank=8)}"


def prompt(number: int) -> str:
    draw = random.Random(number)
    return "".join(draw.choice("abcdefghijklmnop") for _ in range(30 + 5 * number))


def bodies() -> list[dict[str, Any]]:
    """Some that are greedy and some that are not, some with an adapter."""
    same = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3, "stream": True}
    models = ("letters", "letters", "fox")
    return [{**same, "model": models[n % 3], "prompt": prompt(n), "seed": n, "temperature": n % 2} for n in range(6)]


def first_logprobs(server: PenstockServer, number: int) -> dict[str, float]:
    body = {"model": "letters", "prompt": prompt(number), "max_tokens": 1, "logprobs": 5, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
    assert ("-act_int8" in answer["system_fingerprint"]) == (INT8[0] in server.flags)
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


@pytest.mark.timeout(600)
def test_one_answer_in_a_class_of_its_own(model: str, adapter: str) -> None:
    """Aggregated and alone; split, in chunks and together, then from the cache."""
    with PenstockServer([model, *INT8, adapter, "--aggregated"]) as server:
        wanted = [answer.identical for answer in asyncio.run(all_answers(server.url, bodies(), together=False))]
        own = [first_logprobs(server, number) for number in range(6)]
    with PenstockServer([model, *INT8, adapter, "--max-chunk-tokens", "16"]) as server:
        for _ in range(2):
            found = asyncio.run(all_answers(server.url, bodies(), together=True))
            assert [answer.identical for answer in found] == wanted
    with PenstockServer([model, "--aggregated"]) as server:
        floats = [first_logprobs(server, number) for number in range(6)]
    gaps = [abs(one[word] - other[word]) for one, other in zip(own, floats, strict=True) for word in one.keys() & other]
    assert len(gaps) >= 20
    assert 0 < sum(gaps) / len(gaps) < 0.2


def test_other_models_are_refused_before_they_are_loaded() -> None:
    run = penstock("serve", *INT8)
    assert run.returncode == 2
    assert "--activation-dtype int8" in run.stderr
    assert "has no quantized weights" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
