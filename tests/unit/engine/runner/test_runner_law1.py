"""Law 1 at the runner: how a prompt is cut, what else is in the step, and where the pages lie change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.engine.core.request import Request
from penstock.types import SamplingParams, TokenLogprob
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

VOCAB = 113
CONFIG = llama_config(vocab_size=VOCAB, max_position_embeddings=1024, num_key_value_heads=2, intermediate_size=100)
ANSWER = 12

SAMPLINGS = {
    "greedy": SamplingParams(seed=1, max_tokens=ANSWER, temperature=0.0, logprobs=VOCAB, prompt_logprobs=3),
    "sampled": SamplingParams(seed=2, max_tokens=ANSWER, temperature=1.3, logprobs=VOCAB),
    "cut": SamplingParams(seed=3, max_tokens=ANSWER, top_k=20, top_p=0.8, min_p=0.01, logprobs=2),
    "penalised": SamplingParams(
        seed=4,
        max_tokens=ANSWER,
        choice=1,
        presence_penalty=0.7,
        frequency_penalty=0.9,
        repetition_penalty=1.4,
        logit_bias={3: 2.5, 7: -100.0},
        min_tokens=5,
        stop_token_ids=(3, 4, 5),
        logprobs=VOCAB,
    ),
}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 300, 515, 900)


@dataclass(frozen=True)
class Told:
    """Everything a request brought, to be compared for equality of bits."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    logits: bytes  # of the row that drew the first token


Way = Callable[[RunnerBench, Request], Told]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


def last_logits(bench: RunnerBench, row: int = 0) -> bytes:
    rows_RV: NDArray[np.float32] = bench.model.logits_RV[-1]
    return rows_RV[row].tobytes()


def alone(chunk: int, steps: int = 1) -> Way:
    """Nothing else in the step; the prompt in pieces of ``chunk``, the answer in grants of ``steps``."""

    def way(bench: RunnerBench, request: Request) -> Told:
        first = bench.read(request, chunk)
        logits = last_logits(bench)
        logprobs = [*first.logprobs]
        while len(request.output) < ANSWER:
            logprobs += bench.step([(request, 1)], steps=min(steps, ANSWER - len(request.output)))[0].logprobs
        return Told(tuple(request.output), tuple(logprobs), first.prompt_logprobs, logits)

    return way


def in_company(bench: RunnerBench, request: Request) -> Told:
    """Between requests that decode and requests that read, in chunks of 48, its row first, last or in the middle."""
    talkers = [bench.request(prompt_of(n), SamplingParams(seed=n, max_tokens=400, logprobs=0)) for n in (5, 40, 130)]
    for talker in talkers:
        bench.read(talker, 512)
    reader = bench.request(prompt_of(880), SamplingParams(seed=0, max_tokens=1, prompt_logprobs=1))
    told: list[TokenLogprob] = []
    logprobs: list[TokenLogprob] = []
    logits = b""
    while len(request.output) < ANSWER:
        others = [(talker, 1) for talker in talkers]
        if reader.uncomputed > 30:
            others.append((reader, 30))
        place = bench.runner_steps % (len(others) + 1)
        drawn = bench.step([*others[:place], (request, min(48, request.uncomputed)), *others[place:]])[place]
        if drawn.tokens and not logprobs:
            logits = last_logits(bench, min(place, len(talkers)))
        told += drawn.prompt_logprobs
        logprobs += drawn.logprobs
    for other in (*talkers, reader):
        bench.release(other)
    return Told(tuple(request.output), tuple(logprobs), tuple(told), logits)


def preempted(bench: RunnerBench, request: Request) -> Told:
    """Its pages are taken in mid-answer; it comes back with others, and all it knows is computed again."""
    first = bench.read(request, 100)
    logits = last_logits(bench)
    logprobs = [*first.logprobs, *bench.step([(request, 1)], steps=4)[0].logprobs]
    bench.release(request)
    bench.give_pages(request)
    while len(request.output) < ANSWER:
        logprobs += bench.read(request, 33).logprobs
    return Told(tuple(request.output), tuple(logprobs), first.prompt_logprobs, logits)


def resubmitted(bench: RunnerBench, request: Request) -> Told:
    """Another request object goes on from what the client has, in a runner that never saw the first."""
    first = bench.read(request, 64)
    logits = last_logits(bench)
    logprobs = [*first.logprobs, *bench.step([(request, 1)], steps=6)[0].logprobs]
    heir = bench.request(request.prompt, request.sampling, emitted=tuple(request.output))
    bench.runner.remove_request(request.id)
    while len(heir.output) < ANSWER:
        drawn = bench.read(heir, 100)
        assert not drawn.prompt_logprobs  # the client has them already
        logprobs += drawn.logprobs
    bench.release(heir)
    return Told(tuple(heir.output), tuple(logprobs), first.prompt_logprobs, logits)


WAYS: dict[str, Way] = {
    "token by token": alone(1),
    "chunks of 16": alone(16),
    "chunks of 64": alone(64, steps=5),
    "chunks of 37": alone(37, steps=ANSWER),
    "in company": in_company,
    "preempted": preempted,
    "resubmitted": resubmitted,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG, seed=3)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def benches(request: pytest.FixtureRequest, folder: Path) -> tuple[RunnerBench, RunnerBench]:
    """Two of the same model, with pages in another order."""
    return RunnerBench(folder, request.param, pages=400, seed=1), RunnerBench(folder, request.param, pages=400, seed=2)


@pytest.fixture(scope="module")
def plain(benches: tuple[RunnerBench, RunnerBench]) -> dict[tuple[str, int], Told]:
    """Alone, the prompt whole: what every other way must give."""
    result: dict[tuple[str, int], Told] = {}
    for kind, sampling in SAMPLINGS.items():
        for length in LENGTHS:
            request = benches[0].request(prompt_of(length), sampling)
            result[kind, length] = alone(1024)(benches[0], request)
            benches[0].release(request)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on(
    benches: tuple[RunnerBench, RunnerBench], plain: dict[tuple[str, int], Told], way: str
) -> None:
    bench = benches[1]
    for index, ((kind, length), want) in enumerate(plain.items()):
        if way == "token by token" and length > 100 and index % 4:
            continue
        request = bench.request(prompt_of(length), SAMPLINGS[kind])
        assert WAYS[way](bench, request) == want, (kind, length)
        bench.release(request)


def test_the_ways_were_told_apart_by_something(plain: dict[tuple[str, int], Told]) -> None:
    """The comparison above is of varied things: other samplings and prompts give other answers."""
    assert len({told.tokens for told in plain.values()}) > len(plain) * 0.9
    assert all(len(told.tokens) == len(told.logprobs) == ANSWER for told in plain.values())
    for (kind, length), told in plain.items():
        assert len(told.prompt_logprobs) == (length - 1 if kind == "greedy" else 0)
        if kind == "penalised":
            assert not {3, 4, 5} & set(told.tokens[:5])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_bit_depends_on_the_number_of_threads(folder: Path, dtype: str) -> None:
    told: list[Told] = []
    for threads in (2, 1):
        bench = RunnerBench(folder, dtype, threads=threads)
        told.append(alone(256, steps=3)(bench, bench.request(prompt_of(900), SAMPLINGS["greedy"])))
    assert told[0] == told[1]
