"""The requests of a benchmark: lengths and times, from a seed or a trace file, and their prompts: token ids where the
server can make and take them, fitted text elsewhere.

Every token is drawn from (seed, block) or (seed, request), so a run can be repeated, no two prompts share a prefix by
accident, and blocks that a trace says are shared are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import ConfigError
from penstock.http_client import HttpStreamClient, StreamError
from penstock.sim.trace import read_trace

TRACES = ("mooncake", "azure")
"""Kinds of trace files that are read."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request before it has words.  ``at`` is seconds from the start; None leaves it to the arrival process."""

    input_len: int
    output_len: int
    at: float | None = None
    blocks: tuple[int, ...] = ()  # the prompt's beginning: equal ids promise equal tokens, which a cache may find
    block_tokens: int = 0  # in each of those; what the prompt has beyond them is its own


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths drawn evenly from [(1 - ratio) L, (1 + ratio) L], as ``vllm bench serve`` draws them."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0  # tokens shared by all prompts, on top of ``input_len``

    def draw(self, count: int, seed: int) -> list[RequestSpec]:
        rng = np.random.default_rng([seed, 1])
        inputs = self._lengths(rng, self.input_len, count)
        outputs = self._lengths(rng, self.output_len, count)
        return [
            RequestSpec(
                input_len=self.prefix_len + int(i),
                output_len=int(o),
                blocks=(0,) if self.prefix_len else (),
                block_tokens=self.prefix_len,
            )
            for i, o in zip(inputs, outputs, strict=True)
        ]

    def _lengths(self, rng: np.random.Generator, length: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = max(low, math.ceil(length * (1 + self.range_ratio)))
        return rng.integers(low, high, count, endpoint=True)


def of_trace(path: Path, kind: str, count: int) -> list[RequestSpec]:
    """The first ``count`` requests of a trace file, in order of arrival.  ``kind``: of ``TRACES``.

    Raises ConfigError that names file, line and reason, also where the file is of the other kind.
    """
    trace = read_trace(path, count)
    found = "mooncake" if trace.block_tokens else "azure"
    if found != kind:
        raise ConfigError(f"{path}: this is a trace of the kind {found!r}, not {kind!r}")
    return [
        RequestSpec(
            input_len=job.prompt,
            output_len=job.output,
            at=job.at,
            blocks=job.blocks,
            block_tokens=trace.block_tokens,
        )
        for job in trace.requests
    ]


def scale_request(wanted: RequestSpec, *, length: float = 1.0, time: float = 1.0) -> RequestSpec:
    """The same request with lengths and arrival multiplied; shared prefixes stay shared."""
    return replace(
        wanted,
        input_len=max(1, round(wanted.input_len * length)),
        output_len=max(1, round(wanted.output_len * length)),
        at=None if wanted.at is None else wanted.at * time,
        block_tokens=max(1, round(wanted.block_tokens * length)) if wanted.block_tokens else 0,
    )


def fitting(wanted: Sequence[RequestSpec], max_model_len: int | None) -> list[RequestSpec]:
    """Requests that fit the context; the caller reports how many did not."""
    return [w for w in wanted if max_model_len is None or w.input_len + w.output_len <= max_model_len]


def arrivals(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due, the first at 0.

    Gaps are gamma distributed with shape ``burstiness`` (1 is a Poisson process, less comes in bursts, more is more
    regular) and stretched together so that the mean gap is 1 / rate exactly: a short run, too, has the rate that was
    asked for.  An infinite rate has all of them due at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    waits = np.random.default_rng([seed, 2]).gamma(burstiness, size=max(0, count - 1))
    due = np.concatenate([[0.0], np.cumsum(waits)])[:count]
    return [float(at) for at in due * ((count - 1) / rate / due[-1] if count > 1 else 0.0)]


WORD_TEXT: Final = (
    "the a one two old new red blue green small big long dark bright cold warm slow quick quiet loud house tree river "
    "stone road hill field garden bird horse dog cat fish child woman man king queen friend day night morning winter "
    "summer rain snow wind fire water bread apple book letter door window table lamp boat wheel rope song story "
    "went came saw took gave found made said told asked heard knew thought felt kept left held ran walked stood sat "
    "and but then so when while before after over under near far again never always soon often still here there"
)
WORDS: Final = tuple(WORD_TEXT.split())

FIT_TRIES = 8
"""Tokenizer calls spent on one text prompt."""


class PromptKind(StrEnum):
    """How exactly prompts have the length that was asked for."""

    IDS = "token ids"
    FITTED = "text fitted by /tokenize"
    WORDS = "text of about as many words"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Fields that all requests of a run share."""

    model: str
    endpoint: str
    extra: dict[str, Any]

    @property
    def chat(self) -> bool:
        return "chat" in self.endpoint

    def body(self, prompt: list[int] | str, output_len: int) -> bytes:
        """The JSON of one streamed request."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {
            "model": self.model,
            **asked,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields | self.extra)


class PromptMaker:
    """Makes the bodies of requests for one server.  Ask ``learn`` first."""

    def __init__(self, client: HttpStreamClient, shape: RequestShape, seed: int) -> None:
        self.kind = PromptKind.WORDS
        self._client = client
        self._shape = shape
        self._seed = seed
        self._pool = np.empty(0, np.int64)
        self._made = 0  # no two prompts of one maker are alike, warm-ups included

    async def learn(self) -> None:
        """Find out what the server can do: which token ids are harmless words, whether it counts tokens."""
        try:
            tokens = await self._tokenize({"prompt": " " + WORD_TEXT, "add_special_tokens": False})
            if not tokens:  # llama-server reads another field, and takes no offence at this one
                tokens = await self._tokenize({"content": " " + WORD_TEXT})
        except (StreamError, msgspec.DecodeError, KeyError):
            return
        if not tokens:
            return
        self._pool = np.unique(np.asarray(tokens, np.int64))
        self.kind = PromptKind.FITTED if self._shape.chat else PromptKind.IDS

    async def bodies(self, wanted: Sequence[RequestSpec]) -> list[bytes]:
        """One body a request, in order.  Raises StreamError when the tokenizer stops answering."""
        gate = asyncio.Semaphore(8)

        async def one(index: int, want: RequestSpec) -> bytes:
            async with gate:
                return self._shape.body(await self._prompt(index, want), want.output_len)

        first = self._made
        self._made += len(wanted)
        return list(await asyncio.gather(*(one(first + index, want) for index, want in enumerate(wanted))))

    async def _prompt(self, index: int, want: RequestSpec) -> list[int] | str:
        if self.kind is PromptKind.IDS:
            return [int(t) for t in self._pool[self._draws(index, want, want.input_len) % len(self._pool)]]
        if self.kind is PromptKind.WORDS:
            return self._text(index, want, want.input_len)
        return await self._fitted(index, want)

    def _draws(self, index: int, want: RequestSpec, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """``count`` random numbers: first those of the shared blocks, then the request's own."""
        parts = [
            np.random.default_rng([self._seed, 3, block]).integers(0, 1 << 32, want.block_tokens)
            for block in want.blocks[: -(-count // max(1, want.block_tokens))]
        ]
        missing = count - sum(map(len, parts))
        if missing > 0:
            # The length is in it so that unlike runs against one server find nothing of each other in its cache.
            own = np.random.default_rng([self._seed, 4, index, want.input_len])
            parts.append(own.integers(0, 1 << 32, missing))
        return np.concatenate(parts)[:count]

    def _text(self, index: int, want: RequestSpec, words: int) -> str:
        return " ".join(WORDS[d] for d in self._draws(index, want, max(1, words)) % len(WORDS))

    async def _fitted(self, index: int, want: RequestSpec) -> str:
        """Text with as many tokens as wanted, the template's included, or the nearest that was found below."""
        words, best = want.input_len, ""
        low, high = 0, None  # words known to be too few, and too many
        for _ in range(FIT_TRIES):
            text = self._text(index, want, words)
            message = {"role": "user", "content": text}
            count = len(await self._tokenize({"messages": [message], "add_generation_prompt": True}))
            if count <= want.input_len:
                low, best = words, text
            else:
                high = words
            if count == want.input_len or (high is not None and high - low <= 1):
                break
            guess = words + round((want.input_len - count) * words / max(1, count)) or 1
            words = max(low + 1, guess if high is None else min(high - 1, guess))
        return best or self._text(index, want, 1)

    async def _tokenize(self, fields: dict[str, Any]) -> list[int]:
        reply = await self._client.post("/tokenize", msgspec.json.encode({"model": self._shape.model} | fields))
        if reply.status != 200:
            raise StreamError(f"http {reply.status} from /tokenize", reply.body[:200].decode(errors="replace"))
        tokens: list[int] = msgspec.json.decode(reply.body)["tokens"]
        return tokens
