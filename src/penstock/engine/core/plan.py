"""What comes out of the scheduler: a plan of one step, and the outcome of its commit; and the protocol of draft tokens.

All plain data, so the simulator and the tests use the same as a worker.  What is made per row and step is a msgspec
struct: ten times as quick to make as a frozen dataclass, and nothing for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.types import (
    FinishReason,
    RequestId,
    TokenLogprob,
)

if TYPE_CHECKING:
    from penstock.engine.core.request import Request


# --- events: what happened -------------------------------------------------------------------------------------------


# --- plan: what to compute now ---------------------------------------------------------------------------------------


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):
    """Compute ``count`` tokens of ``request`` from position ``start``; ``samples``: and sample the token after them.

    ``draft``: draft tokens that are computed after them, with a token sampled after each (``accepted_count``).
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
class StepPlan:
    """One step (or ``steps`` equal ones, when only answers are written and the caller allowed it)."""

    rows: tuple[ScheduledTokens, ...] = ()
    steps: int = 1  # how often each row is repeated, one token further each time
    predicted_s: float = 0.0
    reserved: tuple[Request, ...] = ()  # stage=decode: admitted now, all pages reserved: pull from ``request.computed``
    returned: tuple[ReturnedRequest, ...] = ()  # could not stay or could not be taken
    preempted: int = 0  # requests whose pages were taken back in making this plan
    removed: tuple[
        RequestId, ...
    ] = ()  # forgotten since the last plan, however they ended; the runner forgets them too
    verified_pages: int = 0  # cached pages that were compared with their checksums for it
    micro_batch: int = 0  # which of the plans that are in flight together (``core.micro_batches``)


# --- outcome: what came of it ----------------------------------------------------------------------------------------


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """The runner's answer for one row: the tokens drawn.

    None for a row that does not sample, ``steps`` otherwise; after a draft those that stand, one at least.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens this row computed, when asked for
    ends: bool = False  # the answer cannot go on: it ends with these tokens, as if it had been too long
    pooled: bytes | None = None  # of a pooling request, with one token that means nothing
    mask_late: bool = (
        False  # what its grammar allows is not known yet: nothing was drawn, its last token is computed again
    )


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request, ready to be sent to its gateway.  ``index`` counts output tokens before them."""

    request: Request
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the whole prompt, with the first token, when asked for
    pooled: bytes | None = None


class CompletedPage(msgspec.Struct, frozen=True, gc=False):
    """stage=prefill: one page is final with ``tokens`` tokens in it and may be sent as ``piece`` of the transfer."""

    request: Request
    piece: int
    block: int
    group: int
    tokens: int


@dataclass(slots=True)
class StepOutcome:
    """What one committed step brought."""

    new_tokens: list[NewTokens] = field(default_factory=list["NewTokens"])
    completed_pages: list[CompletedPage] = field(default_factory=list["CompletedPage"])
    late_masks: int = 0  # rows that drew nothing, as their masks were late


class DraftProposer(Protocol):
    """Guesses for rows that each compute one token; see ``engine.spec``."""

    def propose(self, rows: Sequence[ScheduledTokens]) -> Sequence[tuple[int, ...]]:
        """Draft tokens for each row, to follow its token; nothing at all when none is worth its time."""
        ...

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        """A step of such rows, with or without drafts, was computed in so long."""
        ...

    def remove_request(self, request: RequestId) -> None:
        """The request has left; an unknown one is no error."""
        ...


def accepted_count(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the ``drawn`` tokens stand.

    ``drawn[i]`` was drawn after ``draft[:i]``, so it stands when all of these were drawn before it.  The first always
    does.
    """
    count = 1
    for guessed, token in zip(draft, drawn, strict=False):
        if guessed != token:
            break
        count += 1
    return count
