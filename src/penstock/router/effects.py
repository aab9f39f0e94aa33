"""What a routed request wants done: plain records, and the loop that hands each of them to a port, in order.

The gateway's port is ``router.dispatch``, the simulator's ``sim.gateway``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from penstock.errors import PenstockError
from penstock.router.worker_load import ExpectedWork
from penstock.types import RequestId, TokenBatch, WorkerId
from penstock.wire.gateway_messages import Submit


@dataclass(frozen=True, slots=True)
class SubmitStage:
    """Submit this stage.  ``tokens`` is what it computes, ``work`` what it adds to its worker's load."""

    worker: WorkerId
    incarnation: int
    submit: Submit
    tokens: int
    work: ExpectedWork


@dataclass(frozen=True, slots=True)
class CancelStage:
    """Send the worker a Cancel, if it is still connected."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class AbortMigration:
    """Notify the worker that decodes this request that its successor is gone."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class StageEnded:
    """The stage holds nothing at its worker any more; nothing is sent."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """Pass this to the client.  After a batch with ``finish`` only stages end."""

    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request cannot be served."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class WaitForWorker:
    """Choose workers at ``not_before``, and whenever a worker becomes ready after it."""

    not_before: float


RequestEffect = SubmitStage | CancelStage | AbortMigration | StageEnded | DeliverTokens | FailRequest | WaitForWorker
RequestEffects = tuple[RequestEffect, ...]

_T_contra = TypeVar("_T_contra", contravariant=True)


class EffectPort(Protocol[_T_contra]):
    """Carries out the effects of one request, the ``target``."""

    def observe(self, target: _T_contra, effect: RequestEffect, now: float) -> None:
        """Record ``effect``.  Called before it is carried out."""
        ...

    def deliver(self, target: _T_contra, batch: TokenBatch, now: float) -> None:
        """Pass tokens to the client."""
        ...

    def submit(self, target: _T_contra, effect: SubmitStage, now: float) -> bool:
        """Send a stage to its worker.  False if that failed; the port has applied what follows from it."""
        ...

    def cancel_stage(self, effect: CancelStage) -> None:
        """Release the stage's load and send a Cancel."""
        ...

    def end_stage(self, effect: StageEnded) -> None:
        """Release the stage's load."""
        ...

    def abort_migration(self, effect: AbortMigration) -> None:
        """Notify the decoding worker."""
        ...

    def wait(self, target: _T_contra, not_before: float, now: float) -> None:
        """Choose workers at ``not_before``, or now if that has passed."""
        ...

    def fail(self, target: _T_contra, error: PenstockError, now: float) -> None:
        """Pass the error to the client."""
        ...


def apply_effects(port: EffectPort[_T_contra], target: _T_contra, effects: RequestEffects, now: float) -> None:
    """Carry out ``effects`` in order.  What one leads to is done before the next.

    Stages after one that could not be submitted are skipped: by then the request has cancelled all of them.
    """
    for effect in effects:
        port.observe(target, effect, now)
        if isinstance(effect, DeliverTokens):
            port.deliver(target, effect.batch, now)
        elif isinstance(effect, StageEnded):
            port.end_stage(effect)
        elif isinstance(effect, CancelStage):
            port.cancel_stage(effect)
        elif isinstance(effect, AbortMigration):
            port.abort_migration(effect)
        elif isinstance(effect, SubmitStage):
            if not port.submit(target, effect, now):
                return
        elif isinstance(effect, WaitForWorker):
            port.wait(target, effect.not_before, now)
        elif isinstance(effect, FailRequest):
            port.fail(target, effect.error, now)
