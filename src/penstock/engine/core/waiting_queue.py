"""The queue of requests that wait for pages: by class, within a class fairly among tenants, within a tenant by arrival.

Requests of one queue key (class and tenant) are served in order, and the fair clock says which queue key is next, so
no request starves.  A request that leaves from the middle is skipped when its turn comes.  The order depends on what
requests say alone, never on the order of anything in memory: ties end at the serial number.

The fair clock is start-time fair queueing (Goyal, Vin, Cheng 1996) over tokens, as virtual token counters do it (Sheng
et al., Fairness in Serving Large Language Models, 2024): a tenant's virtual time advances by what is computed for it,
divided by its weight, and the least is served next.  A prompt is charged when it is admitted, less what was cached; an
answer token by token, while others wait.  A tenant that comes back begins at the present: idle time earns no credit.

Pure; knows no pages.
"""

from __future__ import annotations

import heapq

from penstock.engine.core.request import FairnessKey, OrderKey, Request, RequestStatus

MAX_FAIRNESS_KEYS = 1024
"""When there are more, the half that is least ahead of the present is forgotten, and begins there when it is back."""


class FairClock:
    """Virtual seconds are weighted tokens."""

    def __init__(self, *, output_weight: float, memory_s: float) -> None:
        """``output_weight``: what a token of an answer counts, against one of a prompt; ``memory_s``: for how long a
        tenant counts as being there after its last request came."""
        self._output_weight = output_weight
        self._memory_s = memory_s
        self._times: dict[FairnessKey, float] = {}
        self._present: dict[int, float] = {}  # rank -> where its line stood that was served last
        self._seen: dict[FairnessKey, float] = {}  # -> when a request of it came last

    def virtual_time(self, line: FairnessKey) -> float:
        """Where a line stands.  The least is served next."""
        time = self._times.get(line)
        return self._present.get(line[0], 0.0) if time is None else time

    def on_arrival(self, line: FairnessKey, now: float) -> None:
        """A request of this line came."""
        self._seen[line] = now
        if len(self._seen) > MAX_FAIRNESS_KEYS:
            self._forget_unseen(now)

    def on_queued(self, line: FairnessKey) -> None:
        """The line begins to wait: from the present on, or from later if it was served ahead of that."""
        present = self._present.get(line[0], 0.0)
        self._times[line] = max(self._times.get(line, 0.0), present)
        if len(self._times) > MAX_FAIRNESS_KEYS:
            foremost = sorted(self._times, key=lambda each: (-self._times[each], each))[: MAX_FAIRNESS_KEYS // 2]
            self._times = {each: self._times[each] for each in {*foremost, line}}

    def charge_prompt(self, line: FairnessKey, tokens: int, weight: float) -> None:
        """A request is admitted, with ``tokens`` tokens to compute."""
        start = self.virtual_time(line)
        self._present[line[0]] = max(self._present.get(line[0], 0.0), start)
        self._times[line] = start + tokens / weight

    def charge_output(self, line: FairnessKey, tokens: int, weight: float) -> None:
        """``tokens`` output tokens are computed while others wait."""
        self._times[line] = self.virtual_time(line) + self._output_weight * tokens / weight

    def is_contended(self, rank: int, now: float) -> bool:
        """Whether requests of another tenant in this class, or of a class before it, came lately."""
        if len(self._seen) < 2:
            return False
        self._forget_unseen(now)
        before = sum(seen < rank for seen, _ in self._seen)
        return before > 0 or sum(seen == rank for seen, _ in self._seen) > 1

    def _forget_unseen(self, now: float) -> None:
        self._seen = {line: seen for line, seen in self._seen.items() if now - seen < self._memory_s}


QueuePosition = tuple[int, float, OrderKey]
"""(rank of the class, virtual time of the line, order in it): the least is served next."""

_STALE = 64
"""Entries of those who left that a line may have besides as many as wait in it."""


class WaitingQueue:
    """A heap for each line, of the requests whose status is WAITING; first to be served on top."""

    def __init__(self, clock: FairClock) -> None:
        self._clock = clock
        self._lines: dict[FairnessKey, list[tuple[OrderKey, Request]]] = {}
        self._counts: dict[FairnessKey, int] = {}  # of waiting requests; keys without one are absent
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, request: Request) -> None:
        """Line up.  The order key decides the place, also of one that comes back."""
        line = request.fairness_key
        request.status = RequestStatus.WAITING
        if line not in self._counts:
            self._clock.on_queued(line)
        heapq.heappush(self._lines.setdefault(line, []), (request.order, request))
        self._counts[line] = self._counts.get(line, 0) + 1
        self._length += 1

    def position(self, request: Request) -> QueuePosition:
        """When this request is served, be it waiting or running, against others at this moment."""
        return request.rank, self._clock.virtual_time(request.fairness_key), request.order

    def heads(self) -> list[Request]:
        """The first of each line, who is served next first."""
        if len(self._counts) == 1:
            return [self._head(next(iter(self._counts)))]
        return sorted(map(self._head, self._counts), key=self.position)

    def head(self) -> Request | None:
        """The request that is served next."""
        if not self._counts:
            return None
        if len(self._counts) == 1:
            return self._head(next(iter(self._counts)))
        return min(map(self._head, self._counts), key=self.position)

    def ranks(self) -> set[int]:
        """Ranks of the classes with waiting requests."""
        return {rank for rank, _ in self._counts}

    def pop(self, request: Request, status: RequestStatus) -> None:
        """``request``, the first of its line, waits no more.  Raises ValueError for any other."""
        if self._counts.get(request.fairness_key) is None or self._head(request.fairness_key) is not request:
            raise ValueError(f"{request.id} is not the first of its line")
        heapq.heappop(self._lines[request.fairness_key])
        request.status = status
        self._one_less(request.fairness_key)

    def remove(self, request: Request) -> None:
        """``request``, which waits, leaves from wherever it stands."""
        line = request.fairness_key
        request.status = RequestStatus.GONE
        self._one_less(line)
        heap = self._lines.get(line)
        if heap is not None and len(heap) > 2 * self._counts[line] + _STALE:
            self._lines[line] = [entry for entry in heap if _waits(entry[1], line)]
            heapq.heapify(self._lines[line])

    def promote(self, request: Request) -> None:
        """``request``, which waits, goes on waiting as one of the first class."""
        self._one_less(request.fairness_key)
        request.promote()
        self.push(request)

    def _head(self, line: FairnessKey) -> Request:
        heap = self._lines[line]
        while not _waits(heap[0][1], line):
            heapq.heappop(heap)
        return heap[0][1]

    def _one_less(self, line: FairnessKey) -> None:
        self._length -= 1
        self._counts[line] -= 1
        if not self._counts[line]:
            del self._counts[line], self._lines[line]


def _waits(request: Request, line: FairnessKey) -> bool:
    return request.status is RequestStatus.WAITING and request.fairness_key == line
