"""Plan -> arrays -> program -> drawn tokens.

Knows the model only as ``Model``, the backend only as ``Ops``, which makes one program of a whole step.  Holds no page
and no request of its own: pages are the scheduler's, and what it keeps can be rebuilt (``sampling_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.encoder_stage import EncoderStage
from penstock.engine.models.interface import Model, SupportsCrossAttention
from penstock.engine.runner.input_batch import InputBatch, MediaRows, TokenSpan, token_logprob
from penstock.engine.runner.lora import LoraManager
from penstock.engine.runner.rank_group import LeaderProgram, scored_pieces
from penstock.engine.runner.sampling_state import MaskThreads, MaskWait, SamplingStates, no_grammars
from penstock.grammar.matcher import GrammarMatcher
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import MultiStepProgram, Ops, StepProgram
from penstock.kv_spec import blocks_for
from penstock.types import PAGE_TOKENS, Grammar, RequestId


class CrossKvWriter:
    """One for a worker."""

    def __init__(self, model: SupportsCrossAttention, images: MediaRows, ops: Ops, kv: Array) -> None:
        self._model = model
        self._images = images
        self._ops = ops
        self._kv = kv

    def wanted(self, rows: Sequence[ScheduledTokens]) -> bool:
        """Whether a row has tokens that stand for an encoder's rows."""
        source = self._model.source_tokens
        return any(row.start < source for row in rows)

    def write(self, rows: Sequence[ScheduledTokens]) -> list[ScheduledTokens | None]:
        """Have done with those tokens; what is left of each row, None where nothing is."""
        source = self._model.source_tokens
        begun = [row for row in rows if row.start < source]
        ends = [min(row.start + row.count, source) for row in begun]
        values = [
            self._images.rows(row.request.images[0], row.request.media, 0)[row.start : end]
            for row, end in zip(begun, ends, strict=True)
        ]
        rows_TD = self._ops.compute(np.concatenate(values))
        self._model.write_source(self._ops, rows_TD, _batch(begun, ends), self._kv)
        return [_behind(row, source) for row in rows]


def _behind(row: ScheduledTokens, source: int) -> ScheduledTokens | None:
    """The part of a row from position ``source`` on."""
    if row.start >= source:
        return row
    count = row.start + row.count - source
    return ScheduledTokens(row.request, source, count, row.samples, row.draft) if count > 0 else None


def _batch(rows: Sequence[ScheduledTokens], ends: Sequence[int]) -> StepBatch:
    """Positions and pages of these rows' first tokens."""
    positions_T = np.concatenate(
        [np.arange(row.start, end, dtype=np.int32) for row, end in zip(rows, ends, strict=True)]
    )
    starts_S1 = np.cumsum([0, *(end - row.start for row, end in zip(rows, ends, strict=True))]).astype(np.int32)
    table_SP = np.zeros((len(rows), blocks_for(max(ends), PAGE_TOKENS)), np.int32)
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        (own,) = row.request.page_tables
        blocks = blocks_for(end, PAGE_TOKENS)
        table_SP[index, :blocks] = own.pages[:blocks]
    none = np.empty(0, np.int32)
    return StepBatch(np.zeros_like(positions_T), positions_T, starts_S1, table_SP, none)


def begin_masks(spans: Sequence[TokenSpan], masks: MaskThreads, *, may_sit_out: bool) -> Callable[[], None] | None:
    """Compute masks while the step runs that they are for.  Returns a function that waits for them, at most as long as
    ``MaskThreads.mask_wait`` allows if rows may sit the step out; None if no row has a grammar."""
    work = [
        (span.state.constraint, tuple(span.sampled), span.draft) for span in spans if span.state.constraint is not None
    ]
    return masks.begin(work, may_sit_out=may_sit_out).finish if work else None


def begin_next_masks(spans: Sequence[TokenSpan], masks: MaskThreads) -> None:
    """A step has drawn: where masks are slow, the next ones are worked out from now on."""
    for span in spans:
        if span.state.constraint is not None and span.state.constraint.slow:
            masks.begin_next(span.state.constraint, span.result().tokens)


def score_prompt_tokens(model: Model, ops: Ops, spans: Sequence[TokenSpan], hidden_RD: Array) -> None:
    """Log-probabilities of prompt tokens, for the first rows of ``hidden_RD``, piece by piece."""
    wanted = [(span, target) for span in spans for target in span.targets]
    for rows_R in scored_pieces(len(wanted)):
        logits_RV = model.logits(ops, ops.rows(hidden_RD, rows_R))
        piece = wanted[rows_R[0] : rows_R[-1] + 1]
        tops = [span.state.request.sampling.prompt_logprobs or 0 for span, _ in piece]
        targets_R = np.array([target for _, target in piece], np.int32)
        for (span, _), top, one in zip(piece, tops, ops.token_logprobs(logits_RV, targets_R, max(tops)), strict=True):
            span.prompt_logprobs.append(token_logprob(one, top))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerServices:
    """What a runner needs besides model and memory, for requests that ask for it.

    ``matcher_of``: a grammar's matcher at the beginning of an answer, compiled before a request with that grammar is
    planned.  ``images``: where rows of images come from, for a model that reads them.  ``adapters``: those of planned
    requests are in memory.
    """

    matcher_of: Callable[[Grammar], GrammarMatcher] = no_grammars
    images: EncoderStage | None = None
    adapters: LoraManager | None = None
    mask_wait: MaskWait | None = None  # with masks of grammars


