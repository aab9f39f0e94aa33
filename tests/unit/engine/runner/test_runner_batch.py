"""Spans become the arrays of a step, in order, whatever was in the arrays before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.plan import Arrive, Row
from penstock.engine.core.request import Request
from penstock.engine.runner.answer import Answer
from penstock.engine.runner.batch import Span, StepArrays
from penstock.types import BlockHash, Leg, PageId, RequestId, SamplingParams

SAMPLING = SamplingParams(seed=0, max_tokens=100)


def request_of(known: int, first_page: int = 0, sampling: SamplingParams = SAMPLING, emitted: int = 0) -> Request:
    """Token at position p is 1000 + p; page of block b is ``first_page`` + b."""
    tokens = [1000 + position for position in range(known)]
    arrive = Arrive(
        id=RequestId("r"),
        epoch=0,
        leg=Leg.WHOLE,
        prompt=tokens[: known - emitted],
        sampling=sampling,
        arrival=0.0,
        root=BlockHash(bytes(32)),
        emitted=tokens[known - emitted :],
    )
    request = Request(arrive, serial=0, max_model_len=5000)
    request.adopt([PageId(first_page + block) for block in range(known // 16 + 8)], page_tokens=16)
    return request


def span_of(request: Request, start: int, count: int, samples: bool = True) -> Span:
    return Span(Row(request, start, count, samples), Answer(request))


NONE = np.empty(0, np.int32)

steps = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70), st.integers(0, 30)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@given(steps)
def test_every_token_has_its_position_and_its_pages(steps: list[list[tuple[int, int, int]]]) -> None:
    arrays = StepArrays()
    for step in steps:
        spans = [
            span_of(request_of(start + count, index * 1000, emitted=min(emitted, start + count - 1)), start, count)
            for index, (start, count, emitted) in enumerate(step)
        ]
        batch = arrays.fill(spans, NONE)
        assert batch.starts_S1.tolist() == [0, *np.cumsum([count for _, count, _ in step]).tolist()]
        for index, (start, count, _) in enumerate(step):
            begin, end = batch.starts_S1[index : index + 2]
            positions = list(range(start, start + count))
            assert batch.positions_T[begin:end].tolist() == positions
            assert batch.tokens_T[begin:end].tolist() == [1000 + position for position in positions]
            blocks = (start + count - 1) // 16 + 1
            assert batch.table_SP[index, :blocks].tolist() == [index * 1000 + block for block in range(blocks)]
        assert batch.table_SP.shape == (len(step), max((start + count - 1) // 16 + 1 for start, count, _ in step))
        for array in (batch.tokens_T, batch.positions_T, batch.starts_S1, batch.table_SP):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_arrays_are_reused() -> None:
    arrays = StepArrays()
    request = request_of(100)
    first = arrays.fill([span_of(request, 0, 100)], NONE)
    second = arrays.fill([span_of(request, 99, 1), span_of(request, 98, 1)], NONE)
    assert np.shares_memory(first.tokens_T, second.tokens_T)
    assert np.shares_memory(first.positions_T, second.positions_T)
    assert second.tokens_T.tolist() == [1099, 1098]


def test_a_span_goes_on_with_what_was_drawn() -> None:
    span = span_of(request_of(20), 15, 5)
    assert (span.start, span.stop, list(span.tokens)) == (15, 20, [1015, 1016, 1017, 1018, 1019])
    span.drawn.append(42)
    span.advance()
    assert (span.start, span.stop, list(span.tokens)) == (20, 21, [42])


def test_targets_are_the_prompt_tokens_after_those_computed() -> None:
    asked = SamplingParams(seed=0, max_tokens=100, prompt_logprobs=0)
    request = request_of(20, sampling=asked)
    assert list(span_of(request, 0, 5, samples=False).targets) == [1001, 1002, 1003, 1004, 1005]
    assert list(span_of(request, 15, 5).targets) == [1016, 1017, 1018, 1019]
    assert list(span_of(request_of(20), 15, 5).targets) == []
    assert list(span_of(request_of(20, sampling=asked, emitted=2), 0, 20).targets) == []
