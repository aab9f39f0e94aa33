"""What goes into the scheduler (events), and what comes out of it (a plan, an outcome).

All plain data, so the simulator and the tests speak the same language as a worker.  What is made once a row and
step is a msgspec struct: ten times as quick to make as a frozen dataclass, and nothing for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.types import (
    UNCLAIMED,
    AdapterRef,
    BlockHash,
    Claim,
    FinishReason,
    Leg,
    Medium,
    PlacedImage,
    PoolingParams,
    RequestId,
    SamplingParams,
    TokenLogprob,
)
from penstock.wire.messages import PageSource

if TYPE_CHECKING:
    from penstock.engine.core.request import Request


class GrammarInUse(Protocol):
    """A compiled grammar; it is there for as long as somebody holds this (``grammar.worker.GrammarHandle``)."""

    def matcher(self) -> Any:
        """At the beginning of an answer."""
        ...


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive:
    """A request came.  A later epoch replaces an earlier one, an earlier or equal one is ignored."""

    id: RequestId
    epoch: int
    leg: Leg
    prompt: Sequence[int]
    sampling: SamplingParams
    arrival: float  # order of service among the requests of one tenant and class
    root: BlockHash
    hashes: Sequence[BlockHash] = ()  # ready-made, of as many full pages of prompt + emitted as the caller has
    emitted: Sequence[int] = ()  # output tokens that the client has already
    claim: Claim = UNCLAIMED
    open_ended: bool = False  # nobody named a length: it is given back where it becomes too long for this worker
    expected: int = 0  # of one that is open-ended: so many tokens more will probably be written
    images: Sequence[PlacedImage] = ()
    pictures: Sequence[Medium] = ()  # one an image, where the prompt is read
    encoders: Sequence[PageSource] = ()  # workers that may be asked for the images' rows
    pooling: PoolingParams | None = None
    adapter: AdapterRef | None = None  # it must be ready before the scheduler hears of the request
    ahead: int = 0  # leg=decode: tokens that may still be written at the source while the pages come
    in_use: GrammarInUse | None = field(default=None, compare=False, repr=False)  # its grammar, once it is compiled
    apart: bool = False  # only whoever reads prompts computes the prompt, and only whoever writes the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """leg=prefill: the decode worker has room for all pages; the request may be admitted now."""

    id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesArrived:
    """leg=decode: ``computed`` tokens now stand in this worker's own, verified pages (never decreases)."""

    id: RequestId
    epoch: int
    computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """leg=decode: the prefill worker's token; with it and all pages, decoding goes on here.

    ``finish`` is set when that token was also the last: the request ends without a word to the gateway.
    """

    id: RequestId
    epoch: int
    token: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeHere:
    """leg=decode: what another worker computed is too slow to come.  What has not come is computed here, like any
    prompt; the answer goes on behind ``token``, which that worker drew."""

    id: RequestId
    epoch: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """leg=prefill: the receiver has the pages (or its lease ended); free what was held for it."""

    id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Forget the request in whatever state, unless a later epoch of it is here."""

    id: RequestId
    epoch: int


class How(Enum):
    """What an answer that is being written does next (``moving``)."""

    KEEP = auto()  # its pages: another worker copies them
    STOP = auto()  # until the other has everything
    GO_ON = auto()  # here


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """An answer that is being written here is to go on elsewhere."""

    id: RequestId
    epoch: int
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """leg=decode: everything of an answer that moved is here; ``tokens`` are those of it from ``index`` on."""

    id: RequestId
    epoch: int
    index: int
    tokens: tuple[int, ...]


Event = Arrive | Granted | PagesArrived | FirstToken | ComputeHere | Released | Cancelled | Moving | Joined


# --- plan: what to compute now ---------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, gc=False):
    """Compute ``count`` tokens of ``request`` from position ``start``; ``samples``: and draw the token after them.

    ``draft``: guessed tokens that are computed after them, with a token drawn after each; see ``core.speculation``.
    """

    request: Request
    start: int
    count: int
    samples: bool
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReturnedRequest:
    """Given back to the gateway, with the reason."""

    id: RequestId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One step (or ``steps`` equal ones, when only answers are written and the caller allowed it)."""

    rows: tuple[Row, ...] = ()
    steps: int = 1  # how often each row is repeated, one token further each time
    predicted_s: float = 0.0
    reserved: tuple[Request, ...] = ()  # leg=decode: admitted now, all pages reserved: pull from ``request.computed``
    returned: tuple[ReturnedRequest, ...] = ()  # could not stay or could not be taken
    preempted: int = 0  # requests whose pages were taken back in making this plan
    gone: tuple[RequestId, ...] = ()  # forgotten since the last plan, however they ended; the runner forgets them too
    checked: int = 0  # cached pages that were compared with their checksums for it
    micro_batch: int = 0  # which of the plans that are in flight together (``core.micro_batches``)


# --- outcome: what came of it ----------------------------------------------------------------------------------------


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """The runner's answer for one row: the tokens drawn.

    None for a row that does not sample, ``steps`` otherwise; after a draft those that stand, one at least.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens this row computed, when asked for
    cut: bool = False  # the answer cannot go on: it ends with these tokens, as if it had been too long
    pooled: bytes | None = None  # of a prompt that is only read, beside one token that means nothing
    late: bool = False  # what its grammar allows is not known yet: nothing was drawn, its last token is computed again


class Progress(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request, ready to be sent to whoever asked.  ``index`` counts output tokens before them."""

    request: Request
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the whole prompt, with the first token, when asked for
    pooled: bytes | None = None


class PageDone(msgspec.Struct, frozen=True, gc=False):
    """leg=prefill: one page is final with ``tokens`` tokens in it, and may be sent as ``piece`` (``reach.Pieces``)."""

    request: Request
    piece: int
    block: int
    group: int
    tokens: int


@dataclass(slots=True)
class Outcome:
    """What one committed step brought."""

    progress: list[Progress] = field(default_factory=list["Progress"])
    pages_done: list[PageDone] = field(default_factory=list["PageDone"])
    late: int = 0  # rows that drew nothing, as their masks were late
