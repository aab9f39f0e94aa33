"""A tiny model behind the real scheduler and runner, with somebody who guesses in every step, whatever it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest, EngineEvent
from penstock.engine.core.plan import DraftProposer, SampledTokens, ScheduledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.eagle import EagleHead, build_head
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner, RunnerServices
from penstock.engine.spec.draft_model import SLOT_TOKENS, Drafter, DraftModelSource, DraftSource, EagleSource
from penstock.grammar.matcher import CompiledGrammar, GrammarVocabulary, token_trie
from penstock.kernels.select import make_ops
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams, TokenLogprob
from penstock.weights.eagle import inspect_draft_head, load_draft_head
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_heads import head_config, head_tensors, write_head
from tiny_models import llama_config, write_model

VOCAB = 97
END = VOCAB - 1
LETTERS = GrammarVocabulary(
    tokens=[*(bytes((32 + index,)) for index in range(95)), b'":', b"<|end|>"], special=(END,), end_tokens=(END,)
)
"""What the model's tokens are to grammars."""
CONFIG = llama_config(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=2048)


class Mailbox:
    """Requests in, answers out."""

    def __init__(self) -> None:
        self.waiting: list[EngineEvent] = []
        self.answers: dict[RequestId, list[int]] = {}
        self.logprobs: dict[RequestId, list[TokenLogprob]] = {}
        self.preempted = 0
        self.open = 0

    def drain_events(self) -> Iterable[EngineEvent]:
        events, self.waiting = self.waiting, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        pass

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        self.preempted += plan.preempted
        for progress in outcome.new_tokens:
            self.answers.setdefault(progress.request.id, []).extend(progress.tokens)
            self.logprobs.setdefault(progress.request.id, []).extend(progress.logprobs)
            self.open -= progress.finish is not None


@dataclass
class Always:
    """Asks for ``depth`` tokens in every step, and counts what became of them."""

    drafter: Drafter
    depth: int
    drafted: int = 0
    stood: int = 0
    by_step: list[int] = field(default_factory=list[int])

    def propose(self, rows: Sequence[ScheduledTokens]) -> Sequence[tuple[int, ...]]:
        return self.drafter.draft(rows, self.depth)

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        for row, new in zip(rows, drawn, strict=True):
            self.drafted += len(row.draft)
            self.stood += len(new.tokens) - 1 if row.draft else 0

    def remove_request(self, request: RequestId) -> None:
        self.drafter.remove_request(request)


class GuessingBench:
    """One model, its random head, and itself as its own draft model."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._trie = token_trie(LETTERS)
        write_model(folder / "model", CONFIG)
        head = head_config(CONFIG)
        write_head(folder / "head", head, head_tensors(head))
        self.ops = make_ops(compute_dtype=dtype)
        self.spec = inspect_model(folder / "model")
        loaded = load_model(folder / "model", self.spec, self.ops)
        self.model = build_model(loaded, self.ops, 2048)
        found = inspect_draft_head(folder / "head", self.spec)
        weights = load_draft_head(folder / "head", found, loaded.weights_hash, self.ops)
        self.head: EagleHead = build_head(weights, loaded, self.ops, SLOT_TOKENS)
        self.target = loaded

    def runner(self, pages: int, tapped: tuple[int, ...] = ()) -> ModelRunner:
        kv = self.ops.new_kv(self.spec.kv, pages=pages)
        aids = RunnerServices(matcher_of=lambda grammar: CompiledGrammar(grammar, self._trie).matcher())
        runner = ModelRunner(self.model, self.ops, kv, self.ops.record(self.model, kv, tapped=tapped), aids)
        runner.record_hidden_states(tapped, self.head.hidden)
        return runner

    def guide(self, kind: str, runner: ModelRunner) -> DraftSource:
        if kind == "head":
            return EagleSource(self.head, VOCAB, runner)
        return DraftModelSource(self.model, self.spec.kv, VOCAB)

    def answers(
        self, requests: Sequence[tuple[list[int], SamplingParams]], kind: str = "", *, pages: int = 200, depth: int = 3
    ) -> tuple[Mailbox, Always | None]:
        """All requests side by side; guessed for by nobody, a head or the model itself."""
        runner = self.runner(pages, self.head.tapped if kind == "head" else ())
        always = None
        if kind:
            drafter = Drafter(self.guide(kind, runner), self.ops, vocab=VOCAB, places=4, clock=MonotonicClock())
            drafter.set_active(True)
            always = Always(drafter, depth)
        return run(runner, requests, always, pages), always


def run(
    runner: ModelRunner,
    requests: Sequence[tuple[list[int], SamplingParams]],
    speculator: DraftProposer | None,
    pages: int,
    each: Callable[[], None] = lambda: None,
) -> Mailbox:
    """The engine's own loop until everybody has an answer."""
    mailbox = Mailbox()
    config = SchedulerConfig(pages=pages, max_model_len=min(pages * 16, 2048), max_chunk_tokens=48)
    loop = EngineLoop(mailbox, Scheduler(config, speculator=speculator), runner, MonotonicClock())
    for number, (prompt, sampling) in enumerate(requests):
        mailbox.waiting.append(
            AddRequest(
                id=RequestId(f"r{number}"),
                epoch=0,
                stage=RequestStage.WHOLE,
                prompt=prompt,
                sampling=sampling,
                arrival=number,
                root=BlockHash(bytes(32)),
            )
        )
    mailbox.open = len(requests)
    while mailbox.open:
        loop.step()
        each()
    assert loop.scheduler.check_leaks().total == 0
    return mailbox
