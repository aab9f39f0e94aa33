"""Law 1 with guessed tokens: right, wrong or half right, every token and log-probability is what it is without them."""

from __future__ import annotations

from random import Random

import pytest

from penstock.engine.core.request import Request
from penstock.types import SamplingParams, TokenLogprob
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

VOCAB = 67
ANSWER = 40
SAMPLINGS = {
    "greedy": SamplingParams(seed=1, max_tokens=ANSWER, temperature=0.0),
    "sampled": SamplingParams(seed=2, max_tokens=ANSWER, temperature=1.2, choice=1),
    "with log-probabilities": SamplingParams(seed=3, max_tokens=ANSWER, temperature=0.8, logprobs=VOCAB),
    "cut": SamplingParams(seed=4, max_tokens=ANSWER, top_k=9, top_p=0.8, min_p=0.01, logprobs=2),
    "penalised": SamplingParams(
        seed=5,
        max_tokens=ANSWER,
        presence_penalty=0.7,
        frequency_penalty=0.9,
        repetition_penalty=1.3,
        logit_bias={3: 2.5, 7: -100.0},
        logprobs=VOCAB,
    ),
    "not to end too soon": SamplingParams(seed=6, max_tokens=ANSWER, min_tokens=17, stop_token_ids=tuple(range(30))),
}

Told = tuple[list[int], list[TokenLogprob]]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerBench:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, llama_config(vocab_size=VOCAB, max_position_embeddings=512, num_key_value_heads=2))
    return RunnerBench(folder, request.param, pages=120)


def plain(bench: RunnerBench, prompt: list[int], sampling: SamplingParams) -> Told:
    """Token by token."""
    request = bench.request(prompt, sampling)
    logprobs = list(bench.read(request, 64).logprobs)
    while len(request.output) < ANSWER:
        logprobs += bench.step([(request, 1)])[0].logprobs
    bench.release(request)
    return request.output, logprobs


def guess(request: Request, answer: list[int], random: Random) -> tuple[int, ...]:
    """Up to five tokens that come next, one of them perhaps replaced."""
    tokens = answer[len(request.output) :][: random.randrange(6)]
    wrong = random.randrange(8)
    return tuple(token if index != wrong else (token + 1) % VOCAB for index, token in enumerate(tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_guesses_change_how_fast_and_nothing_else(bench: RunnerBench, sampling: SamplingParams) -> None:
    """Two requests side by side, one of them with other words, each with guesses of its own."""
    random = Random(sampling.seed)
    prompts = [[random.randrange(VOCAB) for _ in range(length)] for length in (37, 5)]
    wanted = [plain(bench, prompt, sampling) for prompt in prompts]
    requests = [bench.request(prompt, sampling) for prompt in prompts]
    told = [list(bench.read(request, 64).logprobs) for request in requests]
    stood = fell = 0
    while running := [i for i, request in enumerate(requests) if len(request.output) < ANSWER]:
        drafts = {requests[i].id: guess(requests[i], wanted[i][0][: ANSWER - 1], random) for i in running}
        drawn = bench.step([(requests[i], 1) for i in running], drafts=drafts)
        for i, new in zip(running, drawn, strict=True):
            told[i] += new.logprobs
            stood += len(new.tokens) - 1
            fell += len(drafts[requests[i].id]) - (len(new.tokens) - 1)
    assert [(request.output, logprobs) for request, logprobs in zip(requests, told, strict=True)] == wanted
    assert stood > 10
    assert fell > 3
    for request in requests:
        bench.release(request)
