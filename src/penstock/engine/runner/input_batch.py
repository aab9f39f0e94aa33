"""The input of one step: tokens of requests as arrays, which stay from step to step.

A step whose rows are the last step's, each one token further, changes only what changes: tokens, positions, and a page
now and then.  Everything else is rebuilt.

Positions of three axes for rotary attention (M-RoPE, arXiv:2409.12191) are frame, row and column.  Text counts all
three up alike.  An image's tokens share one frame and count their rows and columns from where the image begins; text
behind it continues above the largest of these, so no axis is ever ahead of the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import SampledTokens, accepted_count
from penstock.engine.runner.sampling_state import SamplingState
from penstock.kernels.operands import Array, GivenRows, StepBatch
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.kv_spec import blocks_for
from penstock.types import PAGE_TOKENS, MediaInput, PlacedImage, RequestId, TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.core.plan import ScheduledTokens
    from penstock.engine.core.request import PageTable, Request


def rope_axes(images: Sequence[PlacedImage], start: int, stop: int) -> NDArray[np.int32]:
    """[stop - start, 3] of the tokens from ``start`` on of a text with these images, from left to right."""
    turns_T3 = np.repeat(np.arange(start, stop, dtype=np.int32)[:, None], 3, axis=1)
    saved = 0  # positions that the images so far have taken less than tokens
    for image in images:
        if image.at >= stop:
            break
        begin = image.at - saved
        first, last = max(start, image.at), min(stop, image.end)
        if first < last:
            own = np.arange(first - image.at, last - image.at, dtype=np.int32)
            places_T3 = np.stack((np.zeros_like(own), own // image.columns, own % image.columns), axis=1)
            turns_T3[first - start : last - start] = begin + places_T3
        saved += image.rows * image.columns - max(image.rows, image.columns)
        behind = max(start, image.end)
        if behind < stop:
            turns_T3[behind - start :] = np.arange(behind, stop, dtype=np.int32)[:, None] - saved
    return turns_T3


class TokenSpan:
    """Consecutive tokens of one request that are computed in one step, and the results so far.

    ``draft``: the last of them are draft tokens; a token is sampled before each of these and after the last.
    """

    __slots__ = ("draft", "logprobs", "prompt_logprobs", "sampled", "samples", "start", "state", "tokens")

    def __init__(self, row: ScheduledTokens, answer: SamplingState) -> None:
        self.state = answer
        self.samples = row.samples
        self.draft = row.draft
        self.restart(row.start, (*row.request.tokens(row.start, row.start + row.count), *row.draft))

    def restart(self, start: int, tokens: Sequence[int]) -> None:
        """These tokens from ``start`` on; nothing is computed yet."""
        self.start = start
        self.tokens = tokens
        self.sampled: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def sampled_positions(self) -> range:
        """Positions that tokens are sampled for."""
        return range(self.stop - len(self.draft), self.stop + 1) if self.samples else range(0)

    @property
    def targets(self) -> Sequence[int]:
        """Prompt tokens that these tokens predict and whose log-probabilities were asked for."""
        if not self.state.request.wants_prompt_logprobs:
            return ()
        return self.state.request.prompt[self.start + 1 : self.stop + 1]

    def advance(self) -> None:
        """Continue with the token just sampled."""
        self.start = self.stop
        self.tokens = self.sampled[-1:]

    def result(self) -> SampledTokens:
        """The results of the span: of the tokens after a draft, the accepted ones; none after a cut."""
        constraint = self.state.constraint if self.samples else None
        if constraint is not None and constraint.late:
            return SampledTokens(prompt_logprobs=tuple(self.prompt_logprobs), mask_late=True)
        count = accepted_count(self.draft, self.sampled) if self.draft else len(self.sampled)
        if constraint is not None and constraint.masked_drafts is not None:
            count = min(count, constraint.masked_drafts + 1)
        cut_at = None if constraint is None else constraint.cut_at
        cut = cut_at is not None and (not self.draft or cut_at < count)
        if cut_at is not None and self.draft:
            count = min(count, cut_at + 1)
        return SampledTokens(
            tuple(self.sampled[:count]), tuple(self.logprobs[:count]), tuple(self.prompt_logprobs), cut
        )


def token_logprob(one: Sampled, top: int | None = None) -> TokenLogprob:
    """The log-probability of a row that asked for it; ``top``: how many of the likeliest it asked for, if fewer."""
    assert one.logprob is not None
    return TokenLogprob(one.token, one.logprob, one.top[:top])


SPARE_BLOCKS = 8
"""Columns of a group's page table beyond those that a step needs, for the steps after it."""


