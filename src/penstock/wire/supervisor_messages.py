"""Messages between the supervisor and its gateways, over an inherited SEQPACKET socket pair."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.types import (
    Incarnation,
    Name,
    Role,
    WorkerState,
)
from penstock.wire.gateway_messages import AnyWorker, Pid, ReasonText, WireMessage

MAX_LABELS = 32

Labels = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], Annotated[str, msgspec.Meta(max_length=256)]],
    msgspec.Meta(max_length=MAX_LABELS),
]
"""What an operator calls a worker, as {"zone": "a"}; shown, and not interpreted."""


class WorkerUp(WireMessage, frozen=True, kw_only=True, tag="worker_up"):
    """A worker process was started and will listen at ``endpoint``."""

    worker: AnyWorker
    incarnation: Incarnation
    role: Role
    pid: Pid
    endpoint: Name
    labels: Labels = msgspec.field(default_factory=dict)


class WorkerDown(WireMessage, frozen=True, kw_only=True, tag="worker_down"):
    """A worker process has ended (or was ended).  ``state`` is dead, or wedged while it is being killed."""

    worker: AnyWorker
    incarnation: Incarnation
    state: WorkerState
    reason: ReasonText
    fault: bool = False  # of what it did: it crashed, hung or ran out of memory, and was not ended from outside


class WorkerRemoved(WireMessage, frozen=True, kw_only=True, tag="worker_removed"):
    """The worker is no longer a member of the service: it gets no new requests, and is forgotten when those that it has
    have ended."""

    worker: AnyWorker


class ServiceDraining(WireMessage, frozen=True, kw_only=True, tag="draining"):
    """The service is about to stop: finish what runs, take nothing new."""


class SuspectWorker(WireMessage, frozen=True, kw_only=True, tag="suspect"):
    """Gateway to supervisor: this worker makes no progress with what it has; please look, and end it if so."""

    worker: AnyWorker
    incarnation: Incarnation
    reason: ReasonText


class LoadModel(WireMessage, frozen=True, kw_only=True, tag="load_model"):
    """The front of a catalogue to its supervisor: start this model's process.  Answered by WorkerUp, or WorkerDown."""

    worker: AnyWorker


class UnloadModel(WireMessage, frozen=True, kw_only=True, tag="unload_model"):
    """The front of a catalog to its supervisor: end the process of an unused model.  Answered by WorkerDown."""

    worker: AnyWorker


SupervisorMessage = WorkerUp | WorkerDown | WorkerRemoved | ServiceDraining | SuspectWorker | LoadModel | UnloadModel
