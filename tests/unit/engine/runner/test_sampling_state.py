"""What is kept of a request between steps is what could be made anew from it at any time."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.events import AddRequest
from penstock.engine.core.request import PageTable, Request
from penstock.engine.runner.sampling_state import SamplingState, SamplingStates, TokenCounts
from penstock.kernels.sampling import SampleRow
from penstock.types import BlockHash, PageId, RequestId, RequestStage, SamplingParams

PENALISED = SamplingParams(seed=9, max_tokens=500, repetition_penalty=1.2, frequency_penalty=0.5, choice=2)


def request_of(
    sampling: SamplingParams = PENALISED, prompt: tuple[int, ...] = (7, 3, 7, 5), name: str = "a"
) -> Request:
    arrive = AddRequest(
        id=RequestId(name),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=prompt,
        sampling=sampling,
        arrival=0.0,
        root=BlockHash(bytes(32)),
    )
    return Request(arrive, serial=0, max_model_len=1000)


def counted(row: SampleRow) -> Counter[int]:
    return Counter(dict(zip(row.output_ids.tolist(), row.output_counts.tolist(), strict=True)))


@given(st.lists(st.integers(0, 300), max_size=400))
def test_counts_are_counts(tokens: list[int]) -> None:
    counts = TokenCounts()
    for token in tokens:
        counts.add(token)
    assert Counter(dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))) == Counter(tokens)
    assert counts.total == len(tokens)
    assert len(counts.ids) == len(set(tokens))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 7))
def test_the_row_counts_output_and_what_was_drawn_since(tokens: list[int], steps: int) -> None:
    """As a run of ``steps`` draws and the scheduler then commits, again and again."""
    request = request_of()
    answer = SamplingState(request)
    for first in range(0, len(tokens), steps):
        drawn: list[int] = []
        for token in tokens[first : first + steps]:
            position = 4 + len(request.output) + len(drawn)
            row = answer.sample_row(position, drawn)
            assert row.position == position
            assert counted(row) == Counter(request.output + drawn)
            drawn.append(token)
        for token in drawn:
            request.append(token)


def test_drawn_tokens_that_were_not_committed_are_uncounted() -> None:
    request = request_of()
    answer = SamplingState(request)
    answer.sample_row(7, [1, 2, 3])
    request.append(1)
    assert counted(answer.sample_row(5, [])) == Counter([1])


def test_the_row_says_what_the_sampling_says() -> None:
    sampling = SamplingParams(
        seed=2**64 - 1,
        max_tokens=5,
        choice=3,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        presence_penalty=1.5,
        logit_bias={5: -1.5, 2: 100.0},
        logprobs=7,
    )
    row = SamplingState(request_of(sampling)).sample_row(4, [])
    assert (row.seed, row.choice, row.temperature, row.top_k, row.top_p, row.min_p) == (
        2**64 - 1,
        3,
        0.5,
        4,
        0.75,
        0.25,
    )
    assert (row.presence_penalty, row.frequency_penalty, row.repetition_penalty, row.logprobs) == (1.5, 0.0, 1.0, 7)
    assert dict(zip(row.bias_ids.tolist(), row.bias_values.tolist(), strict=True)) == {5: -1.5, 2: 100.0}
    assert row.bias_ids.dtype == row.output_ids.dtype == row.output_counts.dtype == row.prompt_ids.dtype == np.int32
    assert row.bias_values.dtype == np.float32


def test_prompt_ids_are_distinct_and_only_there_for_the_repetition_penalty() -> None:
    assert SamplingState(request_of()).sample_row(4, []).prompt_ids.tolist() == [3, 5, 7]
    assert not len(
        SamplingState(request_of(SamplingParams(seed=0, max_tokens=5, presence_penalty=1.0)))
        .sample_row(4, [])
        .prompt_ids
    )


def test_stop_tokens_are_banned_below_min_tokens() -> None:
    request = request_of(SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=(1, 8)))
    answer = SamplingState(request)
    banned = [len(answer.sample_row(4 + index, [0] * index).banned_ids) for index in range(5)]
    assert banned == [2, 2, 2, 0, 0]
    assert answer.sample_row(4, []).banned_ids.tolist() == [1, 8]


def test_pages_follow_the_request() -> None:
    request = request_of()
    answer = SamplingState(request)
    assert answer.pages() == []
    request.set_page_tables([PageTable(0, [PageId(4), PageId(2)]), PageTable(1, [PageId(3)])])
    assert [pages.tolist() for pages in answer.pages()] == [[4, 2], [0, 3]]
    request.page_tables[0].pages.append(PageId(9))
    assert [pages.tolist() for pages in answer.pages()] == [[4, 2, 9], [0, 3]]
    request.clear_pages()
    request.set_page_tables([PageTable(0, [PageId(2), PageId(4), PageId(9)])])
    assert [pages.tolist() for pages in answer.pages()] == [[2, 4, 9]]
    assert answer.pages()[0].dtype == np.int32


def test_another_request_of_the_same_name_starts_anew() -> None:
    answers = SamplingStates()
    first, second = request_of(), request_of()
    first.append(1)
    assert counted(answers.get(first).sample_row(5, [])) == Counter([1])
    assert answers.get(first) is answers.get(first)
    assert counted(answers.get(second).sample_row(4, [])) == Counter()
    assert len(answers) == 1


def test_forgetting() -> None:
    answers = SamplingStates()
    answers.get(request_of(name="a"))
    answers.get(request_of(name="b"))
    answers.remove("a")
    answers.remove("a")
    assert len(answers) == 1


def test_what_may_never_be_drawn_and_what_not_first() -> None:
    sampling = SamplingParams(seed=1, max_tokens=9, banned=(5, 6), banned_first=(7,), min_tokens=2, stop_token_ids=(8,))
    answer = SamplingState(request_of(sampling))
    assert [answer.sample_row(position, ()).banned_ids.tolist() for position in (4, 5, 6, 7)] == [
        [5, 6, 8, 7],
        [5, 6, 8],
        [5, 6],
        [5, 6],
    ]
    assert not answer.gumbel_only(7)
    assert [row.banned_ids.tolist() for row in answer.draft_sample_rows(4, (1, 1))] == [[5, 6, 8, 7], [5, 6, 8], [5, 6]]
