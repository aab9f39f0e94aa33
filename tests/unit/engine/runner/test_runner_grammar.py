"""Law 1 for constrained answers: alone, in a batch, several steps at once, guessed ahead, taken over, preempted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grammar_world import BYTES, END, compiled, grammar_of, schema_grammar
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.core.request import Request
from penstock.engine.runner.model_runner import ModelRunner, RunnerServices
from penstock.engine.runner.sampling_state import GrammarConstraint, MaskJob, MaskThreads, MaskWait
from penstock.grammar.manager import GrammarManager
from penstock.grammar.matcher import GrammarMatcher
from penstock.types import Grammar, SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

CONFIG = llama_config(vocab_size=len(BYTES.tokens), max_position_embeddings=512, eos_token_id=END)
SCHEMA = schema_grammar(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99999},
                       "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3}},
        "required": ["name", "n", "tags"],
        "additionalProperties": False,
    },
    compact=True,
)  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(seed=1, max_tokens=90, temperature=0.0, grammar=SCHEMA, stop_token_ids=(END,)),
    "sampled": SamplingParams(seed=2, max_tokens=90, grammar=SCHEMA, stop_token_ids=(END,), logprobs=2),
    "everything": SamplingParams(
        seed=3, max_tokens=90, choice=1, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, presence_penalty=0.5,
        frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={ord("a"): 2.0, ord("{"): -100.0}, min_tokens=30,
        stop_token_ids=(END,), logprobs=0, grammar=SCHEMA,
    ),
}  # fmt: skip
PROMPT = [3, 70, 9, 200, 31, 5]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> RunnerBench:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, CONFIG)
    grammars = GrammarManager(lambda: BYTES)
    made = RunnerBench(folder, "fp32", pages=600)
    made.runner = ModelRunner(
        made.model, made.ops, made.kv, made.runner.program, aids=RunnerServices(matcher_of=grammars.matcher)
    )
    return made


def finished(request: Request) -> bool:
    return bool(request.output) and (request.output[-1] in request.stop_tokens or request.known >= request.local_end)


def finish(bench: RunnerBench, request: Request, *, steps: int = 1, company: Sequence[Request] = ()) -> list[int]:
    """The whole answer; ``company`` goes on beside it."""
    while request.uncomputed > 1:
        bench.step([(request, request.uncomputed)])
    while not finished(request):
        others = [(other, 1) for other in company if not finished(other)]
        bench.step([*others, (request, 1)], steps=min(steps, request.local_end - request.known))
    return list(request.output)


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(BYTES.tokens[token] for token in tokens if token != END)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_is_the_same_however_it_is_served(bench: RunnerBench, name: str) -> None:
    sampling = SAMPLINGS[name]
    alone = finish(bench, bench.request(PROMPT, sampling))
    if alone[-1] == END:
        assert set(json.loads(text_of(alone))) == {"name", "n", "tags"}
    others = [
        bench.request(PROMPT[:3], SamplingParams(seed=7, max_tokens=300)),
        bench.request([8, 9], SAMPLINGS["sampled"]),
    ]
    for other in others:
        bench.read(other, 64)
    assert finish(bench, bench.request(PROMPT, sampling), company=others) == alone
    for cut in (1, 7, len(alone) // 2):  # another worker takes over, or goes on after a hand-over
        assert finish(bench, bench.request(PROMPT, sampling, emitted=alone[:cut])) == alone
    again = bench.request(PROMPT, sampling)
    bench.read(again, 4)
    for _ in range(5):
        bench.step([(again, 1)])
    bench.release(again)  # preempted: what was drawn stays known
    bench.give_pages(again)
    assert finish(bench, again) == alone


@pytest.mark.parametrize("name", SAMPLINGS)
def test_grants_of_several_steps(bench: RunnerBench, name: str) -> None:
    alone = finish(bench, bench.request(PROMPT, SAMPLINGS[name]))
    request = bench.request(PROMPT, SAMPLINGS[name])
    while not finished(request):
        granted = 1 if request.uncomputed > 1 else min(3, request.local_end - request.known)
        bench.step([(request, request.uncomputed)], steps=granted)
        ended = [index for index, token in enumerate(request.output) if token == END]
        if ended:  # as the scheduler does with what was drawn after the end
            del request.output[ended[0] + 1 :]
            break
    assert request.output == alone


@pytest.mark.parametrize("wrong", [None, 0, 2, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_guessed_tokens_change_nothing(bench: RunnerBench, name: str, wrong: int | None) -> None:
    """Right guesses, and one that the grammar forbids or the model does not draw at every place."""
    alone = finish(bench, bench.request(PROMPT, SAMPLINGS[name]))
    request = bench.request(PROMPT, SAMPLINGS[name])
    bench.read(request, 64)
    while not finished(request):
        known = len(request.output)
        draft = list(alone[known : known + 4])
        if wrong is not None and wrong < len(draft):
            draft[wrong] = ord("~") if draft[wrong] != ord("~") else ord("!")
        row = ScheduledTokens(request, request.computed, 1, True, tuple(draft))
        (drawn,) = bench.runner.run(StepPlan(rows=(row,)))
        request.computed = row.start + len(drawn.tokens)
        for token in drawn.tokens:
            if not finished(request):
                request.append(token)
    assert request.output == alone


def test_min_tokens_gives_way_where_nothing_but_the_end_is_left(bench: RunnerBench) -> None:
    sampling = SamplingParams(
        seed=5, max_tokens=20, min_tokens=10, stop_token_ids=(END,), grammar=grammar_of("choice", '["yes", "no"]')
    )
    assert text_of(finish(bench, bench.request(PROMPT, sampling))) in (b"yes", b"no")
    longer = SamplingParams(
        seed=5, max_tokens=30, min_tokens=10, stop_token_ids=(END,), grammar=grammar_of("regex", "a*")
    )
    assert len(finish(bench, bench.request(PROMPT, longer))) > 10


@pytest.mark.parametrize("least", [1, 2, 5])
def test_stop_tokens_of_a_constrained_answer_are_drawn_from_min_tokens_on(bench: RunnerBench, least: int) -> None:
    eager = SamplingParams(
        seed=5, max_tokens=30, temperature=0.0, min_tokens=least, stop_token_ids=(END,), logit_bias={END: 100.0},
        grammar=grammar_of("regex", "a*"),
    )  # fmt: skip
    assert finish(bench, bench.request(PROMPT, eager)) == [ord("a")] * least + [END]


class Broken:
    """A matcher that gives up after some tokens, as one does whose bounds are reached."""

    def __init__(self, matcher: GrammarMatcher, after: int) -> None:
        self._matcher, self._left = matcher, after
        self.vocabulary, self.end_tokens = matcher.vocabulary, matcher.end_tokens

    def accept_tokens(self, tokens: Sequence[int]) -> bool:
        self._left -= len(tokens)
        return self._matcher.accept_tokens(tokens) and self._left >= 0

    def rollback(self, count: int) -> None:
        self._left += count
        self._matcher.rollback(count)

    def write_mask(self, words: np.ndarray) -> bool:
        return self._matcher.write_mask(words)


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answer_that_cannot_go_on_is_cut_at_the_same_token(bench: RunnerBench, drafts: bool) -> None:
    def broken(grammar: Grammar) -> Broken:
        return Broken(compiled(grammar).matcher(), 6)

    alone = finish(bench, bench.request(PROMPT, SAMPLINGS["greedy"]))
    runner = ModelRunner(bench.model, bench.ops, bench.kv, bench.runner.program, aids=RunnerServices(matcher_of=broken))  # type: ignore[arg-type]
    request = bench.request(PROMPT, SAMPLINGS["greedy"])
    drawn: SampledTokens = SampledTokens()
    while not drawn.ends:
        draft = tuple(alone[len(request.output) :][:4]) if drafts and request.output else ()
        row = ScheduledTokens(request, request.computed, request.uncomputed, True, draft)
        (drawn,) = runner.run(StepPlan(rows=(row,)))
        request.computed = row.start + row.count + len(drawn.tokens) - 1
        for token in drawn.tokens:
            request.append(token)
    assert request.output == [*alone[:7], END]


def test_a_draft_that_runs_into_a_bound_leaves_the_answer_as_it_was(bench: RunnerBench) -> None:
    """What the matcher was given of the draft, and gave up at, is not the answer's: it begins anew."""

    def broken(grammar: Grammar) -> Broken:
        return Broken(compiled(grammar).matcher(), 6)

    letters = SamplingParams(seed=1, max_tokens=90, temperature=0.0, grammar=grammar_of("regex", "[a-z]{30}"))
    answers = []
    for drafts in (False, True):
        runner = ModelRunner(
            bench.model, bench.ops, bench.kv, bench.runner.program, aids=RunnerServices(matcher_of=broken)
        )  # type: ignore[arg-type]
        request = bench.request(PROMPT, letters)
        drawn: SampledTokens = SampledTokens()
        while not drawn.ends:
            guess: tuple[int, ...] = ()
            if drafts and len(request.output) == 4:
                wrong = ord("x") if answers[0][4] != ord("x") else ord("y")
                guess = (wrong,) * 4
            row = ScheduledTokens(request, request.computed, request.uncomputed, True, guess)
            (drawn,) = runner.run(StepPlan(rows=(row,)))
            request.computed = row.start + row.count + len(drawn.tokens) - 1
            for token in drawn.tokens:
                request.append(token)
        answers.append(list(request.output))
    assert answers[1] == answers[0]
    assert len(answers[0]) == 8, "six tokens that the matcher takes, one that it gives up at, and the end"


