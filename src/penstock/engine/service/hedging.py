"""How long this worker would take to compute what it waits for (``kv.transfer.haste``).

By what it has learned of its own steps, and with the prompts that lie before it.  Knows nothing of links.
"""

from __future__ import annotations

from penstock.engine.core.cost import Work
from penstock.engine.core.scheduler import Scheduler
from penstock.types import RequestId


class OwnPace:
    """Of one worker."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def predict(self, request_id: RequestId, start: int, stop: int) -> float | None:
        """See ``haste.Predict``.  Where a prompt shows images only its reader has them, and where it is read in another
        numerics class no other bits will do.

        Of what has come only that counts which the cache can go on from: where layers have windows or states, it
        cannot before their own pages are there.
        """
        scheduler = self._scheduler
        request = scheduler.find(request_id)
        if request is None or request.images or request.apart:
            return None
        start = min(start, scheduler.memory.covered(request.hashes))
        load, own = scheduler.load(), Work()
        own.add(start, stop - start, 1)
        before = Work(tokens=load.prompt_tokens, pairs=load.prompt_pairs)
        seconds = scheduler.cost.predict(own)
        return seconds + scheduler.cost.predict(before) if before.tokens else seconds
