"""What a flight asks for: plain records that the router's service turns into deeds, in order."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.router.worker_load import Due
from penstock.types import RequestId, TokenBatch, WorkerId
from penstock.wire.gateway_messages import Submit


@dataclass(frozen=True, slots=True)
class Send:
    """Submit this leg.  ``tokens`` are what it has to compute, ``due`` what it asks of its worker."""

    worker: WorkerId
    incarnation: int
    submit: Submit
    tokens: int
    due: Due


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Tell the worker to forget the leg, if it still listens."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Tell the worker that writes this answer that whoever was to go on with it has gone."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The leg holds nothing any more; nothing need be sent."""

    worker: WorkerId
    incarnation: int
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give this to the client.  A batch with ``finish`` is the last effect but for the ends of legs."""

    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class Fail:
    """The request cannot be served."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class WaitForWorker:
    """Ask for a decision at ``not_before``, and whenever a worker becomes ready after it."""

    not_before: float


Effect = Send | CancelLeg | Recall | LegEnded | Deliver | Fail | WaitForWorker
Effects = tuple[Effect, ...]