class Told:
    """A matcher that allows everything; it says who asked, and works when it is let."""

    vocabulary = 64
    end_tokens = (END,)

    def __init__(self, names: list[str] | None = None, go_on: threading.Event | None = None) -> None:
        self.names = [] if names is None else names
        self.go_on = go_on

    def accept_tokens(self, tokens: Sequence[int]) -> bool:
        return True

    def write_mask(self, words: np.ndarray) -> bool:
        self.names.append(threading.current_thread().name)
        assert self.go_on is None or self.go_on.wait(60)
        words.fill(0xFFFFFFFF)
        return True


def test_masks_are_worked_out_on_another_thread_or_by_who_waits_for_them(bench: RunnerBench) -> None:
    """Each exactly once, also when the other thread does not come to it."""
    names: list[str] = []

    def work() -> list[Any]:
        request = bench.request(PROMPT, SAMPLINGS["greedy"])
        return [(GrammarConstraint(request, lambda: Told(names)), (), ()) for _ in range(3)]  # type: ignore[arg-type, return-value]

    threads = MaskThreads()
    free = threads.begin(work())
    while len(names) < 3:
        time.sleep(0)
    free.finish()
    assert [name.startswith("masks") for name in names] == [True] * 3
    busy = threading.Event()
    threads._beside.submit(busy.wait)
    starved = threads.begin(work())
    starved.finish()
    assert [name.startswith("masks") for name in names[3:]] == [False] * 3
    busy.set()


