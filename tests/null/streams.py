"""Token streams without workers: the in-memory double of ``interfaces.TokenStreams``.

Tokens are a hash of prompt, seed, choice and position, so an answer is known before it is asked for, whatever batches
it comes in.  Tests say how it is cut into batches, where it fails, and where it waits.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from penstock.interfaces import TtftForecast
from penstock.types import FinishReason, ModelIdentity, RequestId, ServiceClass, TokenBatch, TokenLogprob, ValidRequest

IDENTITY = ModelIdentity(fingerprint="0123456789abcdef" * 4, numerics="null-1-fp32")


def hash_of(*parts: object) -> int:
    """A number that looks random and is not."""
    return xxhash.xxh64_intdigest(repr(parts).encode())


def answer_tokens(request: ValidRequest, vocabulary: int) -> tuple[tuple[int, ...], FinishReason]:
    """The whole answer that this double gives to a request."""
    sampling = request.sampling
    tokens: list[int] = []
    while len(tokens) < sampling.max_tokens:
        token = hash_of(tuple(request.prompt), sampling.seed, sampling.choice, len(tokens)) % vocabulary
        if token in sampling.stop_token_ids:
            if len(tokens) >= sampling.min_tokens:
                return (*tokens, token), FinishReason.STOP
            token = (token + 1) % vocabulary
        tokens.append(token)
    return tuple(tokens), FinishReason.LENGTH


def vector_of(request: ValidRequest, width: int) -> bytes:
    """What this double makes of a text that is only read."""
    assert request.pooling is not None
    count = request.pooling.dimensions or width
    numbers = [hash_of(tuple(request.prompt), index) % 1000 / 1000 for index in range(count)]
    return struct.pack(f"<{count}f", *numbers)


def logprob_of(token: int, position: int, top: int, vocabulary: int) -> TokenLogprob:
    """A made-up log-probability with alternatives."""
    others = tuple(
        (hash_of(token, position, i) % vocabulary, -0.5 * (i + 1) - (hash_of(i, token) % 100) / 1000)
        for i in range(top)
    )
    return TokenLogprob(token, -(hash_of("lp", token, position) % 1000) / 100, others)


@dataclass
class NullStreams:
    """``TokenStreams``.  Fields are the test's to turn; ``opened`` and what follows are its to read."""

    vocabulary: int = 4096
    script: Callable[[ValidRequest], tuple[tuple[int, ...], FinishReason]] | None = None  # else ``answer_tokens``
    batch_sizes: Callable[[random.Random], int] = lambda rng: rng.choice([1, 1, 1, 2, 5])
    cuts: random.Random = field(default_factory=lambda: random.Random(1))
    cached: int = 0
    is_ready: bool = True
    served: ModelIdentity | None = IDENTITY
    stuck: str | None = None
    foreseen: TtftForecast | None = None
    read_by: int = 1  # workers that are ready to read prompts
    rows: Sequence[dict[str, Any]] = ()
    width: int = 4  # of the vectors of texts that are only read
    fail_at: dict[int, Exception] = field(default_factory=dict)  # tokens emitted -> raised then, in every stream
    explained: Sequence[str] = ()  # requests whose decisions are remembered
    explains: bool = True
    gate: asyncio.Event | None = None  # waited for before each batch
    opened: list[ValidRequest] = field(default_factory=list)
    closed: list[RequestId] = field(default_factory=list)
    ended_by_caller: set[RequestId] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def open(self) -> set[RequestId]:
        """Requests that hold something."""
        return {request.id for request in self.opened} - set(self.closed)

    async def until(self, *, opened: int | None = None, none_open: bool = False) -> None:
        """Wait until so many streams were opened, or until none holds anything."""
        while len(self.opened) < (opened or 0) or (none_open and self.open):
            self.changed.clear()
            await self.changed.wait()

    async def stream(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
        """See ``interfaces.TokenStreams``."""
        self.opened.append(request)
        self.changed.set()
        try:
            async for batch in self._batches(request):
                yield batch
        finally:
            self.closed.append(request.id)
            self.changed.set()

    async def _batches(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
        if request.pooling is not None:
            yield await self._pooled(request)
            return
        tokens, finish = self.script(request) if self.script else answer_tokens(request, self.vocabulary)
        sampling = request.sampling
        begun = len(request.begun.tokens)
        assert request.begun.tokens == tokens[:begun], "what is known of an answer is its beginning"
        done = begun
        while done < len(tokens):
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if done in self.fail_at:
                raise self.fail_at[done]
            size = self.batch_sizes(self.cuts)
            size = min([size, len(tokens) - done, *(at - done for at in self.fail_at if at > done)])
            part = tokens[done : done + size]
            first, done = done == 0, done + size  # of one that is begun nobody wants to hear of the prompt
            yield TokenBatch(
                tokens=part,
                logprobs=None if sampling.logprobs is None else self._logprobs(part, done - size, sampling.logprobs),
                prompt_logprobs=self._prompt_logprobs(request) if first else None,
                finish=finish if done == len(tokens) else None,
                cached_tokens=self.cached if first else 0,
            )

    async def _pooled(self, request: ValidRequest) -> TokenBatch:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if 0 in self.fail_at:
            raise self.fail_at[0]
        return TokenBatch(tokens=(0,), finish=FinishReason.LENGTH, pooled=vector_of(request, self.width))

    def _logprobs(self, tokens: Sequence[int], start: int, top: int) -> tuple[TokenLogprob, ...]:
        return tuple(logprob_of(token, start + i, top, self.vocabulary) for i, token in enumerate(tokens))

    def _prompt_logprobs(self, request: ValidRequest) -> tuple[TokenLogprob, ...] | None:
        top = request.sampling.prompt_logprobs
        return None if top is None else self._logprobs(request.prompt[1:], 1, top)

    def mark_stopped(self, request: RequestId) -> None:
        """See ``interfaces.TokenStreams``."""
        self.ended_by_caller.add(request)

    def serving_identity(self, request: RequestId) -> ModelIdentity | None:
        """See ``interfaces.TokenStreams``."""
        return self.served if request in self.open else None

    def identity(self) -> ModelIdentity | None:
        """See ``interfaces.TokenStreams``."""
        return self.served

    async def wait_identity(self) -> ModelIdentity | None:
        """See ``interfaces.TokenStreams``."""
        return self.served

    def ready(self) -> bool:
        """See ``interfaces.TokenStreams``."""
        return self.is_ready

    def stall_reason(self) -> str | None:
        """See ``interfaces.TokenStreams``."""
        return self.stuck

    def prefill_workers(self) -> int:
        """See ``interfaces.TokenStreams``."""
        return self.read_by

    def predict_ttft(self, tokens: int, service: ServiceClass) -> TtftForecast | None:
        """See ``interfaces.TokenStreams``."""
        return self.foreseen

    def routing_decisions(self, request: RequestId) -> Sequence[dict[str, Any]]:
        return [{"because": "there is nobody else"}] if request in self.explained else []

    def routing_decision_line(self, request: RequestId) -> str | None:
        return "whole=\u2603\r\n" if self.explains else None

    def workers(self) -> Sequence[dict[str, Any]]:
        """See ``interfaces.TokenStreams``."""
        return self.rows
