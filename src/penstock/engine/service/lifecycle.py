"""The worker's role, whether it takes new requests, and when it may exit.

A role only says what gateways send here, so a change of role changes the reports; the engine continues with what it
has.  Queued requests that the new role does not serve are returned to their gateways, which resubmit them elsewhere;
responses being decoded on a worker that becomes a prefill worker migrate (``migration``).  Draining is the same, for
all requests.

Decides what is to be done; others do it.  Pure but for its log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.config.schema import WorkerConfig
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.gateways import GatewayRequest, GatewayRequests
from penstock.engine.service.load_report import LoadReporter
from penstock.telemetry.log import log_event
from penstock.types import Duty, RequestStage, Role, WorkerState
from penstock.wire.gateway_messages import AssignRole, ReturnReason

log = logging.getLogger("penstock.worker")

STAGES_OF_ROLE = {
    Role.PREFILL: frozenset({RequestStage.PREFILL}),
    Role.DECODE: frozenset({RequestStage.DECODE}),
    Role.BOTH: frozenset(RequestStage),
    Role.ENCODE: frozenset[RequestStage](),
}
"""The legs that a worker of a role is there for.  It may be given others, where that is quicker."""


class Lifecycle:
    """Start, drain and end of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        reporter: LoadReporter,
        scheduler: Scheduler,
        asks: GatewayRequests,
        *,
        on_role: Callable[[Role], None],
        on_settled: Callable[[Role], None],
    ) -> None:
        """``on_role``: called with a new role; ``on_settled``: once only requests of its own role are here."""
        self._config = config
        self._reporter = reporter
        self._scheduler = scheduler
        self._requests = asks
        self._leaving_since: float | None = None
        self._settles = False  # a new role, and what it leaves behind is still here
        self._on_role = on_role
        self._on_settled = on_settled

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken."""
        return self._reporter.state is WorkerState.DRAINING

    @property
    def moves_answers_away(self) -> bool:
        """Whether answers that are decoded here should continue elsewhere."""
        return self._config.transfers_pages and (self.draining or self._reporter.role is Role.PREFILL)

    def assign(self, message: AssignRole, now: float) -> str | None:
        """Take over the role and duty.  Returns why requests that no longer fit go back; None: nothing has changed."""
        role, duty, reason = message.role, message.duty, None
        if role is not None and role is not self._reporter.role:
            if not self._config.transfers_pages or self._config.fixed_role or role is Role.ENCODE:
                log_event(log, logging.WARNING, "the role stays", role=self._reporter.role.value, asked=role.value)
            else:
                log_event(log, logging.INFO, "another role", role=role.value, before=self._reporter.role.value)
                self._reporter.role = role
                self._reporter.count("role_changes")
                self._on_role(role)
                self._settles = True
                reason = ReturnReason.ROLE_CHANGED
        if duty is Duty.RESTART:
            self.begin_shutdown(now)
        if duty is Duty.SERVE and self.draining and self._leaving_since is None:
            log_event(log, logging.INFO, "takes new requests again")
            self._reporter.state = WorkerState.READY
        elif duty in (Duty.DRAIN, Duty.RESTART) and not self.draining:
            log_event(log, logging.INFO, "drains", requests=len(self._requests), restart=duty is Duty.RESTART)
            self._reporter.state = WorkerState.DRAINING
            reason = ReturnReason.DRAINING
        return reason

    def check_settled(self) -> None:
        """Called now and then; reports once all requests of an earlier role are over."""
        legs = STAGES_OF_ROLE[self._reporter.role]
        if self._settles and all(ask.stage in legs for ask in self._requests.all()):
            self._settles = False
            self._on_settled(self._reporter.role)

    def begin_shutdown(self, now: float) -> None:
        """This worker is to end once no request is left here or ``drain_s`` are over."""
        if self._leaving_since is None:
            self._leaving_since = now

    def is_over(self, now: float) -> bool:
        """Whether this worker may end."""
        since = self._leaving_since
        return since is not None and (not len(self._requests) or now - since >= self._config.drain_s)

    def misplaced_requests(self) -> list[GatewayRequest]:
        """Asks that have not begun and that this worker is not there for."""
        waiting = {request.id for request in self._scheduler.not_started()}
        legs = frozenset[RequestStage]() if self.draining else STAGES_OF_ROLE[self._reporter.role]
        return [
            ask
            for ask in self._requests.all()
            if ask.stage not in legs and (ask.request in waiting or self._scheduler.get_request(ask.request) is None)
        ]
