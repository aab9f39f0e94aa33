"""A model, its kernels and its KV memory behind the real runner, driven by hand: no scheduler, no process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.core.request import PageTable, Request
from penstock.engine.encoder_stage import EncoderStage
from penstock.engine.models.interface import Model, encoder_of
from penstock.engine.models.registry import build_model
from penstock.engine.runner.lora import LoraLimits, LoraManager
from penstock.engine.runner.model_runner import ModelRunner, RunnerServices
from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import Array, Sparse, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.select import make_ops
from penstock.types import (
    PAGE_TOKENS,
    AdapterRef,
    BlockHash,
    MediaInput,
    PageId,
    PlacedImage,
    RequestId,
    RequestStage,
    SamplingParams,
)
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import inspect_model, spec_for_length
from penstock.weights.load import load_model
from penstock.weights.lora import LoraFileLimits, lora_targets, read_lora_adapter

GREEDY = SamplingParams(seed=0, max_tokens=64, temperature=0.0)


SHORT_CELL = 48
"""Tokens of a cell of states here, so that a short text has several."""


def with_short_cells(spec: ModelSpec) -> ModelSpec:
    """The same model, its states kept at a finer grid."""
    if spec.kv.states is None:
        return spec
    kv = replace(spec.kv, states=replace(spec.kv.states, cell=SHORT_CELL))
    return structs.replace(spec, kv=kv)


class RecordingModel:
    """Hands everything on, and keeps the logits that were asked for."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.logits_RV: list[NDArray[np.float32]] = []

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        return self.model.forward(ops, batch, kv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        result = self.model.logits(ops, hidden_RD)
        self.logits_RV.append(np.array(ops.to_numpy(result)))
        return result


class RunnerBench:
    """Requests of one model, with pages given out in a random order that depends on ``seed``.

    ``max_model_len``: by default as long as the model's context.  ``direct``: operation by operation, not as the
    backend records a step.  ``image_cache``: bytes of encoded images that are kept.  ``memory``: where
    pages stand.  ``ops``: further arguments of ``make_ops``.
    The kernel family is ``PENSTOCK_KERNELS``, if that is set.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str = "fp32",
        *,
        pages: int = 256,
        seed: int = 0,
        max_model_len: int | None = None,
        direct: bool = False,
        image_cache: int = 1 << 30,
        max_loras: int = 4,
        sparse: Sparse | None = None,
        memory: memoryview | None = None,
        **ops: Any,
    ) -> None:
        self.spec = msgspec.structs.replace(inspect_model(folder), sparse=sparse)
        self.max_model_len = max_model_len or self.spec.max_positions
        self.spec = with_short_cells(spec_for_length(self.spec, self.max_model_len))
        family = os.environ.get("PENSTOCK_KERNELS") or None
        self.ops = make_ops(**{"family": family, "compute_dtype": dtype, **ops})
        loaded = load_model(folder, self.spec, self.ops)
        self.fingerprint = loaded.fingerprint
        self.model = RecordingModel(build_model(loaded, self.ops, self.max_model_len))
        self.kv = self.ops.new_kv(self.spec.kv, pages=pages, memory=memory)
        program = self.ops.record(self.model.model, self.kv)
        if direct or not isinstance(program, RecordedProgram):
            program = DirectProgram(self.ops, self.model, self.kv)
        self.images = EncoderStage(encoder_of(self.model.model), self.ops, cache_bytes=image_cache)
        self.adapters = LoraManager.for_model(
            self.ops, loaded, LoraLimits(slots=max_loras, nbytes=1 << 30, max_rank=256)
        )
        self.runner = ModelRunner(
            self.model, self.ops, self.kv, program, RunnerServices(images=self.images, adapters=self.adapters)
        )
        self._direct = direct
        self._free = [PageId(int(page)) for page in np.random.default_rng(seed).permutation(pages)]
        self._serial = 0
        self.runner_steps = 0

    def load_adapter(self, folder: Path) -> AdapterRef:
        """The adapter in a folder, in memory."""
        targets, limits = lora_targets(self.spec), LoraFileLimits(max_rank=256, max_bytes=1 << 30)
        ref = AdapterRef(fingerprint=read_lora_adapter(folder, targets, limits).fingerprint, folder=str(folder))
        self.adapters.load(ref)
        if self._direct:
            self.runner.adapted = DirectProgram(self.ops, self.adapters.with_adapters(self.model), self.kv)
        else:
            self.runner.adapted = self.ops.record(self.adapters.with_adapters(self.model.model), self.kv)
        return ref

    def request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        emitted: Sequence[int] = (),
        *,
        images: Sequence[PlacedImage] = (),
        pictures: Sequence[MediaInput] = (),
        adapter: AdapterRef | None = None,
    ) -> Request:
        """A request that owns pages for everything it may become."""
        self._serial += 1
        arrive = AddRequest(
            id=RequestId(f"r{self._serial}"),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=tuple(prompt),
            sampling=sampling,
            arrival=0.0,
            root=BlockHash(bytes(32)),
            emitted=emitted,
            images=images,
            media=pictures,
            adapter=adapter,
        )
        request = Request(arrive, serial=self._serial, max_model_len=self.max_model_len)
        self.give_pages(request)
        return request

    def give_pages(self, request: Request) -> None:
        """As many as it can ever need."""
        held: list[PageTable] = []
        for reach in self.spec.kv.reaches:
            size = reach.tokens_per_page(PAGE_TOKENS)
            held.append(PageTable(0, [self._free.pop() for _ in range(-(-request.local_end // size))], size))
        request.set_page_tables(held)

    def release(self, request: Request) -> None:
        """Take the pages back and forget what was computed, as a preemption does."""
        self._free = [*request.clear_pages(), *self._free]

    def step(
        self, work: Sequence[tuple[Request, int]], steps: int = 1, drafts: Mapping[RequestId, tuple[int, ...]] = {}
    ) -> list[SampledTokens]:
        """Compute so many missing tokens of each request; whoever has none left draws, after each draft token too."""
        rows = tuple(
            ScheduledTokens(
                request, request.computed, count, request.computed + count == request.known, drafts.get(request.id, ())
            )
            for request, count in work
        )
        drawn = list(self.runner.run(StepPlan(rows=rows, steps=steps)))
        self.runner_steps += steps
        program = self.runner.program
        if isinstance(program, RecordedProgram) and len(logits_RV := program.logits()):
            self.model.logits_RV.append(logits_RV)  # of the rows that did not pick
        for row, one in zip(rows, drawn, strict=True):
            row.request.computed = row.start + row.count + max(0, len(one.tokens) - 1)
            for token in one.tokens:
                row.request.append(token)
        return drawn

    def read(self, request: Request, chunk: int) -> SampledTokens:
        """Compute all missing tokens in chunks; the last chunk's answer, with the prompt log-probabilities of all."""
        told: list[Any] = []
        while request.uncomputed:
            (drawn,) = self.step([(request, min(chunk, request.uncomputed))])
            told.extend(drawn.prompt_logprobs)
            if drawn.tokens:
                break
        return SampledTokens(drawn.tokens, drawn.logprobs, tuple(told))
