"""Events: what has happened, as input of the scheduler.

Plain data, so the simulator and the tests use the same ones as a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from penstock.types import (
    DEFAULT_QOS,
    AdapterRef,
    BlockHash,
    FinishReason,
    MediaInput,
    PlacedImage,
    PoolingParams,
    Qos,
    RequestId,
    RequestStage,
    SamplingParams,
)
from penstock.wire.gateway_messages import PageSource


class MatcherFactory(Protocol):
    """A compiled grammar; it is there for as long as somebody holds this (``grammar.manager.GrammarHandle``)."""

    def matcher(self) -> Any:
        """At the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """A request came.  A later epoch replaces an earlier one, an earlier or equal one is ignored."""

    id: RequestId
    epoch: int
    stage: RequestStage
    prompt: Sequence[int]
    sampling: SamplingParams
    arrival: float  # order of service among the requests of one tenant and class
    root: BlockHash
    hashes: Sequence[BlockHash] = ()  # ready-made, of as many full pages of prompt + emitted as the caller has
    emitted: Sequence[int] = ()  # output tokens that the client has already
    qos: Qos = DEFAULT_QOS
    open_ended: bool = False  # without a length: returned where it becomes too long for this worker
    expected_tokens: int = 0  # of one that is open-ended: tokens that will probably be sampled
    images: Sequence[PlacedImage] = ()
    media: Sequence[MediaInput] = ()  # one an image, where the prompt is read
    encoders: Sequence[PageSource] = ()  # workers that may be asked for the images' rows
    pooling: PoolingParams | None = None
    adapter: AdapterRef | None = None  # it must be ready before the scheduler hears of the request
    extra_tokens: int = 0  # stage=decode: tokens that may still be written at the source while the pages come
    grammar: MatcherFactory | None = field(default=None, compare=False, repr=False)  # its grammar, once it is compiled
    prompt_pages_only: bool = False  # pages of the prompt alone are shared or handed over, never of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditGranted:
    """stage=prefill: the decode worker has room for all pages; the request may be admitted now."""

    id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesArrived:
    """stage=decode: ``computed`` tokens now stand in this worker's own, verified pages (never decreases)."""

    id: RequestId
    epoch: int
    computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenArrived:
    """stage=decode: the prefill worker's token; with it and all pages, decoding goes on here.

    ``finish`` is set when that token was also the last: the request ends without a word to the gateway.
    """

    id: RequestId
    epoch: int
    token: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeLocally:
    """stage=decode: what another worker computed is too slow to come.  What has not come is computed here, like any
    prompt; the answer goes on behind ``token``, which that worker drew."""

    id: RequestId
    epoch: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReleased:
    """stage=prefill: the receiver has the pages (or its lease ended); free what was held for it."""

    id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Forget the request in whatever state, unless a later epoch of it is here."""

    id: RequestId
    epoch: int


class MigrationStep(Enum):
    """What an answer that is being written does next (``core.scheduler``)."""

    KEEP = auto()  # its pages: another worker copies them
    STOP = auto()  # until the other has everything
    GO_ON = auto()  # here


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """An answer that is being written here is to go on elsewhere."""

    id: RequestId
    epoch: int
    step: MigrationStep


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationDone:
    """stage=decode: everything of an answer that moved is here; ``tokens`` are those of it from ``index`` on."""

    id: RequestId
    epoch: int
    index: int
    tokens: tuple[int, ...]


EngineEvent = (
    AddRequest
    | CreditGranted
    | PagesArrived
    | FirstTokenArrived
    | RecomputeLocally
    | PagesReleased
    | CancelRequest
    | Migrate
    | MigrationDone
)
