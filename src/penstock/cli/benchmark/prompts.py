"""From lengths to requests: token-id prompts where the server can make and take them, fitted text elsewhere.

Every token is drawn from (seed, block) or (seed, request), so a run can be repeated, no two prompts share a prefix by
accident, and blocks that a trace says are shared are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np

from penstock.cli.benchmark.workload import RequestSpec
from penstock.http_client import HttpStreamClient, StreamError

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
