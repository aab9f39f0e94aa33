"""What the engine's loop needs of whoever computes.

Two implementations: ``model_runner.ModelRunner`` (a model, kernels, KV memory) and ``null.NullRunner`` (a hash).  Of a
runner with two lanes, for a device that computes two plans side by side: ``device_lanes.DeviceLanes`` and
``null.NullLanes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.core.plan import Drawn, Lane, Plan
from penstock.types import RequestId


class Runner(Protocol):
    """Computes plans.  It never changes a request: what it drew is taken up by the scheduler's ``commit``."""

    def run(self, plan: Plan) -> Sequence[Drawn]:
        """One ``Drawn`` a row, in the order of ``plan.rows``; ``Drawn.late`` where a row has to be computed again.

        A row that samples draws ``plan.steps`` tokens, the first for position ``start + count``; each is the input
        of the next.  A row with a draft (then ``steps`` is 1) draws one more after each draft token, and answers with
        those that stand (``core.speculation``).  The pages of ``row.request`` already reach as far as the last token
        that is computed.
        """
        ...

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for this request between steps; an unknown one is no error."""
        ...


class LaneRunner(Protocol):
    """Computes a plan a lane (``Plan.lane``), both at once.  What it draws is what a ``Runner`` draws."""

    def begin(self, plan: Plan) -> None:
        """Start to compute; nothing is under way in this lane.  Reads the rows' requests and pages now, not later."""
        ...

    def done(self, lane: Lane) -> bool:
        """Is what was begun in this lane over?  Does not wait.

        Asked of idle lanes, too, and then any answer will do: what told of the end may have come late, and wakes
        whoever waits until this was asked.
        """
        ...

    def finish(self, lane: Lane) -> Sequence[Drawn]:
        """What it brought, as ``Runner.run``; waits for it if it must.  Requests may be gone by now."""
        ...

    def forget(self, request: RequestId) -> None:
        """As ``Runner.forget``; something of the request may still be under way."""
        ...
