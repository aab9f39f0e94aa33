"""An answer that moves to another worker while it is written: what that means for its request, at either end.

::

    here      RUNNING --KEEP--> RUNNING, gives no page back --STOP--> HANDOVER --forgotten: it goes on there
                 ^                                                       |
                 +------------------------- GO_ON -----------------------+        it goes on here after all

    there     RESERVED, with room for what is written meanwhile --Joined--> RUNNING

Pure; knows neither pages' content nor who the other worker is.
"""

from __future__ import annotations

from penstock.engine.core.plan import How, Joined, Progress
from penstock.engine.core.request import Request, Status
from penstock.engine.core.table import RequestTable
from penstock.types import Leg


def turned(table: RequestTable, request: Request, how: How) -> None:
    """Do as an event ``Moving`` says.  What does not fit the request's state is late, and no error."""
    if request.leg is Leg.PREFILL:
        return
    match how:
        case How.KEEP:
            request.kept = True
        case How.STOP if request.status is Status.RUNNING:
            table.stop(request)
        case How.GO_ON:
            request.kept = False
            if request.status is Status.HANDOVER:
                table.go_on(request)
        case _:
            pass


def joined(table: RequestTable, request: Request, event: Joined) -> Progress | None:
    """All pages are here, and the tokens that were written meanwhile: go on behind them.

    Returns the tokens that nobody told the gateway of from here.  What does not fit what this worker knows and has room
    for is given back.
    """
    known = len(request.output) - event.index
    fresh = event.tokens[known:]
    if not 0 <= known <= len(event.tokens) or request.known + len(fresh) - 1 > request.room:
        table.give_back(request, "pages_lost: tokens that do not fit")
        table.forget(request)
        return None
    index, finish = len(request.output), None
    request.first_token = True
    for token in fresh:
        finish = request.append(token)
    request.computed = request.known - 1
    if finish is None:
        table.memory.settle(request)
        table.start(request)
    else:
        table.forget(request)
    return Progress(request, index, fresh, (), finish) if fresh else None
