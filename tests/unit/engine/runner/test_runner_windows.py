"""Law 1 for a model whose layers read differently far back, with the scheduler that gives pages back as it goes.

A tiny gpt-oss-like pattern: a window in every other layer.  The plain answers come from memory in which nothing is
shared, evicted or preempted, one request at a time and with whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.clock import VirtualClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest, EngineEvent
from penstock.engine.core.plan import StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.kernels.select import make_ops
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams, TokenLogprob
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_models import llama_config, write_model

VOCAB, MAX_LEN, WINDOW, ANSWER = 113, 512, 70, 40
CONFIG = llama_config(
    architectures=["SmolLM3ForCausalLM"],
    model_type="smollm3",
    vocab_size=VOCAB,
    num_hidden_layers=4,
    max_position_embeddings=MAX_LEN,
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
LENGTHS = (5, 64, 71, 130, 300, 301, 290, 150)
FULL_PAGES = MAX_LEN // 16

Told = tuple[list[int], list[TokenLogprob]]


class Engine:
    """The model behind the real scheduler and loop; its mailbox is a list."""

    def __init__(self, folder: Path, **config: Any) -> None:
        spec = inspect_model(folder)
        self.spec, ops = spec, make_ops(compute_dtype="fp32")
        config = {"pages": 400, "max_model_len": MAX_LEN, "reaches": spec.kv.reaches} | config
        self.scheduler = Scheduler(SchedulerConfig(**config))
        model = build_model(load_model(folder, spec, ops), ops, MAX_LEN)
        runner = ModelRunner(model, ops, ops.new_kv(spec.kv, pages=config["pages"]))
        self.loop = EngineLoop(self, self.scheduler, runner, VirtualClock(0.0))
        self.events: list[EngineEvent] = []
        self.told: dict[str, Told] = {}
        self.most_rows = self.most_held = 0

    def drain_events(self) -> Sequence[EngineEvent]:
        events, self.events = self.events, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        pass

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        self.most_rows = max(self.most_rows, len(plan.rows))
        for row in plan.rows:
            if row.request.page_tables and row.request.uncomputed == 1:
                windowed = row.request.page_tables[1]
                self.most_held = max(self.most_held, len(windowed.pages) - windowed.first)
        for item in outcome.new_tokens:
            tokens, logprobs = self.told.setdefault(item.request.id, ([], []))
            tokens += item.tokens
            logprobs += item.logprobs

    def ask(self, length: int, *, name: str = "", seed: int = 0) -> str:
        prompt = np.random.default_rng(length // 100).integers(0, VOCAB, length).tolist()  # some begin alike
        sampling = SamplingParams(seed=length, max_tokens=ANSWER, temperature=float(length % 2), logprobs=3)
        request = RequestId(name or f"r{length}")
        root = BlockHash(bytes([seed]) * 32)
        self.events.append(
            AddRequest(
                id=request, epoch=0, stage=RequestStage.WHOLE, prompt=prompt, sampling=sampling, arrival=0.0, root=root
            )
        )
        return request

    def run(self) -> None:
        while self.loop.step():
            assert self.scheduler.check_leaks().total == 0
        assert self.scheduler.load().pages_used == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windows"), CONFIG, seed=5)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Told]:
    engine = Engine(folder)
    for seed, length in enumerate(LENGTHS):
        engine.ask(length, seed=seed + 1)
        engine.run()
    assert engine.scheduler.memory.hit_tokens == 0
    return engine.told


@pytest.mark.parametrize("chunk", [16, 37, 2048])
def test_one_answer_in_a_batch_in_chunks_and_from_the_cache(folder: Path, plain: dict[str, Told], chunk: int) -> None:
    engine = Engine(folder, max_chunk_tokens=chunk)
    for _ in range(2):
        engine.told.clear()
        for length in LENGTHS:
            engine.ask(length)
        engine.run()
        assert engine.told == plain
    assert engine.most_rows > 4
    assert engine.scheduler.memory.hit_tokens > sum(LENGTHS) // 2


def test_one_answer_where_memory_is_short(folder: Path, plain: dict[str, Told]) -> None:
    """Windows fall out and their pages are somebody else's at once; answers are preempted and computed again."""
    engine = Engine(folder, pages=44, max_model_len=352, max_chunk_tokens=48)
    for length in LENGTHS:
        engine.ask(length)
    engine.run()
    assert engine.told == plain
    assert engine.scheduler.preemptions > 0


def test_memory_for_four_contexts_of_full_pages_holds_six_with_windows(folder: Path, plain: dict[str, Told]) -> None:
    """A page of one of the two groups has half the bytes of a page of all layers."""
    engine = Engine(folder, pages=4 * 2 * FULL_PAGES * 340 // MAX_LEN, max_chunk_tokens=32)
    names = [engine.ask(300, name=f"copy{index}", seed=index) for index in range(6)]
    engine.run()
    assert engine.most_rows == 6
    assert engine.scheduler.preemptions == 0
    assert engine.most_held <= (WINDOW - 1) // 16 + 2, "a window's memory is constant"
    for name in names:
        assert engine.told[name] == plain["r300"]
