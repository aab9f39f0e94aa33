"""How a flight ends that cannot go on: in an error, or because what was delivered is the whole answer.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.limits import FailoverConfig, Limits
from penstock.errors import DeadlineMissed, NoWorkers, PenstockError, RequestError, StalledRequest, WorkerLost
from penstock.types import Claim, FinishReason, SamplingParams, ValidRequest
from penstock.wire.codec import MAX_FRAME_BYTES
from penstock.wire.messages import NO_HELLO, OTHER_PROCESS, TOO_LARGE, TOO_LONG, UNKNOWN

NO_FAILURES = frozenset(
    {"queue_full", "preempted", "yielded", "deadline", "draining", TOO_LONG, NO_HELLO, OTHER_PROCESS}
)
"""Reasons of workers that are well and give a request back."""


_LOST = (UNKNOWN, "unsent", "connection lost", "the gateway was silent")


def is_no_fault_of_sender(reason: str) -> bool:
    """Does this reason speak of a message that was lost, or of another worker, and not of whoever says it?"""
    return reason in _LOST or reason == TOO_LARGE or reason.startswith("pages_lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When to give up."""

    max_attempts: int  # submissions without a new token in between
    first_byte_s: float  # to the first token, of a request that says nothing else
    stall_s: float  # between two tokens
    poison_tokens: int = 8  # new tokens clear a request of the deaths before them

    @classmethod
    def of(cls, failover: FailoverConfig, limits: Limits) -> Patience:
        """As it is set."""
        return cls(
            max_attempts=failover.max_attempts,
            first_byte_s=limits.first_byte_s,
            stall_s=limits.stall_s,
            poison_tokens=failover.poison_tokens,
        )

    def first_s(self, claim: Claim) -> float:
        """To the first token."""
        return self.first_byte_s if claim.max_wait_s is None else claim.max_wait_s


def aged(claim: Claim, waited_s: float, *, started: bool) -> Claim:
    """The claim by now: some of its time is over, and who has a token waits for no first one."""
    if claim.max_wait_s is None:
        return claim
    left = None if started else max(0.0, claim.max_wait_s - waited_s)
    return msgspec.structs.replace(claim, max_wait_s=left)


def too_long(request: ValidRequest, longest: float, *, started: bool) -> PenstockError:
    """Nobody has the memory for it.  ``longest``: the longest context of any worker, if that is why."""
    known, left = len(request.prompt), request.sampling.max_tokens
    if request.open_ended:
        text = f"No worker has the KV memory for {known} tokens of prompt and an answer."
    else:
        text = f"No worker has the KV memory for {known} tokens of prompt and {left} of answer."
    if longest < math.inf:
        text += f" The longest context of any worker is {longest:.0f} tokens."
    return WorkerLost(text) if started else RequestError(text, code="context_length_exceeded")


def too_large() -> PenstockError:
    """A message about it is larger than any may be, whoever sends it."""
    return RequestError(
        f"This request, or a step of its answer, does not fit into a message of {MAX_FRAME_BYTES} bytes between "
        "processes. Ask for fewer log-probabilities, or send a shorter prompt.",
        code="message_too_large",
    )


def stalled(limit_s: float, *, started: bool, waiting: bool, bounded: bool = False) -> PenstockError:
    """No token came within the limit.  ``waiting``: no worker even had it; ``bounded``: it may wait for no longer."""
    if bounded and not started:
        return DeadlineMissed(f"The request waited for {limit_s:g} s, as long as it may, and no token was computed.")
    what = "next" if started else "first"
    if waiting:
        return NoWorkers(f"No worker was free to compute the {what} token within {limit_s:g} s.")
    return StalledRequest(f"No worker computed the {what} token within {limit_s:g} s.")


def satisfied(sampling: SamplingParams, emitted: Sequence[int]) -> FinishReason | None:
    """Do the delivered tokens end the answer already, though nobody has said so?"""
    count = len(emitted)
    if count and count >= sampling.min_tokens and emitted[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= sampling.max_tokens else None
