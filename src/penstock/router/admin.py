"""An operator's requests to workers: another role, draining, restarting.

The gateway checks that the service would continue, sends the request, and waits for the worker's report: all gateways
go by reports.  Two gateways with different requests at once may both find that the service would continue and be wrong
together; the last request wins, and the next one can correct it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import AssignmentTimeout, Conflict, Forbidden, UnknownWorker
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.telemetry.log import log_event
from penstock.types import Duty, Role, WorkerId, WorkerState
from penstock.wire.gateway_messages import AssignRole

log = logging.getLogger("penstock.router")

CONFIRM_TIMEOUT_S = 3.0
"""A worker hears between two steps; so long is waited for its answer."""

ROLES_BY_PART = {"reads prompts": (Role.PREFILL, Role.BOTH), "writes answers": (Role.DECODE, Role.BOTH)}
"""What the service needs somebody for, and the roles that do it."""


@dataclass(slots=True)
class _Waiting:
    taken: Callable[[], bool]
    future: asyncio.Future[None]


class RouterAdmin:
    """``interfaces.WorkerAdmin`` of a gateway."""

    def __init__(self, fleet: Fleet, links: WorkerLinks) -> None:
        self._fleet = fleet
        self._links = links
        self._waiting: list[_Waiting] = []
        self.may_assign: Callable[[str], bool] = lambda worker: True
        """Whether this gateway's node may change this worker."""

    async def assign(
        self, worker: str, *, role: Role | None = None, duty: Duty | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Give a worker another role or duty, and return its row once it has reported it."""
        fleet = self._fleet
        slot = fleet.slot(WorkerId(worker))
        if slot is None:
            raise UnknownWorker(worker[:128], ", ".join(sorted(filter(None, fleet.ids))) or "none")
        if not self.may_assign(worker):
            raise Forbidden(
                f"The worker '{worker}' is another node's, and this gateway's node has no right 'operator'.",
                code="node_not_operator",
            )
        incarnation = fleet.incarnations[slot]
        link = self._links.link_to(fleet.ids[slot], incarnation)
        if link is None or not fleet.is_up(slot):
            raise Conflict(f"The worker '{worker}' is {fleet.states[slot].value}; wait until it is ready.")
        self._check(slot, role, duty, force=force)
        log_event(log, logging.INFO, "asked for by an operator", worker=worker, role=role, duty=duty)

        def taken() -> bool:
            return fleet.incarnations[slot] != incarnation or self._has_taken(slot, role, duty)

        if not link.send(AssignRole(role=role, duty=duty)):
            raise AssignmentTimeout(f"The worker '{worker}' cannot be reached now.")
        if duty is Duty.RESTART or not taken():
            await self._until(taken, worker)
        row = next((row for row in fleet.status_rows() if row["id"] == worker), None)
        if row is None:  # it was forgotten meanwhile
            raise UnknownWorker(worker[:128], ", ".join(sorted(filter(None, fleet.ids))) or "none")
        return row

    def on_report(self) -> None:
        """Resolve what waits for this report."""
        for waiting in self._waiting:
            if waiting.taken() and not waiting.future.done():
                waiting.future.set_result(None)

    async def _until(self, taken: Callable[[], bool], worker: str) -> None:
        waiting = _Waiting(taken, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await waiting.future
        except TimeoutError:
            raise AssignmentTimeout(
                f"The worker '{worker}' has not answered within {CONFIRM_TIMEOUT_S:g} s; it may be amid a long step. "
                "Look at GET /admin/workers."
            ) from None
        finally:
            self._waiting.remove(waiting)

    def _has_taken(self, slot: int, role: Role | None, duty: Duty | None) -> bool:
        fleet = self._fleet
        if role is not None and fleet.roles[slot] is not role:
            return False
        if duty is None:
            return True
        state = fleet.states[slot]
        return state is WorkerState.READY if duty is Duty.SERVE else state is not WorkerState.READY

    # --- what may be done ---------------------------------------------------------------------------------------------

    def _check(self, slot: int, role: Role | None, duty: Duty | None, *, force: bool) -> None:
        """Raises Conflict."""
        fleet = self._fleet
        worker, now = fleet.ids[slot], fleet.roles[slot]
        if role is not None and role is not now and (role is Role.ENCODE or not fleet.can_transfer_kv(slot)):
            why = "encoding needs a worker that was started for it" if role is Role.ENCODE else _fixed(now)
            raise Conflict(f"The worker '{worker}' stays {now.value}: {why}.", param="role", code="role_is_fixed")
        before = [(other, fleet.roles[other]) for other in self._serving(slot)]
        stays = duty in (None, Duty.SERVE)
        after = [(other, role or own if other == slot else own) for other, own in before if other != slot or stays]
        for part, roles in ROLES_BY_PART.items():
            had, has = (any(own in roles for _, own in those) for those in (before, after))
            if had and not has and not force:
                raise Conflict(
                    f"The worker '{worker}' is the last ready one that {part}. Give another worker the role "
                    f'{" or ".join(own.value for own in roles)} first, or insist with "force": true.',
                    code="last_of_its_role",
                )

    def _serving(self, slot: int) -> list[int]:
        """Ready workers that serve what this one does, and this one."""
        fleet = self._fleet
        report = fleet.reports[slot]
        return [s for role in Role for s in fleet.ready(role, report.identity if report is not None else None)]


def _fixed(role: Role) -> str:
    if role is Role.ENCODE:
        return "it has no memory for KV pages"
    return "its pages cannot be handed over, so it serves both phases"
