"""Whole distributions, position by position: what a runner tells of a text, and how near it must be to an oracle.

Log-probabilities are within 1e-3 everywhere, and the greedy token is the same wherever its margin is over 2e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import SampledTokens
from penstock.types import AdapterRef, SamplingParams, TokenLogprob
from runner_bench import RunnerBench

TOLERANCE = 1e-3
MARGIN = 2e-3


def check_rows(got_TV: NDArray[Any], want_TV: NDArray[np.float64]) -> None:
    """The two promises, for whole distributions."""
    off_T = np.abs(got_TV - want_TV).max(axis=1)
    assert off_T.max() <= TOLERANCE, f"rows {np.flatnonzero(off_T > TOLERANCE).tolist()} are off by {off_T.max():g}"
    second_T, first_T = np.sort(want_TV, axis=1)[:, -2:].T
    clear_T = first_T - second_T > MARGIN
    assert clear_T.any()
    assert (got_TV.argmax(1) == want_TV.argmax(1))[clear_T].all()


def whole_rows(told: Sequence[TokenLogprob], vocab: int) -> NDArray[np.float64]:
    """[T, V] of log-probabilities that were asked for with all alternatives."""
    rows_TV = np.full((len(told), vocab), np.nan)
    for row_V, one in zip(rows_TV, told, strict=True):
        ids, values = zip(*one.top, strict=True)
        row_V[list(ids)] = values
        assert row_V[one.token] == one.logprob
    return rows_TV


def rows_of(drawn: SampledTokens, vocab: int) -> NDArray[np.float64]:
    """[T, V] after every token of a prompt, of which ``drawn`` has the first token of the answer."""
    return whole_rows((*drawn.prompt_logprobs, *drawn.logprobs), vocab)


def read_rows(
    bench: RunnerBench, tokens: Sequence[int], chunk: int, *, adapter: AdapterRef | None = None
) -> NDArray[np.float64]:
    """[T, V] after every one of ``tokens``, which are read in chunks."""
    vocab = bench.spec.vocab
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, logprobs=vocab, prompt_logprobs=vocab)
    request = bench.request(tokens, sampling, adapter=adapter)
    drawn = bench.read(request, chunk)
    assert [one.token for one in drawn.prompt_logprobs] == [*tokens[1:]]
    bench.release(request)
    return rows_of(drawn, vocab)
