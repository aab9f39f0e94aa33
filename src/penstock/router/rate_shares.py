"""How the hosts of a fleet's gateways divide the rates of tenants: shares, lent by the second.

::

    gateway host --RateDemands, once a second--> the ready worker with the smallest name
    gateway host <---------RateTotals----------- that worker (engine.service.rate_totals)

A host has a floor of each rate, and the rest in proportion to its part of the demand of all hosts::

    share = (MIN_SHARE + (1 - MIN_SHARE) x sharing x own / total) / hosts

``sharing`` of the ``hosts`` send their demands to the same worker.  Their shares add up to ``sharing / hosts``: hosts
that choose different workers for a while do not use a part twice.  A rate that is not in the totals, of which there is
little demand or none, is divided evenly; so are all of them without such a worker, or after ``TOTALS_VALID_S``.  The
number of hosts is then the last one known.  Shares add up to more than 1 only in the second of a change.

A host that is alone exchanges nothing.  The gateways of a host share their buckets (``launch.shared_rates``), and
whichever looks first exchanges for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.types import WorkerId, WorkerState
from penstock.wire.gateway_messages import MAX_RATE_DEMANDS, RateDemands, RateTotals

MIN_SHARE = 0.1
"""Of an equal share, what a host has without any demand.  What hosts without demand have saved adds to the rate when
all of them use it at once: a tenth, however many they are."""

EXCHANGE_S = 1.0
"""Between two exchanges of a host."""

TOTALS_VALID_S = 3.0
"""After so long without new totals, rates are divided evenly."""

REPORT_VALID_S = 5.0
"""Reports count for so long in the number of hosts; idle workers report at least every two seconds."""


class RateTable(Protocol):
    """The buckets of a host."""

    def locked(self) -> AbstractContextManager[None]:
        """The scope of what follows."""
        ...

    def claim_exchange(self, now: float, every_s: float) -> bool:
        """Whether this process exchanges now: no gateway of the host has done so for ``every_s``."""
        ...

    @property
    def hosts(self) -> int:
        """Hosts that have gateways, as far as known; also without the lock."""
        ...

    def set_hosts(self, hosts: int, now: float) -> None:
        """Sets the number of hosts that have gateways."""
        ...

    def expire_shares(self, before: float, now: float) -> None:
        """Shares that were set before this are equal ones again."""
        ...

    def set_shares(self, shares: Mapping[bytes, float], now: float) -> None:
        """The share of each of these buckets; of all others it is an equal one."""
        ...

    def busiest(self, most: int, now: float) -> dict[bytes, float]:
        """The buckets with the largest recent demands, as parts of a minute's rate."""
        ...


class RateShares:
    """The exchange of one gateway; from its event loop."""

    def __init__(self, table: RateTable, fleet: Fleet, links: WorkerLinks) -> None:
        self._table = table
        self._fleet = fleet
        self._links = links
        self._asked: WorkerId | None = None  # its answer is expected
        self._sent: Mapping[bytes, float] = {}
        self._has_reports = False  # has had some
        self._reported = 0

    @property
    def hosts(self) -> int:
        """Hosts that have gateways, as the last gateway of this host has learnt that exchanged."""
        return self._table.hosts

    def tick(self, now: float) -> None:
        """Called more often than ``EXCHANGE_S``, and as soon as the first worker is ready."""
        if not self._has_reports:
            self._has_reports = self._reported_hosts(now) > 0
            if not self._has_reports:
                return  # the first exchange is for the first report
        with self._table.locked():
            if not self._table.claim_exchange(now, EXCHANGE_S):
                return
            self._reported = self._reported_hosts(now)
            if self._reported:
                self._table.set_hosts(self._reported, now)
            self._table.expire_shares(now - TOTALS_VALID_S, now)
            if self.hosts <= 1:
                return
            self._sent = self._table.busiest(MAX_RATE_DEMANDS, now)
        self._asked = self._adding_worker()
        if self._asked is not None:
            slot = self._fleet.slot(self._asked)
            link = None if slot is None else self._links.link_to(self._asked, self._fleet.incarnations[slot])
            if link is not None:
                link.send(RateDemands(demands=dict(self._sent)))

    def on_totals(self, worker: WorkerId, message: RateTotals, now: float) -> None:
        """The answer of a worker.  One that was not asked is ignored."""
        if worker != self._asked:
            return
        self._asked = None
        hosts = max(1, message.hosts, self._reported)
        sharing = min(message.sharing, hosts)
        shares = {
            name: share_of(self._sent.get(name, 0.0), total, sharing, hosts) for name, total in message.totals.items()
        }
        with self._table.locked():
            self._table.set_hosts(hosts, now)
            self._table.set_shares(shares, now)

    def _reported_hosts(self, now: float) -> int:
        """The most that any ready worker has reported lately; 0: none has."""
        fleet, most = self._fleet, 0
        for slot, state in enumerate(fleet.states):
            report = fleet.reports[slot]
            if state is WorkerState.READY and report is not None and now - fleet.last_seen[slot] < REPORT_VALID_S:
                most = max(most, report.gateway_hosts)
        return most

    def _adding_worker(self) -> WorkerId | None:
        """The worker that adds up the demands: all hosts choose alike, if they see the same workers."""
        fleet = self._fleet
        ready = (fleet.ids[slot] for slot, state in enumerate(fleet.states) if state is WorkerState.READY)
        return min(ready, default=None)


def share_of(own: float, total: float, sharing: int, hosts: int) -> float:
    """The share of a rate that a host has."""
    part = min(1.0, own / total) if total > 0 else 1 / max(1, sharing)
    return (MIN_SHARE + (1 - MIN_SHARE) * max(1, sharing) * part) / hosts