def test_what_goes_wrong_beside_the_step_comes_out(bench: RunnerBench, monkeypatch: pytest.MonkeyPatch):
    def fails(self: GrammarConstraint, job: MaskJob, new: Sequence[int]) -> None:
        raise LookupError("no mask")

    request = bench.request(PROMPT, SAMPLINGS["greedy"])
    monkeypatch.setattr(GrammarConstraint, "compute_masks", fails)
    with pytest.raises(LookupError, match="no mask"):
        bench.read(request, 64)


class Held:
    """A matcher whose masks wait until they are let, as slow ones do; it knows whether masks are worked out at all."""

    def __init__(self, matcher: GrammarMatcher, go_on: threading.Event) -> None:
        self._matcher, self._go_on = matcher, go_on
        self.vocabulary, self.end_tokens = matcher.vocabulary, matcher.end_tokens
        self.accept_tokens, self.rollback = matcher.accept_tokens, matcher.rollback

    def write_mask(self, words: np.ndarray) -> bool:
        assert self._go_on.wait(60)
        return self._matcher.write_mask(words)


def settle(row: ScheduledTokens, drawn: SampledTokens) -> None:
    """As the scheduler does."""
    request = row.request
    request.computed = row.start + row.count + len(drawn.tokens) - 1
    for token in drawn.tokens:
        request.append(token)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("slow_s", [10.0, -1.0], ids=["quick until it is late", "known to be slow"])
def test_no_answer_waits_for_the_mask_of_another_and_all_are_what_they_are_alone(
    bench: RunnerBench, name: str, slow_s: float
) -> None:
    alone = finish(bench, bench.request(PROMPT, SAMPLINGS[name]))
    plain = SamplingParams(seed=9, max_tokens=40)
    other_alone = finish(bench, bench.request([8, 9], plain))
    go_on = threading.Event()
    aids = RunnerServices(
        matcher_of=lambda grammar: Held(compiled(grammar).matcher(), go_on),  # type: ignore[arg-type, return-value]
        mask_wait=MaskWait(wait_s=0.0, slow_s=slow_s),
    )
    runner = ModelRunner(bench.model, bench.ops, bench.kv, bench.runner.program, aids=aids)
    request, other = bench.request(PROMPT, SAMPLINGS[name]), bench.request([8, 9], plain)
    sat_out = turns = 0
    while not (finished(request) and finished(other)):
        turns += 1
        waits = request.id in runner.without_masks()
        sat_out += waits
        rows = [
            ScheduledTokens(one, one.computed, one.uncomputed, True)
            for one in (request, other)
            if not finished(one) and not (one is request and waits)
        ]
        for row, drawn in zip(rows, runner.run(StepPlan(rows=tuple(rows))), strict=True):
            settle(row, drawn)
        if turns % 3 == 0 or finished(other):  # only now and then is a mask let through
            job = runner._answers.get(request).constraint.job  # type: ignore[union-attr]
            go_on.set()
            assert job is not None
            assert job.done.wait(60)
            go_on.clear()
        assert len(other.output) == min(turns, 40), "it has a token of every step"
    assert other.output == other_alone
    assert request.output == alone
    assert sat_out
    runner.remove_request(request.id)
    assert not runner.without_masks()