class MediaRows(Protocol):
    """Where the rows of images come from (``engine.encoder_stage.EncoderStage``)."""

    @property
    def axes(self) -> bool:
        """Whether the model's positions have three axes."""
        ...

    def rows(self, image: PlacedImage, pictures: Sequence[MediaInput], index: int) -> NDArray[np.float32]:
        """[tokens, D] of image ``index`` of a request."""
        ...


class InputBatch:
    """Owner of the arrays that ``batch`` and ``picks`` show, and of the spans that they stand for.

    Output rows: the scored ones, then those of ``logit_spans``, then those of ``gumbel_spans``.
    """

    def __init__(
        self,
        images: MediaRows | None = None,
        hidden: Callable[[NDArray[np.float32]], Array] = np.array,
        *,
        slot_of: Callable[[str], int] | None = None,
    ) -> None:
        """``hidden`` makes the backend's array of what ``images`` gives.  ``slot_of``: of an adapter by its
        fingerprint, or of none; None: there are no adapters."""
        self._images = images
        self._hidden = hidden
        self._tapped: tuple[int, ...] = ()
        self._taps = np.empty((0, 0), np.float32)
        self.exports_hidden_states = False  # are hidden states wanted now?
        self._handed_out = False  # and were they in the last step?
        self._slot_of = slot_of
        self._tokens = np.empty(0, np.int32)
        self._positions = np.empty(0, np.int32)
        self._starts = np.empty(0, np.int32)
        self._table = np.empty(0, np.int32)
        self._requests: list[Request] = []
        self._held: list[list[PageTable]] = []
        self._keyed = 1  # groups of layers whose tables are there
        self._cell: int | None = None  # tokens of a page of the others, which hold states
        self._at: list[int] = []  # position of each span's only token; empty when some span has more
        self.spans: list[TokenSpan] = []
        self.logit_spans: list[TokenSpan] = []
        self.gumbel_spans: list[TokenSpan] = []
        self.scored = 0
        self.batch = StepBatch(self._tokens, self._positions, self._starts, self._table.reshape(0, 0), self._tokens)
        self.picks = GumbelRows.empty(0)

    # --- anew ---------------------------------------------------------------------------------------------------------

    def rebuild(self, spans: list[TokenSpan]) -> None:
        """The arrays of these spans, one after another."""
        count = sum(len(span.tokens) for span in spans)
        blocks = max(blocks_for(span.stop, PAGE_TOKENS) for span in spans) + SPARE_BLOCKS
        keyed = keyed_groups(spans[0].state.request.page_tables)
        columns = blocks * keyed
        self._reserve(count, len(spans), columns)
        table_SP = self._table[: len(spans) * columns].reshape(len(spans), columns)
        begin = 0
        for index, span in enumerate(spans):
            end = begin + len(span.tokens)
            if end - begin == 1:
                self._tokens[begin] = span.tokens[0]
                self._positions[begin] = span.start
            else:
                self._tokens[begin:end] = span.tokens
                self._positions[begin:end] = np.arange(span.start, span.stop, dtype=np.int32)
            self._starts[index + 1] = begin = end
            for group, pages_P in enumerate(span.state.pages()[:keyed]):
                own_P = pages_P[: blocks_for(span.stop, PAGE_TOKENS)]
                table_SP[index, group * blocks : group * blocks + len(own_P)] = own_P
        self.spans = spans
        wanted_R = self._want()
        turns_T3, given = self._see(spans)
        self._handed_out = self.exports_hidden_states
        if self._handed_out and len(wanted_R) > len(self._taps):
            self._taps = np.empty((_room(len(wanted_R)), self._taps.shape[1]), np.float32)
        self.batch = StepBatch(
            self._tokens[:count],
            self._positions[:count],
            self._starts[: len(spans) + 1],
            table_SP,
            wanted_R,
            turns_T3,
            given,
            tapped=self._tapped,
            taps_RW=self._taps[: len(wanted_R)] if self._handed_out else None,
            states_SW=state_pages(spans),
            adapters_S=self._adapters(spans),
        )
        self._fill_picks()
        self._requests = [span.state.request for span in spans]
        self._held = [request.page_tables for request in self._requests]
        self._keyed = keyed
        self._cell = self._held[0][-1].page_tokens if keyed < len(self._held[0]) else None
        single = self.scored == 0 and count == len(spans) == len(wanted_R) and given is None
        self._at = [span.start for span in spans] if single else []

    def _see(self, spans: list[TokenSpan]) -> tuple[NDArray[np.int32] | None, GivenRows | None]:
        """How far the axes of the tokens are turned, if images turn them apart; the rows of images among them."""
        if self._images is None or not any(span.state.request.images for span in spans):
            return None, None
        turns_T3: NDArray[np.int32] | None = None
        if self._images.axes:
            turns_T3 = np.concatenate([rope_axes(span.state.request.images, span.start, span.stop) for span in spans])
        places: list[NDArray[np.int32]] = []
        values: list[NDArray[np.float32]] = []
        begin = 0
        for span in spans:
            request = span.state.request
            for index, image in enumerate(request.images):
                first, last = max(span.start, image.at), min(span.stop, image.end)
                if first < last:
                    rows_ND = self._images.rows(image, request.media, index)
                    places.append(np.arange(begin + first - span.start, begin + last - span.start, dtype=np.int32))
                    values.append(rows_ND[first - image.at : last - image.at])
            begin += len(span.tokens)
        if not places:
            return turns_T3, None
        return turns_T3, GivenRows(np.concatenate(places), self._hidden(np.concatenate(values)))

    def _adapters(self, spans: list[TokenSpan]) -> NDArray[np.int32] | None:
        """The slot of each span's adapter; None when no span has one."""
        slot_of = self._slot_of
        if slot_of is None or not any(span.state.request.adapter for span in spans):
            return None
        return np.array([slot_of(span.state.request.adapter) for span in spans], np.int32)

    def _want(self) -> NDArray[np.int32]:
        """The output rows, in order; sets ``scored``, ``logit_spans`` and ``gumbel_spans``."""
        scored: list[int] = []
        listed: list[int] = []
        picked: list[int] = []
        self.logit_spans, self.gumbel_spans = [], []
        begin = 0
        for span in self.spans:
            scored.extend(range(begin, begin + len(span.targets)))
            begin += len(span.tokens)
            if not span.samples:
                continue
            rows = range(begin - len(span.sampled_positions), begin)
            if span.state.gumbel_only(span.sampled_positions[0]):
                picked.extend(rows)
                self.gumbel_spans.append(span)
            else:
                listed.extend(rows)
                self.logit_spans.append(span)
        self.scored = len(scored)
        return np.array(scored + listed + picked, np.int32)

    def _fill_picks(self) -> None:
        self.picks = picks = GumbelRows.empty(sum(len(span.sampled_positions) for span in self.gumbel_spans))
        begin = 0
        for span in self.gumbel_spans:
            sampling, positions = span.state.request.sampling, span.sampled_positions
            rows = slice(begin, begin + len(positions))
            picks.seeds_F[rows] = sampling.seed
            picks.positions_F[rows] = positions
            picks.choices_F[rows] = sampling.choice
            picks.temperatures_F[rows] = sampling.temperature
            begin = rows.stop

    def _reserve(self, tokens: int, spans: int, columns: int) -> None:
        if tokens > len(self._tokens):
            self._tokens = np.empty(_room(tokens), np.int32)
            self._positions = np.empty(_room(tokens), np.int32)
        if spans + 1 > len(self._starts):
            self._starts = np.zeros(_room(spans + 1), np.int32)
        if spans * columns > len(self._table):
            self._table = np.zeros(_room(spans * columns), np.int32)

    # --- one token further --------------------------------------------------------------------------------------------

    @property
    def is_recurrent(self) -> bool:
        """Whether there are recurrent layers, which cannot compute a token twice."""
        return self._cell is not None

    @property
    def gumbel_only(self) -> bool:
        """Whether every span brings one token sampled by temperature alone, and nothing else."""
        return len(self.gumbel_spans) == len(self._at) == len(self.spans)

    def advance_in_place(self, rows: Sequence[ScheduledTokens], *, spans: bool) -> bool:
        """Continue with these rows, if they are the last step's, each with the one token that was sampled since.

        False when they are others: then nothing was changed.  ``spans``: keep the spans up to date too.
        """
        if len(rows) != len(self._at) or self.exports_hidden_states != self._handed_out:
            return False
        for row, request, held, at in zip(rows, self._requests, self._held, self._at, strict=True):
            start = row.start
            if row.request is not request or start != at + 1 or request.known != start + 1 or row.count != 1:
                return False
            # Pages taken back and given anew are another list.
            if not row.samples or row.draft or request.page_tables is not held or not request.output:
                return False
        tokens = [request.output[-1] for request in self._requests]
        if not self._move():
            return False
        self.batch.tokens_T[:] = tokens
        if spans or not self.gumbel_only:
            for span, start, token in zip(self.spans, self._at, tokens, strict=True):
                span.restart(start, (token,))
        return True

    def advance(self) -> None:
        """Continue each span with its sampled token."""
        for span in self.spans:
            span.advance()
        if not (self._at and self._move()):
            self.rebuild(self.spans)
            return
        self.batch.tokens_T[:] = [span.tokens[0] for span in self.spans]

    def batch_ahead(self, step: int) -> StepBatch | None:
        """The batch of the ``step``-th of several steps whose tokens the host has not seen (``MultiStepProgram``)."""
        return self.batch if step == 0 or self._move() else None

    def take_sampled_ahead(self, tokens_NF: NDArray[np.int32]) -> None:
        """The tokens that such steps sampled; the spans then continue after the last of them."""
        for span, at, tokens_N in zip(self.spans, self._at, tokens_NF.T.tolist(), strict=True):
            span.sampled += tokens_N
            span.start, span.tokens = at, (tokens_N[-2] if len(tokens_N) > 1 else span.tokens[-1],)

    def _move(self) -> bool:
        """Advance all positions by one, but not the tokens.  False, and nothing changed, when the table is too narrow,
        or states are in other pages."""
        table_SP = self.batch.table_SP
        at = [position + 1 for position in self._at]
        blocks = table_SP.shape[1] // self._keyed
        if max(at) >= blocks * PAGE_TOKENS:
            return False
        if self._cell is not None and any(position % self._cell <= 1 for position in at):
            return False
        for index, position in enumerate(at):
            if position % PAGE_TOKENS == 0:
                block = position // PAGE_TOKENS
                for group, own in enumerate(self._held[index][: self._keyed]):
                    table_SP[index, group * blocks + block] = own.pages[block]
        self._at = at
        self._positions[: len(at)] += 1
        if self.batch.turns_T3 is not None:
            np.add(self.batch.turns_T3, 1, out=self.batch.turns_T3)
        if self.gumbel_spans:
            positions_F = self.picks.positions_F
            positions_F += 1
        return True

    # --- what came of it ----------------------------------------------------------------------------------------------

    def sample_rows(self) -> list[SampleRow]:
        """How the ``logit_spans`` sample, one row a token."""
        rows: list[SampleRow] = []
        for span in self.logit_spans:
            if span.draft:
                rows += span.state.draft_sample_rows(span.sampled_positions[0], span.draft)
            else:
                rows.append(span.state.sample_row(span.stop, span.sampled))
        return rows

    def take_sampled(self, answers: Sequence[Sampled]) -> None:
        """Hand out the samples: ``answers`` to the ``logit_spans``, the picked tokens to the ``gumbel_spans``."""
        results = iter(answers)
        for span in self.logit_spans:
            wants = span.state.request.sampling.logprobs is not None
            for one in islice(results, len(span.sampled_positions)):
                span.sampled.append(one.token)
                if wants:
                    span.logprobs.append(token_logprob(one))
        tokens = iter(self.picks.tokens_F.tolist())
        for span in self.gumbel_spans:
            span.sampled += islice(tokens, len(span.sampled_positions))

    def record_hidden_states(self, tapped: tuple[int, ...], hidden: int) -> None:
        """Let steps export hidden states, of ``hidden`` numbers each, after these layers."""
        self._tapped = tapped
        self._taps = np.empty((0, len(tapped) * hidden), np.float32)

    def hidden_states(self) -> dict[RequestId, tuple[int, NDArray[np.float32]]]:
        """For each span sampled in the last step: position of the first token sampled, and hidden states of it
        and of what follows in the span.  Valid until the next step."""
        begin, found = self.scored, dict[RequestId, tuple[int, NDArray[np.float32]]]()
        if not self._handed_out:
            return found
        for index, span in enumerate((*self.logit_spans, *self.gumbel_spans)):
            draws = span.sampled_positions
            start = self._at[index] if self.gumbel_only else draws[0] - 1
            found[span.state.request.id] = (start, self._taps[begin : begin + len(draws)])
            begin += len(draws)
        return found

    def sampled_tokens(self) -> list[SampledTokens]:
        """The results of the spans."""
        return [span.result() for span in self.spans]


def keyed_groups(held: Sequence[PageTable]) -> int:
    """The number of groups with keys and values; the groups after them hold states."""
    return sum(own.page_tokens == PAGE_TOKENS for own in held)


def state_pages(spans: Sequence[TokenSpan]) -> NDArray[np.int32] | None:
    held = [span.state.request.page_tables[keyed_groups(span.state.request.page_tables) :] for span in spans]
    if not held[0]:
        return None
    cell, parts = held[0][0].page_tokens, len(held[0])
    runs = [(max(0, span.start - 1) // cell, blocks_for(span.stop, cell)) for span in spans]
    pages_SW = np.zeros((len(spans), parts * max(end - first for first, end in runs)), np.int32)
    for row_W, own, (first, end) in zip(pages_SW, held, runs, strict=True):
        row_W[: (end - first) * parts] = [part.pages[index] for index in range(first, end) for part in own]
    return pages_SW


def _room(wanted: int) -> int:
    """The next power of two, so that arrays seldom grow."""
    return 1 << (wanted - 1).bit_length()
