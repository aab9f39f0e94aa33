"""How much long prompts delay the tokens of running responses: what splitting prefill from decode is for.

A fixed number of responses run all the time, each followed by the next.  After a warm-up, a long prompt arrives at a
fixed interval, whatever became of the one before.  Measured are the gaps between the tokens of the running responses
while that goes on, and how long the long prompts wait for their first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

from penstock.cli.benchmark.load_generator import LoadGenerator, LoadProgress, TimedRequest, background, sleep_until
from penstock.cli.benchmark.metrics import RequestRecord, error_counts, gaps_before, gaps_during, measure, summary

REFUSED_PAUSE_S = 0.05
"""A server that refuses is not asked again in a busy loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceScenario:
    """The scenario.  Times in seconds."""

    running: int  # answers that are being written at any time
    every: float  # between two long prompts
    warmup: float  # the running answers alone, before


@dataclass(slots=True)
class InterferenceResult:
    """What was seen.  ``since`` and ``sleep_until`` bound the measured part on the clock of the records."""

    answers: list[RequestRecord]  # the last ones are cut short: the run ended
    long_prompts: list[RequestRecord]
    since: float
    until: float

    def report(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """Times in seconds; ``running.itl_s`` is what the scenario is about."""
        window = self.until - self.since
        measured = gaps_during(self.answers, self.since, self.until)
        quiet = gaps_before(self.answers, self.since)
        return {
            "duration_s": window,
            "running": {
                "answers": len(self.answers),
                "failed": sum(not answer.ok for answer in self.answers),
                "errors": error_counts(self.answers),
                "events_per_s": len(measured) / window,
                "itl_s": summary(measured, percentiles),
                "itl_before_s": summary(quiet, percentiles),
            },
            "long": measure(self.long_prompts, duration=window, percentiles=percentiles),
        }

    def raw(self) -> dict[str, Any]:
        """For plots: every gap as [seconds from the first long prompt to its beginning, its length], and the times of
        every long prompt."""
        return {
            "gaps": [[a - self.since, b - a] for answer in self.answers for a, b in pairwise(answer.events)],
            "long": [
                {"due": r.due - self.since, "events": [t - self.since for t in r.events]} for r in self.long_prompts
            ],
        }


class _RunningAnswers:
    """Answers that are written one after another, ``count`` at any time, until it is cancelled."""

    def __init__(self, load: LoadGenerator, bodies: Sequence[bytes]) -> None:
        self.answers: list[RequestRecord] = []
        self._live: set[int] = set()  # indices of answers that have not ended
        self._load = load
        self._bodies = cycle(bodies)

    async def keep_one_running(self) -> None:
        while True:
            record = self._load.record()
            index = len(self.answers)
            self.answers.append(record)
            self._live.add(index)
            await self._load.ask(next(self._bodies), record)
            self._live.discard(index)
            if not record.ok:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def all_heard_since(self, moment: float) -> None:
        """Wait until no gap that was open at ``moment`` is open any more: a stall at the end counts in full."""
        while any(events and events[-1] < moment for events in (self.answers[i].events for i in self._live)):  # noqa: ASYNC110 - records signal nothing
            await asyncio.sleep(0.005)


async def run_interference(
    load: LoadGenerator,
    scenario: InterferenceScenario,
    answer_bodies: Sequence[bytes],
    long_bodies: Sequence[bytes],
    progress: LoadProgress | None = None,
) -> InterferenceResult:
    """Play the scenario: the running answers take their bodies in turn, the long prompts one each."""
    running = _RunningAnswers(load, answer_bodies)
    jobs = [TimedRequest(body, at=index * scenario.every) for index, body in enumerate(long_bodies)]
    streams = [asyncio.create_task(running.keep_one_running()) for _ in range(scenario.running)]
    async with background(streams):
        await asyncio.sleep(scenario.warmup)
        since = time.perf_counter()
        long_prompts = await load.run(jobs, max_concurrency=None, closed_loop=False, progress=progress)
        end = since + scenario.every * len(jobs)
        await sleep_until(end)
        end = max(end, time.perf_counter())
        async with asyncio.timeout(load.timeout):
            await running.all_heard_since(end)
    return InterferenceResult(answers=running.answers, long_prompts=long_prompts, since=since, until=end)
