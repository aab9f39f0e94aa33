"""Threads that do jobs one after the other, for whoever must not wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger("penstock.worker")

Job = Callable[[], None]

WRITE_PAUSE_S = 50e-6
"""Between two pages that are written: nobody waits for them."""


class Doer(Protocol):
    """Who does jobs."""

    busy_since: float | None

    @property
    def waiting(self) -> int:
        """Jobs that are not begun."""
        ...

    def put(self, job: Job) -> None:
        """Do this, too."""
        ...

    def end(self) -> None:
        """Nothing more comes: end when all is done."""
        ...

    def join(self, patience_s: float) -> bool:
        """Has it ended?  Waits for that so long at most."""
        ...


class Hand:
    """A thread.  Jobs are done in order.  What one raises is logged: it must deal with what it can foresee."""

    def __init__(self, name: str, clock: Callable[[], float], pause_s: float) -> None:
        """``pause_s`` after each job: the interpreter has one lock, and the worker's loop may wait for it."""
        self._pause_s = pause_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._clock = clock
        self.busy_since: float | None = None  # the job that is being done was begun then
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that are not begun."""
        return self._jobs.qsize()

    def put(self, job: Job) -> None:
        """Do this, too."""
        self._jobs.put(job)

    def end(self) -> None:
        """Nothing more comes: end when all is done."""
        self._jobs.put(None)

    def join(self, patience_s: float) -> bool:
        """Has it ended?  Waits for that so long at most; who has not is left behind."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.busy_since = self._clock()
            try:
                job()
            except Exception:
                log.exception("a job of the KV store failed")
            self.busy_since = None
            if self._pause_s:
                time.sleep(self._pause_s)
