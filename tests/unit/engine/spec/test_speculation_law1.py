"""Law 1 with a head and with a draft model: whatever they guess, the answers are what they are without them."""

from __future__ import annotations

import json
from random import Random

import pytest
from draft_bench import END, LETTERS, VOCAB, GuessingBench

from grammar_world import grammar_of, schema_grammar
from penstock.types import RequestId, SamplingParams

ANSWER = 60
REQUESTS = [
    (37, SamplingParams(seed=1, max_tokens=ANSWER, temperature=0.0)),
    (5, SamplingParams(seed=2, max_tokens=ANSWER, temperature=1.1, choice=1)),
    (70, SamplingParams(seed=3, max_tokens=ANSWER, temperature=0.8, top_k=9, top_p=0.8, logprobs=3)),
    (12, SamplingParams(seed=4, max_tokens=ANSWER - 20, presence_penalty=0.7, repetition_penalty=1.3)),
    (9, SamplingParams(seed=5, max_tokens=ANSWER, min_tokens=20, stop_token_ids=tuple(range(30)))),
]


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GuessingBench:
    return GuessingBench(tmp_path_factory.mktemp("guessing"), request.param)


def requests() -> list[tuple[list[int], SamplingParams]]:
    random = Random(7)
    return [([random.randrange(VOCAB) for _ in range(length)], sampling) for length, sampling in REQUESTS]


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_guesses_change_how_fast_and_nothing_else(bench: GuessingBench, kind: str) -> None:
    """Five requests side by side, one more than can be guessed for; then with so few pages that some are preempted."""
    plain, _ = bench.answers(requests())
    for pages in (200, 14):
        guessed, always = bench.answers(requests(), kind, pages=pages)
        assert guessed.answers == plain.answers
        assert guessed.logprobs == plain.logprobs
        assert always is not None
        assert always.drafted > 50
        assert (guessed.preempted > 0) == (pages == 14)


PET = schema_grammar(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 999}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    compact=True,
)
ANYTHING = grammar_of("regex", "[ -~]{30,50}")
FORMED = {"max_tokens": ANSWER, "stop_token_ids": (END,)}
CONSTRAINED = [
    (37, SamplingParams(seed=1, temperature=0.0, grammar=PET, **FORMED)),
    (5, SamplingParams(seed=2, temperature=0.9, grammar=PET, logprobs=2, **FORMED)),
    (20, SamplingParams(seed=3, temperature=0.8, grammar=ANYTHING, logprobs=0, min_tokens=35, **FORMED)),
    (12, SamplingParams(seed=4, temperature=0.8, **FORMED)),
]


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_guesses_change_no_answer_that_is_held_to_a_form(bench: GuessingBench, kind: str) -> None:
    """Who guesses knows nothing of it: what it forbids falls.  Beside an answer without a form; preempted, too."""
    asked = [(list(range(length)), sampling) for length, sampling in CONSTRAINED]
    plain, _ = bench.answers(asked)
    for number, (_, sampling) in enumerate(asked):
        if sampling.grammar == PET and (tokens := plain.answers[RequestId(f"r{number}")])[-1] == END:
            assert set(json.loads(b"".join(LETTERS.tokens[token] for token in tokens[:-1]))) == {"name", "age"}
    for pages in (200, 14):
        guessed, always = bench.answers(asked, kind, pages=pages)
        assert guessed.answers == plain.answers
        assert guessed.logprobs == plain.logprobs
        assert always is not None
        assert 0 < always.stood < always.drafted
        assert (guessed.preempted > 0) == (pages == 14)


def test_a_draft_model_that_is_the_model_is_always_right(bench: GuessingBench) -> None:
    """Greedy and sampled: it draws with the very random numbers, out of pages of its own."""
    alone = requests()[:2]
    plain, _ = bench.answers(alone)
    guessed, always = bench.answers(alone, "draft", depth=4)
    assert guessed.answers == plain.answers
    assert always is not None
    assert always.stood == always.drafted > 60


def test_a_context_that_is_full_begins_anew(bench: GuessingBench) -> None:
    """Contexts of 1024 tokens and a longer answer: a head forgets, a draft model reads the last tokens again."""
    prompt = [index % VOCAB for index in range(300)]
    request = [(prompt, SamplingParams(seed=9, max_tokens=1200, temperature=0.9))]
    plain, _ = bench.answers(request)
    for kind in ("head", "draft"):
        guessed, always = bench.answers(request, kind, depth=2)
        assert guessed.answers == plain.answers
        assert always is not None
        assert always.drafted > 400


def test_the_bundled_head_is_the_bundled_models() -> None:
    """By the hash of its weights; and it is small."""
    from penstock.bundled import storyteller
    from penstock.config.schema import ServeConfig
    from penstock.engine.models.eagle import EagleHead
    from penstock.kernels.select import make_ops
    from penstock.launch.draft_model import DraftHeadFolder, find_draft
    from penstock.launch.speculation import load_draft
    from penstock.weights.inspect import inspect_model
    from penstock.weights.load import load_model

    folder = storyteller()
    spec = inspect_model(folder)
    found = find_draft(ServeConfig(speculate="auto"), folder, spec)
    assert isinstance(found, DraftHeadFolder)
    assert found.spec.target is not None
    assert (found.path / "model.safetensors").stat().st_size < 3_000_000
    ops = make_ops(compute_dtype="bf16")
    head = load_draft(found, load_model(folder, spec, ops), ops, 1)
    assert isinstance(head, EagleHead)
    assert (head.tapped, head.hidden) == (found.spec.tapped, spec.hidden)
