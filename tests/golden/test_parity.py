"""Log-probabilities are those of transformers, both in fp32: within 1e-3 everywhere, and the same greedy token
wherever its margin is over 2e-3.  Through the real runner, over paged KV, in chunks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_oracle import Oracle
from tokenizers import Tokenizer
from whole_rows import TOLERANCE, check_rows, read_rows

from penstock.kernels.select import available_families
from penstock.types import SamplingParams
from penstock.weights.architecture.decoder import DecoderConfig
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

BUNDLED = Path(__file__).parents[2] / "src/penstock/bundled/storyteller"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped queries, bf16, three shards": ({}, {"shards": 3}),
    "one key-value head, tied, fp16": (
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 99},
        {"dtype": "fp16"},
    ),
    "a key-value head each, head size 20, fp32": (
        {"num_key_value_heads": None, "hidden_size": 80, "intermediate_size": 100, "vocab_size": 113},
        {"dtype": "fp32"},
    ),
    "head size 24 beside hidden 72, six heads": (
        {"num_attention_heads": 6, "hidden_size": 72, "head_dim": 24, "intermediate_size": 33, "vocab_size": 127},
        {},
    ),
    "head size 80, three heads, two shards": (
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "hidden_size": 72,
            "tie_word_embeddings": True,
        },
        {"dtype": "fp32", "shards": 2},
    ),
    "head size 128": ({"num_attention_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6}, {}),
    "head size 6, twelve heads": (
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "hidden_size": 60,
            "head_dim": 6,
            "intermediate_size": 250,
        },
        {"dtype": "fp16"},
    ),
    "llama3 scaling": ({"rope_scaling": LLAMA3, "rope_theta": 500000.0}, {}),
    "llama3 scaling, new dialect": (
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 20000.0}, "head_dim": 32},
        {"dtype": "fp32"},
    ),
    "linear scaling": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "one layer, one head": ({"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}, {}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_random_models(tmp_path: Path, case: str) -> None:
    changes, options = CONFIGS[case]
    config = llama_config(**changes)
    folder = write_model(tmp_path, config, seed=len(case), **options)
    vocab = config["vocab_size"]
    tokens = np.random.default_rng(1).integers(0, vocab, 300).tolist()
    want_TV = Oracle.of(folder).logprobs_TV(tokens)
    bench = RunnerBench(folder)
    for chunk in (300, 64, 37):
        check_rows(read_rows(bench, tokens, chunk), want_TV)


@pytest.mark.parametrize("family", available_families())
def test_every_kernel_family(tmp_path: Path, family: str) -> None:
    config = llama_config(hidden_size=80, intermediate_size=100, vocab_size=113, rope_scaling=LLAMA3)
    folder = write_model(tmp_path, config)
    tokens = np.random.default_rng(2).integers(0, 113, 200).tolist()
    check_rows(read_rows(RunnerBench(folder, family=family), tokens, 50), Oracle.of(folder).logprobs_TV(tokens))


@pytest.fixture(scope="module")
def storyteller(plain_storyteller: Path) -> tuple[RunnerBench, Oracle]:
    """The compressed weights that are shipped, and the oracle on the plain ones."""
    return RunnerBench(BUNDLED, pages=300), Oracle.of(plain_storyteller)


def chat(*turns: str) -> list[int]:
    """A conversation in the bundled model's chat format, ready for the next answer."""
    text = "<|begin|>"
    for index, turn in enumerate(turns):
        text += ("<|user|>", "<|assistant|>")[index % 2] + turn + "<|end|>"
    ids: list[int] = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(text + "<|assistant|>").ids
    return ids


STORY = (
    "Once upon a time, there was a little fox called Asha who lived in a green valley.\n\nAsha was the smallest. "
    'She could not carry the big baskets. "You are too small," said the others, and they played without her.'
)

TEXTS = {
    "a request": chat("Tell me a story about a little fox who was lost."),
    "a conversation": chat("Tell me a story.", STORY, "What happened next?"),
    "not what it was trained on": chat('def f(x): return {"größe": x ** 2}  # 你好 🦊 <b>…</b>'),
    "a long text": chat("Tell me a story.", *([STORY, "And then?"] * 24))[:1700],
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_bundled_model_on_text(storyteller: tuple[RunnerBench, Oracle], case: str) -> None:
    bench, oracle = storyteller
    tokens = TEXTS[case]
    want_TV = oracle.logprobs_TV(tokens)
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=5)
    request = bench.request(tokens, sampling)
    bench.model.logits_RV.clear()
    drawn = bench.read(request, chunk=512)
    logits_TV = np.concatenate(bench.model.logits_RV).astype(np.float64)
    peak_T1 = logits_TV.max(1, keepdims=True)
    check_rows(logits_TV - peak_T1 - np.log(np.exp(logits_TV - peak_T1).sum(1, keepdims=True)), want_TV)
    for row_V, one in zip(want_TV, (*drawn.prompt_logprobs, *drawn.logprobs), strict=True):
        assert abs(one.logprob - row_V[one.token]) <= TOLERANCE
        assert [logprob for _, logprob in one.top] == pytest.approx(np.sort(row_V)[::-1][:5], abs=TOLERANCE)
        assert all(abs(logprob - row_V[token]) <= TOLERANCE for token, logprob in one.top)
    bench.release(request)


def test_the_bf16_compute_type_stays_near(storyteller: tuple[RunnerBench, Oracle]) -> None:
    """No promise of parity: rounding to bf16 moves log-probabilities a little, and greedy tokens hardly ever."""
    tokens = TEXTS["a long text"]
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    bench = RunnerBench(BUNDLED, "bf16", pages=120)
    told = bench.read(bench.request(tokens, sampling), 512).prompt_logprobs
    want_TV = storyteller[1].logprobs_TV(tokens)[:-1]
    off_T = [abs(one.logprob - row_V[one.token]) for one, row_V in zip(told, want_TV, strict=True)]
    assert np.mean(off_T) < 0.01
    assert np.mean([one.top[0][0] == row_V.argmax() for one, row_V in zip(told, want_TV, strict=True)]) > 0.99


def test_an_answer_that_the_bundled_model_writes_itself(storyteller: tuple[RunnerBench, Oracle]) -> None:
    """Prompt read whole, answer written token by token, each log-probability against the oracle's on the same text."""
    bench, oracle = storyteller
    request = bench.request(TEXTS["a request"], SamplingParams(seed=7, max_tokens=150, temperature=0.8, logprobs=0))
    drawn = [*bench.read(request, chunk=16).logprobs]
    while len(request.output) < 150:
        drawn += bench.step([(request, 1)], steps=7)[0].logprobs
    tokens = [*request.prompt, *request.output]
    want_TV = oracle.logprobs_TV(tokens)
    for position, one in enumerate(drawn, start=len(request.prompt)):
        assert one.token == tokens[position]
        assert abs(one.logprob - want_TV[position - 1, one.token]) <= TOLERANCE
    bench.release(request)


def test_the_oracle_read_the_same_configuration(storyteller: tuple[RunnerBench, Oracle]) -> None:
    bench, oracle = storyteller
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config["rms_norm_eps"] == bench.spec.details_as(DecoderConfig).norm.eps
    assert sum(weight.numel() for weight in oracle.model.parameters()) == bench.spec.parameters
