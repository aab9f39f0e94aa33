"""All requests of one engine, each in the one place that its status names, and the moves between the places.

A request that leaves gives everything back in the same call.  Knows nothing of steps and budgets.

::

    WHOLE    WAITING -> RUNNING -> GONE                          preempted: RUNNING -> WAITING
    PREFILL  UNGRANTED -Granted-> WAITING -> RUNNING -> HANDOVER -Released-> GONE
    DECODE   WAITING -> RESERVED -PagesArrived, FirstToken-> RUNNING -> GONE      preempted: -> returned, GONE
"""

from __future__ import annotations

from penstock.engine.core.memory import PageMemory
from penstock.engine.core.plan import ReturnedRequest
from penstock.engine.core.queue import WaitingQueue
from penstock.engine.core.request import Request, Status
from penstock.types import Leg, RequestId


class RequestTable:
    """Owner of the requests; ``memory`` owns their pages."""

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self.all: dict[RequestId, Request] = {}  # all that are not GONE
        self.running: dict[RequestId, Request] = {}
        self.reserved: dict[RequestId, Request] = {}
        self.queue = WaitingQueue()
        self.ungranted = 0
        self.preemptions = 0  # since the start
        self.returned: list[ReturnedRequest] = []  # for the next plan to hand out
        self.gone: list[RequestId] = []  # the same

    @property
    def queued(self) -> int:
        """Requests without pages."""
        return self.ungranted + len(self.queue)

    @property
    def active(self) -> int:
        """Requests that take part in steps, or will as soon as their pages arrive."""
        return len(self.running) + len(self.reserved)

    def add(self, request: Request) -> None:
        """A new request; no other of its id is here."""
        self.all[request.id] = request
        if request.status is Status.UNGRANTED:
            self.ungranted += 1
        else:
            self.queue.push(request)

    def grant(self, request: Request) -> None:
        """leg=prefill: the receiver has room, so the request may line up."""
        if request.status is Status.UNGRANTED:
            self.ungranted -= 1
            self.queue.push(request)

    def admit(self, request: Request) -> None:
        """The head of the queue has got its pages."""
        if request.leg is Leg.DECODE:
            self.reserved[request.id] = self.queue.pop(Status.RESERVED)
        else:
            self.running[request.id] = self.queue.pop(Status.RUNNING)

    def start(self, request: Request) -> None:
        """leg=decode: everything has arrived."""
        del self.reserved[request.id]
        request.status = Status.RUNNING
        self.running[request.id] = request

    def hand_over(self, request: Request) -> None:
        """leg=prefill: everything is computed; the pages are held for the receiver."""
        del self.running[request.id]
        request.status = Status.HANDOVER

    def preempt(self, victim: Request) -> None:
        """Take the pages back.  What was full stays in the prefix cache for as long as nobody needs the room."""
        self.preemptions += 1
        victim.preempted += 1
        if victim.leg is Leg.WHOLE:
            del self.running[victim.id]
            self.memory.release(victim)
            self.queue.push(victim)
        else:
            self.give_back(victim, "preempted")
            self.forget(victim)

    def give_back(self, request: Request, reason: str) -> None:
        """Tell the gateway to serve this request elsewhere."""
        self.returned.append(ReturnedRequest(request.id, request.epoch, reason))

    def forget(self, request: Request) -> None:
        """Free everything at once, whatever the status."""
        match request.status:
            case Status.UNGRANTED:
                self.ungranted -= 1
            case Status.WAITING:
                self.queue.discard(request)
            case Status.RESERVED:
                del self.reserved[request.id]
            case Status.RUNNING:
                del self.running[request.id]
            case _:
                pass
        request.status = Status.GONE
        del self.all[request.id]
        self.gone.append(request.id)
        self.memory.release(request)
