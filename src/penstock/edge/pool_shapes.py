"""``/v1/embeddings``, ``/rerank`` and ``/classify`` on the wire: as OpenAI, Jina and Cohere, and vLLM write them."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.wire.ports import PoolWork


class PoolHead(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says besides its items."""

    id: str
    created: int  # Unix seconds
    model: str
    tokens: int  # of all texts


class PoolShape(Protocol):
    """How one API writes what became of texts."""

    prefix: str
    """Of ids, as ``embd-``."""

    operation: str
    """As OpenTelemetry calls it, or as the route is called."""

    def items(self, work: PoolWork, pooled: Sequence[bytes]) -> Iterator[Any]:
        """One object a text that is told."""
        ...

    def whole(self, head: PoolHead, items: list[msgspec.Raw]) -> Any:
        """The answer."""
        ...


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


def _usage(head: PoolHead) -> _Usage:
    return _Usage(prompt_tokens=head.tokens, total_tokens=head.tokens)


def numbers(pooled: bytes) -> list[float]:
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


class EmbeddingShape:
    """``PoolShape`` of OpenAI's embeddings."""

    prefix = "embd-"
    operation = "embeddings"

    def items(self, work: PoolWork, pooled: Sequence[bytes]) -> Iterator[Any]:
        """Numbers, or base64 of them as they are."""
        for index, own in enumerate(pooled):
            yield _Embedding(index=index, embedding=b64encode(own).decode() if work.base64 else numbers(own))

    def whole(self, head: PoolHead, items: list[msgspec.Raw]) -> Any:
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


class RerankShape:
    """``PoolShape`` of Jina's and Cohere's reranking."""

    prefix = "rerank-"
    operation = "rerank"

    def items(self, work: PoolWork, pooled: Sequence[bytes]) -> Iterator[Any]:
        """The best first; of equals the earlier."""
        scores = [numbers(own)[0] for own in pooled]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        for index in best[: work.top]:
            document = UNSET if work.documents is None else _Document(work.documents[index])
            yield _Ranked(index=index, relevance_score=scores[index], document=document)

    def whole(self, head: PoolHead, items: list[msgspec.Raw]) -> Any:
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


class ClassifyShape:
    """``PoolShape`` of vLLM's ``/classify``."""

    prefix = "classify-"
    operation = "classify"

    def items(self, work: PoolWork, pooled: Sequence[bytes]) -> Iterator[Any]:
        """The likeliest label, the earlier of equals, and what all of them have."""
        for index, own in enumerate(pooled):
            scores = numbers(own)
            label = work.labels[max(range(len(scores)), key=scores.__getitem__)]
            yield _Class(index=index, label=label, probs=scores, num_classes=len(scores))

    def whole(self, head: PoolHead, items: list[msgspec.Raw]) -> Any:
        """A list."""
        return _Classes(id=head.id, created=head.created, model=head.model, data=items, usage=_usage(head))
