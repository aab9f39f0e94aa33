"""A recorded step gives the bits of its operations run one by one, in every kernel family and for any shapes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.core.request import Request
from penstock.kernels.native.backend import families
from penstock.kernels.native.program import RecordedProgram
from penstock.types import SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

VOCAB = 203
CONFIG = llama_config(vocab_size=VOCAB, max_position_embeddings=640, num_key_value_heads=2, intermediate_size=100)
BACKENDS = [(family, dtype) for family in families() for dtype in ("bf16", "fp32")]

WAYS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3, "choice": 4},
    {"top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
    {"min_tokens": 2, "stop_token_ids": (1, 2, 3)},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0, "temperature": 0.0, "logprobs": 0},
)


class Asked(NamedTuple):
    """One request: length of its prompt, tokens a step, how it draws."""

    prompt: int
    chunk: int
    way: int


asked = st.builds(
    Asked, st.integers(1, 300) | st.integers(1, 40), st.sampled_from([1, 3, 16, 50, 200]), st.integers(0, len(WAYS) - 1)
)


@cache
def folder_of(base: str) -> Path:
    return write_model(Path(base), CONFIG, seed=5)


@cache
def benches(base: str, family: str, dtype: str) -> tuple[RunnerBench, RunnerBench]:
    made = [
        RunnerBench(folder_of(base), dtype, pages=400, family=family, direct=direct, threads=2)
        for direct in (False, True)
    ]
    return made[0], made[1]


def told(bench: RunnerBench, all_asked: list[Asked], steps: int) -> list[Any]:
    """Everything that some steps bring: every request reads in its chunks, then writes; then the pages' bytes."""
    requests: list[Request] = []
    for index, one in enumerate(all_asked):
        prompt = np.random.default_rng(one.prompt).integers(0, VOCAB, one.prompt).tolist()
        requests.append(bench.request(prompt, SamplingParams(seed=index, max_tokens=64, **WAYS[one.way])))
    result: list[Any] = []
    for _ in range(6):
        work = [(request, min(one.chunk, request.uncomputed)) for request, one in zip(requests, all_asked, strict=True)]
        alone = all(request.uncomputed == 1 for request in requests)
        result.append(bench.step(work, steps if alone else 1))
    pages = [page for request in requests for page in request.page_tables[0].pages[: request.computed // 16]]
    memory = bench.kv.memory.view(np.uint8).reshape(400, -1)
    result.append([memory[page].tobytes() for page in pages])
    for request in requests:
        bench.runner.remove_request(request.id)
        bench.release(request)
    return result


@pytest.mark.parametrize(("family", "dtype"), BACKENDS)
def test_recorded_and_direct_are_equal(tmp_path_factory: pytest.TempPathFactory, family: str, dtype: str) -> None:
    base = str(tmp_path_factory.getbasetemp() / "recorded")

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.lists(asked, min_size=1, max_size=6), st.sampled_from([1, 1, 3]))
    def check(all_asked: list[Asked], steps: int) -> None:
        recorded, direct = benches(base, family, dtype)
        assert isinstance(recorded.runner.program, RecordedProgram)
        assert told(recorded, all_asked, steps) == told(direct, all_asked, steps)

    check()
