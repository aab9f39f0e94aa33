"""What tenants ask of all gateway hosts together, as far as hosts send it to this worker.

Gateways of several hosts have no link between them, but all of them speak to the workers.  They choose one worker that
adds up their demands (``router.rate_shares``).  It decides nothing, and knows no tenant: names are keyed digests.  Ages
are those of messages here; no host's clock is compared.  Pure: time is a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest

from penstock.wire.gateway_messages import MAX_GATEWAY_HOSTS, MAX_RATE_TOTALS, RateTotals

DEMAND_VALID_S = 3.0
"""A host's demand counts for so long after it came; the next one is due after a second (``router.rate_shares``)."""

ADD_INTERVAL_S = 0.5
"""Between two additions of all hosts' demands; between them, only the demand of the host that asks is replaced."""

MAX_RATE_DEMAND = 1e9


@dataclass(slots=True)
class _HostDemand:
    at: float
    demands: Mapping[bytes, float]


class RateDemandTotals:
    """The demands of all hosts, by bucket."""

    def __init__(self) -> None:
        self._hosts: dict[str, _HostDemand] = {}
        self._totals: dict[bytes, float] = {}
        self._listed: tuple[bytes, ...] = ()  # the largest of them
        self._added_at = float("-inf")

    def on_demands(self, host: str, demands: Mapping[bytes, float], hosts: int, now: float) -> RateTotals:
        """Replaces the demands of a host, and returns the totals.  ``hosts``: those with gateways that speak to this
        worker."""
        known = self._hosts.pop(host, None)
        self._hosts[host] = _HostDemand(now, demands)
        if known is None or now - self._added_at >= ADD_INTERVAL_S:
            self._add_all(now)
        else:
            for name, demand in known.demands.items():
                self._totals[name] = self._totals.get(name, 0.0) - demand
            for name, demand in demands.items():
                self._totals[name] = self._totals.get(name, 0.0) + demand
        totals = {name: min(max(0.0, self._totals.get(name, 0.0)), MAX_RATE_DEMAND) for name in self._listed}
        return RateTotals(
            hosts=min(max(hosts, 1), MAX_GATEWAY_HOSTS),
            sharing=min(len(self._hosts), max(hosts, 1), MAX_GATEWAY_HOSTS),
            totals=totals,
        )

    def _add_all(self, now: float) -> None:
        """Forgets silent hosts; adds up the others anew, so that errors of rounding do not pile up."""
        self._added_at = now
        self._hosts = {host: each for host, each in self._hosts.items() if now - each.at < DEMAND_VALID_S}
        totals: dict[bytes, float] = {}
        for each in self._hosts.values():
            for name, demand in each.demands.items():
                totals[name] = totals.get(name, 0.0) + demand
        self._totals = totals
        self._listed = tuple(nlargest(MAX_RATE_TOTALS, totals, key=totals.__getitem__))
