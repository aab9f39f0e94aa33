"""Sparse attention behind the runner: other answers than full attention, and always the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.engine.core.request import Request
from penstock.kernels.operands import Sparse
from penstock.types import SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

VOCAB = 113
ANSWER = 16
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 600).tolist()
SAMPLING = SamplingParams(seed=2, max_tokens=ANSWER, temperature=1.3, logprobs=VOCAB)
SPARSE = Sparse(sinks=1, window=1, chosen=2, start=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(vocab_size=VOCAB, max_position_embeddings=1024, num_hidden_layers=2)
    return write_model(tmp_path_factory.mktemp("model"), config, seed=3)


def answer(bench: RunnerBench, request: Request, cuts: list[int]) -> tuple[object, ...]:
    """Tokens and log-probabilities; the prompt, or what is known, in pieces that end at ``cuts``, the rest as it is."""
    logprobs = []
    for cut in [*cuts, request.known]:
        if cut > request.computed:
            logprobs += bench.step([(request, cut - request.computed)])[0].logprobs
    while len(request.output) < ANSWER:
        logprobs += bench.step([(request, 1)])[0].logprobs
    return tuple(request.output), tuple(logprobs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_prompt_one_answer(folder: Path, dtype: str) -> None:
    bench = RunnerBench(folder, dtype, pages=100, sparse=SPARSE)
    whole = bench.request(PROMPT, SAMPLING)
    told = answer(bench, whole, [])
    bench.release(whole)
    chance = np.random.default_rng(1)
    for _ in range(4):
        request = bench.request(PROMPT, SAMPLING)
        cuts = sorted(chance.integers(1, len(PROMPT), 12).tolist())
        assert answer(bench, request, cuts) == told
        bench.release(request)


def test_what_was_written_is_read_alike(folder: Path) -> None:
    """An answer's tokens leave what a prompt of the same tokens leaves, so whoever takes over cannot be told apart."""
    bench = RunnerBench(folder, pages=100, sparse=SPARSE)
    first = bench.request(PROMPT, SAMPLING)
    tokens, logprobs = answer(bench, first, [333])
    bench.release(first)
    heir = bench.request(PROMPT, SAMPLING, emitted=tokens[:9])
    assert answer(bench, heir, [450]) == (tokens, logprobs[9:])


def test_other_answers_and_another_identity(folder: Path) -> None:
    sparse, full = (RunnerBench(folder, pages=100, sparse=rule) for rule in (SPARSE, None))
    assert sparse.fingerprint != full.fingerprint
    answers = [answer(bench, bench.request(PROMPT, SAMPLING), []) for bench in (sparse, full)]
    assert answers[0] != answers[1]
    short = [answer(bench, bench.request(PROMPT[:250], SAMPLING), []) for bench in (sparse, full)]
    assert short[0] == short[1]
