"""What a flight asks for: plain records that the router's service turns into deeds, in order."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.router.worker_load import ExpectedWork
from penstock.types import RequestId, TokenBatch, WorkerId
from penstock.wire.gateway_messages import Submit


@dataclass(frozen=True, slots=True)
class SubmitStage:
    """Submit this leg.  ``tokens`` are what it has to compute, ``due`` what it asks of its worker."""

    worker: WorkerId
    incarnation: int
    submit: Submit
    tokens: int
    work: ExpectedWork


@dataclass(frozen=True, slots=True)
class CancelStage:
    """Tell the worker to forget the leg, if it still listens."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class AbortMigration:
    """Tell the worker that writes this answer that whoever was to go on with it has gone."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class StageEnded:
    """The leg holds nothing any more; nothing need be sent."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """Give this to the client.  A batch with ``finish`` is the last effect but for the ends of legs."""

    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request cannot be served."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class WaitForWorker:
    """Ask for a decision at ``not_before``, and whenever a worker becomes ready after it."""

    not_before: float


RequestEffect = SubmitStage | CancelStage | AbortMigration | StageEnded | DeliverTokens | FailRequest | WaitForWorker
RequestEffects = tuple[RequestEffect, ...]
