"""Spans become the arrays of a step, in order, whatever was in the arrays before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import ScheduledTokens
from penstock.engine.core.request import PageTable, Request
from penstock.engine.runner.input_batch import InputBatch, TokenSpan
from penstock.engine.runner.sampling_state import SamplingState
from penstock.types import BlockHash, PageId, RequestId, RequestStage, SamplingParams

SAMPLING = SamplingParams(seed=0, max_tokens=100)


def request_of(known: int, first_page: int = 0, sampling: SamplingParams = SAMPLING, emitted: int = 0) -> Request:
    """Token at position p is 1000 + p; page of block b is ``first_page`` + b."""
    tokens = [1000 + position for position in range(known)]
    arrive = AddRequest(
        id=RequestId("r"),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=tokens[: known - emitted],
        sampling=sampling,
        arrival=0.0,
        root=BlockHash(bytes(32)),
        emitted=tokens[known - emitted :],
    )
    request = Request(arrive, serial=0, max_model_len=5000)
    give(request, [first_page + block for block in range(known // 16 + 8)])
    return request


def give(request: Request, pages: list[int]) -> None:
    """Of two groups of layers; the second has other pages."""
    request.set_page_tables([PageTable(0, [PageId(page + other) for page in pages]) for other in (0, 7000)])


def span_of(request: Request, start: int, count: int, samples: bool = True) -> TokenSpan:
    return TokenSpan(ScheduledTokens(request, start, count, samples), SamplingState(request))


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70), st.integers(0, 30)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@given(steps)
def test_every_token_has_its_position_and_its_pages(steps: list[list[tuple[int, int, int]]]) -> None:
    arrays = InputBatch()
    for step in steps:
        spans = [
            span_of(request_of(start + count, index * 1000, emitted=min(emitted, start + count - 1)), start, count)
            for index, (start, count, emitted) in enumerate(step)
        ]
        arrays.rebuild(spans)
        batch = arrays.batch
        assert batch.starts_S1.tolist() == [0, *np.cumsum([count for _, count, _ in step]).tolist()]
        for index, (start, count, _) in enumerate(step):
            begin, end = batch.starts_S1[index : index + 2]
            positions = list(range(start, start + count))
            assert batch.positions_T[begin:end].tolist() == positions
            assert batch.tokens_T[begin:end].tolist() == [1000 + position for position in positions]
            blocks = (start + count - 1) // 16 + 1
            for group in (0, 1):
                pages = [group * 7000 + index * 1000 + block for block in range(blocks)]
                assert batch.table_of(group, 2)[index, :blocks].tolist() == pages
        assert batch.table_SP.shape[0] == len(step)
        for array in (batch.tokens_T, batch.positions_T, batch.starts_S1, batch.table_SP):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_arrays_are_reused() -> None:
    arrays = InputBatch()
    request = request_of(100)
    arrays.rebuild([span_of(request, 0, 100)])
    first = arrays.batch
    arrays.rebuild([span_of(request, 99, 1), span_of(request, 98, 1)])
    second = arrays.batch
    assert np.shares_memory(first.tokens_T, second.tokens_T)
    assert np.shares_memory(first.positions_T, second.positions_T)
    assert second.tokens_T.tolist() == [1099, 1098]


def test_wanted_rows_stand_in_order() -> None:
    """Those that are scored, those that draw from logits, those that are picked."""
    asked = SamplingParams(seed=0, max_tokens=100, prompt_logprobs=0)
    cut = SamplingParams(seed=0, max_tokens=100, top_k=3)
    plain = SamplingParams(seed=2**64 - 1, max_tokens=100, choice=3, temperature=0.5)
    spans = [
        span_of(request_of(9, sampling=plain), 8, 1),
        span_of(request_of(9), 0, 4, samples=False),
        span_of(request_of(20, sampling=asked), 17, 3),
        span_of(request_of(7, sampling=cut), 5, 2),
    ]
    arrays = InputBatch()
    arrays.rebuild(spans)
    assert (arrays.scored, arrays.logit_spans, arrays.gumbel_spans) == (2, [spans[3]], [spans[0], spans[2]])
    assert arrays.batch.sample_rows_R.tolist() == [5, 6, 9, 0, 7]
    picks = arrays.picks
    assert (picks.seeds_F.tolist(), picks.choices_F.tolist()) == ([2**64 - 1, 0], [3, 0])
    assert (picks.positions_F.tolist(), picks.temperatures_F.tolist()) == ([9, 20], [0.5, 1.0])


@given(
    begun=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    moves=st.lists(st.tuples(st.sampled_from(["on", "on", "on", "pages", "leave", "twice"]), st.integers(0, 3))),
)
def test_going_on_is_filling_anew(begun: list[tuple[int, bool]], moves: list[tuple[str, int]]) -> None:
    """Whatever happens between two steps, the arrays are those of spans made afresh."""
    arrays, serial = InputBatch(), 1000
    cut = SamplingParams(seed=3, max_tokens=100, top_k=2)
    requests = [request_of(known, 100 * i, SAMPLING if plain else cut) for i, (known, plain) in enumerate(begun)]
    arrays.rebuild([span_of(request, request.known - 1, 1) for request in requests])
    for move, chosen in moves:
        for request in requests:
            serial += 1
            request.append(serial)
            if request.known > request.capacity:
                for group, own in enumerate(request.page_tables):
                    own.pages.append(PageId(serial + group))
                request.update_capacity()
        request = requests[chosen % len(requests)]
        if move == "pages":
            own, _ = request.page_tables
            request.clear_pages()
            give(request, [page + 5000 for page in own.pages])
        elif move == "leave" and len(requests) > 1:
            requests.remove(request)
        elif move == "twice":
            request.append(7)
        rows = [ScheduledTokens(each, each.known - 1, 1, True) for each in requests]
        went_on = arrays.advance_in_place(rows, spans=True)
        assert went_on or move != "on"
        if not went_on:
            arrays.rebuild([TokenSpan(row, SamplingState(row.request)) for row in rows])
        fresh = InputBatch()
        fresh.rebuild([TokenSpan(row, SamplingState(row.request)) for row in rows])
        got, want = arrays.batch, fresh.batch
        for name in ("tokens_T", "positions_T", "starts_S1", "sample_rows_R"):
            assert getattr(got, name).tolist() == getattr(want, name).tolist()
        for index, row in enumerate(rows):
            blocks = row.start // 16 + 1
            for group in (0, 1):
                tables = [batch.table_of(group, 2)[index, :blocks].tolist() for batch in (got, want)]
                assert tables[0] == tables[1]
        assert arrays.picks.positions_F.tolist() == fresh.picks.positions_F.tolist()
        assert [(span.start, tuple(span.tokens)) for span in arrays.spans] == [
            (span.start, tuple(span.tokens)) for span in fresh.spans
        ]


def test_a_span_goes_on_with_what_was_drawn() -> None:
    span = span_of(request_of(20), 15, 5)
    assert (span.start, span.stop, list(span.tokens)) == (15, 20, [1015, 1016, 1017, 1018, 1019])
    span.sampled.append(42)
    span.advance()
    assert (span.start, span.stop, list(span.tokens)) == (20, 21, [42])


def test_targets_are_the_prompt_tokens_after_those_computed() -> None:
    asked = SamplingParams(seed=0, max_tokens=100, prompt_logprobs=0)
    request = request_of(20, sampling=asked)
    assert list(span_of(request, 0, 5, samples=False).targets) == [1001, 1002, 1003, 1004, 1005]
    assert list(span_of(request, 15, 5).targets) == [1016, 1017, 1018, 1019]
    assert list(span_of(request_of(20), 15, 5).targets) == []
    assert list(span_of(request_of(20, sampling=asked, emitted=2), 0, 20).targets) == []
