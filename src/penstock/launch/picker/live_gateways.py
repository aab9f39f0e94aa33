"""The gateways among the members that can serve now, as each says itself.

Each member is probed at ``/ready`` every ``ready_every_s``, over one connection.  A gateway that drains, that has no
worker, or that does not answer within ``ready_timeout_s`` is left out until it says otherwise.  To be wrong for that
long does no harm: the proxy has further endpoints to try, and any gateway gives the same response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.config.limits import PickerLimits
from penstock.http_client import HttpStreamClient, StreamError
from penstock.launch.members.interface import Member, Members, follow_members
from penstock.launch.picker.choice import GatewayRanking
from penstock.telemetry.log import log_event

log = logging.getLogger(__name__)

PATH = "/ready"
OK = 200


class LiveGateways:
    """Follows ``members`` while ``run`` runs.  ``ranking`` is what there is now; ``on_change`` is called after a change
    of it."""

    def __init__(
        self, members: Members, limits: PickerLimits, *, https: bool = False, on_change: Callable[[], None]
    ) -> None:
        """``https``: gateways speak HTTPS.  Their certificates are not verified, as no request is sent here."""
        self.ranking = GatewayRanking(())
        self.settled = asyncio.Event()  # the first members are known, and each has answered or has not
        self._members = members
        self._limits = limits
        self._scheme = "https" if https else "http"
        self._on_change = on_change
        self._probes: dict[str, asyncio.Task[None]] = {}  # by HOST:PORT
        self._ready: dict[str, bool] = {}  # of those that were probed

    @property
    def member_count(self) -> int:
        """Number of members, ready or not."""
        return len(self._probes)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await follow_members(self._members, self._set_members)
        finally:
            for probe in self._probes.values():
                probe.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _set_members(self, members: Sequence[Member]) -> None:
        wanted = {member.endpoint.removeprefix("tcp://"): member for member in members}
        for endpoint in self._probes.keys() - wanted.keys():
            self._probes.pop(endpoint).cancel()
            self._ready.pop(endpoint, None)
            log_event(log, logging.INFO, "gateway is no longer a member", gateway=endpoint)
        for endpoint in wanted.keys() - self._probes.keys():
            self._probes[endpoint] = asyncio.get_running_loop().create_task(self._probe(endpoint))
        self._changed()

    def _changed(self) -> None:
        if len(self._ready) == len(self._probes):
            self.settled.set()
        ready = [endpoint for endpoint, is_ready in self._ready.items() if is_ready]
        if set(ready) != set(self.ranking.endpoints):
            self.ranking = GatewayRanking(ready)
        self._on_change()

    async def _probe(self, endpoint: str) -> None:
        """Until cancelled."""
        async with HttpStreamClient(f"{self._scheme}://{endpoint}", verify=False) as client:
            while True:
                problem = await self._problem(client)
                known = self._ready.get(endpoint)
                if known != (problem is None):
                    self._ready[endpoint] = problem is None
                    if problem is None:
                        log_event(log, logging.INFO, "gateway is ready", gateway=endpoint)
                    else:
                        log_event(log, logging.WARNING, "gateway is not ready", gateway=endpoint, reason=problem)
                    self._changed()
                await asyncio.sleep(self._limits.ready_every_s)

    async def _problem(self, client: HttpStreamClient) -> str | None:
        """Why it cannot serve; None: it can."""
        try:
            async with asyncio.timeout(self._limits.ready_timeout_s):
                reply = await client.get(PATH)
        except TimeoutError:
            return f"no answer within {self._limits.ready_timeout_s:g} s"
        except StreamError as error:
            return str(error)
        except Exception as error:
            log.exception("a gateway cannot be asked")
            return type(error).__name__
        return None if reply.status == OK else f"{PATH} answers {reply.status}"