class ModelRunner:
    """The ``Runner`` of a model that generates."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: Array,
        program: StepProgram | None = None,
        aids: RunnerServices | None = None,
        *,
        micro_batches: int = 1,
    ) -> None:
        """``kv``: memory made by ``ops.new_kv`` that holds the pages the plans speak of.

        ``program``: the model's step over this memory; by default as the backend records it.  ``micro_batches``: plans
        that are in flight at once; if there are several, the program is a ``LeaderProgram``.
        """
        aids = aids or RunnerServices()
        images, adapters = aids.images, aids.adapters
        self._model = model
        self._ops = ops
        self.program = ops.record(model, kv) if program is None else program
        self._answers = SamplingStates(aids.matcher_of)
        self._images = images
        self._sources = None
        if isinstance(model, SupportsCrossAttention):
            if images is None:
                raise ValueError("what an encoder makes is read, and there is no encoder")
            self._sources = CrossKvWriter(model, images, ops, kv)
        self._kv = kv
        self._tapped: tuple[int, ...] = ()
        self._adapters = adapters
        self.adapted: StepProgram | None = None  # with what adapters add; recorded when the first of them is used
        slot_of = None if adapters is None else adapters.slot_of
        self._batches = [InputBatch(images, ops.hidden, slot_of=slot_of) for _ in range(micro_batches)]
        self._arrays = self._batches[0]  # of the plan that is computed
        self._launched: set[int] = set()  # micro-batches
        self._masks = MaskThreads(aids.mask_wait)

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        if self._sources is None or not self._sources.wanted(plan.rows):
            return self._run(plan)
        left = self._sources.write(plan.rows)
        self._let_go(plan)
        drawn = iter(self._run(replace(plan, rows=tuple(row for row in left if row is not None))))
        return [SampledTokens() if row is None else next(drawn) for row in left]

    def launch(self, plan: StepPlan) -> None:
        program, arrays = cast(LeaderProgram, self.program), self._prepare(plan)
        self._launched.add(plan.micro_batch)
        program.launch(arrays.batch, arrays.scored, arrays.picks)

    def _prepare(self, plan: StepPlan) -> InputBatch:
        """The arrays of a plan with rows."""
        self._arrays = arrays = self._batches[plan.micro_batch]
        if plan.micro_batch in self._launched:
            self._launched.remove(plan.micro_batch)
        elif not arrays.advance_in_place(plan.rows, spans=plan.steps > 1):
            arrays.rebuild([TokenSpan(row, self._answers.get(row.request)) for row in plan.rows])
            self._let_go(plan)
        return arrays

    def _run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        if not plan.rows:
            return ()
        arrays = self._prepare(plan)
        if plan.steps == 1 and arrays.gumbel_only:
            self._program().run(arrays.batch, 0, [], arrays.picks)
            return [SampledTokens((token,)) for token in arrays.picks.tokens_F.tolist()]
        done = self._run_ahead(plan.steps) if plan.steps > 1 else 0
        if not done:
            self._step(may_sit_out=plan.steps == 1)
            done = 1
        for _ in range(plan.steps - done):
            arrays.advance()
            self._step(may_sit_out=False)
        begin_next_masks(arrays.logit_spans, self._masks)
        return arrays.sampled_tokens()

    def without_masks(self) -> Set[RequestId]:
        return self._masks.waiting_requests()

    def _run_ahead(self, steps: int) -> int:
        """Steps that the program can take without the host in between; how many it took."""
        arrays, program = self._arrays, self._program()
        if not arrays.gumbel_only or not isinstance(program, MultiStepProgram):
            return 0
        if not program.can_run_ahead(arrays.batch, arrays.picks):
            return 0
        tokens_NF = program.run_ahead(arrays.picks, steps, arrays.batch_ahead)
        arrays.take_sampled_ahead(tokens_NF)
        return len(tokens_NF)

    def remove_request(self, request: RequestId) -> None:
        self._answers.remove(request)
        self._masks.remove(request)
        if self._images is not None:
            self._images.remove_request(request)

    def _let_go(self, plan: StepPlan) -> None:
        """Requests whose images are in the arrays, or behind them, need them no longer."""
        if self._images is None:
            return
        for row in plan.rows:
            images = row.request.images
            if images and row.start < images[-1].end <= row.start + row.count:
                self._images.remove_request(row.request.id)

    def record_hidden_states(self, tapped: tuple[int, ...], hidden: int) -> None:
        """The program was recorded to export hidden states of ``hidden`` numbers behind these layers."""
        self._tapped = tapped
        self._arrays.record_hidden_states(tapped, hidden)

    def export_hidden_states(self, wanted: bool) -> None:
        """Whether hidden states are to be handed out from the next step on; at first they are not."""
        self._arrays.exports_hidden_states = wanted

    def hidden_states(self) -> Mapping[RequestId, tuple[int, NDArray[np.float32]]]:
        return self._arrays.hidden_states()

    def _step(self, *, may_sit_out: bool) -> None:
        """Compute every span; draw and score what was asked for.  ``may_sit_out``: rows whose masks are late may."""
        arrays = self._arrays
        may_sit_out = may_sit_out and not arrays.is_recurrent
        rows, ready = arrays.sample_rows(), begin_masks(arrays.logit_spans, self._masks, may_sit_out=may_sit_out)
        program = self._program()
        arrays.take_sampled(program.run(arrays.batch, arrays.scored, rows, arrays.picks, ready))
        if arrays.scored:
            score_prompt_tokens(self._model, self._ops, arrays.spans, program.hidden())

    def _program(self) -> StepProgram:
        """The model's step, or the one with adapters where a row has one: a row without has the same bits in both."""
        if self._adapters is None or self._arrays.batch.adapters_S is None:
            return self.program
        if self.adapted is None:
            self.adapted = self._ops.record(self._adapters.with_adapters(self._model), self._kv, tapped=self._tapped)
        return self.adapted
