"""Sends requests when they are due and notes when their tokens come back.

The schedule never waits for answers (an open loop) unless a concurrency limit says so.  Knows nothing about what the
numbers add up to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from penstock.cli.benchmark.metrics import RequestRecord
from penstock.cli.openai_client import ChunkUsage, decode_chunk, error_of
from penstock.http_client import DONE, HttpStreamClient, StreamError


class ResponseRecorder:
    """Takes the events of one answer into its ``RequestRecord`` record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self.done = False

    def __call__(self, data: bytes, arrived: float) -> None:
        """Raises StreamError for an error event and for what is no chunk."""
        if data == DONE:
            self.done = True
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as error:
            raise StreamError("bad chunk", str(error)) from error
        if chunk.error is not None:
            raise StreamError(f"error event {chunk.error.code or ''}".rstrip(), chunk.error.message)
        if any(choice.text_added() for choice in chunk.choices):
            self._record.events.append(arrived)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)

    def _take_usage(self, usage: ChunkUsage) -> None:
        self._record.prompt_tokens = usage.prompt_tokens
        self._record.output_tokens = usage.completion_tokens or 0
        if usage.prompt_tokens_details is not None:
            self._record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


@dataclass(slots=True)
class LoadProgress:
    """What a progress bar shows while the run goes on."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, ready to be sent ``at`` seconds after the start."""

    body: bytes
    at: float = 0.0


class LoadGenerator:
    """Runs jobs against one endpoint."""

    def __init__(self, client: HttpStreamClient, endpoint: str, *, timeout: float) -> None:
        self._client = client
        self._endpoint = endpoint
        self.timeout = timeout

    async def run(
        self,
        jobs: Sequence[TimedRequest],
        *,
        max_concurrency: int | None,
        closed_loop: bool,
        progress: LoadProgress | None = None,
    ) -> list[RequestRecord]:
        """All jobs, each sent when it is due and a slot is free.

        ``closed_loop``: a job is due when its slot becomes free; otherwise when its ``at`` says, however late a slot
        is free.  Cancelling cancels every request.
        """
        start = time.perf_counter()
        gate = asyncio.Semaphore(max_concurrency or max(1, len(jobs)))
        progress = progress or LoadProgress(len(jobs))

        async def one(job: TimedRequest) -> RequestRecord:
            async with gate:
                record = self.record(due=None if closed_loop else start + job.at)
                progress.sent += 1
                await self.ask(job.body, record)
                progress.done += 1
                progress.failed += not record.ok
                progress.output_tokens += record.output_tokens
                return record

        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await sleep_until(start + job.at)
                tasks.append(group.create_task(one(job)))
        return [task.result() for task in tasks]

    def record(self, due: float | None = None) -> RequestRecord:
        """An empty record of a request that is sent now."""
        now = time.perf_counter()
        return RequestRecord(due=now if due is None else due, sent=now)

    async def ask(self, body: bytes, record: RequestRecord) -> None:
        """One request from sending to its last event.  Failures are noted in the record, never raised."""
        reader = ResponseRecorder(record)
        try:
            async with asyncio.timeout(self.timeout):
                reply = await self._client.post(self._endpoint, body, reader)
            record.error = failure_kind(reply.status, reply.body, reader.done, record)
        except StreamError as error:
            record.error = error.kind
        except TimeoutError:
            record.error = f"timeout after {self.timeout:g} s"
        record.output_tokens = record.output_tokens or len(record.events)


def failure_kind(status: int, body: bytes, done: bool, record: RequestRecord) -> str | None:
    """Short kind of what is wrong with a reply that came to its end, None when nothing is."""
    if status != 200:
        return f"http {status} {error_of(body).code or ''}".rstrip()
    if not done:
        return "stream ended early"
    return None if record.events else "no text"


async def sleep_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` has reached ``moment``; one turn of the loop when it has already.

    Some loops' timers are early by a fraction of a millisecond, hence more than one sleep.
    """
    await asyncio.sleep(0)
    while (left := moment - time.perf_counter()) > 0:  # noqa: ASYNC110 - what is waited for is time
        await asyncio.sleep(left)


@asynccontextmanager
async def background(coroutine_tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Tasks that run while the body runs and are cancelled, and waited for, when it ends."""
    try:
        yield
    finally:
        for task in coroutine_tasks:
            task.cancel()
        await asyncio.gather(*coroutine_tasks, return_exceptions=True)
