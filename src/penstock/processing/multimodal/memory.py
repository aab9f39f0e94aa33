"""Memory that threads take for a while: bounded in sum, before it is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteSemaphore:
    """So many bytes at a time.  Whoever wants more than are left waits; who is alone never waits."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, nbytes: int) -> Iterator[None]:
        """Take so many bytes until the end of the block.  For threads: blocks until they are there."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + nbytes <= self.limit)
            self.held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self.held -= nbytes
                self._changed.notify_all()
