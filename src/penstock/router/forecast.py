"""How long a request that came now would take to its first token, by what workers report.  Pure.

The worker is taken that would be first; which one the router will choose is another question, but no worse one.
"""

from __future__ import annotations

from penstock.router.fleet import Fleet
from penstock.router.policy.costs import waiting
from penstock.types import Role, ServiceClass
from penstock.wire.ports import Forecast

READERS = (Role.PREFILL, Role.BOTH)


def forecast(fleet: Fleet, tokens: int, service: ServiceClass) -> Forecast | None:
    """For a prompt of so many tokens, nothing of it cached; None while no worker has measured a step."""
    found: Forecast | None = None
    for role in READERS:
        slots = fleet.slots_of(role, None)
        if not len(slots) or not fleet.columns.measured(slots).any():
            continue
        load, rates = fleet.columns.at(slots)
        wait = waiting(load, rates, urgent=service is ServiceClass.INTERACTIVE)
        read = rates.step + rates.token * tokens + rates.pair * (tokens * (tokens + 1) / 2) + rates.draw
        best = int((wait + read).argmin())
        here = Forecast(wait_s=float(wait[best]), read_s=float(read[best]))
        if found is None or here.wait_s + here.read_s < found.wait_s + found.read_s:
            found = here
    return found
