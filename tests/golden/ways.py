"""Ways in which one answer comes about, through the real runner: by law 1 all of them tell the same.

Knows no model: a test gives what makes its request anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.core.request import Request
from penstock.types import PAGE_TOKENS, TokenLogprob
from runner_bench import RunnerBench

Told = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]
"""Tokens of the answer and their log-probabilities."""


@dataclass(frozen=True)
class Ways:
    """Of one request's answer, which ends with ``max_tokens``.  Every way gives back the pages that it used."""

    bench: RunnerBench
    request: Callable[[], Request]  # the same one every time

    def alone(self, chunk: int) -> Told:
        """Nothing else in the step, the prompt in pieces."""
        request = self.request()
        told = self._answered(request, [*self.bench.read(request, chunk).logprobs])
        self.bench.release(request)
        return told

    def in_company(self, writer: Request, reader: Request, *, chunk: int, others: int) -> Told:
        """Behind one that writes and before one that reads ``others`` tokens a step and never gets to its answer."""
        self.bench.read(writer, 90)
        request = self.request()
        logprobs: list[TokenLogprob] = []
        while len(request.output) < request.sampling.max_tokens:
            work = [
                (writer, 1),
                (request, min(chunk, request.uncomputed)),
                (reader, min(others, reader.uncomputed - 1)),
            ]
            logprobs += self.bench.step([(one, count) for one, count in work if count])[1].logprobs
        for one in (writer, reader, request):
            self.bench.release(one)
        return tuple(request.output), tuple(logprobs)

    def on_cached_pages(self, first: Request, tokens: int) -> Told:
        """The prompt's first ``tokens``, whole pages of them, were computed for ``first``."""
        assert tokens % PAGE_TOKENS == 0
        second = self.request()
        self.bench.read(first, 64)
        counts = [tokens // held.page_tokens for held in second.page_tables]
        own = [held.pages[:count] for held, count in zip(second.page_tables, counts, strict=True)]
        for mine, theirs, count in zip(second.page_tables, first.page_tables, counts, strict=True):
            mine.pages[:count] = theirs.pages[:count]
        second.computed = tokens
        told = self._answered(second, [*self.bench.read(second, 64).logprobs])
        for mine, pages in zip(second.page_tables, own, strict=True):
            mine.pages[: len(pages)] = pages
        self.bench.release(first)
        self.bench.release(second)
        return told

    def after_a_preemption(self) -> Told:
        """In mid-answer: prompt and answer are computed anew, on other pages."""
        request = self.request()
        logprobs = [*self.bench.read(request, 64).logprobs]
        logprobs += self.bench.step([(request, 1)])[0].logprobs
        self.bench.release(request)
        self.bench.give_pages(request)
        logprobs += self.bench.read(request, 10).logprobs
        told = self._answered(request, logprobs)
        self.bench.release(request)
        return told

    def _answered(self, request: Request, logprobs: list[TokenLogprob]) -> Told:
        """The rest of the answer, token by token."""
        while len(request.output) < request.sampling.max_tokens:
            logprobs += self.bench.step([(request, 1)])[0].logprobs
        return tuple(request.output), tuple(logprobs)
