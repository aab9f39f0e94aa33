"""All requests of one engine, each in the one place that its status names, and the moves between the places.

A request that leaves gives everything back in the same call.  Knows nothing of steps and budgets.

::

    WHOLE    WAITING -> RUNNING -> GONE                          preempted: RUNNING -> WAITING
    PREFILL  UNGRANTED -CreditGranted-> WAITING -> RUNNING -> HANDOVER -PagesReleased-> GONE
    moving   RUNNING -> HANDOVER -> GONE, or back (``core.scheduler``)
    DECODE   WAITING -> RESERVED -PagesArrived, FirstTokenArrived-> RUNNING -> GONE   preempted: -> returned, GONE
                        RESERVED -RecomputeLocally-> WAITING, a WHOLE one from then on
"""

from __future__ import annotations

from penstock.engine.core.kv_cache_manager import KvCacheManager
from penstock.engine.core.plan import ReturnedRequest
from penstock.engine.core.request import Request, RequestStatus
from penstock.engine.core.waiting_queue import FairClock, WaitingQueue
from penstock.types import RequestId, RequestStage
from penstock.wire.gateway_messages import ReturnReason


class RequestTable:
    """Owner of the requests; ``memory`` owns their pages."""

    def __init__(self, memory: KvCacheManager, fair: FairClock) -> None:
        self.memory = memory
        self.fair = fair
        self.requests: dict[RequestId, Request] = {}  # all that are not GONE
        self.running: dict[RequestId, Request] = {}
        self.reserved: dict[RequestId, Request] = {}
        self.paused: dict[RequestId, Request] = {}  # moving; they may still come back
        self.queue = WaitingQueue(fair)
        self.ungranted = 0
        self.preemptions = 0  # since the start
        self.yield_count = 0  # of those, for a request of a class that goes first
        self.expired = 0  # requests given back because their time was up, since the start
        self.returned: list[ReturnedRequest] = []  # for the next plan to hand out
        self.removed: list[RequestId] = []  # the same

    @property
    def queued(self) -> int:
        """Requests without pages."""
        return self.ungranted + len(self.queue)

    @property
    def active_count(self) -> int:
        """Requests that take part in steps, or will as soon as their pages arrive, or should they not move."""
        return len(self.running) + len(self.reserved) + len(self.paused)

    def add(self, request: Request) -> None:
        """A new request; no other of its id is here."""
        self.requests[request.id] = request
        if request.status is RequestStatus.UNGRANTED:
            self.ungranted += 1
        else:
            self.queue.push(request)

    def enqueue_granted(self, request: Request) -> None:
        """stage=prefill: the receiver has room, so the request may line up."""
        if request.status is RequestStatus.UNGRANTED:
            self.ungranted -= 1
            self.queue.push(request)

    def admit(self, request: Request) -> None:
        """The first of a line has got its pages.  What a preempted one computes anew is not its tenant's debt."""
        elsewhere = request.stage is RequestStage.DECODE
        self.queue.pop(request, RequestStatus.RESERVED if elsewhere else RequestStatus.RUNNING)
        (self.reserved if elsewhere else self.running)[request.id] = request
        self.fair.charge_prompt(
            request.fairness_key, 0 if request.preemptions else request.uncomputed, request.qos.weight
        )

    def start_running(self, request: Request) -> None:
        """stage=decode: everything has arrived."""
        del self.reserved[request.id]
        request.status = RequestStatus.RUNNING
        self.running[request.id] = request

    def recompute_locally(self, request: Request) -> None:
        """stage=decode: what has not arrived is computed here.  Full pages that have are found again in the cache.

        It is admitted once more, and counts as preempted then: its tenant was charged for the prompt already.
        """
        del self.reserved[request.id]
        request.preemptions += 1
        self.memory.release(request)
        request.stage = RequestStage.WHOLE
        self.queue.push(request)

    def hand_over(self, request: Request) -> None:
        """stage=prefill: everything is computed; the pages are held for the receiver."""
        del self.running[request.id]
        request.status = RequestStatus.HANDOVER

    def pause(self, request: Request) -> None:
        """Moving: nothing more of it is computed here, unless it goes on."""
        del self.running[request.id]
        request.status = RequestStatus.HANDOVER
        self.paused[request.id] = request

    def resume(self, request: Request) -> None:
        """It does not move after all."""
        del self.paused[request.id]
        request.status = RequestStatus.RUNNING
        self.running[request.id] = request

    def preempt(self, victim: Request, *, yielding: bool = False) -> None:
        """Free its pages.  Full pages stay in the prefix cache until the room is needed.

        ``yielding``: to a request of a class that goes first.
        """
        self.preemptions += 1
        self.yield_count += yielding
        victim.preemptions += 1
        if victim.stage is RequestStage.WHOLE:
            del self.running[victim.id]
            self.memory.release(victim)
            self.queue.push(victim)
        else:
            self.return_request(victim, ReturnReason.YIELDED if yielding else ReturnReason.PREEMPTED)
            self.remove(victim)

    def expire(self, now: float) -> None:
        """Return heads of the queue whose deadline has passed."""
        for request in self.queue.heads():
            if request.deadline is not None and request.deadline <= now and not request.output:
                self.expired += 1
                self.return_request(request, ReturnReason.DEADLINE)
                self.remove(request)

    def return_request(self, request: Request, reason: str) -> None:
        """Tell the gateway to serve this request elsewhere."""
        self.returned.append(ReturnedRequest(request.id, request.epoch, reason))

    def remove(self, request: Request) -> None:
        """Free everything at once, whatever the status."""
        match request.status:
            case RequestStatus.UNGRANTED:
                self.ungranted -= 1
            case RequestStatus.WAITING:
                self.queue.remove(request)
            case RequestStatus.RESERVED:
                del self.reserved[request.id]
            case RequestStatus.RUNNING:
                del self.running[request.id]
            case _:
                self.paused.pop(request.id, None)
        request.status = RequestStatus.GONE
        del self.requests[request.id]
        self.removed.append(request.id)
        self.memory.release(request)
