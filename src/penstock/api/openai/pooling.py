"""``/v1/embeddings``, ``/rerank`` and ``/classify``: pools all inputs, and writes the responses of OpenAI, Jina, vLLM.

A bounded number of inputs is with the workers at any time.  However a response ends, every token stream that it had
open is closed.  Large responses are encoded piece by piece, so that other streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.idempotency import TokenStreamSource
from penstock.errors import WorkerLost
from penstock.interfaces import PreparedPooling


class PoolingResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response apart from its items."""

    id: str
    created: int  # Unix seconds
    model: str
    tokens: int  # of all texts


class PoolingResponseFormat(Protocol):
    """How one API writes pooled outputs."""

    id_prefix: str
    """Prefix of ids, such as ``embd-``."""

    operation: str
    """As OpenTelemetry calls it, or as the route is called."""

    def items(self, work: PreparedPooling, pooled: Sequence[bytes]) -> Iterator[Any]:
        """One object per input of the response."""
        ...

    def complete(self, head: PoolingResponseHead, items: list[msgspec.Raw]) -> Any:
        """The response."""
        ...


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


def _usage(head: PoolingResponseHead) -> _Usage:
    return _Usage(prompt_tokens=head.tokens, total_tokens=head.tokens)


def fp32_values(pooled: bytes) -> list[float]:
    """fp32, little-endian."""
    values = array("f", pooled)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


# --- embeddings ------------------------------------------------------------------------------------------------------


class _Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class _Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    model: str
    usage: _Usage
    id: str
    created: int


class EmbeddingResponseFormat:
    """``PoolingResponseFormat`` of OpenAI's embeddings."""

    id_prefix = "embd-"
    operation = "embeddings"

    def items(self, work: PreparedPooling, pooled: Sequence[bytes]) -> Iterator[Any]:
        """Numbers, or base64 of them as they are."""
        for index, own in enumerate(pooled):
            yield _Embedding(index=index, embedding=b64encode(own).decode() if work.base64 else fp32_values(own))

    def complete(self, head: PoolingResponseHead, items: list[msgspec.Raw]) -> Any:
        """A list."""
        return _Embeddings(data=items, model=head.model, usage=_usage(head), id=head.id, created=head.created)


# --- reranking -------------------------------------------------------------------------------------------------------


class _Document(msgspec.Struct, frozen=True):
    text: str


class _Ranked(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: _Document | UnsetType = UNSET


class _Ranking(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[msgspec.Raw]
    usage: _Usage


class RerankResponseFormat:
    """``PoolingResponseFormat`` of Jina's and Cohere's reranking."""

    id_prefix = "rerank-"
    operation = "rerank"

    def items(self, work: PreparedPooling, pooled: Sequence[bytes]) -> Iterator[Any]:
        """The best first; of equals the earlier."""
        scores = [fp32_values(own)[0] for own in pooled]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        for index in best[: work.top_n]:
            document = UNSET if work.documents is None else _Document(work.documents[index])
            yield _Ranked(index=index, relevance_score=scores[index], document=document)

    def complete(self, head: PoolingResponseHead, items: list[msgspec.Raw]) -> Any:
        """Results."""
        return _Ranking(id=head.id, model=head.model, results=items, usage=_usage(head))


# --- classification --------------------------------------------------------------------------------------------------


class _Class(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class _Classes(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[msgspec.Raw]
    usage: _Usage


class ClassifyResponseFormat:
    """``PoolingResponseFormat`` of vLLM's ``/classify``."""

    id_prefix = "classify-"
    operation = "classify"

    def items(self, work: PreparedPooling, pooled: Sequence[bytes]) -> Iterator[Any]:
        """The likeliest label, the earlier of equals, and what all of them have."""
        for index, own in enumerate(pooled):
            scores = fp32_values(own)
            label = work.labels[max(range(len(scores)), key=scores.__getitem__)]
            yield _Class(index=index, label=label, probs=scores, num_classes=len(scores))

    def complete(self, head: PoolingResponseHead, items: list[msgspec.Raw]) -> Any:
        """A list."""
        return _Classes(id=head.id, created=head.created, model=head.model, data=items, usage=_usage(head))


_PIECES_A_TURN = 8
"""Vectors written before others get a turn: a fraction of a millisecond."""

_encode = msgspec.json.Encoder().encode


async def pool_all(streams: TokenStreamSource, work: PreparedPooling, at_once: int) -> list[bytes]:
    """The pooled output of every input, in order; at most ``at_once`` are with the workers at any time.

    Raises the first failure.
    """
    left = iter(range(len(work.requests)))
    found = [b""] * len(work.requests)

    async def take() -> None:
        for index in left:
            found[index] = await _read(streams, work, index)

    tasks = [asyncio.create_task(take()) for _ in range(min(at_once, len(found)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _read(streams: TokenStreamSource, work: PreparedPooling, index: int) -> bytes:
    stream = streams.stream(work.requests[index])
    try:
        async for batch in stream:
            if batch.pooled is not None:
                return batch.pooled
    finally:
        await stream.aclose()
    raise WorkerLost("A text was read and nothing came of it.")


async def encode_pooling_response(
    shape: PoolingResponseFormat, head: PoolingResponseHead, work: PreparedPooling, pooled: Sequence[bytes]
) -> bytes:
    """The whole response."""
    items: list[msgspec.Raw] = []
    for item in shape.items(work, pooled):
        items.append(msgspec.Raw(_encode(item)))
        if len(items) % _PIECES_A_TURN == 0:
            await asyncio.sleep(0)
    return _encode(shape.complete(head, items))
