"""One real engine in this process: scheduler, prefix cache, sealed page memory and runner over the bundled model."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.bundled import storyteller
from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest, EngineEvent
from penstock.engine.core.page_pool import LeakCheck
from penstock.engine.core.plan import StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.encoder_stage import EncoderStage
from penstock.engine.loop import EngineLoop
from penstock.engine.models.interface import encoder_of
from penstock.engine.models.registry import build_model
from penstock.engine.runner.lora import LoraLimits, LoraManager
from penstock.engine.runner.model_runner import ModelRunner, RunnerServices
from penstock.hashing import block_hashes, chain_root
from penstock.kernels.select import make_ops
from penstock.kv.checksum import PageChecksums
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.types import ModelIdentity, PageId, RequestId, RequestStage, SamplingParams
from penstock.weights.inspect import inspect_model, spec_for_length
from penstock.weights.load import load_model

PAGES = 64
LENGTH = 512
ROOT = chain_root(ModelIdentity(fingerprint="f" * 64, numerics="bench"))


class _Box:
    """A mailbox that is a list."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.tokens: dict[RequestId, list[int]] = {}

    def drain_events(self) -> Iterable[EngineEvent]:
        events, self.events = self.events, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        """Nobody watches."""

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        for progress in outcome.new_tokens:
            self.tokens.setdefault(progress.request.id, []).extend(progress.tokens)


class Engine:
    """Answers of a few tokens, one at a time."""

    def __init__(self) -> None:
        folder = storyteller()
        spec = spec_for_length(inspect_model(folder), LENGTH)
        ops = make_ops(family=None, compute_dtype="bf16", threads=1)
        loaded = load_model(folder, spec, ops)
        model = build_model(loaded, ops, LENGTH)
        layout = KvLayout.for_shape(spec.kv, "bf16")
        self.memory = KvMemory.anonymous(layout, PAGES)
        kv = ops.new_kv(layout.shape, pages=PAGES, memory=self.memory.buffer)
        adapters = LoraManager.for_model(ops, loaded, LoraLimits(slots=1, nbytes=1 << 20, max_rank=8))
        images = EncoderStage(encoder_of(model), ops, cache_bytes=1)
        runner = ModelRunner(model, ops, kv, ops.record(model, kv), RunnerServices(images=images, adapters=adapters))
        config = SchedulerConfig(pages=PAGES, max_model_len=LENGTH)
        self._scheduler = Scheduler(
            config, StepCostModel(cost_prior(spec.parameters)), verifier=PageChecksums(self.memory)
        )
        self._box = _Box()
        self._loop = EngineLoop(self._box, self._scheduler, runner, MonotonicClock())
        self._asked = 0

    @property
    def damaged(self) -> int:
        """Cached pages that were found damaged before they were used."""
        return self._scheduler.memory.damaged_pages

    def answer(self, prompt: list[int]) -> list[int]:
        """Four greedy tokens."""
        self._asked += 1
        name = RequestId(f"r{self._asked}")
        self._box.events.append(
            AddRequest(
                id=name,
                epoch=1,
                stage=RequestStage.WHOLE,
                prompt=tuple(prompt),
                sampling=SamplingParams(seed=0, max_tokens=4, temperature=0.0),
                arrival=0.0,
                root=ROOT,
                hashes=tuple(block_hashes(ROOT, tuple(prompt))),
            )
        )
        while len(self._box.tokens.get(name, ())) < 4:
            self._loop.step()
        self._loop.step()
        return self._box.tokens.pop(name)

    def cached_pages(self, prompt: list[int]) -> list[PageId]:
        """Where the prompt's full pages lie now."""
        hashes = list(block_hashes(ROOT, tuple(prompt)))
        with self._scheduler.memory.prefix.match(hashes, len(hashes)).lease as lease:
            return list(lease.pages)

    def check(self) -> LeakCheck:
        """Pages that have no owner, or too many."""
        return self._scheduler.check_leaks()

    def close(self) -> None:
        """Nothing outlives it."""
