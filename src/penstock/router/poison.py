"""Which request crashes workers: crash records of requests, and isolation of the suspects.

A worker that crashes takes all its requests with it, and any may be the cause.  All go on elsewhere; those that get new
tokens there are cleared.  Who is there when a second worker dies, and alone so, is the cause and fails.  Where several
were there both times they are kept apart from then on, no two at one worker, until they are cleared or one of them has
ended a worker alone.  Deaths from outside (SIGKILL, SIGTERM, a stopped process) do not count.

::

    death      who was there    counted         then
    1          a b c            a1 b1 c1        together elsewhere
    2          a b              a2 b2           apart;  c got 8 tokens meanwhile: cleared
    3          b                b3              b fails, a has long gone on

Pure; knows nothing about fleets and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import PoisonRequest
from penstock.types import RequestId, WorkerId

WorkerKeys = frozenset[tuple[WorkerId, int]]
"""(worker, incarnation)."""


class CrashRecord:
    """The deaths that are held against one request."""

    __slots__ = ("_cleared_at", "_tokens", "deaths")

    def __init__(self, tokens: int) -> None:
        """``tokens`` new ones clear it."""
        self._tokens = tokens
        self._cleared_at = 0
        self.deaths: tuple[str, ...] = ()

    def add_death(self, death: str, emitted: int) -> None:
        """A worker died by itself while it had this request, which stood at ``emitted`` tokens."""
        self.deaths += (death,)
        self._cleared_at = emitted + self._tokens

    def on_progress(self, emitted: int) -> None:
        """Note progress; enough new tokens clear the record."""
        if self.deaths and emitted >= self._cleared_at:
            self.deaths = ()

    def error(self, request: RequestId, emitted: int) -> PoisonRequest:
        """The error that the client receives."""
        sent = f"The {emitted} tokens sent so far stay valid" if emitted else "No token was sent"
        return PoisonRequest(
            f"Request {request} ended {len(self.deaths)} workers and is not tried on others; the service's log says "
            f"which and how. {sent}."
        )


def find_culprit(deaths: Mapping[RequestId, int], limit: int) -> RequestId | None:
    """The one whom most deaths are held against, ``limit`` or more, if it is one.  ``deaths``: of all there."""
    most = max(deaths.values(), default=0)
    worst = [request for request, count in deaths.items() if count == most]
    return worst[0] if most >= limit and len(worst) == 1 else None


class PoisonIsolation:
    """Requests that are suspected, and the workers that each is at."""

    def __init__(self, limit: float) -> None:
        """``limit``: deaths that make a request a suspect."""
        self._limit = limit
        self._at: dict[RequestId, WorkerKeys] = {}

    def __len__(self) -> int:
        return len(self._at)

    def is_suspect(self, guilt: CrashRecord) -> bool:
        """Whether a request with this record is isolated."""
        return len(guilt.deaths) >= self._limit

    def place(self, request: RequestId, workers: Iterable[tuple[WorkerId, int]]) -> None:
        """A suspect was given to these workers, and is nowhere else."""
        self._at[request] = frozenset(workers)

    def remove(self, request: RequestId) -> None:
        """It is nowhere, or suspected no more."""
        self._at.pop(request, None)

    def occupied_workers(self, besides: RequestId) -> WorkerKeys:
        """Workers that have a suspect other than ``besides``."""
        return frozenset(pair for request, pairs in self._at.items() if request != besides for pair in pairs)
